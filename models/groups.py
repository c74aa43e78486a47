"""Layers of different kinds cut into groups of a repeated pattern, so that all of them loop."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_jax.config import LayerKind

_MAX_PATTERN = 16


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers `first_layer` on: `kinds` in turn, `num_repeats` times. A compiled loop has one body of `len(kinds)`
    layers.

    The layers at one place of the pattern are a slot and have their weights stacked; slots are counted through all
    groups.
    """

    first_layer: int
    first_slot: int
    kinds: tuple[LayerKind, ...]
    num_repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.kinds) * self.num_repeats

    def slot_layers(self, place: int) -> range:
        """The layers of the slot at this place of the pattern."""
        first = self.first_layer + place
        return range(first, self.first_layer + self.num_layers, len(self.kinds))


def layer_groups(kinds: tuple[LayerKind, ...]) -> tuple[LayerGroup, ...]:
    """The fewest slots in all, so the shortest program; of those the fewest groups, the first as long as can be."""
    if len(set(kinds)) == 1:
        return (LayerGroup(first_layer=0, first_slot=0, kinds=kinds[:1], num_repeats=len(kinds)),)
    n, patterns = len(kinds), range(1, min(_MAX_PATTERN, len(kinds)) + 1)
    runs = {p: [0] * (n + 1) for p in patterns}  # layers from i on that equal the one p later
    # Of the layers from i on: slots, groups, less the first group's layers, and its pattern.
    best = [(0, 0, 0, 1)] * (n + 1)
    for i in reversed(range(n)):
        options = []
        for p in patterns:
            if i + p <= n:
                runs[p][i] = runs[p][i + 1] + 1 if i + p < n and kinds[i] == kinds[i + p] else 0
                repeats = (runs[p][i] + p) // p
                slots, groups, *_ = best[i + p * repeats]
                options.append((slots + p, groups + 1, -p * repeats, p))
        best[i] = min(options)
    result, i, slot = [], 0, 0
    while i < n:
        _, _, layers, p = best[i]
        repeats = -layers // p
        result.append(LayerGroup(first_layer=i, first_slot=slot, kinds=kinds[i : i + p], num_repeats=repeats))
        i, slot = i + p * repeats, slot + p
    return tuple(result)
