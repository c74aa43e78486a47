"""Reads a config.json: every field checked for its type, and every field that was asked for remembered."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from sarathi_jax.config import MAX_LAYERS, Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

MAX_INT = 2**31 - 1
"""Positions and sizes are int32 on the device."""
FULL, WINDOW = "full_attention", "sliding_attention"


class Fields:
    """The fields of a parsed config.json. A field that is null or absent has the default, where there is one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._need(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INT:
            raise ValueError(f"{key}={reprlib.repr(value)} must be an integer of 32 bits")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return to_number(key, self._need(key, default))

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        return to_flag(key, self.get(key, default))

    def activation(self, key: str = "hidden_act", default: str = "silu") -> Activation:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ValueError(f"{key}={reprlib.repr(value)} is not supported; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def num_layers(self) -> int:
        value = self.integer("num_hidden_layers")
        if not 1 <= value <= MAX_LAYERS:
            raise ValueError(f"num_hidden_layers={value} must be from 1 to {MAX_LAYERS}")
        return value

    def head_dim(self, default: int | None = None) -> int:
        """As given; where the field is absent the default; else hidden size over heads."""
        if self.get("head_dim") is not None:
            return self.integer("head_dim")
        if default is not None and "head_dim" not in self.config:
            return default
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if heads < 1 or hidden % heads:
            raise ValueError(f"hidden_size={hidden} must be a multiple of num_attention_heads={heads}, or set head_dim")
        return hidden // heads

    def layer_types(self) -> list[str] | None:
        """`layer_types`: FULL or WINDOW for each layer."""
        layer_types, num_layers = self.get("layer_types"), self.num_layers()
        if layer_types is not None and not (
            isinstance(layer_types, list)
            and len(layer_types) == num_layers
            and all(layer in (WINDOW, FULL) for layer in layer_types)
        ):
            raise ValueError(
                f"layer_types={reprlib.repr(layer_types)} must name {FULL} or {WINDOW} for each of "
                f"num_hidden_layers={num_layers}"
            )
        return layer_types

    def refuse(self, key: str, value: Any, reason: str) -> NoReturn:
        """ValueError for a value that asks for something not done here."""
        raise ValueError(f"{key}={reprlib.repr(value)} is not supported: {reason}")

    def _need(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None and key not in self.config:
            raise ValueError(f"the model's config has no {key!r}; it is needed")
        return value


def to_number(key: str, value: Any) -> float:
    """`value` of field `key`, or ValueError unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{key}={reprlib.repr(value)} must be a finite number")
    return float(value)


def to_flag(key: str, value: Any) -> bool:
    """`value` of field `key`, or ValueError unless it is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{key}={reprlib.repr(value)} must be true or false")
    return value


def shortest(pattern: list[bool]) -> tuple[bool, ...]:
    """The shortest pattern that repeats to this one (the last time perhaps in part)."""
    n = len(pattern)
    period = next(p for p in range(1, n + 1) if all(pattern[i] == pattern[i - p] for i in range(p, n)))
    return tuple(pattern[:period])


def windows(length: int | None, pattern: list[bool]) -> dict[str, Any]:
    """ModelConfig's fields for layers with a window of that length; `pattern` has an entry for each layer."""
    if length is None or not any(pattern):
        return {"sliding_window": None}
    return {"sliding_window": length, "window_pattern": shortest(pattern)}
