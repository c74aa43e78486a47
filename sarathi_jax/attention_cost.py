"""What an attention call must move and compute, whatever kernel does it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class AttentionCost(NamedTuple):
    """The least that a call takes of memory and arithmetic."""

    num_bytes: int
    flops: int

    def floor_s(self, *, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds below which no kernel can be on a device with these peaks."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


def attention_cost(
    lens: Iterable[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_bytes: int,
    window: int | None = None,
) -> AttentionCost:
    """One layer's attention over sequences (q_len, kv_len), each query seeing `window` keys at most.

    Bytes: keys and values that any query of a sequence sees, once for each KV head; queries and outputs once. Pages
    that sequences share are counted for each. FLOPs: two products of 2 D for every query head and key that it sees.
    """
    queries = keys = pairs = 0
    for q_len, kv_len in lens:
        if not 1 <= q_len <= kv_len:
            raise ValueError(f"a sequence needs 1 <= q_len <= kv_len; got {q_len=} {kv_len=}")
        seen, products = keys_and_pairs(q_len, kv_len, window)
        queries, keys, pairs = queries + q_len, keys + seen, pairs + products
    num_bytes = keys * key_bytes(num_kv_heads, head_dim, value_bytes) + 2 * value_bytes * head_dim * num_heads * queries
    return AttentionCost(num_bytes, pairs * pair_flops(num_heads, head_dim))


def keys_and_pairs(q_len: int, kv_len: int, window: int | None = None) -> tuple[int, int]:
    """Keys that any of a sequence's queries sees, and pairs of a query and a key that it sees."""
    start = kv_len - q_len
    pairs = q_len * start + q_len * (q_len + 1) // 2
    if window is None or kv_len <= window:
        return kv_len, pairs
    cut, hidden = kv_len - max(start, window), max(start - window, 0)  # queries; they miss hidden + 1, + 2, ... keys
    return min(kv_len, q_len - 1 + window), pairs - cut * hidden - cut * (cut + 1) // 2


def key_bytes(num_kv_heads: int, head_dim: int, value_bytes: int) -> int:
    """A key and its value."""
    return 2 * num_kv_heads * head_dim * value_bytes


def pair_flops(num_heads: int, head_dim: int) -> int:
    """A query with a key, and the key's value with its weight."""
    return 4 * num_heads * head_dim
