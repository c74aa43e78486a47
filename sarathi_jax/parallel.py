"""Devices for a model: replicas, pipeline stages, tensor groups; a mesh for each stage, and where arrays go on it.

A mesh has one axis, "tensor". Pipeline stages and replicas have meshes of their own: nothing is computed across them,
what passes from one to the next does so explicitly (`pipeline.Hop`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sarathi_jax.axes import MESH_AXES, STAGE, TENSOR
from sarathi_jax.config import check_positive

POOL_AXES = (None, "kv_heads", None, None)
"""Of keys and of values."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How many devices share a model, and in what way.

    Each layer is split over `tensor` devices, the layers are cut into `pipeline` stages, and `data` such pipelines
    serve requests side by side. `devices` None takes the first of `jax.devices()`; neighbours form a tensor group.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    devices: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data"):
            check_positive(name, getattr(self, name))

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline * self.data

    def replicas(self) -> list[Parallel]:
        """Each replica by itself, with its own devices."""
        devices = self._devices().reshape(self.data, -1)
        return [replace(self, data=1, devices=tuple(own)) for own in devices]

    def meshes(self) -> list[list[Mesh]]:
        """A mesh for each replica and stage. ValueError where there are too few devices."""
        return [[tensor_mesh(group) for group in replica] for replica in self._devices()]

    def _devices(self) -> np.ndarray:
        """By replica, stage and place in the tensor group."""
        devices = jax.devices() if self.devices is None else list(self.devices)
        if self.num_devices > len(devices):
            raise ValueError(
                f"tensor={self.tensor} x pipeline={self.pipeline} x data={self.data} is a mesh of {self.num_devices} "
                f"devices, and there are {len(devices)}; use fewer (on a CPU, XLA_FLAGS="
                f"--xla_force_host_platform_device_count={self.num_devices} before jax is imported makes virtual ones)"
            )
        if len(set(devices)) != len(devices):
            raise ValueError("devices names one of them twice")
        return np.array(devices[: self.num_devices]).reshape(self.data, self.pipeline, self.tensor)


def tensor_mesh(devices: Sequence[Any]) -> Mesh:
    return jax.make_mesh((len(devices),), (TENSOR,), axis_types=(AxisType.Auto,), devices=list(devices))


def joined(meshes: Sequence[Mesh]) -> Mesh:
    """One mesh of several tensor groups, with an axis "stage" before theirs."""
    devices = np.stack([mesh.devices for mesh in meshes])
    return Mesh(devices, (STAGE, TENSOR), axis_types=(AxisType.Auto, AxisType.Auto))


def partition(axes: Sequence[str | None]) -> PartitionSpec:
    """Over which mesh axis each of these logical axes is split."""
    return PartitionSpec(*(MESH_AXES[axis] for axis in axes))


def sharding(mesh: Mesh, axes: Sequence[str | None] = ()) -> NamedSharding:
    """Where an array with these logical axes goes; none is a copy on every device."""
    return NamedSharding(mesh, partition(axes))


def spread(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Split over the longest axis that the devices divide, whatever it means; a copy on each where there is none."""
    axes = [i for i, size in enumerate(shape) if size % mesh.size == 0]
    longest = max(axes, key=lambda i: shape[i], default=None)
    return NamedSharding(mesh, PartitionSpec(*(TENSOR if i == longest else None for i in range(len(shape)))))


def bytes_per_device(arrays: Any) -> dict[Any, int]:
    """Bytes of a tree of arrays on each of this process's devices."""
    held: dict[Any, int] = {}
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + math.prod(shard.data.shape) * array.dtype.itemsize
    return held
