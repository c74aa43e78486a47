"""What a family is: an architecture, the meaning of its config.json, and its tensors' names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.families.fields import Fields
from sarathi_jax.models.families.names import TensorNames


def llama_names(config: ModelConfig) -> TensorNames:
    """Hugging Face's Llama names, the ones a `Checkpoint` goes by."""
    return TensorNames()


@dataclass(frozen=True, kw_only=True)
class Family:
    """`config` maps the fields of a config.json to ModelConfig's (but for `architecture`). A field it does not ask for
    must be harmless, if it is one of those that can change the model (`hf_config.REFUSED`)."""

    model_type: str
    architecture: str
    config: Callable[[Fields], dict[str, Any]]
    names: Callable[[ModelConfig], TensorNames] = llama_names
