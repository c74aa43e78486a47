"""A model cut for several devices: which layers a part has, how its heads are laid out, which numbers a device gets.

Heads: every device of a tensor group gets as many KV heads as the others, with as many query heads each. Where the
model's do not divide, KV heads are replicated, each copy with a share of its query heads, or heads of zeros are added,
or both; a head of zeros changes nothing, as its rows of the output projection are zero too. The vocabulary and the MLP
are padded with zeros to a multiple of the devices; the decoder masks the logits of the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sarathi_jax.axes import MESH_AXES
from sarathi_jax.config import ModelConfig, check_positive
from sarathi_jax.models.weight_specs import WeightSpec, weight_specs

_PADDED = ("vocab", "mlp")


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """`num_kv_heads` heads of the cache with `num_groups` query heads each, over all devices of a tensor group.

    Each of the model's KV heads stands there `num_copies` times, side by side; those that are left are zeros.
    """

    num_kv_heads: int
    num_groups: int
    num_copies: int

    @classmethod
    def choose(cls, config: ModelConfig, tensor: int) -> HeadLayout:
        """That with the fewest columns of projections, K (G + 2), and of those with the smallest cache."""
        layouts = []
        for copies in range(1, config.num_groups + 1):
            kv_heads = -(-config.num_kv_heads * copies // tensor) * tensor
            groups = -(-config.num_groups // copies)
            layouts.append((kv_heads * (groups + 2), kv_heads, copies, groups))
        _, kv_heads, copies, groups = min(layouts)
        return cls(num_kv_heads=kv_heads, num_groups=groups, num_copies=copies)

    def is_exact(self, config: ModelConfig) -> bool:
        """Whether heads are the model's own, in their order."""
        return self.num_kv_heads == config.num_kv_heads and self.num_copies == 1

    def columns(self, config: ModelConfig, num_shared: int) -> np.ndarray:
        """Where each column comes from, among the model's K (G + num_shared); one past them is zeros.

        Columns of a KV head are its query heads, then `num_shared` of its own (its key and its value, or none).
        """
        k, g = config.num_kv_heads, config.num_groups
        columns = np.full((self.num_kv_heads, self.num_groups + num_shared), k * (g + num_shared))
        for place in range(k * self.num_copies):
            head, copy = divmod(place, self.num_copies)
            first = head * (g + num_shared)
            share = range(copy * self.num_groups, min((copy + 1) * self.num_groups, g))
            columns[place, : len(share)] = [first + group for group in share]
            columns[place, self.num_groups :] = range(first + g, first + g + num_shared)
        return columns.reshape(-1)


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Layers `layers` of a model, split over `tensor` devices; the first part embeds, the last one has the head."""

    config: ModelConfig
    layers: range
    tensor: int = 1

    def __post_init__(self) -> None:
        check_positive("tensor", self.tensor)
        c = self.config
        if self.tensor > c.num_heads:
            works = ", ".join(str(n) for n in range(1, c.num_heads + 1) if HeadLayout.choose(c, n).is_exact(c))
            raise ValueError(
                f"tensor={self.tensor} is more than num_heads={c.num_heads} of the model; 1 to {c.num_heads} work, and "
                f"without padding or copies {works}"
            )

    @classmethod
    def whole(cls, config: ModelConfig, tensor: int = 1) -> ModelPart:
        return cls(config=config, layers=range(config.num_layers), tensor=tensor)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.config.num_layers

    @cached_property
    def heads(self) -> HeadLayout:
        return HeadLayout.choose(self.config, self.tensor)

    @cached_property
    def local_config(self) -> ModelConfig:
        """What the decoder of one device sees: these layers, and its own heads."""
        kv_heads = self.heads.num_kv_heads // self.tensor
        return replace(self._layers_config, num_heads=kv_heads * self.heads.num_groups, num_kv_heads=kv_heads)

    @cached_property
    def logical_specs(self) -> dict[str, WeightSpec]:
        """The weights of this part as the model has them."""
        specs = weight_specs(self._layers_config)
        needed = {name for name in specs if name.startswith("layers")}
        if self.is_first:
            needed |= {"embed", "positions"}
        if self.is_last:
            needed |= {"final_norm", "final_norm_bias", "head"} | ({"embed"} if self.config.tie_embeddings else set())
        shift = self.layers.start
        return {
            name: spec if spec.layers is None or not shift else replace(
                spec, layers=range(spec.layers.start + shift, spec.layers.stop + shift, spec.layers.step)
            )
            for name, spec in specs.items()
            if name in needed
        }  # fmt: skip

    @cached_property
    def specs(self) -> dict[str, WeightSpec]:
        """The weights of this part as its devices have them, all together."""
        return {name: self._arranged_spec(spec) for name, spec in self.logical_specs.items()}

    def arrange(self, axes: tuple[str | None, ...], array: Any, xp: Any = np) -> Any:
        """A weight, or an entry of one, with these axes: heads laid out and padding added. `xp`: NumPy or jax.numpy."""
        axes = axes[len(axes) - array.ndim :]
        if "kv_heads" in axes:
            at = axes.index("kv_heads")
            heads, columns = array.shape[at : at + 2]
            num_shared = columns - self.config.num_groups
            if not self.heads.is_exact(self.config):
                before, after = array.shape[:at], array.shape[at + 2 :]
                flat = array.reshape(*before, heads * columns, *after)
                flat = xp.concatenate([flat, xp.zeros((*before, 1, *after), array.dtype)], axis=at)
                taken = xp.take(flat, self.heads.columns(self.config, num_shared), axis=at)
                array = taken.reshape(*before, self.heads.num_kv_heads, self.heads.num_groups + num_shared, *after)
        for at, axis in enumerate(axes):
            missing = -array.shape[at] % self.tensor
            if axis in _PADDED and missing:
                array = xp.pad(array, [(0, missing if i == at else 0) for i in range(array.ndim)])
        return array

    def device_shape(self, spec: WeightSpec) -> tuple[int, ...]:
        """What one device holds of a weight of `specs`."""
        split = lambda size, axis: size // self.tensor if MESH_AXES[axis] else size
        return tuple(map(split, spec.shape, spec.axes))

    @cached_property
    def _layers_config(self) -> ModelConfig:
        """The model with these layers alone."""
        first, c = self.layers.start, self.config
        rotated = lambda pattern: tuple(pattern[(first + i) % len(pattern)] for i in range(len(pattern)))
        patterns = {name: rotated(getattr(c, name)) for name in ("rope_pattern", "window_pattern", "moe_pattern")}
        return replace(c, num_layers=len(self.layers), **patterns)

    def _arranged_spec(self, spec: WeightSpec) -> WeightSpec:
        shape = list(spec.shape)
        for at, axis in enumerate(spec.axes):
            if axis == "kv_heads":
                shape[at] = self.heads.num_kv_heads
                shape[at + 1] += self.heads.num_groups - self.config.num_groups
            elif axis in _PADDED:
                shape[at] += -shape[at] % self.tensor
        pack: Callable[..., np.ndarray] = lambda *tensors: self.arrange(spec.axes, spec.pack(*tensors))
        return replace(spec, shape=tuple(shape), pack=pack)
