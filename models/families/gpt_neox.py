"""GPT-NeoX and Pythia."""

from __future__ import annotations

from typing import Any

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.families.family import Family
from sarathi_jax.models.families.fields import Fields
from sarathi_jax.models.families.names import TensorNames, qkv_by_kv_head
from sarathi_jax.models.families.rope import partial_rope


def _gpt_neox(f: Fields) -> dict[str, Any]:
    heads, head_dim, bias = f.integer("num_attention_heads"), f.head_dim(), f.flag("attention_bias", True)
    return {
        "vocab_size": f.integer("vocab_size"),
        "hidden_size": f.integer("hidden_size"),
        "intermediate_size": f.integer("intermediate_size"),
        "num_layers": f.num_layers(),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "max_position": f.integer("max_position_embeddings"),
        **partial_rope(f, head_dim, share_key="rotary_pct", share=0.25, theta_key="rotary_emb_base"),
        "block": "parallel" if f.flag("use_parallel_residual", True) else "sequential",
        "norm": "layer",
        "norm_eps": f.number("layer_norm_eps", 1e-5),
        "gated_mlp": False,
        "hidden_act": f.activation(default="gelu"),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": True,
        "tie_embeddings": f.flag("tie_word_embeddings"),
    }


def _names(config: ModelConfig) -> TensorNames:
    return TensorNames(
        layers="gpt_neox.layers.",
        top={
            "gpt_neox.embed_in": "model.embed_tokens",
            "gpt_neox.final_layer_norm": "model.norm",
            "embed_out": "lm_head",  # so in transformers 4
        },
        layer={
            "attention.query_key_value": qkv_by_kv_head(config),
            "attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        },
        buffers=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    )


GPT_NEOX = Family(model_type="gpt_neox", architecture="GPTNeoXForCausalLM", config=_gpt_neox, names=_names)
