"""Maps a Hugging Face config.json to a ModelConfig; what it asks for and is not supported is refused by name."""

from __future__ import annotations

import reprlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any, Literal, get_args

from sarathi_jax.config import ModelConfig, RopeKind, RopeScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`model_type` and the architecture it stands for."""

_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh", "relu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "partial_rotary_factor": (1,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "use_qk_norm": (False,),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "text_config": (),
    "vision_config": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
}
"""Fields that ask for something not done here, with the values (null aside) that ask for nothing."""

_MAX_INT = 2**31 - 1
"""Positions and sizes are int32 on the device."""

_ROPE_FIELDS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed config.json.

    Fields and defaults are those of transformers, with one exception: a Mistral config without the key `sliding_window`
    has full attention here (transformers would assume 4096). ValueError for what is missing, malformed or unsupported.
    """
    model_type = _model_type(config)
    for key, harmless in _REFUSED.items():
        if (value := config.get(key)) is not None and value not in harmless:
            raise ValueError(
                f"{key}={reprlib.repr(value)} is not supported; remove it only if the weights do not need it"
            )
    heads, hidden = _int(config, "num_attention_heads"), _int(config, "hidden_size")
    head_dim = config.get("head_dim", 128 if model_type == "qwen3" else None)
    if head_dim is None:
        if heads < 1 or hidden % heads:
            raise ValueError(f"hidden_size={hidden} must be a multiple of num_attention_heads={heads}, or set head_dim")
        head_dim = hidden // heads
    kv_heads = heads if model_type == "llama" and "num_key_value_heads" not in config else None
    if kv_heads is None:
        kv_heads = heads if _require(config, "num_key_value_heads") is None else _int(config, "num_key_value_heads")
    attention_bias = _bool(config, "attention_bias")
    for key, families in (("attention_bias", ("llama", "qwen2", "qwen3")), ("mlp_bias", ("llama",))):
        if _bool(config, key) and model_type not in families:
            raise ValueError(f"{key}=true is not supported for {ARCHITECTURES[model_type]}, which has no such bias")
    activation = config.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act={activation!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    theta, scaling = _rope(config)
    return ModelConfig(
        architecture=ARCHITECTURES[model_type],
        vocab_size=_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_int(config, "intermediate_size"),
        num_layers=_int(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=_int(config, "max_position_embeddings"),
        rms_norm_eps=_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=_bool(config, "tie_word_embeddings"),
        qkv_bias=model_type == "qwen2" or attention_bias,
        o_bias=attention_bias and model_type != "qwen2",
        mlp_bias=_bool(config, "mlp_bias"),
        qk_norm=model_type == "qwen3",
        sliding_window=_sliding_window(config, model_type),
        hidden_act=_ACTIVATIONS[activation],
    )


def _model_type(config: Mapping[str, Any]) -> str:
    """The `model_type`, or the one that `architectures` stands for where there is none. They may not disagree."""
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    architectures = architectures if isinstance(architectures, list) else [architectures]
    by_architecture = {architecture: name for name, architecture in ARCHITECTURES.items()}
    named = [by_architecture.get(a) if isinstance(a, str) else None for a in architectures]
    if model_type is None and len(named) == 1:
        model_type = named[0]
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES or named not in ([], [model_type]):
        raise ValueError(
            f"architectures={repr(architectures)[:200]} with model_type={reprlib.repr(config.get('model_type'))} is "
            f"not supported; known: {', '.join(f'{a} ({m})' for m, a in ARCHITECTURES.items())}"
        )
    return model_type


def _sliding_window(config: Mapping[str, Any], model_type: str) -> int | None:
    """The window of all layers, or None where no layer has one; ValueError for a mix."""
    window = config.get("sliding_window")
    if model_type in ("qwen2", "qwen3") and not _bool(config, "use_sliding_window"):
        window = None
    num_layers, layer_types = _int(config, "num_hidden_layers"), config.get("layer_types")
    if layer_types is not None and not (
        isinstance(layer_types, list)
        and len(layer_types) == num_layers
        and all(layer in ("sliding_attention", "full_attention") for layer in layer_types)
    ):
        raise ValueError(
            f"layer_types={reprlib.repr(layer_types)} must name full_attention or sliding_attention for each of "
            f"num_hidden_layers={num_layers}"
        )
    if window is None:
        if model_type in ("llama", "mistral") and "sliding_attention" in (layer_types or ()):
            raise ValueError("layer_types asks for sliding_attention but sliding_window is null; set its length")
        return None
    if model_type == "llama":
        raise ValueError(f"sliding_window={window!r} is not supported for LlamaForCausalLM; set it to null")
    if layer_types is not None:
        windowed = [layer == "sliding_attention" for layer in layer_types]
    elif model_type == "mistral":
        windowed = [True]
    else:
        first = _int(config, "max_window_layers")
        windowed = [first < num_layers, first <= 0]
    if any(windowed) and not all(windowed):
        raise ValueError(
            f"sliding_window={window!r} for some layers only (layer_types={reprlib.repr(layer_types)}, "
            f"max_window_layers={config.get('max_window_layers')!r}) is not supported; all or none may have it"
        )
    return _int(config, "sliding_window") if all(windowed) else None


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Base and scaling, from `rope_scaling` or `rope_parameters` (which holds the base as well)."""
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(field) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"{field}={reprlib.repr(rope)} must be one flat object; one for each layer type is not supported"
        )
    theta = rope.get("rope_theta")
    theta = _number("rope_theta", config.get("rope_theta", 10000.0) if theta is None else theta)
    kind = rope.get("rope_type", rope.get("type"))
    if kind is None:
        if any(value is not None for key, value in rope.items() if key not in ("type", "rope_type", "rope_theta")):
            raise ValueError(f"{field}={reprlib.repr(dict(rope))} has no 'rope_type'; say which kind of scaling it is")
        return theta, RopeScaling()
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        raise ValueError(f"{field} of kind {kind!r} is not supported; known: {', '.join(get_args(RopeKind))}")
    if rope.get("partial_rotary_factor", 1) not in (None, 1):
        raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported; only 1 is")
    plain = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
    extra = {key for key, value in rope.items() if value is not None} - plain - _ROPE_FIELDS[kind]
    if unknown := extra - set.union(*_ROPE_FIELDS.values()):
        raise ValueError(f"{field} has {sorted(unknown)}, which {kind!r} does not know; remove what is not needed")
    if extra:
        warnings.warn(f"{field} has {sorted(extra)}, which {kind!r} does not use", UserWarning, stacklevel=3)
    return theta, _scaling(config, field, rope, kind)


def _scaling(config: Mapping[str, Any], field: str, rope: Mapping[str, Any], kind: str) -> RopeScaling:
    """As transformers derives it: the trained length is max_position_embeddings where it is not given apart."""
    max_position = _int(config, "max_position_embeddings")
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = max_position if original is None else _positive("original_max_position_embeddings", original)

    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key)
        if value is None and default is None:
            raise ValueError(f"{field} of kind {kind!r} needs {key!r}")
        return _number(f"{field}[{key!r}]", default if value is None else value)

    def optional(key: str) -> float | None:
        return None if rope.get(key) is None else number(key)

    match kind:
        case "linear":
            return RopeScaling(kind="linear", factor=number("factor"))
        case "dynamic":  # transformers stretches max_position_embeddings, whatever the original length
            return RopeScaling(kind="dynamic", factor=number("factor"), original_max_position=max_position)
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=number("factor"),
                original_max_position=original,
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
            )
        case "yarn":
            return RopeScaling(
                kind="yarn",
                factor=number("factor", max_position / original),
                original_max_position=original,
                beta_fast=optional("beta_fast") or 32.0,
                beta_slow=optional("beta_slow") or 1.0,
                attention_factor=optional("attention_factor"),
                mscale=optional("mscale") or None,  # to transformers 0 is none
                mscale_all_dim=optional("mscale_all_dim") or None,
                truncate=rope.get("truncate") is None or _bool(rope, "truncate"),
            )
    return RopeScaling()


def _require(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise ValueError(f"the model's config has no {key!r}; it is needed")
    return config[key]


def _int(config: Mapping[str, Any], key: str) -> int:
    value = _require(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MAX_INT:
        raise ValueError(f"{key}={reprlib.repr(value)} must be an integer of 32 bits")
    return value


def _positive(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INT:
        raise ValueError(f"{key}={reprlib.repr(value)} must be an integer from 1 to {_MAX_INT}")
    return value


def _bool(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}={reprlib.repr(value)} must be true or false")
    return bool(value)


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{key}={reprlib.repr(value)} must be a finite number")
    return float(value)
