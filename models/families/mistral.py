"""Mistral, and Mixtral with its experts."""

from __future__ import annotations

from typing import Any

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.families.family import Family
from sarathi_jax.models.families.fields import FULL, WINDOW, Fields
from sarathi_jax.models.families.llama import llama_like
from sarathi_jax.models.families.names import TensorNames


def _window(f: Fields) -> dict[str, Any]:
    """The window of all layers; absent is none here (transformers would take 4096 for Mistral)."""
    kinds = set(f.layer_types() or ())
    window = None if f.get("sliding_window") is None else f.integer("sliding_window")
    if window is None and WINDOW in kinds:
        raise ValueError("layer_types asks for sliding_attention but sliding_window is null; set its length")
    if window is not None and kinds == {FULL, WINDOW}:
        f.refuse("layer_types", f.get("layer_types"), "a window for some layers only, which this family has not")
    return {"sliding_window": None if kinds == {FULL} else window}


def _mistral(f: Fields) -> dict[str, Any]:
    return {**llama_like(f), **_window(f)}


def _mixtral(f: Fields) -> dict[str, Any]:
    size = f.integer("intermediate_size")
    experts = {
        "num_experts": f.integer("num_local_experts", 8),
        "experts_per_token": f.integer("num_experts_per_tok", 2),
    }
    return {**llama_like(f, eps=1e-5, theta=1e6), **_window(f), **experts, "expert_size": size}


def _mixtral_names(config: ModelConfig) -> TensorNames:
    moe, names = "block_sparse_moe", {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    layer = {f"{moe}.experts.{{}}.{stored}": f"mlp.experts.{{}}.{name}" for stored, name in names.items()}
    return TensorNames(layer={f"{moe}.gate": "mlp.gate", **layer})


MISTRAL = Family(model_type="mistral", architecture="MistralForCausalLM", config=_mistral)
MIXTRAL = Family(model_type="mixtral", architecture="MixtralForCausalLM", config=_mixtral, names=_mixtral_names)
