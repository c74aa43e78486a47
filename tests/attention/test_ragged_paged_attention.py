"""Every attention backend against the reference, and the reference against the definition."""

from __future__ import annotations

import dataclasses
import inspect
import math

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from sarathi_jax.attention import ragged_paged_attention, select_backend, xla

from .cases import (
    BF16,
    F32,
    KERNELS,
    SETUPS,
    TOLERANCE,
    Case,
    Geometry,
    check,
    compiled,
    expected,
    make_case,
    numpy_attention,
    over,
    run,
    worst_error,
)

# (q_len, kv_len) of each sequence; all fit the default geometry, so that a backend compiles once for them.
MIXES = {
    "decodes and chunks": [(1, 77), (1, 128), (1, 700), (1, 1), (64, 64), (37, 411), (150, 300), (5, 5)],
    "decodes and short chunks": [(1, 77), (1, 128), (1, 700), (1, 1), (45, 411), (5, 5)],
    "only decodes": [(1, n) for n in (9, 700, 33, 128, 1, 257, 511, 64, 129, 2, 300, 768)],
    "only chunks": [(2, 2), (65, 65), (63, 200), (130, 600), (16, 17)],
    "lone token": [(1, 1)],
    "lone decode": [(1, 530)],
    "lone chunk": [(100, 100)],
    "chunks of one token after chunks": [(1, 40), (20, 300), (1, 99), (1, 1), (7, 7), (1, 513)],
    "decodes around page ends": [(1, n) for n in (15, 16, 17, 31, 32, 33, 47, 48, 49)],
    "decodes around block ends": [(1, n) for n in (127, 128, 129, 255, 256, 257, 511, 512, 513)],
    "chunks around page ends": [(n, n) for n in (15, 16, 17, 31, 32, 33)],
    "chunks that end around page ends": [(14, 31), (15, 32), (16, 33), (1, 16), (2, 16), (3, 17)],
    "chunks that end around block ends": [(30, n) for n in (127, 128, 129, 255, 256, 257, 511, 512, 513)],
    "chunks around tile ends": [(63, 163), (64, 164), (65, 165), (128, 128)],
    "chunks around larger tile ends": [(127, 227), (129, 129), (64, 64)],
    "whole prompt": [(319, 319)],
    "chunk of a long prompt": [(1, 500), (300, 750)],
    "every row and sequence": [*[(1, 50 + 3 * n) for n in range(11)], (309, 768)],
}
MIXED, SHORT = "decodes and chunks", "decodes and short chunks"


def test_mixes_are_longer_than_any_block():
    """Else a kernel tuned to larger blocks would be tested inside its first one only."""
    sizes = {name: size for name, size in vars(xla).items() if name.isupper() and isinstance(size, int)}
    lens = [pair for mix in MIXES.values() for pair in mix]
    assert max(kv_len for _, kv_len in lens) > 2 * max(sizes.values()), sizes
    assert max(q_len for q_len, _ in lens) > max(2 * sizes["CHUNK_TILE"], sizes["LONG_CHUNK_TILE"]), sizes


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (1, None), (37, None), (None, 3.0), (21, 3.0)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 1), (3, 3)])
def test_reference_follows_the_definition(heads, kv_heads, window, soft_cap):
    geometry = Geometry(heads=heads, kv_heads=kv_heads, page_size=7, tokens=64, seqs=6, pages_per_seq=12)
    lens = [(1, 1), (1, 70), (30, 30), (20, 84), (2, 14)]
    case = make_case(lens, geometry=geometry, window=window, soft_cap=soft_cap)
    check(case, expected(case), numpy_attention(case))


@over("mix", MIXES, [SHORT, "decodes around block ends"])
def test_mix(backend, mix):
    case = make_case(MIXES[mix], backend=backend)
    check(case, run(case, backend))


@over("mix", [MIXED, "only decodes", "every row and sequence"])
def test_mix_bfloat16(backend, mix):
    case = make_case(MIXES[mix], dtype=BF16)
    check(case, run(case, backend))


@over("mix, num_decodes", [(MIXED, n) for n in range(4)], [(SHORT, 2)])
def test_fewer_decodes_than_there_are(backend, mix, num_decodes):
    """`num_decodes` is a hint for speed: 0 is always right."""
    case = make_case(MIXES[mix], backend=backend, num_decodes=num_decodes)
    check(case, run(case, backend))


