"""Phi-3, Phi-3.5 and Phi-4: fused projections, partial rotary positions, longrope."""

from __future__ import annotations

from typing import Any

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.families.family import Family
from sarathi_jax.models.families.fields import Fields
from sarathi_jax.models.families.llama import sizes
from sarathi_jax.models.families.names import TensorNames, in_turn
from sarathi_jax.models.families.rope import partial_rope


def _phi3(f: Fields) -> dict[str, Any]:
    fields = sizes(f, kv_heads=f.integer("num_attention_heads"))
    return {
        **fields,
        **partial_rope(f, fields["head_dim"], renamed={"su": "longrope", "yarn": "longrope"}),
        "norm_eps": f.number("rms_norm_eps", 1e-5),
        "hidden_act": f.activation(),
        "sliding_window": None if f.get("sliding_window") is None else f.integer("sliding_window"),
        "tie_embeddings": f.flag("tie_word_embeddings"),
    }


def _names(config: ModelConfig) -> TensorNames:
    q, kv = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    gate_up = {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size}
    return TensorNames(
        layer={
            "self_attn.qkv_proj": in_turn({"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}),
            "mlp.gate_up_proj": in_turn(gate_up),
        }
    )


PHI3 = Family(model_type="phi3", architecture="Phi3ForCausalLM", config=_phi3, names=_names)
