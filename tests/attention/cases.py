"""Batches for the attention tests, built to catch what a wrong kernel would get away with on tidy data.

Every sequence has keys of its own; page tables are permuted and not contiguous; whatever no sequence may read is NaN:
pages nobody holds, slots past the end of a last page, padding queries. Page table entries past a sequence's end name
NaN pages, rows past `num_seqs` hold random lengths and pages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sarathi_jax.attention import ragged_paged_attention

F32, BF16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)
TOLERANCE = {F32: 1e-5, BF16: 1e-2}  # relative Frobenius error, per sequence
DEAD_PAGES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """All that a compiled program depends on, but for dtype and options."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    page_size: int = 16
    tokens: int = 320
    seqs: int = 12
    pages_per_seq: int = 48
    pool_head_size: int | None = None  # of a padded pool

    @property
    def max_len(self) -> int:
        return self.page_size * self.pages_per_seq


class Setup(NamedTuple):
    """What a backend is tested with where a test does not say otherwise."""

    geometry: Geometry
    dtype: np.dtype


SETUPS = {
    "xla": Setup(Geometry(), F32),
    "pallas_gpu": Setup(Geometry(heads=6, head_size=64, page_size=32, tokens=64, pages_per_seq=24), BF16),
    "pallas_tpu": Setup(Geometry(heads=6, head_size=80, pool_head_size=128, tokens=64), F32),
}
KERNELS = [
    pytest.param(
        "pallas_gpu",
        marks=[
            pytest.mark.skipif(
                tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12),
                reason="Mosaic GPU kernels are interpreted on the CPU by jax >= 0.12 only",
            ),
            pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),  # NaN keys, masked afterwards
        ],
    ),
    pytest.param("pallas_tpu"),
]
"""The Pallas kernels, run by JAX's interpreters: 1 to 3 s a batch, hence fewer of them."""


def over(name: str, thorough: Iterable, sharp: Iterable = (), gpu: Iterable = ()):
    """Parametrize `backend` and `name`: XLA with all of `thorough`, kernels with `sharp`, that of GPUs with `gpu`."""
    cases = [pytest.param("xla", *_values(value), id=f"xla-{_label(value)}") for value in thorough]
    for kernel in KERNELS:
        [backend] = kernel.values
        cases += [
            pytest.param(backend, *_values(value), id=f"{backend}-{_label(value)}", marks=kernel.marks)
            for value in (*sharp, *(gpu if backend == "pallas_gpu" else ()))
        ]
    return pytest.mark.parametrize(f"backend, {name}", cases)


