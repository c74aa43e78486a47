"""Ragged paged attention on TPUs: one Pallas kernel for decodes and chunks together.

Not JAX's own `ragged_paged_attention` (v2), for three reasons: it wants keys and values interleaved by head,
[P, B, 2 K, D], where the pool of all backends here is two of [P, K, B, D], which would have to be copied; it takes no
number of KV heads that a tile cannot hold, such as 3; and decodes share query blocks with chunks, so that one decode
costs a chunk's rows.

The grid goes over items (see `work`): a tile of 128 rows of a chunk, or the rows of one decode. An item holds the rows
of all KV heads, as a page lies whole in memory: one copy brings it for all of them. Key blocks are double-buffered;
while the last one of an item is multiplied, the first block and the queries of the next item are fetched.

Heads whose size is no multiple of 128 stand in a pool that is padded with zeros to one (`api.pool_head_size`).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sarathi_jax.attention import work
from sarathi_jax.attention.work import NEG, round_up

LANES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the kernel cuts its work.

    Attributes:
      keys: keys of a block, a multiple of the page size or a divisor of it.
      rows: rows of a chunk's tile.
    """

    keys: int
    rows: int


def default_blocks(q, k_pages) -> Blocks:
    """128 rows (more for an odd group of over 8 heads, whose tiles would not end at a copy's), and as many keys (up to
    512) as fit 8 MiB with all heads' keys and values in two buffers."""
    (_, heads, head_size), (_, kv_heads, page_size, _) = q.shape, k_pages.shape
    groups, fitting = heads // kv_heads, 2**23 // (4 * kv_heads * head_size * q.dtype.itemsize)
    keys = max(LANES, min(512, fitting // LANES * LANES))
    return Blocks(keys=round_up(keys, page_size), rows=max(128, _query_step(groups, _align(q.dtype)) * groups))


def _align(dtype) -> int:
    """Rows of a memory tile: copies begin and end at multiples of it."""
    return 32 // jnp.dtype(dtype).itemsize


def _query_step(groups: int, align: int) -> int:
    """The fewest queries whose rows end at a multiple of `align`."""
    return align // math.gcd(groups, align)


def unsupported(q, k_pages) -> str | None:
    """Why the kernel cannot serve these shapes, or None."""
    (_, heads, head_size), (_, kv_heads, page_size, _) = q.shape, k_pages.shape
    if head_size % LANES:
        return f"head size {head_size} is not a multiple of {LANES}"
    if page_size % _align(q.dtype) or (LANES % page_size and page_size % LANES):
        return f"page size {page_size} is no divisor or multiple of {LANES}, and one of {_align(q.dtype)}"
    if heads // kv_heads > LANES:
        return f"{heads // kv_heads} query heads to a KV head are more than {LANES}"
    return None


def unsupported_device() -> str | None:
    """Why the kernel cannot run on the device at hand, or None."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return None if device.platform == "tpu" else f"it is made for TPUs, here is {device.device_kind}"


def make_schedule(
    q, k_pages, kv_lens, cu_q_lens, num_seqs, num_decodes, *, window=None, interpret: bool = False,
    blocks: Blocks | None = None,
) -> work.Schedule:  # fmt: skip
    """See `api.schedule_attention`."""
    del interpret
    groups, align, blocks = q.shape[1] // k_pages.shape[1], _align(q.dtype), blocks or default_blocks(q, k_pages)
    kv_lens, cu_q_lens = (jnp.asarray(x, jnp.int32) for x in (kv_lens, cu_q_lens))
    packing = work.pack(cu_q_lens, num_seqs, tokens=q.shape[0], groups=groups, align=align, tile_rows=blocks.rows)
    step = _query_step(groups, align)
    items = work.make_items(
        kv_lens, cu_q_lens, num_seqs, num_decodes, packing, groups=groups, block=blocks.keys,
        tile_queries=blocks.rows // groups // step * step, window=window,
    )  # fmt: skip
    return work.Schedule(packing, items)


def ragged_paged_attention(
    q, k_pages, v_pages, kv_lens, page_table, cu_q_lens, num_seqs, num_decodes, *, scale, window=None, soft_cap=None,
    interpret: bool = False, blocks: Blocks | None = None, schedule: work.Schedule | None = None,
):  # fmt: skip
    """See `api.ragged_paged_attention`, which asks `unsupported` and `unsupported_device` first.

    `interpret`: on any device, by JAX's interpreter of TPU kernels. `blocks`: those of `schedule`; None: the default.
    """
    kv_heads, blocks = k_pages.shape[1], blocks or default_blocks(q, k_pages)
    groups = q.shape[1] // kv_heads
    packing, items = schedule or make_schedule(
        q, k_pages, kv_lens, cu_q_lens, num_seqs, num_decodes, window=window, blocks=blocks
    )
    page_table = jnp.asarray(page_table, jnp.int32)
    rows = _attend(
        work.pack_queries(q, packing, kv_heads), k_pages, v_pages, items.table, items.num_items, page_table,
        groups=groups, scale=scale, window=window, soft_cap=soft_cap, blocks=blocks, interpret=interpret,
    )  # fmt: skip
    return work.unpack_rows(rows, packing, groups).reshape(q.shape)


def _attend(
    packed, k_pages, v_pages, table, count, page_table,
    *, groups, scale, window, soft_cap, blocks: Blocks, interpret: bool,
):  # fmt: skip
    """Rows like `packed`, [K, R, D]; those that nobody owns stay as they come."""
    from jax.experimental.pallas import tpu as pltpu  # here, as it takes a fifth of the time of importing jax

    kv_heads, _, head_size = packed.shape
    page_size, pages_per_seq = k_pages.shape[2], page_table.shape[1]
    keys, tile_rows, align = blocks.keys, blocks.rows, _align(packed.dtype)
    decode_rows = round_up(groups, align)
    precision = lax.Precision.HIGHEST if packed.dtype == jnp.float32 else None

    def kernel(table_ref, pages_ref, count_ref, q_ref, k_ref, v_ref, out_ref, q_buf, k_buf, v_buf, out_buf, *rest):
        top_ref, norm_ref, acc_ref, step_ref, q_sems, kv_sems, out_sems = rest
        item, count = pl.program_id(0), count_ref[0]
        column = lambda i, c: table_ref[i * 8 + c]

        def query_copies(i, act):
            """Start or wait for the queries of item i."""
            for rows, is_decode in ((decode_rows, 1), (tile_rows, 0)):

                @pl.when(column(i, work.IS_DECODE) == is_decode)
                def _(rows=rows):
                    here = pl.ds(pl.multiple_of(column(i, work.Q_ROW), align), rows)
                    slot = lax.rem(i, 2)
                    act(pltpu.make_async_copy(q_ref.at[:, here], q_buf.at[slot, :, pl.ds(0, rows)], q_sems.at[slot]))

        def key_copies(i, j, slot, act):
            """Start or wait for the pages of item i's block j that hold keys it sees."""
            first_page = column(i, work.SEQ) * pages_per_seq + j * (keys // page_size)
            num_pages = jnp.minimum(
                lax.div(column(i, work.LAST_LIMIT) - j * keys + (page_size - 1), page_size), keys // page_size
            )

            def copy_page(n, _):
                page, here = pages_ref[first_page + n], pl.ds(pl.multiple_of(n * page_size, page_size), page_size)
                for ref, buf in ((k_ref, k_buf), (v_ref, v_buf)):
                    act(pltpu.make_async_copy(ref.at[page], buf.at[slot, :, here], kv_sems.at[slot]))

            lax.fori_loop(0, num_pages, copy_page, None)

        def out_copies(i, act):
            """Start or wait for the results of item i, `align` rows at a time: its rows may end inside a tile."""
            slot, row = lax.rem(i, 2), column(i, work.OUT_ROW)
            num_rows = (column(i, work.LAST_LIMIT) - column(i, work.LIMIT) + 1) * groups

            def copy_rows(n, _):
                first = pl.multiple_of(n * align, align)
                there = out_ref.at[:, pl.ds(pl.multiple_of(row + first, align), align)]
                act(pltpu.make_async_copy(out_buf.at[slot, :, pl.ds(first, align)], there, out_sems.at[slot]))

            lax.fori_loop(0, lax.div(num_rows + (align - 1), align), copy_rows, None)

        start, wait = (lambda copy: copy.start()), (lambda copy: copy.wait())

        @pl.when((item == 0) & (count > 0))
        def _():
            step_ref[0] = 0
            query_copies(item, start)
            key_copies(item, column(item, work.FIRST_BLOCK), 0, start)

        def attend(rows):
            """Item `item`, of so many rows a head."""
            first_block, end_block = column(item, work.FIRST_BLOCK), column(item, work.END_BLOCK)
            limit, last_limit = column(item, work.LIMIT), column(item, work.LAST_LIMIT)
            first_key = 0 if window is None else jnp.maximum(limit - window, 0)
            mine = lax.rem(item, 2)
            query_copies(item, wait)
            row = lax.broadcasted_iota(jnp.int32, (rows, keys), 0)
            limits = limit + row // groups  # keys that each row sees
            top_ref[:, :rows] = jnp.full((kv_heads, rows, LANES), NEG, jnp.float32)
            norm_ref[:, :rows] = jnp.zeros((kv_heads, rows, LANES), jnp.float32)
            acc_ref[:, :rows] = jnp.zeros((kv_heads, rows, head_size), jnp.float32)

            def block(j, step):
                slot, at = lax.rem(step, 2), j * keys

                @pl.when(j + 1 < end_block)
                def _():
                    key_copies(item, j + 1, 1 - slot, start)

                @pl.when((j + 1 == end_block) & (item + 1 < count))
                def _():
                    query_copies(item + 1, start)
                    key_copies(item + 1, column(item + 1, work.FIRST_BLOCK), 1 - slot, start)

                key_copies(item, j, slot, wait)

                # A slot that no query reaches may hold anything, and 0 * NaN is NaN.
                @pl.when((at < first_key) | (at + keys > last_limit))
                def _():
                    key = at + lax.broadcasted_iota(jnp.int32, (keys, head_size), 0)
                    real = (key >= first_key) & (key < last_limit)
                    for head in range(kv_heads):
                        values = v_buf[slot, head]
                        v_buf[slot, head] = jnp.where(real, values, jnp.zeros_like(values))

                key = at + lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
                seen = key < limits
                if window is not None:
                    seen &= key >= limits - window
                for head in range(kv_heads):
                    scores = lax.dot_general(
                        q_buf[mine, head, :rows], k_buf[slot, head], (((1,), (1,)), ((), ())),
                        precision=precision, preferred_element_type=jnp.float32,
                    ) * scale  # fmt: skip
                    if soft_cap is not None:
                        scores = soft_cap * jnp.tanh(scores / soft_cap)
                    scores = jnp.where(seen, scores, NEG)
                    old = top_ref[head, :rows, :1]
                    top = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
                    fade, weights = jnp.exp(old - top), jnp.exp(scores - top)
                    norm = norm_ref[head, :rows, :1] * fade + jnp.sum(weights, axis=1, keepdims=True)
                    product = lax.dot_general(
                        weights.astype(packed.dtype), v_buf[slot, head], (((1,), (0,)), ((), ())),
                        precision=precision, preferred_element_type=jnp.float32,
                    )  # fmt: skip
                    acc_ref[head, :rows] = acc_ref[head, :rows] * fade + product
                    top_ref[head, :rows] = jnp.broadcast_to(top, (rows, LANES))
                    norm_ref[head, :rows] = jnp.broadcast_to(norm, (rows, LANES))
                return step + 1

            step_ref[0] = lax.fori_loop(first_block, end_block, block, step_ref[0])
            for head in range(kv_heads):
                norm = jnp.maximum(norm_ref[head, :rows, :1], 1e-30)
                out_buf[mine, head, :rows] = (acc_ref[head, :rows] / norm).astype(packed.dtype)

        for rows, is_decode in ((decode_rows, 1), (tile_rows, 0)):

            @pl.when((item < count) & (column(item, work.IS_DECODE) == is_decode))
            def _(rows=rows):
                attend(rows)

        @pl.when(item < count)
        def _():
            out_copies(item, start)

            @pl.when(item > 0)
            def _():
                out_copies(item - 1, wait)

            @pl.when(item == count - 1)
            def _():
                out_copies(item, wait)

    buffers = lambda *shape: pltpu.VMEM((2, kv_heads, *shape), packed.dtype)
    state = lambda width: pltpu.VMEM((kv_heads, tile_rows, width), jnp.float32)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(jnp.maximum(count, 1),),
            in_specs=[whole] * 3,
            out_specs=whole,
            scratch_shapes=[
                buffers(tile_rows, head_size),
                buffers(keys, head_size),
                buffers(keys, head_size),
                buffers(tile_rows, head_size),
                state(LANES),
                state(LANES),
                state(head_size),
                pltpu.SMEM((1,), jnp.int32),
                *[pltpu.SemaphoreType.DMA((2,))] * 3,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(packed.shape, packed.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=64 * 2**20),
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        name="ragged_paged_attention",
    )(table.reshape(-1), page_table.reshape(-1), count[None], packed, k_pages, v_pages)