@over("mix", [MIXED], ["chunks of one token after chunks"])
def test_rows_past_num_seqs_are_ignored(backend, mix):
    """The same batch with other garbage in its padding gives the same bits."""
    case = make_case(MIXES[mix], backend=backend)
    kv_lens, page_table = case.kv_lens.copy(), case.page_table.copy()
    kv_lens[case.num_seqs :] = 10**6
    page_table[case.num_seqs :] = 0
    other = case.replace(kv_lens=kv_lens, page_table=page_table)
    used = int(case.cu_q_lens[-1])
    np.testing.assert_array_equal(run(case, backend)[:used], run(other, backend)[:used])


@over("mix", [MIXED, "lone decode", "lone chunk"], ["lone decode"])
def test_padding_rows_are_finite(backend, mix):
    """They flow on through the model: a NaN there would reach the sink page and, by way of a sum, anything."""
    case = make_case(MIXES[mix], backend=backend)
    case = case.replace(q=np.nan_to_num(case.q, nan=7.0))
    assert np.isfinite(run(case, backend)).all()


@over("window, soft_cap, dtype", [(1, None, F32), (130, None, F32), (37, 2.5, BF16)])
def test_window(backend, window, soft_cap, dtype):
    """No multiples of a block, and most of the chunks are longer than the window."""
    case = make_case(MIXES[MIXED], window=window, soft_cap=soft_cap, dtype=dtype)
    check(case, run(case, backend))


@over("mix", [MIXED], [SHORT])
def test_keys_before_the_window_may_be_gone(backend, mix):
    """Keys that no query sees are nobody's: their pages may have been given away, and the table names others."""
    case = make_case(MIXES[mix], backend=backend, window=37, soft_cap=2.5)
    gone, want = case.forgotten(), expected(case)
    assert (gone.page_table != case.page_table).sum() > 30
    check(case, run(gone, backend), want)
    assert worst_error(case, expected(gone), want) == 0


