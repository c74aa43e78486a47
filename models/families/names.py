"""What a family's checkpoints call their tensors, where those are not Hugging Face's Llama names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sarathi_jax.config import ModelConfig

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYERS = "model.layers."


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How many rows of a stored tensor are ours, and which."""

    num_rows: int
    pick: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Fused:
    """A stored tensor of `num_rows` rows that holds tensors of ours, or one and something more."""

    num_rows: int
    parts: Mapping[str, Rows]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor under its Llama name: a stored one, or some rows of one that must have `stored_rows`."""

    name: str
    stored_rows: int | None = None
    rows: Rows | None = None


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Stored names without their .weight or .bias, and the Llama name of each, or what is fused in it.

    `layer` are those behind `layers` and the layer's number, {} in them the number of an expert. What is not listed
    keeps its name. Names that match `buffers` are no weights: the config has what they hold.
    """

    layers: str = _LAYERS
    top: Mapping[str, str | Fused] = field(default_factory=dict)
    layer: Mapping[str, str | Fused] = field(default_factory=dict)
    buffers: str = r"(.*\.)?rotary_emb\.inv_freq"

    def is_buffer(self, stored: str) -> bool:
        return re.fullmatch(self.buffers, stored) is not None

    def parts(self, stored: str) -> list[Part]:
        """What a stored tensor holds."""
        split = _split(stored, self.layers)
        if split is None:
            return [Part(name=stored)]
        table = self.top if split.layer is None else self.layer
        target = table.get(split.template, split.template)
        if isinstance(target, str):
            return [Part(name=split.join(_LAYERS, target))]
        return [
            Part(name=split.join(_LAYERS, name), stored_rows=target.num_rows, rows=rows)
            for name, rows in target.parts.items()
        ]

    def stored(self, name: str) -> str:
        """What the tensor of that Llama name is stored as, or in."""
        split = _split(name, _LAYERS)
        if split is None:
            return name
        for stored, target in (self.top if split.layer is None else self.layer).items():
            if split.template == target or (isinstance(target, Fused) and split.template in target.parts):
                return split.join(self.layers, stored)
        return split.join(self.layers, split.template)


@dataclass(frozen=True, kw_only=True)
class _Split:
    """A tensor's name taken apart: layer, name in it with {} for numbers, those numbers, weight or bias."""

    layer: str | None
    template: str
    numbers: list[str]
    kind: str

    def join(self, layers: str, template: str) -> str:
        prefix = "" if self.layer is None else f"{layers}{self.layer}."
        return f"{prefix}{template.format(*self.numbers)}.{self.kind}"


def _split(name: str, layers: str) -> _Split | None:
    """None for a name that is no weight or bias."""
    match = re.fullmatch(r"([^{}]+)\.(weight|bias)", name)
    if match is None:
        return None
    stem, kind = match.groups()
    if (inside := re.fullmatch(re.escape(layers) + r"(\d+)\.(.+)", stem)) is None:
        return _Split(layer=None, template=stem, numbers=[], kind=kind)
    layer, stem = inside.groups()
    return _Split(layer=layer, template=_NUMBER.sub("{}", stem), numbers=_NUMBER.findall(stem), kind=kind)


def qkv_by_kv_head(config: ModelConfig) -> Fused:
    """Each KV head's query heads, then its key, then its value (Falcon, GPT-NeoX)."""
    k, g, hd = config.num_kv_heads, config.num_groups, config.head_dim

    def part(first: int, count: int) -> Rows:
        def pick(x: np.ndarray) -> np.ndarray:
            heads = x.reshape(k, g + 2, hd, *x.shape[1:])[:, first : first + count]
            return heads.reshape(k * count * hd, *x.shape[1:])

        return Rows(num_rows=k * count * hd, pick=pick)

    parts = {"self_attn.q_proj": part(0, g), "self_attn.k_proj": part(g, 1), "self_attn.v_proj": part(g + 1, 1)}
    return Fused(num_rows=k * (g + 2) * hd, parts=parts)


def in_turn(sizes: Mapping[str, int], *, skip: int = 0) -> Fused:
    """One after the other, each with its number of rows, behind `skip` rows that are nobody's."""
    parts, start = {}, skip
    for name, size in sizes.items():
        parts[name] = Rows(num_rows=size, pick=lambda x, rows=slice(start, start + size): x[rows])
        start += size
    return Fused(num_rows=start, parts=parts)
