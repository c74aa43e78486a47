"""Llama 2 and 3, Yi, SmolLM2, and what their relatives share."""

from __future__ import annotations

from typing import Any

from sarathi_jax.models.families.family import Family
from sarathi_jax.models.families.fields import WINDOW, Fields
from sarathi_jax.models.families.rope import rope


def sizes(f: Fields, *, head_dim: int | None = None, kv_heads: int | None = None) -> dict[str, Any]:
    """The sizes under Llama's names. Where a field is absent: `head_dim`, else hidden size over heads; `kv_heads`, else
    an error. A null num_key_value_heads is one for each query head."""
    heads = f.integer("num_attention_heads")
    if "num_key_value_heads" in f.config:
        kv_heads = heads
    return {
        "vocab_size": f.integer("vocab_size"),
        "hidden_size": f.integer("hidden_size"),
        "intermediate_size": f.integer("intermediate_size"),
        "num_layers": f.num_layers(),
        "num_heads": heads,
        "num_kv_heads": f.integer("num_key_value_heads", kv_heads),
        "head_dim": f.head_dim(head_dim),
        "max_position": f.integer("max_position_embeddings"),
    }


def llama_like(
    f: Fields,
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    theta: float = 10000.0,
) -> dict[str, Any]:
    """A decoder with Llama's fields; the arguments are the family's defaults."""
    return {
        **sizes(f, head_dim=head_dim, kv_heads=kv_heads),
        **rope(f, theta=theta),
        "norm_eps": f.number("rms_norm_eps", eps),
        "hidden_act": f.activation(),
        "tie_embeddings": f.flag("tie_word_embeddings", tied),
    }


def attention_biases(f: Fields) -> dict[str, Any]:
    """One flag for the biases of q, k, v and o."""
    bias = f.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def _llama(f: Fields) -> dict[str, Any]:
    if f.get("sliding_window") is not None:
        f.refuse("sliding_window", f.get("sliding_window"), "Llama has none; set it to null")
    if WINDOW in (f.layer_types() or ()):
        f.refuse("layer_types", WINDOW, "Llama has no sliding_attention")
    return {
        **llama_like(f, kv_heads=f.integer("num_attention_heads")),
        **attention_biases(f),
        "mlp_bias": f.flag("mlp_bias"),
    }


LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM", config=_llama)