@over("page_size, window", [(1, 37), (7, None), (48, 37), (300, None)])
def test_page_size(backend, page_size, window):
    """Pages that do not divide a block, or are larger than one; lengths at their ends."""
    geometry = dataclasses.replace(
        SETUPS[backend].geometry, page_size=page_size, pages_per_seq=-(-640 // page_size), tokens=240
    )
    at = page_size * max(1, 150 // page_size)
    lens = [
        (1, at),
        (1, at + 1),
        (1, 1),
        (1, 640),
        (1, at - 1 or 1),
        (40, 40),
        (100, 617),
        (min(at, 60), at),
        (2, at + 1),
    ]
    case = make_case(lens, backend=backend, geometry=geometry, window=window)
    check(case, run(case, backend))


@over(
    "heads, kv_heads, head_size, dtype",
    [(4, 1, 64, F32), (9, 3, 64, BF16), (4, 4, 80, F32)],
    gpu=[(2, 2, 256, BF16)],
)
def test_heads(backend, heads, kv_heads, head_size, dtype):
    """Multi-query, grouped, multi-head; head sizes in use."""
    page_size = 128 if head_size == 256 else 16  # there longer than the GPU kernel's blocks
    geometry = Geometry(
        heads=heads, kv_heads=kv_heads, head_size=head_size, page_size=page_size, tokens=128, seqs=8, pages_per_seq=24
    )
    lens = [(1, 30), (1, 1), (1, 384), (70, 70), (17, 300)] if backend == "xla" else [(1, 200), (1, 1), (20, 150)]
    case = make_case(lens, geometry=geometry, dtype=dtype)
    check(case, run(case, backend))


@over("heads, head_size", [(6, 80)], [(142, 64)])
def test_many_query_heads_and_a_padded_pool(backend, heads, head_size):
    """Falcon-7B has 71 query heads to a KV head; TPUs hold 128 numbers to a row. No row or page is to spare."""
    geometry = Geometry(heads=heads, head_size=head_size, pool_head_size=128, tokens=5, seqs=2, pages_per_seq=10)
    case = make_case([(1, 150), (4, 40)], geometry=geometry, dtype=SETUPS[backend].dtype)
    check(case, run(case, backend))


@over("tokens", [1, 65])
def test_tight_shapes(backend, tokens):
    """No padding row, no padding sequence, no spare page: slices that reach an array's edge are clamped and shift."""
    lens = [(1, 7), (tokens - 1, tokens + 41)] if tokens > 1 else [(1, 48)]
    geometry = dataclasses.replace(
        SETUPS[backend].geometry, tokens=tokens, seqs=len(lens), page_size=16, pages_per_seq=-(-lens[-1][1] // 16)
    )
    case = make_case(lens, backend=backend, geometry=geometry)
    check(case, run(case, backend))


@over("keys", [160], [160])
def test_shared_pages(backend, keys):
    """A common prefix is held once."""
    lens = [(1, 200), (1, 170), (1, 160), (40, 100), (14, 200), (6, 500)]
    n = keys // SETUPS[backend].geometry.page_size
    shared = {1: (0, n), 2: (1, n), 3: (0, n // 3), 4: (2, n - 1), 5: (0, n)}
    case = make_case(lens, backend=backend, shared=shared)
    assert len(np.unique(case.page_table[:3, :n])) == n
    check(case, run(case, backend))


@over("mix", [MIXED], ["chunks of one token after chunks"])
def test_batch_mates_do_not_matter(backend, mix):
    """A sequence alone gives what it gives in company, but for rounding where a kernel cuts decodes in other places."""
    case = make_case(MIXES[mix], backend=backend, window=37, soft_cap=2.5)
    together, tolerance = run(case, backend), 1e-6 if case.q.dtype == F32 else TOLERANCE[BF16]
    for s in range(case.num_seqs if backend == "xla" else 3):
        alone = case.solo(s)
        want = np.zeros_like(together)
        want[alone.rows(0)] = together[case.rows(s)]
        assert worst_error(alone, run(alone, backend), want) < tolerance, s


@over("sign, dtype", [(1, F32), (-1, F32), (1, BF16), (-1, BF16)], [(-1, None)])
def test_large_scores(backend, sign, dtype):
    """Scores of +-1e4 must not overflow the softmax; one key then takes all the weight."""
    case = make_case(MIXES["chunks of one token after chunks"], backend=backend, dtype=dtype)
    dtype = case.q.dtype
    # All scores of a query are about sign * 1e4, apart by tens.
    q, k_pages = np.abs(case.q.astype(np.float32)), 300 * sign + case.k_pages.astype(np.float32)
    case = case.replace(q=q * np.float32(3), k_pages=k_pages).astype(dtype)
    keys = case.k_pages[case.page_table[0, 0], :, 0, : case.q.shape[2]]
    scores = np.einsum("hd,hd->h", case.q[0].astype(float), np.repeat(keys, case.q.shape[1] // len(keys), 0))
    assert (np.abs(scores * case.scale) > 5e3).all()
    got = run(case, backend)
    assert np.isfinite(got[: int(case.cu_q_lens[-1])]).all()
    assert worst_error(case, got, expected(case)) < 2e-2  # float32 holds such scores to 1e-3


@pytest.mark.parametrize("backend", ["xla", *KERNELS])
def test_one_compile_for_all_lengths(backend):
    sizes, few = [], ["lone token", "lone decode", "chunks of one token after chunks"]
    for seed, mix in enumerate(MIXES if backend == "xla" else few):
        case = make_case(MIXES[mix], backend=backend, seed=seed)
        run(case, backend)
        sizes.append(compiled(backend, case.scale, None, None)._cache_size())
    assert len(set(sizes)) == 1


SHAPES = [  # geometry, window, soft cap: one compile each
    (Geometry(heads=4, kv_heads=2, page_size=16, tokens=96, seqs=10, pages_per_seq=40), 10_000, None),
    (Geometry(heads=4, kv_heads=1, page_size=7, tokens=150, seqs=5, pages_per_seq=90), 37, None),
    (Geometry(heads=3, kv_heads=3, page_size=64, tokens=200, seqs=17, pages_per_seq=5), 5, 4.0),
]


KERNEL_SHAPES = [
    (Geometry(heads=15, kv_heads=3, head_size=128, page_size=32, tokens=24, seqs=4, pages_per_seq=9), 50, None),
    (
        Geometry(
            heads=17, kv_heads=1, head_size=64, pool_head_size=128, page_size=128, tokens=24, seqs=5, pages_per_seq=3
        ),
        None,
        3.0,
    ),
]


@st.composite
def batches(draw, shapes=SHAPES, dtype=F32) -> Case:
    geometry, window, soft_cap = draw(st.sampled_from(shapes))
    lens, left = [], geometry.tokens
    for _ in range(draw(st.integers(1, geometry.seqs))):
        q_len = draw(st.just(1) | st.integers(1, left))
        lens.append((q_len, q_len + draw(st.integers(0, geometry.max_len - q_len))))
        left -= q_len
        if not left:
            break
    if draw(st.booleans()):
        lens.sort(key=lambda x: x[0] > 1)
    decodes = next((i for i, (q_len, _) in enumerate(lens) if q_len > 1), len(lens))
    return make_case(
        lens, geometry=geometry, window=window, soft_cap=soft_cap, dtype=dtype, seed=draw(st.integers(0, 2**16)),
        num_decodes=draw(st.just(decodes) | st.integers(0, decodes)),
    )  # fmt: skip


@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples * 3 // 5)
@hypothesis.given(case=batches())
def test_any_batch(case):
    check(case, run(case, "xla"))


@pytest.mark.parametrize("backend", KERNELS)
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 10)
@hypothesis.given(data=st.data())
def test_any_batch_of_a_kernel(backend, data):
    case = data.draw(batches(KERNEL_SHAPES, SETUPS[backend].dtype))
    check(case, run(case, backend))


# What a wrong kernel would compute, had by handing a right one altered arguments. The suite must see each, without the
# help of NaNs and at its loosest tolerance.
MUTATIONS = {
    "reads the pages of the first sequence for all": lambda c: c.replace(
        page_table=np.broadcast_to(c.page_table[2], c.page_table.shape)
    ),
    "reads the next sequence's pages": lambda c: c.replace(page_table=np.roll(c.page_table, -1, axis=0)),
    "swaps a sequence's first pages": lambda c: c.replace(page_table=c.page_table[:, [1, 0, *range(2, 48)]]),
    "reads one page for all": lambda c: c.replace(page_table=np.repeat(c.page_table[:, :1], 48, axis=1)),
    "stands one position late": lambda c: c.replace(kv_lens=np.where(c.kv_lens < 768, c.kv_lens + 1, 768)),
    "stands one position early": lambda c: c.replace(kv_lens=np.maximum(c.kv_lens - 1, np.diff(c.cu_q_lens))),
    "sees the tail of the last page": lambda c: c.replace(kv_lens=-(-c.kv_lens // 16) * 16),
    "windows by whole pages": lambda c: c.replace(window=48),
    "windows one key too many": lambda c: c.replace(window=38),
    "windows one key too few": lambda c: c.replace(window=36),
    "has no window": lambda c: c.replace(window=None),
    "doubles the scale": lambda c: c.replace(scale=2 * c.scale),
    "has no scale": lambda c: c.replace(scale=1.0),
    "has no soft cap": lambda c: c.replace(soft_cap=None),
    "takes another head's keys": lambda c: c.replace(k_pages=c.k_pages[:, ::-1]),
    "takes another head's values": lambda c: c.replace(v_pages=c.v_pages[:, ::-1]),
    "takes keys for values": lambda c: c.replace(v_pages=c.k_pages),
    "takes another row's query": lambda c: c.replace(q=np.roll(c.q, 1, axis=0)),
    "leaves out the last sequence": lambda c: c.replace(num_seqs=c.num_seqs - 1),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_suite_sees(mutation):
    right = make_case(MIXES[MIXED], window=37, soft_cap=2.5, dtype=BF16).healed()
    wrong = MUTATIONS[mutation](right)
    check(right, run(right, "xla"))
    with pytest.raises(AssertionError):
        check(right, run(wrong, "reference"))


def test_suite_sees_nan():
    case = make_case(MIXES[MIXED])
    want = expected(case)
    got = want.copy()
    got[case.rows(5).start, 0, 0] = np.nan
    assert worst_error(case, got, want) == math.inf
    with pytest.raises(AssertionError):
        check(case, got, want)


def test_suite_sees_one_wrong_row_of_a_chunk():
    case = make_case(MIXES[MIXED])
    want = expected(case)
    got = want.copy()
    got[case.rows(6).stop - 1] *= 1.5
    assert worst_error(case, got, want) > TOLERANCE[BF16]


# A user runs without the tests' shape checker, which would answer first.
unchecked = inspect.unwrap(ragged_paged_attention)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((8, 16))}, r"q \[T, H, D\].*q.shape=\(8, 16\)"),
        ({"k_pages": jnp.zeros((5, 2, 16))}, r"k_pages.shape=\(5, 2, 16\)"),
        ({"v_pages": jnp.zeros((5, 2, 4, 8))}, r"v_pages.shape=\(5, 2, 4, 8\)"),
        ({"q": jnp.zeros((8, 4, 8))}, r"head size must agree.*q.shape=\(8, 4, 8\)"),
        ({"q": jnp.zeros((8, 3, 16))}, r"multiple of K.*q.shape=\(8, 3, 16\)"),
        ({"q": jnp.zeros((0, 4, 16))}, r"at least one query row.*\(0, 4, 16\)"),
        ({"kv_lens": jnp.ones(4, jnp.int32)}, r"rows disagree: kv_lens.shape=\(4,\)"),
        ({"page_table": jnp.zeros((2, 6), jnp.int32)}, r"rows disagree.*page_table.shape=\(2, 6\)"),
        ({"page_table": jnp.zeros(3, jnp.int32)}, r"rows disagree.*page_table.shape=\(3,\)"),
        ({"cu_q_lens": jnp.zeros(3, jnp.int32)}, r"rows disagree.*cu_q_lens.shape=\(3,\)"),
        ({"q": jnp.zeros((8, 4, 16), jnp.bfloat16)}, "share a dtype.*bfloat16.*float32"),
        ({"v_pages": jnp.zeros((5, 2, 4, 16), jnp.bfloat16)}, "share a dtype"),
        (
            dict.fromkeys(["k_pages", "v_pages"], jnp.zeros((5, 2, 4, 16), jnp.bfloat16)),
            "share a dtype.*float32.*bfloat16",
        ),
        (
            {
                "kv_lens": jnp.zeros(0, jnp.int32),
                "page_table": jnp.zeros((0, 6), jnp.int32),
                "cu_q_lens": jnp.zeros(1, jnp.int32),
            },
            r"at least one sequence row; got kv_lens.shape=\(0,\)",
        ),
        ({"page_table": np.full((3, 6), 5, np.int32)}, "page ids must be from 0 to 4; .* has 5 to 5"),
        ({"page_table": np.full((3, 6), -1, np.int32)}, "page ids must be from 0 to 4.* has -1 to -1"),
        ({"window": 0}, "window=0 must be None or >= 1"),
        ({"window": -3}, "window=-3"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be None or > 0"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0"),
        ({"backend": "cuda"}, "attention backend 'cuda' is not known; known: .*xla.*reference"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    args = {
        "q": jnp.zeros((8, 4, 16)),
        "k_pages": jnp.zeros((5, 2, 4, 16)),
        "v_pages": jnp.zeros((5, 2, 4, 16)),
        "kv_lens": jnp.ones(3, jnp.int32),
        "page_table": jnp.zeros((3, 6), jnp.int32),
        "cu_q_lens": jnp.arange(4, dtype=jnp.int32),
        "num_seqs": jnp.int32(3),
        "num_decodes": jnp.int32(0),
        "scale": 0.25,
    }
    with pytest.raises(ValueError, match=message):
        unchecked(**(args | changes))


def test_half_precision_is_refused():
    """float16 overflows at 65504: scores of a real model reach it."""
    q, pages = jnp.zeros((8, 4, 16), jnp.float16), jnp.zeros((5, 2, 4, 16), jnp.float16)
    ints = jnp.ones(3, jnp.int32), jnp.zeros((3, 6), jnp.int32), jnp.arange(4, dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"float32 or bfloat16; got q.dtype=dtype\('float16'\)"):
        unchecked(q, pages, pages, *ints, jnp.int32(3), jnp.int32(0), scale=0.25)


def test_scale_has_no_default():
    with pytest.raises(TypeError, match="scale"):
        unchecked(*make_case([(1, 1)]).arrays())


@pytest.mark.parametrize("backend", ["xla", "pallas_gpu", "pallas_tpu", "reference"])
def test_select_backend_takes_a_known_name(backend):
    assert select_backend(backend) == backend


def test_select_backend():
    assert select_backend() == "xla"
    with pytest.raises(ValueError, match=r"attention backend 'nope' is not known; known: .*xla"):
        select_backend("nope")
