"""What is the Pallas kernels' own: where they give way, how work is cut, several devices."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from sarathi_jax import device
from sarathi_jax.attention import (
    api,
    pallas_gpu,
    pallas_tpu,
    pool_head_size,
    ragged_paged_attention,
    schedule_attention,
    work,
)
from sarathi_jax.config import ModelConfig
from sarathi_jax.models.decoder import Decoder, KVPool
from sarathi_jax.models.layer import TokenRows
from sarathi_jax.models.weights import init_weights
from sarathi_jax.runner import ModelRunner
from sarathi_jax.shapes import Shapes

from .cases import BF16, KERNELS, Geometry, check, expected, make_case

LENS = [(1, 77), (1, 600), (1, 1), (64, 264), (30, 30), (5, 700)]


@pytest.fixture(autouse=True)
def warn_again():
    api._warn_once.cache_clear()


def shapes(heads=8, kv_heads=2, head_size=128, page_size=16, dtype=jnp.bfloat16):
    q = jax.ShapeDtypeStruct((32, heads, head_size), dtype)
    return q, jax.ShapeDtypeStruct((9, kv_heads, page_size, head_size), dtype)


@pytest.mark.parametrize("head_size", pallas_gpu.HEAD_SIZES)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [2, 14, 58, 142])
def test_gpu_serves(head_size, page_size, heads):
    """Every head size and page size there is use for, with any group."""
    assert pallas_gpu.unsupported(*shapes(heads=heads, head_size=head_size, page_size=page_size)) is None


@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (pallas_gpu, {"dtype": jnp.float32}, "multiplies bfloat16, not float32"),
        (pallas_gpu, {"head_size": 80}, "head size 80 is not one of"),
        (pallas_gpu, {"page_size": 48}, "page size 48"),
        (pallas_tpu, {"head_size": 64}, "head size 64 is not a multiple of 128"),
        (pallas_tpu, {"page_size": 8}, "page size 8"),
        (pallas_tpu, {"page_size": 48}, "page size 48"),
        (pallas_tpu, {"heads": 600}, "300 query heads to a KV head"),
    ],
)
def test_kernels_say_what_they_cannot_serve(module, options, reason):
    assert reason in module.unsupported(*shapes(**options))


@pytest.mark.parametrize("backend", ["pallas_gpu", "pallas_tpu"])
def test_a_device_that_it_cannot_serve_gets_xla_and_one_warning(backend):
    case = make_case(LENS[:3], geometry=Geometry(head_size=128, tokens=16, seqs=4), dtype=BF16)
    attend = jax.jit(functools.partial(ragged_paged_attention, scale=case.scale, backend=backend))
    with pytest.warns(UserWarning, match=rf"gives way from '{backend}' to 'xla': it (is made for|needs)") as caught:
        got = np.asarray(attend(*case.arrays()))
    assert len(caught) == 1
    check(case, got)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ragged_paged_attention(*case.arrays(), scale=case.scale, backend=backend)


@pytest.mark.parametrize("backend", KERNELS)
def test_shapes_that_it_cannot_serve_get_xla_and_a_warning(backend):
    """An interpreted kernel too: a wrong head size must not become a wrong number."""
    case = make_case(LENS[:3], geometry=Geometry(head_size=80, tokens=16, seqs=4), dtype=BF16)
    with pytest.warns(UserWarning, match="to 'xla': head size 80"):
        got = ragged_paged_attention(*case.arrays(), scale=case.scale, backend=backend, interpret=True)
    check(case, np.asarray(got))


def test_schedule_made_once_serves_all_layers():
    geometry = Geometry(heads=2, kv_heads=1, head_size=128, tokens=24, seqs=4, pages_per_seq=20)
    case = make_case([(1, 77), (1, 300), (20, 150)], geometry=geometry)
    q, k_pages, _, kv_lens, _, cu_q_lens, num_seqs, num_decodes = case.arrays()
    options = {"backend": "pallas_tpu", "interpret": True}

    @jax.jit
    def two_layers(*arrays):
        schedule = schedule_attention(q, k_pages, kv_lens, cu_q_lens, num_seqs, num_decodes, **options)
        attend = functools.partial(ragged_paged_attention, scale=case.scale, schedule=schedule, **options)
        return jax.lax.map(lambda layer: attend(arrays[0], arrays[1] * layer, *arrays[2:]), jnp.asarray([1.0, 0.5]))

    for layer, got in zip([1.0, 0.5], np.asarray(two_layers(*case.arrays())), strict=True):
        check(case.replace(k_pages=case.k_pages * np.float32(layer)), got)


def test_xla_needs_no_schedule():
    case = make_case(LENS)
    q, k_pages, _, *lengths = case.arrays()
    assert schedule_attention(q, k_pages, lengths[0], *lengths[2:]) is None


@pytest.mark.parametrize(
    ("window", "decode_units", "chunk_splits"), [(None, 0, 1), (100, 0, 1), (100, 1, 1), (None, 7, 1), (100, 40, 3)]
)
def test_items_cover_every_key_once(window, decode_units, chunk_splits):
    """Each query's keys are in the ranges of its items, each in one of them, and no two items write the same row."""
    block, groups, align, tile = 32, 3, 8, 40
    lens = [(1, n) for n in (1, 31, 32, 33, 700, 64)] + [(n, n + 70) for n in (1, 39, 40, 41, 95)]
    case = make_case(lens, geometry=Geometry(tokens=230, seqs=14))

    @jax.jit
    def make(kv_lens, cu_q_lens, num_seqs, num_decodes):
        packing = work.pack(cu_q_lens, num_seqs, tokens=230, groups=groups, align=align, tile_rows=128)
        return packing, work.make_items(
            kv_lens, cu_q_lens, num_seqs, num_decodes, packing, groups=groups, block=block, tile_queries=tile,
            window=window, decode_units=decode_units, decode_rows=2 * align, chunk_splits=chunk_splits,
        )  # fmt: skip

    packing, items = make(*(case.arrays()[i] for i in (3, 5, 6, 7)))
    seen = {s: [[] for _ in range(q_len)] for s, (q_len, _) in enumerate(lens)}
    written = set()
    is_decode = []
    for row in np.asarray(items.table)[: int(items.num_items)]:
        s, q_row, out_row, limit, last_limit, first, end, decode = row.tolist()
        q_len, kv_len = lens[s]
        is_decode.append(decode)
        rows = range(out_row, out_row + (2 * align if decode and decode_units else (last_limit - limit + 1) * groups))
        assert not written & set(rows)
        written |= set(rows)
        assert out_row % align == q_row % align == 0
        for x in range(limit, last_limit + 1):
            query = x - 1 - (kv_len - q_len)
            assert q_row + (x - limit) * groups == int(packing.seq_row[s]) + query * groups
            seen[s][query] += range(first * block, end * block)
    for s, (q_len, kv_len) in enumerate(lens):
        for query, keys in enumerate(seen[s]):
            assert len(keys) == len(set(keys)), (s, query)
            last = kv_len - q_len + query
            assert set(range(0 if window is None else max(0, last - window + 1), last + 1)) <= set(keys), (s, query)
            assert max(keys) < work.round_up(kv_len, block)
    half = is_decode[: len(is_decode) // 2]
    assert abs(sum(half) / len(half) - np.mean(is_decode)) < 0.2  # mixed evenly


@pytest.mark.parametrize("lens", [[(1, 900)], [(1, 100)] * 6, [(64, 700)]])
def test_a_small_batch_fills_the_chip(lens):
    """One long decode is cut into about as many items as many short ones make, a lone chunk too."""
    blocks = pallas_gpu.default_blocks(8 if len(lens[0]) and lens[0][0] == 1 else 64, 8, 4, 128, 132)
    if lens[0][0] > 1:
        assert blocks.chunk_splits * work.ceil_div(64, blocks.tile_queries(4)) * 8 > 132 // 2
        return
    make = functools.partial(pallas_gpu.make_schedule, *shapes(32, 8), blocks=blocks)
    kv_lens, cu_q_lens = np.array([100 * kv_len for _, kv_len in lens]), np.arange(len(lens) + 1)
    _, items = jax.jit(make)(
        kv_lens.astype(np.int32), cu_q_lens.astype(np.int32), np.int32(len(lens)), np.int32(len(lens))
    )
    assert 132 <= int(items.num_items) * 8 <= 4 * 132


@pytest.mark.parametrize(("kv_heads", "copies"), [(8, 1), (2, 4), (1, 8)])
def test_split_over_devices(kv_heads, copies):
    """A shard of KV heads with its query heads; where there are more devices than KV heads, each stands on several."""
    geometry = Geometry(heads=8, kv_heads=kv_heads, tokens=128, seqs=8)
    case = make_case([pair for pair in LENS if pair[1] <= geometry.max_len], geometry=geometry, window=90)
    want = expected(case)
    pools = {name: np.repeat(getattr(case, name), copies, axis=1) for name in ("k_pages", "v_pages")}
    mesh = jax.make_mesh((kv_heads * copies,), ("tensor",), axis_types=(AxisType.Auto,))
    heads, whole = PartitionSpec(None, "tensor"), PartitionSpec()
    attend = jax.shard_map(
        functools.partial(ragged_paged_attention, scale=case.scale, window=case.window),
        mesh=mesh, in_specs=(*[heads] * 3, *[whole] * 5), out_specs=heads, check_vma=False,
    )  # fmt: skip
    got = jax.jit(attend)(*case.replace(**pools).arrays())
    assert {shard.data.shape[1] for shard in got.addressable_shards} == {8 // (kv_heads * copies)}
    check(case, np.asarray(got), want)


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_every_group_of_query_heads_fits_the_tiles(warpgroups):
    blocks = dataclasses.replace(pallas_gpu.default_blocks(512, 8, 4, 128, 132), warpgroups=warpgroups)
    for groups in range(1, 200):
        parts, size = blocks.parts(groups)
        queries = blocks.tile_queries(size)
        assert (parts - 1) * size < groups <= parts * size
        assert size <= pallas_gpu.ROWS
        assert queries * size % pallas_gpu.ALIGN == 0
        assert blocks.tile_rows / 2 < queries * groups / parts <= blocks.tile_rows, groups  # most rows are of use


def test_defaults_agree_with_what_memory_there_is():
    for head_size in pallas_gpu.HEAD_SIZES:
        blocks = pallas_gpu.default_blocks(512, 8, 4, head_size, 132)
        used = blocks.tile_rows * (2 * head_size + 4) + blocks.stages * 4 * blocks.keys * head_size
        assert blocks.stages >= 2
        assert used + pallas_gpu.SMEM_RESERVE <= pallas_gpu.SMEM_BYTES


CONFIG = ModelConfig(
    architecture="llama", vocab_size=32, hidden_size=24, intermediate_size=16, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, max_position=64,
)  # fmt: skip
SHAPES = Shapes(num_tokens=(8,), num_rows=2, num_slots=2, page_size=4, max_pages=4, num_pages=8)


def test_a_pool_for_tpus_has_heads_of_whole_rows(monkeypatch):
    """Its runner asks for it, and it is what the pool's size is reckoned with; elsewhere no memory is wasted."""
    model = Decoder(CONFIG, init_weights(CONFIG, jnp.dtype(jnp.float32)))
    assert ModelRunner(model, SHAPES).kv.k.shape[3] == 16
    monkeypatch.setattr(pallas_tpu, "unsupported_device", lambda: None)
    assert [pool_head_size(size) for size in (16, 64, 128, 192)] == [128, 128, 128, 256]
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    kv = ModelRunner(model, SHAPES).kv
    assert kv.k.shape[3] == 128
    assert kv.k.nbytes + kv.v.nbytes == 9 * device.page_bytes(CONFIG, 4, jnp.float32)


def test_a_model_on_a_padded_pool_computes_the_same():
    """A chunk, then a decode; padding stays zeros."""
    model = Decoder(CONFIG, init_weights(CONFIG, jnp.dtype(jnp.float32), scale=0.2))
    ids = np.arange(8, dtype=np.int32)
    table = np.array([[5, 2, 8, 8], [8, 8, 8, 8]], np.int32)

    def rows(first: int, last: int) -> TokenRows:
        n, position = last - first, np.minimum(first + ids, last - 1)
        return TokenRows(
            token_ids=position, positions=position, prompt_lens=np.full(8, 5, np.int32),
            page_ids=np.where(ids < n, table[0, position // 4], 8), offsets=np.where(ids < n, position % 4, 0),
            page_table=table, kv_lens=np.array([last, 0], np.int32), cu_q_lens=np.array([0, n, n], np.int32),
            num_seqs=np.int32(1), num_decodes=np.int32(n == 1),
        )  # fmt: skip

    step, got = jax.jit(lambda rows, kv: model(rows, kv), compiler_options={"xla_backend_optimization_level": 0}), []
    for head_size in (16, 128):
        kv = KVPool(*(jnp.zeros((18, 2, 4, head_size)) for _ in "kv"))
        for first, last in ((0, 5), (5, 6)):
            hidden, kv = step(rows(first, last), kv)
        got.append((np.asarray(hidden)[:1], *(np.asarray(x) for x in kv)))
    for plain, padded in zip(*got, strict=True):
        np.testing.assert_allclose(padded[..., : plain.shape[-1]], plain, rtol=1e-5, atol=1e-6)
        assert not padded[..., plain.shape[-1] :].any()
    assert np.abs(got[0][1][5, :, 0]).sum() > 0
