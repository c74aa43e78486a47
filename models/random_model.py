"""A model of a published shape without its weights: they are drawn on the device. For measuring, not for text."""

from __future__ import annotations

from sarathi_jax.known_models import model_config

PREFIX = "random:"


class RandomModel:
    """The model `random:<name>`, name one of `known_models.MODELS`; it has no tokenizer and no end token."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, source: str) -> None:
        self.source = source
        self.config = model_config(source.removeprefix(PREFIX))

    def tokenizer(self) -> None:
        return None

    def tokenizer_files(self) -> dict[str, bytes]:
        return {}
