"""Every weight of the decoder, declared once: shape, logical axes, and where it comes from in a checkpoint.

Initialisation, loading and sharding all follow from this table. Layer weights are stacked over a leading L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.checkpoint import Checkpoint

_EMBED, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = "model.layers.{}."


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """One weight of the model. `sources`: the checkpoint's tensors (under a layer's prefix when `stacked`), in Hugging
    Face's shapes; `pack` makes them into one array of this shape (a layer's, when stacked)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: dict[str, tuple[int, ...]]
    pack: Callable[..., np.ndarray]
    stacked: bool = True


def weight_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """The weights of a model of this configuration, by name, in a fixed order."""
    d, f, v, n = config.hidden_size, config.intermediate_size, config.vocab_size, config.num_layers
    k, g, hd = config.num_kv_heads, config.num_groups, config.head_dim
    same = lambda x: x

    def layer(shape, axes, sources, pack) -> WeightSpec:
        return WeightSpec(shape=(n, *shape), axes=("layer", *axes), sources=sources, pack=pack)

    def pack_qkv(q, key, value):
        """q [H D, d], k and v [K D, d] -> [d, K, G + 2, D]: each KV head beside its query heads, to shard together."""
        q, key, value = q.reshape(k, g, hd, -1), key.reshape(k, 1, hd, -1), value.reshape(k, 1, hd, -1)
        return np.moveaxis(np.concatenate([q, key, value], axis=1), -1, 0)

    def pack_qkv_bias(q, key, value):
        return np.concatenate([q.reshape(k, g, hd), key.reshape(k, 1, hd), value.reshape(k, 1, hd)], axis=1)

    def projections(kind: str, tail: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        sizes = {"q": k * g * hd, "k": k * hd, "v": k * hd}
        return {f"self_attn.{name}_proj.{kind}": (size, *tail) for name, size in sizes.items()}

    specs = {
        "embed": WeightSpec(shape=(v, d), axes=("vocab", "embed"), sources={_EMBED: (v, d)}, pack=same, stacked=False),
        "final_norm": WeightSpec(shape=(d,), axes=("embed",), sources={_NORM: (d,)}, pack=same, stacked=False),
        "attn_norm": layer((d,), ("embed",), {"input_layernorm.weight": (d,)}, same),
        "qkv": layer((d, k, g + 2, hd), ("embed", "kv_heads", None, None), projections("weight", (d,)), pack_qkv),
        "o": layer(
            (k, g, hd, d), ("kv_heads", None, None, "embed"), {"self_attn.o_proj.weight": (d, k * g * hd)},
            lambda o: o.T.reshape(k, g, hd, d),
        ),
        "mlp_norm": layer((d,), ("embed",), {"post_attention_layernorm.weight": (d,)}, same),
        "gate_up": layer(
            (d, 2, f), ("embed", None, "mlp"), {"mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d)},
            lambda gate, up: np.stack([gate.T, up.T], axis=1),
        ),
        "down": layer((f, d), ("mlp", "embed"), {"mlp.down_proj.weight": (d, f)}, lambda down: down.T),
    }  # fmt: skip
    if not config.tie_embeddings:
        specs["head"] = WeightSpec(
            shape=(v, d), axes=("vocab", "embed"), sources={_HEAD: (v, d)}, pack=same, stacked=False
        )
    if config.qkv_bias:
        specs["qkv_bias"] = layer((k, g + 2, hd), ("kv_heads", None, None), projections("bias", ()), pack_qkv_bias)
    if config.o_bias:
        specs["o_bias"] = layer((d,), ("embed",), {"self_attn.o_proj.bias": (d,)}, same)
    if config.qk_norm:
        specs["q_norm"] = layer((hd,), (None,), {"self_attn.q_norm.weight": (hd,)}, same)
        specs["k_norm"] = layer((hd,), (None,), {"self_attn.k_norm.weight": (hd,)}, same)
    if config.mlp_bias:
        specs["gate_up_bias"] = layer(
            (2, f), (None, "mlp"), {"mlp.gate_proj.bias": (f,), "mlp.up_proj.bias": (f,)},
            lambda gate, up: np.stack([gate, up]),
        )  # fmt: skip
        specs["down_bias"] = layer((d,), ("embed",), {"mlp.down_proj.bias": (d,)}, same)
    return specs


def load_weights(checkpoint: Checkpoint, dtype: DTypeLike) -> dict[str, Array]:
    """All weights on the default device in `dtype`, read one tensor at a time.

    Raises:
      ValueError: tensors missing from the checkpoint, tensors nobody asks for, or shapes that disagree: all are listed,
        before anything is read.
    """
    config = checkpoint.config
    specs = weight_specs(config)
    _check_tensors(checkpoint, specs, config.num_layers)
    weights = {}
    for name, spec in specs.items():
        array = np.empty(spec.shape, jnp.dtype(dtype))
        if spec.stacked:
            for i in range(config.num_layers):
                array[i] = spec.pack(*(checkpoint.read(_LAYER.format(i) + source) for source in spec.sources))
        else:
            array[...] = spec.pack(*(checkpoint.read(source) for source in spec.sources))
        weights[name] = jax.device_put(array)
    return weights


def init_weights(config: ModelConfig, dtype: DTypeLike, seed: int = 0, scale: float = 0.02) -> dict[str, Array]:
    """Random weights: normal with deviation `scale`, norms around 1. For tests and for timing without weights."""

    @jax.jit  # one program, not a few for each weight
    def draw(key: Array) -> dict[str, Array]:
        weights = {}
        for i, (name, spec) in enumerate(weight_specs(config).items()):
            noise = jax.random.normal(jax.random.fold_in(key, i), spec.shape, jnp.float32) * scale
            weights[name] = (1.0 + noise if name.endswith("norm") else noise).astype(dtype)
        return weights

    return draw(jax.random.key(seed, impl="rbg"))  # compiles several times faster than threefry


def _sources(specs: dict[str, WeightSpec], num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for spec in specs.values():
        for prefix in [_LAYER.format(i) for i in range(num_layers)] if spec.stacked else [""]:
            for source, shape in spec.sources.items():
                yield prefix + source, shape


def _check_tensors(checkpoint: Checkpoint, specs: dict[str, WeightSpec], num_layers: int) -> None:
    names = checkpoint.names
    if num_layers > len(names):  # before the names of all those layers are built
        raise ValueError(
            f"checkpoint {checkpoint.source} does not fit its config: the config has {num_layers} layers and the "
            f"checkpoint {len(names)} tensors"
        )
    wanted = dict(_sources(specs, num_layers))
    problems = []
    for label, found in (("missing", wanted.keys() - names), ("not understood", names - wanted.keys())):
        if found:
            shown = ", ".join(sorted(found)[:12]) + (f" and {len(found) - 12} more" if len(found) > 12 else "")
            problems.append(f"{len(found)} tensors {label}: {shown}")
    for name in sorted(wanted.keys() & names):
        if tuple(checkpoint.shape(name)) != wanted[name]:
            problems.append(f"{name} has shape {tuple(checkpoint.shape(name))}, the config asks for {wanted[name]}")
    if problems:
        raise ValueError(f"checkpoint {checkpoint.source} does not fit its config: " + "; ".join(problems[:20]))
