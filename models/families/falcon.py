"""Falcon: 7B (multi-query), the new decoder of 40B, 180B and 11B. ALiBi positions (the RW models) are refused."""

from __future__ import annotations

from typing import Any

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.families.family import Family
from sarathi_jax.models.families.fields import Fields
from sarathi_jax.models.families.names import TensorNames, qkv_by_kv_head
from sarathi_jax.models.families.rope import rope


def _falcon(f: Fields) -> dict[str, Any]:
    if f.flag("alibi"):
        f.refuse("alibi", True, "positions by ALiBi, as falcon-rw-1b has them, are not done here")
    heads, hidden, bias = f.integer("num_attention_heads"), f.integer("hidden_size"), f.flag("bias")
    if f.head_dim() * heads != hidden:
        f.refuse("head_dim", f.head_dim(), "Falcon's is hidden_size over num_attention_heads")
    new, multi_query = f.flag("new_decoder_architecture"), f.flag("multi_query", True)
    kv_heads, num_norms = f.integer("num_kv_heads", heads), f.integer("num_ln_in_parallel_attn", 2 if new else 1)
    if not (new or f.flag("parallel_attn", True)):
        block = "sequential"
    elif num_norms == 2 and not new:
        f.refuse("num_ln_in_parallel_attn", 2, "the old decoder has one norm for attention and MLP")
    else:
        block = "parallel" if num_norms == 2 else "parallel_shared_norm"
    if new and not f.flag("parallel_attn", True):
        f.refuse("parallel_attn", False, "the new decoder is parallel")
    return {
        "vocab_size": f.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": f.integer("ffn_hidden_size", 4 * hidden),
        "num_layers": f.num_layers(),
        "num_heads": heads,
        "num_kv_heads": 1 if multi_query and not new else kv_heads,
        "head_dim": f.head_dim(),
        "max_position": f.integer("max_position_embeddings", 2048),
        **rope(f),
        "block": block,
        "norm": "layer",
        "norm_eps": f.number("layer_norm_epsilon", 1e-5),
        "gated_mlp": False,
        "hidden_act": f.activation("activation", "gelu"),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "tie_embeddings": f.flag("tie_word_embeddings", True),
    }


def _names(config: ModelConfig) -> TensorNames:
    norms = {"ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm"} if config.block == "parallel" else {}
    return TensorNames(
        layers="transformer.h.",
        top={"transformer.word_embeddings": "model.embed_tokens", "transformer.ln_f": "model.norm"},
        layer={
            **norms,
            "self_attention.query_key_value": qkv_by_kv_head(config),
            "self_attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        },
        buffers=r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",
    )


FALCON = Family(model_type="falcon", architecture="FalconForCausalLM", config=_falcon, names=_names)
