"""Seconds of an operator: the longer of its arithmetic, in waves of whole tiles, and of its memory traffic."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from sarathi_jax.hardware import Device, Link

_Bytes = TypeVar("_Bytes", float, np.ndarray)

_SPLITS = (1, 2, 4, 8)
"""Pieces that a matmul's inner dimension may be cut into, for more tiles; their sums go through memory."""


class Matmul(NamedTuple):
    """[tokens, inner] x [inner, columns] on one device. Of `experts` of them a token goes through `per_token`."""

    inner: int
    columns: int
    experts: int = 1
    per_token: int = 1

    @property
    def num_weights(self) -> int:
        return self.inner * self.columns * self.experts


def matmul_s(device: Device, num_tokens: np.ndarray, matmul: Matmul, value_bytes: int = 2) -> np.ndarray:
    """Seconds of a matmul for each of these token counts (>= 1), with the best split of `inner`.

    Tiles run in waves, one to a core, each wave as long as a full one. Tokens are spread evenly over the experts that
    they are expected to reach.
    """
    share, tokens = device.efficiency, np.asarray(num_tokens, dtype=np.float64)
    active = matmul.experts * (1.0 - (1.0 - matmul.per_token / matmul.experts) ** tokens)
    rows = tokens * matmul.per_token / active
    memory_rate = device.memory_bytes_per_s * share.memory
    tile_rows, tile_columns = device.tile
    num_tiles = active * np.ceil(np.round(rows / tile_rows, 9)) * -(-matmul.columns // tile_columns)
    tile_s = 2 * tile_rows * tile_columns * matmul.inner / (device.flops_per_s * share.math / device.num_cores)
    math = np.full(tokens.shape, np.inf)
    for split in _SPLITS if device.num_cores > 1 else (1,):
        sums_s = 2 * 4 * split * active * rows * matmul.columns / memory_rate if split > 1 else 0.0
        waves = np.ceil(np.round(num_tiles * split / device.num_cores, 9))
        math = np.minimum(math, waves * tile_s / split + sums_s)
    weights, moved = active * matmul.inner * matmul.columns, active * rows * (matmul.inner + matmul.columns)
    return share.matmul_kernel_s + np.maximum(math, (weights + moved) * value_bytes / memory_rate)


def elementwise_s(device: Device, num_values: np.ndarray, num_kernels: int = 1, value_bytes: int = 2) -> np.ndarray:
    """Seconds of kernels that read and write `num_values` together and compute next to nothing."""
    share = device.efficiency
    return num_kernels * share.kernel_s + num_values * value_bytes / (device.memory_bytes_per_s * share.elementwise)


def all_reduce_s(link: Link, num_devices: int, num_bytes: np.ndarray) -> np.ndarray:
    """Seconds to sum so many bytes over the devices of a ring."""
    if num_devices == 1:
        return np.zeros_like(num_bytes, dtype=np.float64)
    return link.latency_s + 2 * (num_devices - 1) / num_devices * num_bytes / link.bytes_per_s


def send_s(link: Link, num_bytes: _Bytes) -> _Bytes:
    """Seconds to send so many bytes to another device."""
    return link.latency_s + num_bytes / link.bytes_per_s
