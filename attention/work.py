"""What the Pallas kernels work on: packed queries, and items that pair a query tile with a range of key blocks; and how
results of ranges are merged.

Packing and items are functions of the lengths alone, the same for every layer with the same window. XLA leaves them in
the layers' loop where they stand there (its code motion does not move what grows on the way, and comparing all with all
does), a dozen small programs each time: hence `api.schedule_attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

NEG = -1e30
"""The score of a key that is not seen, and the top of no keys; finite: see xla.py."""

MIN_BLOCKS = 4
"""A decode is not cut into ranges of fewer blocks: each costs a load of its query and a merge."""

SEQ, Q_ROW, OUT_ROW, LIMIT, LAST_LIMIT, FIRST_BLOCK, END_BLOCK, IS_DECODE = range(8)
"""Columns of an item: its sequence; where its rows begin, packed and in the result; keys that its first query sees and
that its last one sees; its range of key blocks; whether it is a decode's."""


class Packing(NamedTuple):
    """Queries of a KV head's group side by side, a sequence after the other, each at a multiple of `align` rows: a copy
    of `align` rows never holds two sequences."""

    source: Int32[Array, " R"]
    """Row of [T * G, D] that stands in packed row r; rows nobody owns repeat row 0."""
    token_row: Int32[Array, " T"]
    """Packed row of a token's first head; 0 for padding."""
    seq_row: Int32[Array, " S"]
    """Packed row of a sequence's first token."""
    is_token: Int32[Array, " T"]
    """1 for a token, 0 for padding."""


class Schedule(NamedTuple):
    """The lengths of a batch, as a kernel wants them."""

    packing: Packing
    items: Items


class Items(NamedTuple):
    """Items in the order in which they are handed out, decodes and chunks mixed evenly; `num_items` rows count."""

    table: Int32[Array, "I 8"]
    num_items: Int32[Array, ""]
    owner: Int32[Array, " U"]
    """Sequence of each decode item, by `OUT_ROW`; S where there is none."""


