"""Ragged paged attention on Hopper GPUs: one Mosaic GPU kernel for decodes and chunks together.

A persistent block on every multiprocessor takes items (see `work`) in turn, each for one KV head. One warpgroup fetches
key blocks, page by page through the page table, by TMA into a ring of shared-memory stages, and runs ahead over item
ends; two warpgroups compute with wgmma and a running softmax (FlashAttention-3, Shah et al. 2024, section 3.1). The
query heads of a KV head, up to 64, are rows of one tile, so that keys and values are read once for all of them; more
are cut into parts that the kernel takes for KV heads of their own.

- A chunk's item is a tile of 128 rows: each computing warpgroup has 64 and walks all blocks.
- A decode's item has a group of rows and a range of its blocks, even ones for the first warpgroup and odd ones for the
  second. Ranges are cut from the lengths of all decodes, so that a few long ones fill the chip as many short ones do,
  and their partial softmaxes are merged afterwards (Flash-Decoding, Dao et al. 2023).

Decodes and chunks are handed out in even mixture: some multiprocessors wait for memory while others multiply.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sarathi_jax.attention import work
from sarathi_jax.attention.work import NEG, ceil_div, round_up

LOG2_E = math.log2(math.e)
ROWS = 64  # of a warpgroup's wgmma
ALIGN = 8  # rows of a shared-memory tile: a copy begins and ends at multiples of it
SMEM_BYTES = 227 * 1024
SMEM_RESERVE = 2560  # for reductions and barriers
HEAD_SIZES = (64, 128, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the kernel cuts its work.

    Attributes:
      warpgroups: warpgroups that compute; one more fetches.
      keys: keys of a stage, a multiple of 64.
      stages: stages of the ring.
      num_blocks: thread blocks, one on each multiprocessor.
      decode_units: about so many items the decodes of a batch are cut into.
      chunk_splits: ranges of keys that each chunk tile is cut into.
    """

    warpgroups: int
    keys: int
    stages: int
    num_blocks: int
    decode_units: int
    chunk_splits: int

    @property
    def tile_rows(self) -> int:
        """Rows of a chunk's tile."""
        return self.warpgroups * ROWS

    def tile_queries(self, size: int) -> int:
        """Queries, of `size` rows each, of a chunk's tile: their rows fit it and end at a multiple of ALIGN."""
        step = ALIGN // math.gcd(size, ALIGN)
        return self.tile_rows // size // step * step

    def parts(self, groups: int) -> tuple[int, int]:
        """How many parts the query heads of a KV head are cut into, and the rows of a query in each.

        As few parts as the rows of a decode's wgmma allow. Some rows stay empty where chunk tiles hold more queries so.
        """
        parts = ceil_div(groups, ROWS)
        fewest = ceil_div(groups, parts)
        return parts, max(range(fewest, round_up(fewest, ALIGN) + 1), key=self.tile_queries)


