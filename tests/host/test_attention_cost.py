"""The floor that benchmarks and cost models hold a kernel to, against counting by hand."""

from __future__ import annotations

import pytest

from sarathi_jax.attention_cost import AttentionCost, attention_cost

SHAPE = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "value_bytes": 2}


@pytest.mark.parametrize("window", [None, 1, 5, 37, 64, 1000])
@pytest.mark.parametrize(
    "lens", [[(1, 1)], [(1, 64)], [(64, 64)], [(30, 90)], [(1, 37), (1, 38), (36, 36), (40, 77), (5, 500)], []]
)
def test_counts_what_queries_see(lens, window):
    keys = pairs = queries = 0
    for q_len, kv_len in lens:
        seen = [range(0 if window is None else max(0, p - window + 1), p + 1) for p in range(kv_len - q_len, kv_len)]
        keys += len(set().union(*seen))
        pairs += sum(map(len, seen))
        queries += q_len
    cost = attention_cost(lens, **SHAPE, window=window)
    assert cost.flops == pairs * 8 * 2 * (16 + 16)
    assert cost.num_bytes == keys * 2 * 2 * 16 * 2 + 2 * queries * 8 * 16 * 2


def test_floor_is_the_longer_of_both():
    cost = AttentionCost(num_bytes=3000, flops=5000)
    assert cost.floor_s(bytes_per_s=1000, flops_per_s=1e9) == 3.0
    assert cost.floor_s(bytes_per_s=1e9, flops_per_s=1000) == 5.0


@pytest.mark.parametrize("pair", [(0, 5), (6, 5), (-1, 3)])
def test_impossible_lengths_are_refused(pair):
    with pytest.raises(ValueError, match=rf"1 <= q_len <= kv_len; got q_len={pair[0]} kv_len={pair[1]}"):
        attention_cost([pair], **SHAPE)
