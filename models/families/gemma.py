"""Gemma 2 and the text models of Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sarathi_jax.config import ModelConfig, RopeScaling
from sarathi_jax.models.families.family import Family
from sarathi_jax.models.families.fields import FULL, WINDOW, Fields, windows
from sarathi_jax.models.families.llama import attention_biases, sizes
from sarathi_jax.models.families.names import TensorNames
from sarathi_jax.models.families.rope import rope, rope_object, rope_of


def _common(f: Fields, *, period: int, caps: Mapping[str, float | None]) -> dict[str, Any]:
    """Every `period`-th layer has full attention, the others a window, unless `layer_types` says otherwise."""
    layer_types, scalar = f.layer_types(), f.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise ValueError(f"query_pre_attn_scalar={scalar} must be positive")
    if layer_types is None:
        layer_types = [FULL if (layer + 1) % period == 0 else WINDOW for layer in range(f.num_layers())]
    cap = lambda key: f.optional_number(key) if key in f.config else caps[key]
    is_windowed = [kind == WINDOW for kind in layer_types]
    window = (
        None if "sliding_window" in f.config and f.get("sliding_window") is None else f.integer("sliding_window", 4096)
    )
    if window is None and any(is_windowed):
        raise ValueError("sliding_window is null but some layers have sliding_attention; set its length")
    fields = sizes(f, head_dim=256)
    return {
        **fields,
        **attention_biases(f),
        **windows(window, is_windowed),
        "norm_eps": f.number("rms_norm_eps", 1e-6),
        "norm_offset": 1.0,
        "post_norms": True,
        "hidden_act": f.activation("hidden_activation", "gelu_pytorch_tanh"),
        "embed_scale": max(fields["hidden_size"], 1) ** 0.5,
        "query_scale": scalar**-0.5,
        "attention_soft_cap": cap("attn_logit_softcapping"),
        "logit_soft_cap": cap("final_logit_softcapping"),
        "tie_embeddings": f.flag("tie_word_embeddings", True),
    }


def _gemma2(f: Fields) -> dict[str, Any]:
    f.get("hidden_act")  # in old configs beside hidden_activation, which wins
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {**_common(f, period=2, caps=caps), **rope(f)}


def _gemma3(f: Fields) -> dict[str, Any]:
    period = f.integer("sliding_window_pattern", f.integer("_sliding_window_pattern", 6))
    if period < 1:
        raise ValueError(f"sliding_window_pattern={period} must be at least 1")
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    field, parameters = rope_object(f)
    by_kind = {kind: parameters[kind] or {} for kind in (FULL, WINDOW) if kind in parameters}
    main = rope_of(f, field, by_kind.get(FULL, {}) if by_kind else parameters, theta=f.number("rope_theta", 1e6))
    local = rope_of(f, field, by_kind.get(WINDOW, {}), theta=f.number("rope_local_base_freq", 10000.0))
    if local.get("rope_scaling", RopeScaling()) != RopeScaling():
        f.refuse(field, parameters[WINDOW], "scaled rotary positions in layers with a window")
    fields = {**_common(f, period=period, caps=caps), **main, "qk_norm": True}
    if fields["sliding_window"] is not None:
        fields["local_rope_theta"] = local["rope_theta"]
    return fields


def _names(config: ModelConfig) -> TensorNames:
    return TensorNames(
        layer={
            "post_attention_layernorm": "self_attn.post_norm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "mlp.post_norm",
        }
    )


GEMMA2 = Family(model_type="gemma2", architecture="Gemma2ForCausalLM", config=_gemma2, names=_names)
GEMMA3 = Family(model_type="gemma3_text", architecture="Gemma3ForCausalLM", config=_gemma3, names=_names)
