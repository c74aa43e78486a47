"""Qwen2 and 2.5, Qwen3, and Qwen3 with experts."""

from __future__ import annotations

from typing import Any

from sarathi_jax.models.families.family import Family
from sarathi_jax.models.families.fields import WINDOW, Fields, shortest, windows
from sarathi_jax.models.families.llama import attention_biases, llama_like


def _windows(f: Fields) -> dict[str, Any]:
    """Where `use_sliding_window` is set: layers named in `layer_types`, or those from `max_window_layers` on."""
    layer_types, num_layers = f.layer_types(), f.num_layers()
    length, first = f.get("sliding_window"), f.get("max_window_layers")
    if not f.flag("use_sliding_window") or length is None:
        return {"sliding_window": None}
    if layer_types is None:
        first = f.integer("max_window_layers")
        return windows(f.integer("sliding_window"), [layer >= first for layer in range(num_layers)])
    return windows(f.integer("sliding_window"), [layer == WINDOW for layer in layer_types])


def _qwen2(f: Fields) -> dict[str, Any]:
    f.flag("attention_bias")  # q, k and v have one in any case, o never
    return {**llama_like(f), **_windows(f), "qkv_bias": True}


def _qwen3(f: Fields) -> dict[str, Any]:
    return {**llama_like(f, head_dim=128), **attention_biases(f), **_windows(f), "qk_norm": True}


def _qwen3_moe(f: Fields) -> dict[str, Any]:
    num_layers, step = f.num_layers(), f.integer("decoder_sparse_step", 1)
    dense = f.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense) or step < 1:
        raise ValueError(
            f"mlp_only_layers={dense!r} must be a list of layers and decoder_sparse_step={step} at least 1"
        )
    moe = [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
    window = f.integer("sliding_window", 4096)
    window = window if f.flag("use_sliding_window") else None
    f.get("max_window_layers")  # transformers does not look at it here
    fields = {**llama_like(f), **attention_biases(f), "qk_norm": True, "sliding_window": window}
    experts = {
        "num_experts": f.integer("num_experts", f.integer("num_local_experts", 128)),
        "experts_per_token": f.integer("num_experts_per_tok", 8),
        "expert_size": f.integer("moe_intermediate_size", 768),
        "norm_topk_prob": f.flag("norm_topk_prob"),
        "moe_pattern": shortest(moe),
    }
    return fields | (experts if any(moe) and experts["num_experts"] else {})


QWEN2 = Family(model_type="qwen2", architecture="Qwen2ForCausalLM", config=_qwen2)
QWEN3 = Family(model_type="qwen3", architecture="Qwen3ForCausalLM", config=_qwen3)
QWEN3_MOE = Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", config=_qwen3_moe)
