"""Maps a Hugging Face config.json to a ModelConfig; what it asks for and is not supported is refused by name."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.families.family import Family
from sarathi_jax.models.families.fields import Fields
from sarathi_jax.models.families.registry import FAMILIES

REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "per_layer_config": ({},),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "alibi": (False,),
    "position_embedding_type": ("rope", "rotary"),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "layer_types": (),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "lm_head_bias": (False,),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "text_config": (),
    "vision_config": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "logit_scale": (1,),
}
"""Fields that ask for something only some families have, or none here, with the values (null aside) that ask for
nothing."""


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed config.json.

    Fields and defaults are those of transformers, with one exception: a Mistral config without the key `sliding_window`
    has full attention here (transformers would assume 4096). ValueError for what is missing, malformed or unsupported.
    """
    family, fields = family_of(config), Fields(config)
    values = family.config(fields)
    for key, harmless in REFUSED.items():
        value = config.get(key)
        if key not in fields.asked and value is not None and value not in harmless:
            raise ValueError(
                f"{key}={reprlib.repr(value)} is not supported for {family.architecture}; remove it only if the "
                "weights do not need it"
            )
    return ModelConfig(architecture=family.architecture, **values)


def family_of(config: Mapping[str, Any]) -> Family:
    """By `model_type`, or where there is none by `architectures`. They may not disagree."""
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    architectures = architectures if isinstance(architectures, list) else [architectures]
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    named = [by_architecture.get(a) if isinstance(a, str) else None for a in architectures]
    if model_type is None and len(named) == 1:
        model_type = named[0]
    if not isinstance(model_type, str) or model_type not in FAMILIES or named not in ([], [model_type]):
        raise ValueError(
            f"architectures={repr(architectures)[:200]} with model_type={reprlib.repr(config.get('model_type'))} is "
            f"not supported; known: {', '.join(f'{family.architecture} ({name})' for name, family in FAMILIES.items())}"
        )
    return FAMILIES[model_type]
