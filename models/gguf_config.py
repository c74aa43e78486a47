"""Maps a GGUF file's metadata to a ModelConfig; what a file asks for and is not supported is refused by name."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sarathi_jax.config import ModelConfig, RopeScaling, check_int
from sarathi_jax.models.families.fields import shortest

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""GGUF's names of the architectures read here, and Hugging Face's. A llama file with experts is a Mixtral."""

BLOCK_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([\w.]+)\.(weight|bias)")
ROPE_FREQS = "rope_freqs.weight"
MAX_EXPERTS = 1 << 16
"""Far more than any layer has: every expert is looked at."""

_REFUSED = {
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "use_parallel_residual": (False,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attention.scale": (0,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.sliding_window_pattern": (),
    "attention.temperature_scale": (0,),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
}
"""Keys that ask for something not done here, with the values that ask for nothing."""


class _Keys:
    """The metadata of one architecture, each value checked for its type."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self.metadata, self.arch = metadata, arch

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and len(set(map(repr, value))) == 1:
            value = value[0]  # one entry a layer
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(
                f"has '{self.arch}.{key}'={reprlib.repr(value)}; it must be an integer, one for all layers"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e38:
            raise ValueError(f"has '{self.arch}.{key}'={reprlib.repr(value)}; it must be a finite number")
        return float(str(np.float32(value)))  # written as float32: 1e-5, not 9.999999747378752e-06

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.arch}.{key}")


def model_config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_divisors: np.ndarray | None
) -> ModelConfig:
    """From the metadata, the tensors' shapes ([out, in], under GGUF's names), and the values of `rope_freqs.weight`."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ValueError(
            f"has general.architecture={reprlib.repr(arch)}, not supported; known: {', '.join(ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise ValueError(
            f"is one of {reprlib.repr(metadata['split.count'])} parts; merge them first (llama-gguf-split --merge)"
        )
    keys = _Keys(metadata, arch)
    for key, harmless in _REFUSED.items():
        if (value := keys.get(key)) is not None and value not in harmless:
            raise ValueError(f"has '{arch}.{key}'={reprlib.repr(value)}, which is not supported")
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if "token_embd.weight" not in shapes or heads < 1:
        raise ValueError(f"needs a tensor 'token_embd.weight' and '{arch}.attention.head_count' >= 1")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise ValueError(f"has '{arch}.{key}'={keys.integer(key)}; only the head size, {head_dim}, is supported")
    blocks = {int(match[1]) for name in shapes if (match := BLOCK_NAME.fullmatch(name))}
    num_layers = keys.integer("block_count")
    if len(blocks) != num_layers or max(blocks, default=-1) != num_layers - 1:
        raise ValueError(f"has '{arch}.block_count'={num_layers} but tensors of {len(blocks)} blocks: corrupt")
    theta, experts = keys.number("rope.freq_base", 10000.0), _experts(keys, shapes, num_layers)
    return ModelConfig(
        architecture="MixtralForCausalLM" if arch == "llama" and experts else ARCHITECTURES[arch],
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(keys, rope_divisors, theta, head_dim),
        tie_embeddings="output.weight" not in shapes,
        qkv_bias=arch == "qwen2" or _has_bias(shapes, "attn_q", "attn_k", "attn_v"),
        o_bias=_has_bias(shapes, "attn_output"),
        mlp_bias=_has_bias(shapes, "ffn_gate", "ffn_up", "ffn_down"),
        qk_norm=arch in ("qwen3", "qwen3moe"),
        sliding_window=keys.integer("attention.sliding_window", 0) or None,
        attention_soft_cap=keys.number("attn_logit_softcapping", 0.0) or None,
        logit_soft_cap=keys.number("final_logit_softcapping", 0.0) or None,
        **experts,
    )