def _values(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _label(value) -> str:
    return "-".join(map(str, _values(value)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The arguments of one call, as NumPy arrays."""

    q: np.ndarray  # [T, H, D]
    k_pages: np.ndarray  # [P, K, B, E], E >= D
    v_pages: np.ndarray  # [P, K, B, E]
    kv_lens: np.ndarray  # i32[S]
    page_table: np.ndarray  # i32[S, N]
    cu_q_lens: np.ndarray  # i32[S + 1]
    num_seqs: int
    num_decodes: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def replace(self, **changes) -> Case:
        return dataclasses.replace(self, **changes)

    def rows(self, s: int) -> slice:
        return slice(int(self.cu_q_lens[s]), int(self.cu_q_lens[s + 1]))

    def arrays(self) -> tuple[jax.Array, ...]:
        """The arguments in the call's order."""
        pools = tuple(jnp.asarray(x) for x in (self.q, self.k_pages, self.v_pages))
        tables = (self.kv_lens, self.page_table, self.cu_q_lens, self.num_seqs, self.num_decodes)
        return pools + tuple(jnp.asarray(x, jnp.int32) for x in tables)

    def astype(self, dtype) -> Case:
        return self.replace(**{name: getattr(self, name).astype(dtype) for name in ("q", "k_pages", "v_pages")})

    def healed(self) -> Case:
        """Random numbers where the NaNs were: a kernel that reads there is not given away by a NaN."""
        rng = np.random.default_rng(1)

        def heal(x):
            return np.where(np.isnan(x), rng.normal(size=x.shape).astype(x.dtype), x)

        return self.replace(q=heal(self.q), k_pages=heal(self.k_pages), v_pages=heal(self.v_pages))

    def forgotten(self) -> Case:
        """Keys that no query's window shows are gone: NaN where they were, and entries of whole pages of them name
        other sequences' last pages and pages of NaN in turn."""
        assert self.window is not None
        k_pages, v_pages, page_table = self.k_pages.copy(), self.v_pages.copy(), self.page_table.copy()
        page_size, rows = self.k_pages.shape[2], np.arange(self.num_seqs)
        last_pages = self.page_table[rows, (self.kv_lens[: self.num_seqs] - 1) // page_size]
        dead_pages = np.flatnonzero(np.isnan(self.k_pages.astype(np.float32)).all(axis=(1, 2, 3)))
        for s, q_len in enumerate(np.diff(self.cu_q_lens)[: self.num_seqs]):
            position = np.arange(max(0, self.kv_lens[s] - q_len + 1 - self.window))
            for pool in (k_pages, v_pages):
                pool[self.page_table[s, position // page_size], :, position % page_size] = np.nan
            num_gone = len(position) // page_size
            page_table[s, :num_gone] = last_pages[s - 1]
            page_table[s, 1:num_gone:2] = dead_pages[0]
        return self.replace(k_pages=k_pages, v_pages=v_pages, page_table=page_table)

    def solo(self, s: int) -> Case:
        """Sequence s alone, in the same shape."""
        q = np.full_like(self.q, np.nan)
        mine = self.q[self.rows(s)]
        q[: len(mine)] = mine
        kv_lens, page_table, cu_q_lens = (
            self.kv_lens.copy(),
            self.page_table.copy(),
            np.full_like(self.cu_q_lens, len(mine)),
        )
        kv_lens[0], page_table[0], cu_q_lens[0] = self.kv_lens[s], self.page_table[s], 0
        return self.replace(
            q=q, kv_lens=kv_lens, page_table=page_table, cu_q_lens=cu_q_lens, num_seqs=1,
            num_decodes=int(s < self.num_decodes),
        )  # fmt: skip


def make_case(
    lens: Sequence[tuple[int, int]],
    *,
    backend: str = "xla",
    geometry: Geometry | None = None,
    seed: int = 0,
    num_decodes: int | None = None,
    shared: Mapping[int, tuple[int, int]] | None = None,
    dtype=None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Case:
    """A case of sequences (q_len, kv_len).

    Args:
      backend: whose `SETUPS` give the geometry and dtype that are left out.
      num_decodes: by default the leading sequences of q_len 1.
      shared: sequence -> (an earlier sequence, how many of its first pages it has in common with it).
    """
    g, rng = geometry or SETUPS[backend].geometry, np.random.default_rng(seed)
    dtype = SETUPS[backend].dtype if dtype is None else dtype
    q_lens = [q_len for q_len, _ in lens]
    assert len(lens) <= g.seqs, (len(lens), g)
    assert sum(q_lens) <= g.tokens, (sum(q_lens), g)
    assert all(1 <= q_len <= kv_len <= g.max_len for q_len, kv_len in lens), (lens, g)

    num_pages = g.seqs * g.pages_per_seq + DEAD_PAGES
    order = rng.permutation(num_pages)
    dead, free = order[:DEAD_PAGES], iter(order[DEAD_PAGES:])
    shape = num_pages, g.kv_heads, g.page_size, g.pool_head_size or g.head_size
    k_pages, v_pages = (np.full(shape, np.nan, np.float32) for _ in "kv")
    page_table = rng.integers(0, num_pages, (g.seqs, g.pages_per_seq))
    kv_lens = rng.integers(1, g.max_len + 1, g.seqs)
    for s, (_, kv_len) in enumerate(lens):
        parent, common = (shared or {}).get(s, (0, 0))
        used = -(-kv_len // g.page_size)
        assert common * g.page_size <= min(kv_len, kv_lens[parent]) or not common
        own = [next(free) for _ in range(used - common)]
        page_table[s] = [*page_table[parent, :common], *own, *rng.choice(dead, g.pages_per_seq - used)]
        kv_lens[s] = kv_len
        position = np.arange(common * g.page_size, kv_len)
        for pool in (k_pages, v_pages):
            new = rng.normal(size=(len(position), g.kv_heads, g.head_size))
            new = np.pad(new, ((0, 0), (0, 0), (0, pool.shape[3] - g.head_size)))
            pool[page_table[s, position // g.page_size], :, position % g.page_size] = new

    cu_q_lens = np.full(g.seqs + 1, sum(q_lens))
    cu_q_lens[: len(lens) + 1] = np.cumsum([0, *q_lens])
    q = np.full((g.tokens, g.heads, g.head_size), np.nan, np.float32)
    q[: sum(q_lens)] = 3 * rng.normal(size=(sum(q_lens), g.heads, g.head_size))
    if num_decodes is None:
        num_decodes = next((i for i, q_len in enumerate(q_lens) if q_len > 1), len(lens))
    return Case(
        q=q, k_pages=k_pages, v_pages=v_pages, kv_lens=kv_lens, page_table=page_table, cu_q_lens=cu_q_lens,
        num_seqs=len(lens), num_decodes=num_decodes, scale=g.head_size**-0.5, window=window, soft_cap=soft_cap,
    ).astype(dtype)  # fmt: skip


@functools.cache
def compiled(backend: str, scale: float, window: int | None, soft_cap: float | None):
    """The call with its options bound, jitted (the reference is a host loop and is not)."""
    fn = functools.partial(
        ragged_paged_attention, scale=scale, window=window, soft_cap=soft_cap, backend=backend,
        interpret=backend.startswith("pallas"),
    )  # fmt: skip
    options = {"xla_backend_optimization_level": 0} if backend.startswith("pallas") else None  # the interpreter's
    return fn if backend == "reference" else jax.jit(fn, compiler_options=options)


def run(case: Case, backend: str) -> np.ndarray:
    return np.asarray(compiled(backend, case.scale, case.window, case.soft_cap)(*case.arrays()))


def expected(case: Case) -> np.ndarray:
    """The reference on the same values in float32."""
    return run(case.astype(np.float32), "reference")


def worst_error(case: Case, got: np.ndarray, want: np.ndarray) -> float:
    """The largest relative Frobenius error of any sequence; infinite where anything is not finite."""
    errors = []
    for s in range(case.num_seqs):
        a, b = (x[case.rows(s)].astype(np.float64) for x in (got, want))
        errors.append(np.linalg.norm(a - b) / np.linalg.norm(b))
    return max(e if math.isfinite(e) else math.inf for e in map(float, errors))


def check(case: Case, got: np.ndarray, want: np.ndarray | None = None) -> None:
    """What every test of a backend's numbers comes down to."""
    assert got.shape == case.q.shape
    assert got.dtype == case.q.dtype
    error = worst_error(case, got, expected(case) if want is None else want)
    assert error < TOLERANCE[case.q.dtype], error


def numpy_attention(case: Case) -> np.ndarray:
    """Attention by its definition, a loop over queries and heads in float64: what the reference is held to."""
    q, k_pages, v_pages = (x.astype(np.float64) for x in (case.q, case.k_pages, case.v_pages))
    (_, heads, _), (_, kv_heads, page_size, _) = q.shape, k_pages.shape
    out = np.zeros(q.shape)
    for s in range(case.num_seqs):
        first, kv_len = case.rows(s).start, int(case.kv_lens[s])
        q_len = case.rows(s).stop - first
        for i in range(q_len):
            position = kv_len - q_len + i
            oldest = 0 if case.window is None else max(0, position - case.window + 1)
            slots = [(case.page_table[s, p // page_size], p % page_size) for p in range(oldest, position + 1)]
            for h in range(heads):
                kv_head = h // (heads // kv_heads)
                keys = np.array([k_pages[page, kv_head, offset] for page, offset in slots])
                values = np.array([v_pages[page, kv_head, offset] for page, offset in slots])
                scores = case.scale * keys @ q[first + i, h]
                if case.soft_cap is not None:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                weights = np.exp(scores - scores.max())
                out[first + i, h] = weights @ values / weights.sum()
    return out
