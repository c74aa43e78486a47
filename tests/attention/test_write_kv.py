"""Where this step's keys and values land in the pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sarathi_jax.attention import ragged_paged_attention, write_kv

PAGES, KV_HEADS, PAGE_SIZE, HEAD_SIZE = 9, 2, 4, 8
SINK = 0
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)


def pools(dtype, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(PAGES, KV_HEADS, PAGE_SIZE, HEAD_SIZE)), dtype) for _ in "kv")


def new_kv(tokens: int, dtype=jnp.float32, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(tokens, KV_HEADS, HEAD_SIZE)), dtype) for _ in "kv")


def ids(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


@DTYPES
def test_every_token_lands_in_its_slot_and_nowhere_else(dtype):
    (k_pages, v_pages), (k, v) = pools(dtype), new_kv(6)
    page_ids, offsets = ids(3, 3, 8, 1, 8, 5), ids(2, 3, 0, 1, 3, 0)
    got = jax.jit(write_kv)(k_pages, v_pages, k, v, page_ids, offsets)
    for pages, x, result in zip((k_pages, v_pages), (k, v), got, strict=True):
        want = np.asarray(pages).copy()
        for t in range(6):
            want[page_ids[t], :, offsets[t], :] = np.asarray(x[t].astype(dtype))
        assert result.dtype == dtype
        np.testing.assert_array_equal(np.asarray(result), want)


def test_padding_of_a_pool_is_written_with_zeros():
    """Whatever stood there: a zero in a query times NaN is NaN."""
    k, v = new_kv(2)
    garbage = jnp.full((PAGES, KV_HEADS, PAGE_SIZE, 128), jnp.nan)
    for pages, x in zip(jax.jit(write_kv)(garbage, garbage, k, v, ids(4, 5), ids(1, 0)), (k, v), strict=True):
        rows = np.asarray(pages)[[4, 5], :, [1, 0]]
        np.testing.assert_array_equal(rows[..., :HEAD_SIZE], np.asarray(x))
        assert not rows[..., HEAD_SIZE:].any()


@DTYPES
def test_padding_changes_only_the_sink_page(dtype):
    """Padding rows may repeat one sink slot, and hold anything."""
    (k_pages, v_pages), (k, v) = pools(dtype), new_kv(8)
    k, v = k.at[2:].set(jnp.nan), v.at[2:].set(jnp.nan)
    page_ids, offsets = ids(4, 4, *[SINK] * 6), ids(1, 2, *[0] * 6)
    got = jax.jit(write_kv)(k_pages, v_pages, k, v, page_ids, offsets)
    for pages, x, result in zip((k_pages, v_pages), (k, v), got, strict=True):
        want = np.asarray(pages).copy()
        want[4, :, 1:3] = np.swapaxes(np.asarray(x[:2].astype(dtype)), 0, 1)
        np.testing.assert_array_equal(np.asarray(result)[1:], want[1:])


def test_a_step_of_padding_leaves_all_pages_as_they_were():
    (k_pages, v_pages), (k, v) = pools(jnp.float32), new_kv(5)
    k_after, v_after = jax.jit(write_kv)(k_pages, v_pages, k, v, ids(*[SINK] * 5), ids(*[0] * 5))
    np.testing.assert_array_equal(np.asarray(k_after)[1:], np.asarray(k_pages)[1:])
    np.testing.assert_array_equal(np.asarray(v_after)[1:], np.asarray(v_pages)[1:])


def test_donated_pools_are_written_in_place():
    """A copy of the pool each step would cost more than the step."""
    k_pages, v_pages = pools(jnp.float32)
    before = k_pages.unsafe_buffer_pointer(), v_pages.unsafe_buffer_pointer()
    write = jax.jit(write_kv, donate_argnums=(0, 1))
    k_after, v_after = write(k_pages, v_pages, *new_kv(2), ids(1, 2), ids(0, 3))
    assert k_pages.is_deleted()
    assert v_pages.is_deleted()
    assert (k_after.unsafe_buffer_pointer(), v_after.unsafe_buffer_pointer()) == before


def test_in_place_as_a_loop_carry():
    """The layers' loop carries the pool; the compiled loop must hold no second one."""

    def steps(k_pages, v_pages, k, v):
        def body(i, pages):
            return write_kv(*pages, k, v, ids(1, 2) + i % 3, ids(0, 3))

        return jax.lax.fori_loop(0, 10, body, (k_pages, v_pages))

    big = jax.ShapeDtypeStruct((4096, KV_HEADS, PAGE_SIZE, HEAD_SIZE), jnp.float32)
    x = jax.ShapeDtypeStruct((2, KV_HEADS, HEAD_SIZE), jnp.float32)
    memory = jax.jit(steps, donate_argnums=(0, 1)).lower(big, big, x, x).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * big.size * 4
    assert memory.temp_size_in_bytes < big.size * 4 // 10


def test_chunks_are_read_back_in_order_through_the_page_table():
    """Three sequences written in uneven chunks, interleaved; every value says whose it is and where it stands."""
    page_table = np.array([[7, 2, 5], [3, 8, 1], [6, 4, SINK]])
    kv_lens, written = [10, 12, 7], [0, 0, 0]

    def tag(s, position):
        return 100.0 * (s + 1) + position

    k_pages = v_pages = jnp.full((PAGES, KV_HEADS, PAGE_SIZE, HEAD_SIZE), -1.0)
    write = jax.jit(write_kv)
    for plan in ([(0, 3), (1, 5)], [(1, 1), (0, 6)], [(2, 7)], [(0, 1), (1, 6)]):
        rows = []
        for s, n in plan:
            rows += [(s, position) for position in range(written[s], written[s] + n)]
            written[s] += n
        padding = 8 - len(rows)
        values = np.array([*(tag(*row) for row in rows), *[-7.0] * padding], np.float32)
        k = jnp.asarray(np.broadcast_to(values[:, None, None], (8, KV_HEADS, HEAD_SIZE)))
        page_ids = ids(*(page_table[s, p // PAGE_SIZE] for s, p in rows), *[SINK] * padding)
        offsets = ids(*(p % PAGE_SIZE for _, p in rows), *[0] * padding)
        k_pages, v_pages = write(k_pages, v_pages, k, -k, page_ids, offsets)
    assert written == kv_lens
    for s, kv_len in enumerate(kv_lens):
        for position in range(kv_len):
            slot = (page_table[s, position // PAGE_SIZE], slice(None), position % PAGE_SIZE)
            assert np.all(np.asarray(k_pages)[slot] == tag(s, position)), (s, position)
            assert np.all(np.asarray(v_pages)[slot] == -tag(s, position)), (s, position)


def test_attention_reads_what_was_written():
    """Queries of zeros weigh all keys alike, so the output is the mean of the positions seen."""
    page_ids, offsets = ids(5, 5, 5, 5, 2, 2), ids(0, 1, 2, 3, 0, 1)
    k, _ = new_kv(6)
    v = jnp.broadcast_to(jnp.arange(6.0)[:, None, None], k.shape)
    empty = jnp.full((PAGES, KV_HEADS, PAGE_SIZE, HEAD_SIZE), jnp.nan)
    k_pages, v_pages = write_kv(empty, empty, k, v, page_ids, offsets)
    out = ragged_paged_attention(
        jnp.zeros((6, 4, HEAD_SIZE)), k_pages, v_pages, ids(6), ids(5, 2)[None], ids(0, 6), jnp.int32(1), jnp.int32(0),
        scale=1.0,
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(out)[:, 0, 0], np.arange(6) / 2, rtol=1e-6)