def _experts(keys: _Keys, shapes: Iterable[str], num_layers: int) -> dict[str, Any]:
    """ModelConfig's fields of a mixture: layers with a router have experts. Shares sum to one unless the file says
    otherwise, as llama.cpp takes it."""
    arch, count = keys.arch, keys.integer("expert_count", 0)
    if (arch not in ("llama", "qwen3moe") and count) or (arch == "qwen3moe" and not count):
        raise ValueError(f"has '{arch}.expert_count'={count}, which is not supported")
    if not count:
        return {}
    check_int(f"{arch}.expert_count", count, 1, MAX_EXPERTS, f"at most {MAX_EXPERTS}")
    used, width = keys.integer("expert_used_count"), keys.integer("feed_forward_length")
    check_int(f"{arch}.expert_used_count", used, 1, count, "1 <= expert_used_count <= expert_count")
    if arch == "qwen3moe":
        width = keys.integer("expert_feed_forward_length", width // used)
    if type(norm := keys.get("expert_weights_norm")) not in (bool, type(None)):
        raise ValueError(f"has '{arch}.expert_weights_norm'={reprlib.repr(norm)}; it must be true or false")
    routers = {int(m[1]) for name in shapes if (m := BLOCK_NAME.fullmatch(name)) and m[2] == "ffn_gate_inp"}
    if not routers:
        raise ValueError(f"has '{arch}.expert_count'={count} but no tensor 'blk.*.ffn_gate_inp.weight'")
    return {
        "num_experts": count,
        "experts_per_token": used,
        "expert_size": width,
        "norm_topk_prob": norm is not False,
        "moe_pattern": shortest([layer in routers for layer in range(num_layers)]),
    }


def _has_bias(names: Iterable[str], *parts: str) -> bool:
    return any((m := BLOCK_NAME.fullmatch(name)) and m[2] in parts and m[3] == "bias" for name in names)


def _rope_scaling(keys: _Keys, divisors: np.ndarray | None, theta: float, head_dim: int) -> RopeScaling:
    """As llama.cpp reads it: no type but a factor is linear; a tensor of divisors is llama3's."""
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0) or 1.0
    kind = keys.get("rope.scaling.type") or "linear"
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"has '{keys.arch}.rope.scaling.type'={reprlib.repr(kind)}; supported: none, linear, yarn")
    scaling = RopeScaling()
    if kind == "yarn":
        scaling = RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position=keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    elif kind == "linear" and factor != 1.0:
        scaling = RopeScaling(kind="linear", factor=factor)
    if divisors is None:
        return scaling
    if scaling.kind != "default":
        raise ValueError(f"has {ROPE_FREQS!r} and rope scaling {scaling.kind!r}; one of them is supported at a time")
    return llama3_scaling(divisors, theta, head_dim)


@np.errstate(all="ignore")
def llama3_scaling(divisors: np.ndarray, theta: float, head_dim: int) -> RopeScaling:
    """The llama3 scaling whose per-frequency divisors (float32 [head_dim / 2]) these are; ValueError if none is.

    In 1/wavelength, the inverse divisor is 1/factor up to low_freq_factor / original_max_position, then linear, then 1
    from high_freq_factor / original_max_position on. Only these ratios matter, so low_freq_factor is 1 here.
    """
    if divisors.shape != (head_dim // 2,) or not (np.isfinite(divisors).all() and (divisors >= 1.0).all()):
        raise ValueError(f"has {ROPE_FREQS!r} of shape {list(divisors.shape)}; {head_dim // 2} numbers >= 1 are needed")
    if (divisors == 1.0).all():
        return RopeScaling()
    d = divisors.astype(np.float64)
    inverse_wavelength = theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    factor = float(str(divisors[-1]))
    candidates = [(8192, 4.0)]
    between = np.flatnonzero((d > 1.0) & (d < factor))
    if len(between) >= 2:  # the line through the first and the last
        ends = between[[0, -1]]
        y, x = (1 / d[ends] - 1 / factor) / (1 - 1 / factor), inverse_wavelength[ends]
        slope = (y[0] - y[1]) / (x[0] - x[1])
        high, original = 1 - 1 / (y[0] - slope * x[0]), slope / (slope * x[0] - y[0])
        if math.isfinite(high) and 1 < high < 1e6 and 1 <= original < 1e9:
            candidates += [(round(original), round(float(high), digits)) for digits in (2, 6)]
    for original, high in candidates:
        smooth = np.clip((original * inverse_wavelength - 1.0) / (high - 1.0), 0.0, 1.0)
        if np.allclose(1.0 / d, (1 - smooth) / factor + smooth, rtol=1e-5, atol=0.0):
            return RopeScaling(kind="llama3", factor=factor, original_max_position=original, high_freq_factor=high)
    raise ValueError(f"has {ROPE_FREQS!r} that are not the divisors of a llama3 scaling")
