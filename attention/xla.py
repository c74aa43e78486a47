"""Chunked paged attention in plain XLA: page blocks walked with a running softmax, trip counts taken from the data.

No gather of a sequence's whole padded page list, no scores across sequences. Decodes go in groups of rows that share a
loop; every longer chunk goes in query tiles of its own sequence. Compiles once per shape, whatever the lengths.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_NEG = -1e30  # finite: exp(_NEG - _NEG) of a fully masked block is 1, and a later real score rescales it to 0

DECODE_ROWS = 8
DECODE_BLOCK = 128
CHUNK_TILE = 128
LONG_CHUNK_TILE = 256
"""Rows taken at a time where a chunk has more than CHUNK_TILE left: keys are gathered for half as many tiles."""
CHUNK_BLOCK = 128
LONG_CHUNK_BLOCK = 256
"""Keys walked at a time by tiles that are full size: their matmuls are worth the coarser end."""

FUSED_ROWS = 3
"""Up to so many query rows to a KV head, products are summed in the loop that gathers the pages: a matmul of fewer rows
costs more than it saves, and the gathered block is never written (measured on a CPU: -25 % for 3 rows of 64)."""


def _dot_last(query: jax.Array, keys: jax.Array) -> jax.Array:
    """[..., K, M, D] x [..., K, N, D] -> f32[..., K, M, N]."""
    if query.shape[-2] <= FUSED_ROWS:
        return jnp.sum(query[..., :, None, :] * keys[..., None, :, :], axis=-1)
    return jnp.einsum("...kmd,...knd->...kmn", query, keys, preferred_element_type=jnp.float32)


def _dot_keys(weights: jax.Array, values: jax.Array) -> jax.Array:
    """f32[..., K, M, N] x [..., K, N, D] -> f32[..., K, M, D]."""
    if weights.shape[-2] <= FUSED_ROWS:
        return jnp.sum(weights[..., None] * values[..., None, :, :], axis=-2)
    weights = weights.astype(values.dtype)
    return jnp.einsum("...kmn,...knd->...kmd", weights, values, preferred_element_type=jnp.float32)


class _Softmax(NamedTuple):
    """Running softmax over key blocks: largest score, sum of weights, weighted values."""

    top: jax.Array  # f32[..., M]
    norm: jax.Array  # f32[..., M]
    acc: jax.Array  # f32[..., M, D]


def ragged_paged_attention(
    q, k_pages, v_pages, kv_lens, page_table, cu_q_lens, num_seqs, num_decodes, *, scale, window=None, soft_cap=None
):
    """See `api.ragged_paged_attention`."""
    tokens, heads, dim = q.shape
    folded = math.frexp(scale)[0] == 0.5
    if folded:  # a power of two is exact in any dtype, and queries are fewer than scores
        q = q * jnp.asarray(scale, q.dtype)
    kv_heads, page_size = k_pages.shape[1:3]
    groups = heads // kv_heads
    seqs = kv_lens.shape[0]
    tile, long_tile = (min(size, -(-tokens // 8) * 8) for size in (CHUNK_TILE, LONG_CHUNK_TILE))
    chunk_block = LONG_CHUNK_BLOCK if tile >= CHUNK_TILE else CHUNK_BLOCK
    decode_pages, chunk_pages = max(DECODE_BLOCK // page_size, 1), max(chunk_block // page_size, 1)
    # Slices are clamped at the edges, which would shift rows and pages: pad so that none reaches an edge.
    rows = -(-seqs // DECODE_ROWS) * DECODE_ROWS
    page_table = jnp.pad(page_table, ((0, rows - seqs), (0, max(decode_pages, chunk_pages))))
    kv_lens = jnp.pad(kv_lens, (0, rows - seqs))
    q = jnp.pad(q, ((0, max(long_tile, DECODE_ROWS)), (0, 0), (0, 0))).reshape(-1, kv_heads, groups, dim)
    out = jnp.zeros(q.shape, q.dtype)

    def attend(softmax: _Softmax, query, page_ids, first_key, limit) -> _Softmax:
        """One block of keys. query [..., K, M, D], page_ids [..., N]; key positions in [limit-window, limit) are seen.

        limit: i32[..., M], broadcast over the KV heads.
        """

        def flat(x):
            x = jnp.moveaxis(x, -4, -3)
            return x.reshape(*x.shape[:-3], -1, dim)  # [..., K, N * B, D]

        keys, values = flat(k_pages[page_ids]), flat(v_pages[page_ids])
        if query.shape[-2] <= FUSED_ROWS:  # widened before they are written: a CPU's narrow stores are slower
            query, keys, values = (x.astype(jnp.float32) for x in (query, keys, values))
        scores = _dot_last(query, keys)
        if not folded:
            scores *= scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        limit = limit[..., None, :, None]  # [..., 1, M, 1]
        position = first_key + jnp.arange(keys.shape[-2])
        position = position.reshape((1,) * (limit.ndim - 1) + position.shape)
        seen = position < limit
        reached = position < jnp.max(limit, axis=-2, keepdims=True)
        if window is not None:
            seen &= position >= limit - window
            reached &= position >= jnp.min(limit, axis=-2, keepdims=True) - window
        scores = jnp.where(seen, scores, _NEG)
        # A slot nobody sees may hold anything, and 0 * NaN is NaN.
        values = jnp.where(jnp.swapaxes(reached, -1, -2), values, 0)
        top = jnp.maximum(softmax.top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - top[..., None])
        fade = jnp.exp(softmax.top - top)
        acc = _dot_keys(weights, values)
        return _Softmax(top, softmax.norm * fade + jnp.sum(weights, axis=-1), softmax.acc * fade[..., None] + acc)

    def walk(query, table, limit, num_pages):
        """Running softmax of `query` over the pages of `table` that any of its rows can see, `num_pages` a trip."""
        block = num_pages * page_size
        start = jnp.zeros((), jnp.int32)
        if window is not None:
            start = jnp.maximum(jnp.min(jnp.where(limit > 0, limit, jnp.iinfo(jnp.int32).max)) - window, 0) // block
        stop = -(-jnp.max(limit) // block)
        shape = query.shape[:-1]
        init = _Softmax(
            jnp.full(shape, _NEG, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(query.shape, jnp.float32)
        )

        def body(carry):
            j, softmax = carry
            page_ids = lax.dynamic_slice_in_dim(table, j * num_pages, num_pages, axis=-1)
            return j + 1, attend(softmax, query, page_ids, j * block, limit)

        _, softmax = lax.while_loop(lambda carry: carry[0] < stop, body, (start, init))
        return (softmax.acc / jnp.maximum(softmax.norm, 1e-30)[..., None]).astype(q.dtype)

    def decode_group(i, out):
        """Rows [8 i, 8 i + 8): one query each, one loop for all."""
        row = i * DECODE_ROWS
        query = lax.dynamic_slice_in_dim(q, row, DECODE_ROWS)  # [R, K, G, D]
        table = lax.dynamic_slice_in_dim(page_table, row, DECODE_ROWS)
        lens = lax.dynamic_slice_in_dim(kv_lens, row, DECODE_ROWS)
        lens = jnp.where(row + jnp.arange(DECODE_ROWS) < num_decodes, lens, 0)
        limit = jnp.broadcast_to(lens[:, None], (DECODE_ROWS, groups))
        o = walk(query, table, limit, decode_pages)
        return lax.dynamic_update_slice_in_dim(out, o, row, axis=0)

    def chunk_tile(tile, s, done, out):
        """One query tile of sequence s, `done` of whose queries are behind. Rows past the chunk are computed too and
        overwritten by whoever owns them."""
        first, q_len = cu_q_lens[s] + done, cu_q_lens[s + 1] - cu_q_lens[s]
        query = lax.dynamic_slice_in_dim(q, first, tile)  # [M, K, G, D]
        query = jnp.swapaxes(query, 0, 1).reshape(kv_heads, tile * groups, dim)
        row = jnp.minimum(done + jnp.arange(tile), q_len - 1)
        limit = jnp.repeat(kv_lens[s] - q_len + row + 1, groups)
        o = walk(query, page_table[s], limit, chunk_pages)
        o = jnp.swapaxes(o.reshape(kv_heads, tile, groups, dim), 0, 1)
        out = lax.dynamic_update_slice_in_dim(out, o, first, axis=0)
        last = done + tile >= q_len
        return jnp.where(last, s + 1, s), jnp.where(last, 0, done + tile), out

    def next_tile(carry):
        if long_tile == tile:
            return chunk_tile(tile, *carry)
        s, done, _ = carry
        is_long = cu_q_lens[s + 1] - cu_q_lens[s] - done > tile
        tiles = [functools.partial(chunk_tile, size) for size in (long_tile, tile)]
        return lax.cond(is_long, *tiles, *carry)

    out = lax.fori_loop(0, -(-num_decodes // DECODE_ROWS), decode_group, out)
    # In order of the rows: a tile's overhang is garbage only until the next sequence's own tile has run.
    _, _, out = lax.while_loop(
        lambda carry: carry[0] < num_seqs, next_tile, (num_decodes, jnp.zeros((), jnp.int32), out)
    )
    return out[:tokens].reshape(tokens, heads, dim)
