"""OPT: learned positions, LayerNorm, ReLU. The variant of opt-350m is refused."""

from __future__ import annotations

from typing import Any

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.families.family import Family
from sarathi_jax.models.families.fields import Fields
from sarathi_jax.models.families.names import TensorNames, in_turn

_OFFSET = 2
"""The first rows of the stored positions belong to padding."""


def _opt(f: Fields) -> dict[str, Any]:
    heads, hidden, bias = f.integer("num_attention_heads"), f.integer("hidden_size"), f.flag("enable_bias", True)
    if f.integer("word_embed_proj_dim", hidden) != hidden:
        f.refuse("word_embed_proj_dim", f.get("word_embed_proj_dim"), "projected embeddings, as opt-350m has them")
    if not f.flag("do_layer_norm_before", True):
        f.refuse("do_layer_norm_before", False, "norms after the sublayers, as opt-350m has them")
    if f.flag("_remove_final_layer_norm"):
        f.refuse("_remove_final_layer_norm", True, "a model without a final norm")
    if not f.flag("layer_norm_elementwise_affine", True):
        f.refuse("layer_norm_elementwise_affine", False, "norms without weights")
    return {
        "vocab_size": f.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": f.integer("ffn_dim"),
        "num_layers": f.num_layers(),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": f.head_dim(),
        "max_position": f.integer("max_position_embeddings"),
        "positions": "learned",
        "norm": "layer",
        "gated_mlp": False,
        "hidden_act": f.activation("activation_function", "relu"),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "tie_embeddings": f.flag("tie_word_embeddings", True),
    }


def _names(config: ModelConfig) -> TensorNames:
    positions = in_turn({"model.embed_positions": config.max_position}, skip=_OFFSET)
    return TensorNames(
        layers="model.decoder.layers.",
        top={
            "model.decoder.embed_tokens": "model.embed_tokens",
            "model.decoder.embed_positions": positions,
            "model.decoder.final_layer_norm": "model.norm",
        },
        layer={
            "self_attn_layer_norm": "input_layernorm",
            "self_attn.out_proj": "self_attn.o_proj",
            "final_layer_norm": "post_attention_layernorm",
            "fc1": "mlp.up_proj",
            "fc2": "mlp.down_proj",
        },
    )


OPT = Family(model_type="opt", architecture="OPTForCausalLM", config=_opt, names=_names)
