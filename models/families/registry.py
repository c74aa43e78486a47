"""Every family that is read, by `model_type`."""

from __future__ import annotations

from sarathi_jax.models.families.falcon import FALCON
from sarathi_jax.models.families.family import Family
from sarathi_jax.models.families.gemma import GEMMA2, GEMMA3
from sarathi_jax.models.families.gpt_neox import GPT_NEOX
from sarathi_jax.models.families.llama import LLAMA
from sarathi_jax.models.families.mistral import MISTRAL, MIXTRAL
from sarathi_jax.models.families.opt import OPT
from sarathi_jax.models.families.phi3 import PHI3
from sarathi_jax.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from sarathi_jax.models.families.smollm3 import SMOLLM3

_ALL = (
    LLAMA, MISTRAL, MIXTRAL, FALCON, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3, PHI3, OPT, SMOLLM3, GPT_NEOX,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
