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
        queries += q_len
        keys += kv_len if window is None else min(kv_len, q_len - 1 + window)
        pairs += _num_seen(kv_len, window) - _num_seen(kv_len - q_len, window)
    num_bytes = 2 * value_bytes * head_dim * (num_kv_heads * keys + num_heads * queries)
    return AttentionCost(num_bytes, 4 * num_heads * head_dim * pairs)


def _num_seen(kv_len: int, window: int | None) -> int:
    """Keys that all queries of positions below `kv_len` see together."""
    ramp = kv_len if window is None else min(kv_len, window)
    return ramp * (ramp + 1) // 2 + (kv_len - ramp) * ramp