def ceil_div(a, b):
    return -(-a // b)


def round_up(a, b):
    return ceil_div(a, b) * b


def num_packed_rows(tokens: int, groups: int, seqs: int, align: int, tile_rows: int) -> int:
    """Rows of the packed queries; reading a whole tile from any row that is owned stays inside."""
    return round_up(tokens * groups + min(seqs, tokens) * (align - 1), align) + tile_rows


def pack(cu_q_lens, num_seqs, *, tokens: int, groups: int, align: int, tile_rows: int) -> Packing:
    """Where each query stands in the packed rows."""
    seqs = cu_q_lens.shape[0] - 1
    seq, token = jnp.arange(seqs, dtype=jnp.int32), jnp.arange(tokens, dtype=jnp.int32)
    q_lens = jnp.where(seq < num_seqs, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    rows = round_up(q_lens * groups, align)
    seq_row = jnp.cumsum(rows, dtype=jnp.int32) - rows
    owner = jnp.minimum(_count_reached(cu_q_lens[1:], token), seqs - 1)
    is_token = token < cu_q_lens[num_seqs]
    token_row = jnp.where(is_token, seq_row[owner] + (token - cu_q_lens[owner]) * groups, 0)
    total = num_packed_rows(tokens, groups, seqs, align, tile_rows)
    heads = jnp.arange(groups, dtype=jnp.int32)
    place = jnp.where(is_token, token_row, total)[:, None] + heads[None]
    source = jnp.zeros(total, jnp.int32).at[place].set(token[:, None] * groups + heads[None], mode="drop")
    return Packing(source, token_row, seq_row, is_token.astype(jnp.int32))


def pack_queries(q: Float[Array, "T H D"], packing: Packing, kv_heads: int) -> Float[Array, "K R D"]:
    tokens, heads, dim = q.shape
    rows = jnp.swapaxes(q.reshape(tokens, kv_heads, heads // kv_heads, dim), 0, 1).reshape(kv_heads, -1, dim)
    return rows[:, packing.source]


def unpack_rows(rows: Float[Array, "K R D"], packing: Packing, groups: int) -> Float[Array, "T K G D"]:
    """The inverse of `pack_queries`, zeros for padding."""
    row = packing.token_row[:, None] + jnp.arange(groups, dtype=jnp.int32)[None]
    real = (packing.is_token > 0)[:, None, None, None]
    return jnp.where(real, jnp.moveaxis(rows[:, row], 0, 1), 0)


def make_items(
    kv_lens,
    cu_q_lens,
    num_seqs,
    num_decodes,
    packing: Packing,
    *,
    groups: int,
    block: int,
    tile_queries: int,
    window: int | None,
    decode_units: int = 0,
    decode_rows: int = 0,
    chunk_splits: int = 1,
) -> Items:
    """The items of a call.

    Args:
      block: keys of a block.
      tile_queries: queries of a chunk's tile.
      decode_units: about so many items all decodes are cut into, evenly by blocks; 0: each is one, and its result
        stands where its query does.
      decode_rows: rows of the result that each of those items has, after the rows of the chunks.
      chunk_splits: ranges of blocks that every chunk tile is cut into; range c's result stands c * R rows further on.
    """
    tokens, total_rows = packing.token_row.shape[0], packing.source.shape[0]
    seqs = kv_lens.shape[0]
    seq = jnp.arange(seqs, dtype=jnp.int32)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    live = min(seqs, tokens)

    def first_key(limit):
        return jnp.zeros_like(limit) if window is None else jnp.maximum(limit - window, 0)

    # Decodes: ranges of `length` blocks each.
    lens = jnp.where(seq < num_decodes, kv_lens, 0)
    first, end = first_key(lens) // block, ceil_div(lens, block)
    length = jnp.maximum(ceil_div(jnp.sum(end - first), decode_units), MIN_BLOCKS) if decode_units else 2**30
    counts = ceil_div(end - first, length)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    num_units = live + decode_units
    unit = jnp.arange(num_units, dtype=jnp.int32)
    s = jnp.minimum(_count_reached(ends, unit), seqs - 1)
    from_block = first[s] + (unit - (ends[s] - counts[s])) * length
    row = packing.seq_row[s]
    out_row = total_rows * chunk_splits + unit * decode_rows if decode_units else row
    decodes = _rows(
        s, row, out_row, lens[s], lens[s], from_block, jnp.minimum(from_block + length, end[s]), jnp.ones_like(s)
    )
    num_decode_items = ends[-1]
    owner = jnp.where(unit < num_decode_items, s, seqs)

    # Chunks: query tiles, each cut into `chunk_splits` ranges.
    counts = jnp.where((seq >= num_decodes) & (seq < num_seqs), ceil_div(q_lens, tile_queries), 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    part = jnp.arange((tokens // tile_queries + live) * chunk_splits, dtype=jnp.int32)
    tile, split = part // chunk_splits, part % chunk_splits
    s = jnp.minimum(_count_reached(ends, tile), seqs - 1)
    query = (tile - (ends[s] - counts[s])) * tile_queries
    limit = kv_lens[s] - q_lens[s] + query + 1
    last_limit = limit + jnp.minimum(tile_queries, q_lens[s] - query) - 1
    first, end = first_key(limit) // block, ceil_div(last_limit, block)
    length = ceil_div(end - first, chunk_splits)
    row = packing.seq_row[s] + query * groups
    from_block = jnp.minimum(first + split * length, end)
    chunks = _rows(
        s, row, row + split * total_rows, limit, last_limit, from_block, jnp.minimum(from_block + length, end),
        jnp.zeros_like(s),
    )  # fmt: skip
    num_chunk_items = ends[-1] * chunk_splits

    # Item x is the next decode whenever their even share of the first x + 1 items grows.
    count = num_decode_items + num_chunk_items
    x = jnp.arange(num_units + part.shape[0], dtype=jnp.int32)
    if num_units * x.shape[0] < 2**31:
        share = lambda x: x * num_decode_items // jnp.maximum(count, 1)
    else:
        share = lambda x: jnp.minimum(x, num_decode_items)
    before, is_decode = share(x), share(x + 1) > share(x)
    decode, chunk = (jnp.minimum(i, len(t) - 1) for i, t in ((before, decodes), (x - before, chunks)))
    return Items(jnp.where(is_decode[:, None], decodes[decode], chunks[chunk]), count, owner)


def merge_splits(rows, lse):
    """[K, C, R, D] and their log2 sums [K, C, R] -> [K, R, D]: the softmax over all C ranges."""
    if rows.shape[1] == 1:
        return rows[:, 0]
    weights = jnp.exp2(lse - jnp.max(lse, axis=1, keepdims=True))
    weights /= jnp.sum(weights, axis=1, keepdims=True)
    return jnp.sum(rows.astype(jnp.float32) * weights[..., None], axis=1).astype(rows.dtype)


def merge_units(rows, lse, owner, seqs: int):
    """[K, U, W, G, D], log2 sums [K, U, W, G] and the sequence of each unit -> [seqs, K, G, D].

    A small matmul of weights [K, G, seqs, W U]: sums in one order, where a scatter's would vary from run to run.
    """
    used = owner < seqs
    lse = jnp.where(used[None, :, None, None], lse, NEG)
    mine = owner[None] == jnp.arange(seqs, dtype=jnp.int32)[:, None]  # [seqs, U]
    parts = jnp.moveaxis(lse, 3, 1)[:, :, None]  # [K, G, 1, U, W]
    parts = jnp.where(mine[None, None, :, :, None], parts, NEG)
    weights = jnp.exp2(parts - jnp.max(parts, axis=(3, 4), keepdims=True))
    weights = jnp.where(mine[None, None, :, :, None], weights, 0)
    norm = jnp.maximum(jnp.sum(weights, axis=(3, 4)), 1e-30)  # [K, G, seqs]
    parts = jnp.where(used[None, :, None, None, None], rows, 0).astype(jnp.float32)
    merged = jnp.einsum("kgsup,kupgd->kgsd", weights, parts, precision=lax.Precision.HIGHEST) / norm[..., None]
    return jnp.transpose(merged, (2, 0, 1, 3)).astype(rows.dtype)


def _rows(*columns) -> Int32[Array, "I 8"]:
    return jnp.stack([jnp.asarray(column, jnp.int32) for column in columns], axis=1)


def _count_reached(ends: jax.Array, x: jax.Array) -> jax.Array:
    """How many of the sorted `ends` are <= each x, in one pass (a binary search would be a loop of small programs)."""
    return jnp.sum(ends[None] <= x[:, None], axis=1, dtype=jnp.int32)