def default_blocks(tokens: int, kv_heads: int, groups: int, head_size: int, multiprocessors: int) -> Blocks:
    """128 keys a stage and as many stages (up to 4) as shared memory holds beside the query tiles.

    Heads of 256 take 64 keys, and all registers that one computing warpgroup can have. Decodes are cut into two items a
    multiprocessor; chunk tiles only where a full batch has too few of them to fill the chip. All follow from shapes, so
    nothing compiles anew within one.
    """
    warpgroups, keys = (2, 128) if head_size <= 128 else (1, 64)
    stage, tiles = 2 * keys * head_size * 2, warpgroups * ROWS * (head_size * 2 + 4)
    blocks = Blocks(
        warpgroups=warpgroups,
        keys=keys,
        stages=min(4, (SMEM_BYTES - tiles - SMEM_RESERVE) // stage),
        num_blocks=multiprocessors,
        decode_units=1,
        chunk_splits=1,
    )
    parts, size = blocks.parts(groups)
    tile_items = ceil_div(tokens, blocks.tile_queries(size)) * kv_heads * parts
    return dataclasses.replace(
        blocks,
        decode_units=ceil_div(2 * multiprocessors, kv_heads * parts),
        chunk_splits=max(1, min(8, multiprocessors // tile_items)),
    )


def unsupported(q, k_pages) -> str | None:
    """Why the kernel cannot serve these shapes, or None."""
    head_size, page_size = q.shape[2], k_pages.shape[2]
    if q.dtype != jnp.bfloat16:
        return f"it multiplies bfloat16, not {q.dtype.name}"
    if head_size not in HEAD_SIZES:
        return f"head size {head_size} is not one of {HEAD_SIZES}"
    if page_size not in (8, 16, 32, 64, 128, 256):
        return f"page size {page_size} is not a power of two from 8 to 256"
    return None


def unsupported_device() -> str | None:
    """Why the kernel cannot run on the device at hand, or None."""
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 12):
        return f"it needs jax >= 0.12, here is {jax.__version__}"
    device, abstract = jax.devices()[0], jax.sharding.get_abstract_mesh().abstract_device
    if device.platform == "gpu":
        is_hopper = str(getattr(device, "compute_capability", "")) == "9.0"  # ROCm has names there
    else:  # compiling for a device that is not here: only its name is known
        is_hopper = abstract is not None and any(name in abstract.device_kind for name in ("H100", "H200"))
    here = device.device_kind if abstract is None else abstract.device_kind
    return None if is_hopper else f"it is made for Hopper GPUs (compute capability 9.0), here is {here}"


def _multiprocessors() -> int:
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return (abstract.num_cores if abstract else jax.devices()[0].core_count) or 132


def _blocks(q, k_pages, interpret: bool) -> Blocks:
    (tokens, heads, head_size), kv_heads = q.shape, k_pages.shape[1]
    return default_blocks(tokens, kv_heads, heads // kv_heads, head_size, 2 if interpret else _multiprocessors())


def make_schedule(
    q, k_pages, kv_lens, cu_q_lens, num_seqs, num_decodes, *, window=None, interpret: bool = False,
    blocks: Blocks | None = None,
) -> work.Schedule:  # fmt: skip
    """See `api.schedule_attention`."""
    blocks = blocks or _blocks(q, k_pages, interpret)
    _, size = blocks.parts(q.shape[1] // k_pages.shape[1])
    kv_lens, cu_q_lens = (jnp.asarray(x, jnp.int32) for x in (kv_lens, cu_q_lens))
    packing = work.pack(cu_q_lens, num_seqs, tokens=q.shape[0], groups=size, align=ALIGN, tile_rows=blocks.tile_rows)
    items = work.make_items(
        kv_lens, cu_q_lens, num_seqs, num_decodes, packing, groups=size, block=blocks.keys,
        tile_queries=blocks.tile_queries(size), window=window, decode_units=blocks.decode_units,
        decode_rows=blocks.warpgroups * round_up(size, ALIGN), chunk_splits=blocks.chunk_splits,
    )  # fmt: skip
    return work.Schedule(packing, items)


def ragged_paged_attention(
    q, k_pages, v_pages, kv_lens, page_table, cu_q_lens, num_seqs, num_decodes, *, scale, window=None, soft_cap=None,
    interpret: bool = False, blocks: Blocks | None = None, schedule: work.Schedule | None = None,
):  # fmt: skip
    """See `api.ragged_paged_attention`, which asks `unsupported` and `unsupported_device` first.

    `interpret`: on any device, by JAX's interpreter of GPU kernels. `blocks`: those of `schedule`; None: the default.
    """
    (tokens, heads, head_size), kv_heads = q.shape, k_pages.shape[1]
    groups, blocks = heads // kv_heads, blocks or _blocks(q, k_pages, interpret)
    parts, size = blocks.parts(groups)
    packing, items = schedule or make_schedule(
        q, k_pages, kv_lens, cu_q_lens, num_seqs, num_decodes, window=window, interpret=interpret, blocks=blocks
    )
    page_table = jnp.asarray(page_table, jnp.int32)
    decode_rows, warpgroups, live = round_up(size, ALIGN), blocks.warpgroups, min(kv_lens.shape[0], tokens)
    padding = (0, 0), (0, 0), (0, parts * size - groups), (0, 0)
    padded = jnp.pad(q.reshape(tokens, kv_heads, groups, head_size), padding).reshape(tokens, -1, head_size)
    packed = work.pack_queries(padded, packing, kv_heads * parts)
    num_units, total_rows = items.owner.shape[0], packed.shape[1]
    chunk_rows = total_rows * blocks.chunk_splits
    rows, lse = _attend(
        packed, k_pages, v_pages, items.table, items.num_items[None], page_table,
        chunk_rows + num_units * warpgroups * decode_rows,
        groups=size, scale=scale, window=window, soft_cap=soft_cap, blocks=blocks, interpret=interpret,
    )  # fmt: skip
    split = lambda x: x[:, :chunk_rows].reshape(len(packed), blocks.chunk_splits, total_rows, *x.shape[2:])
    chunks = work.unpack_rows(work.merge_splits(split(rows), split(lse)), packing, size)
    units = lambda x: x[:, chunk_rows:].reshape(len(packed), num_units, warpgroups, decode_rows, *x.shape[2:])
    decodes = work.merge_units(units(rows)[..., :size, :], units(lse)[..., :size], items.owner, live)
    decodes = jnp.pad(decodes, ((0, tokens - live), (0, 0), (0, 0), (0, 0)))
    is_decode = jnp.arange(tokens) < num_decodes
    out = jnp.where(is_decode[:, None, None, None], decodes, chunks).reshape(tokens, kv_heads, parts * size, head_size)
    return out[:, :, :groups].reshape(q.shape)


def _attend(
    packed, k_pages, v_pages, table, count, page_table, out_rows: int,
    *, groups, scale, window, soft_cap, blocks: Blocks, interpret: bool,
):  # fmt: skip
    """Rows [K, out_rows, D] and their log2 sums of weights [K, out_rows], written where the items say.

    K here is KV heads times parts of their query heads, `groups` the rows of a query in a part.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # here, as it takes long to import

    num_heads, _, head_size = packed.shape
    parts, page_size = num_heads // k_pages.shape[1], k_pages.shape[2]
    warpgroups, keys, stages = blocks.warpgroups, blocks.keys, blocks.stages
    run = min(page_size, keys)  # keys of one copy
    row_layout, tile_layout = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    spread = lambda x, shape: lax.broadcast_in_dim(x, shape, [0])
    decode_rows = round_up(groups, ALIGN)

    def kernel(q_ref, k_ref, v_ref, table_ref, count_ref, page_table_ref, out_ref, lse_ref, *scratch):
        q_smem, lse_smem, k_smem, v_smem, q_ready, k_ready, v_ready, cleaned, consumed, *rest = scratch
        group = lax.axis_index("group")
        block = lax.axis_index("block")
        # Items of this block: block, block + num_blocks, ...; each for all heads in turn.
        num_items = lax.div(count_ref[0] * num_heads - block + (blocks.num_blocks - 1), blocks.num_blocks)

        def item(i):
            """The columns of this block's i-th item, and its head."""
            index = block + i * blocks.num_blocks
            row = lax.div(index, num_heads)
            return [table_ref[row, column] for column in range(8)], lax.rem(index, num_heads)

        def multiply(a, b, shape):
            def product(ref):
                plgpu.wgmma(ref, a, b)
                return ref[...]

            return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

        @pl.when(group < warpgroups)
        def _compute():
            plgpu.set_max_registers(232, action="increase")  # has no effect where the compiler ignores it (C7504)

            def compute_item(i, step):
                columns, head = item(i)
                _, q_row, out_row, limit, last_limit, first_block, end_block, is_decode = columns
                decodes = is_decode > 0
                my_row = jnp.where(decodes, 0, group * ROWS)  # of the tile
                num_rows = jnp.where(decodes, groups, (last_limit - limit + 1) * groups - my_row)
                first_key = 0 if window is None else jnp.maximum(limit - window, 0)
                plgpu.copy_gmem_to_smem(
                    q_ref.at[head, pl.ds(pl.multiple_of(q_row + my_row, ALIGN), ROWS)], q_smem.at[group],
                    q_ready.at[group],
                )  # fmt: skip
                row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=row_layout)
                limits = spread(limit + lax.div(row + my_row, groups), (ROWS, keys))  # keys that each row sees
                column = plgpu.broadcasted_iota(jnp.int32, (ROWS, keys), 1, layout=tile_layout)
                my_limit = limit + lax.div(my_row, groups)
                my_last_limit = limit + lax.div(my_row + (ROWS - 1), groups)
                plgpu.barrier_wait(q_ready.at[group])

                def attend(slot, at, top, norm, acc):
                    scores = multiply(q_smem.at[group], k_smem.at[slot].transpose((1, 0)), (ROWS, keys))
                    if soft_cap is None:
                        scores *= scale * LOG2_E
                    else:  # tanh by exp2: the hardware's own is good to 11 bits
                        tanh = 1 - 2 / (1 + jnp.exp2(scores * (2 * LOG2_E * scale / soft_cap)))
                        scores = tanh * (soft_cap * LOG2_E)

                    def mask(scores):
                        seen = column + at < limits
                        if window is not None:
                            seen &= column + at >= limits - window
                        return jnp.where(seen, scores, NEG)

                    partly = at + keys > my_limit
                    if window is not None:
                        partly |= at < my_last_limit - window
                    scores = lax.cond(partly, mask, lambda scores: scores, scores)
                    new_top = jnp.maximum(top, scores.max(axis=1))
                    fade = jnp.exp2(top - new_top)
                    weights = jnp.exp2(scores - spread(new_top, scores.shape))
                    norm = norm * fade + weights.sum(axis=1)
                    weights = weights.astype(packed.dtype)
                    values = v_smem.at[slot]
                    faded = acc * spread(fade, acc.shape)
                    if interpret:  # its wgmma takes nothing from registers and starts from zero
                        [weights_smem] = rest
                        weights_smem[group] = weights
                        plgpu.commit_smem()
                        return new_top, norm, faded + multiply(weights_smem.at[group], values, acc.shape)
                    acc = pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(
                        plgpu.WGMMAAccumulatorRef.init(faded)
                    )
                    return new_top, norm, acc

                def compute_block(j, carry):
                    step, *softmax = carry
                    slot, at = lax.rem(step, stages), j * keys
                    plgpu.barrier_wait(k_ready.at[slot])
                    plgpu.barrier_wait(v_ready.at[slot])
                    # A slot that no query reaches may hold anything, and 0 * NaN is NaN.
                    cleaner = jnp.where(decodes, lax.rem(j - first_block, warpgroups), 0)

                    @pl.when((at < first_key) | (at + keys > last_limit))
                    def _clean():
                        @pl.when(group == cleaner)
                        def _():
                            key = at + plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), 0, layout=tile_layout)
                            for r, c in itertools.product(range(0, keys, ROWS), range(0, head_size, ROWS)):
                                here = slot, pl.ds(r, ROWS), pl.ds(c, ROWS)  # in parts, for want of registers
                                values = v_smem[here]
                                real = (key + r >= first_key) & (key + r < last_limit)
                                v_smem[here] = jnp.where(real, values, jnp.zeros_like(values))
                            plgpu.commit_smem()

                        plgpu.barrier_arrive(cleaned)
                        plgpu.barrier_wait(cleaned)

                    mine = jnp.logical_not(decodes) | (group == lax.rem(j - first_block, warpgroups))
                    softmax = lax.cond(mine, functools.partial(attend, slot, at), lambda *softmax: softmax, *softmax)
                    plgpu.barrier_arrive(consumed.at[slot])
                    return step + 1, *softmax

                start = (
                    plgpu.layout_cast(jnp.full((ROWS,), NEG, jnp.float32), row_layout),
                    plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout),
                    plgpu.layout_cast(jnp.zeros((ROWS, head_size), jnp.float32), tile_layout),
                )
                step, top, norm, acc = lax.fori_loop(first_block, end_block, compute_block, (step, *start))
                norm = jnp.maximum(norm, 1e-30)
                q_smem[group] = (acc / spread(norm, acc.shape)).astype(packed.dtype)  # its queries have been read
                lse_smem[group] = top + jnp.log(norm) * LOG2_E
                plgpu.commit_smem()
                out = out_row + jnp.where(decodes, group * decode_rows, my_row)
                for first in range(0, ROWS, ALIGN):

                    @pl.when(first < num_rows)
                    def _store(first=first):
                        there = pl.ds(pl.multiple_of(out + first, ALIGN), ALIGN)
                        plgpu.copy_smem_to_gmem(q_smem.at[group, pl.ds(first, ALIGN)], out_ref.at[head, there])

                @pl.when(decodes | (blocks.chunk_splits > 1))  # else nothing is merged
                def _store_sums():
                    def store(r, _):
                        lse_ref[head, out + r] = lse_smem[group, r]

                    lax.fori_loop(0, jnp.minimum(num_rows, ROWS), store, None)

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                return step

            lax.fori_loop(0, num_items, compute_item, jnp.int32(0))

        @pl.when(group == warpgroups)
        def _fetch():
            plgpu.set_max_registers(40, action="decrease")

            def fetch_item(i, step):
                columns, head = item(i)
                kv_head = lax.div(head, parts)
                seq, last_limit, first_block, end_block = columns[0], columns[4], columns[5], columns[6]

                def fetch_block(j, step):
                    slot, at = lax.rem(step, stages), j * keys
                    # The page ids are on their way while the slot is waited for.
                    places = [
                        jnp.minimum(lax.div(at + r, page_size), page_table.shape[1] - 1) for r in range(0, keys, run)
                    ]
                    pages = [page_table_ref[seq, place] for place in places]

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(consumed.at[slot])

                    for ref, smem, ready in ((k_ref, k_smem, k_ready), (v_ref, v_smem, v_ready)):
                        for r, page in zip(range(0, keys, run), pages, strict=True):
                            here = smem.at[slot, pl.ds(r, run)]
                            offset = pl.multiple_of(lax.rem(at + r, page_size), ALIGN) if run < page_size else 0
                            there = ref.at[page, kv_head, pl.ds(offset, run)]

                            @pl.when(at + r < last_limit)
                            def _(here=here, there=there, ready=ready):
                                plgpu.copy_gmem_to_smem(there, here, ready.at[slot])

                            @pl.when(at + r >= last_limit)
                            def _(ready=ready):
                                plgpu.barrier_arrive(ready.at[slot])

                    return step + 1

                return lax.fori_loop(first_block, end_block, fetch_block, step)

            steps = lax.fori_loop(0, num_items, fetch_item, jnp.int32(0))

            def drain(j, _):
                plgpu.barrier_wait(consumed.at[lax.rem(j, stages)])

            lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

    swizzle = plgpu.find_swizzle(head_size * 16)
    transforms = (
        plgpu.TilingTransform((ALIGN, swizzle // 2)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    smem = lambda *shape: plgpu.SMEM(shape, packed.dtype, transforms=transforms)
    ring = functools.partial(plgpu.Barrier, num_barriers=stages)
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_heads, out_rows, head_size), packed.dtype),
            jax.ShapeDtypeStruct((num_heads, out_rows), jnp.float32),
        ),
        scratch_types=[
            smem(warpgroups, ROWS, head_size),
            plgpu.SMEM((warpgroups, ROWS), jnp.float32),
            smem(stages, keys, head_size),
            smem(stages, keys, head_size),
            plgpu.Barrier(num_barriers=warpgroups),
            ring(num_arrivals=keys // run),
            ring(num_arrivals=keys // run),
            plgpu.Barrier(num_arrivals=warpgroups),
            ring(num_arrivals=warpgroups),
            *([smem(warpgroups, ROWS, keys)] if interpret else []),
        ],
        grid=(blocks.num_blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
        kernel_name="ragged_paged_attention",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )(packed, k_pages, v_pages, table, count, page_table)
