"""The attention call: one ragged batch of decodes and chunks over a paged KV cache.

The convention is that of ragged paged attention on TPUs. All queries stand in one axis; sequence s owns rows
`cu_q_lens[s]:cu_q_lens[s+1]`, and they are its last tokens: query i stands at position `kv_len - q_len + i` and sees
the keys up to itself. A decode is q_len 1, a chunk is longer; nothing says "prefill".

On several devices the call goes below `jax.shard_map`, each with the KV heads and the query heads that it holds; a KV
head may stand on several of them, each with a share of its query heads.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from sarathi_jax.arrays import AnyArray, AnyScalar
from sarathi_jax.attention import pallas_gpu, pallas_tpu, reference, xla
from sarathi_jax.attention.work import Schedule, round_up

Backend = Literal["xla", "pallas_gpu", "pallas_tpu", "reference"]
AttentionFn = Callable[..., Float[Array, "T H D"]]

_PALLAS: dict[Backend, ModuleType] = {"pallas_gpu": pallas_gpu, "pallas_tpu": pallas_tpu}
_BACKENDS: dict[str, AttentionFn] = {
    name: module.ragged_paged_attention for name, module in {"xla": xla, "reference": reference, **_PALLAS}.items()
}


def select_backend(name: str | None = None) -> Backend:
    """The backend to use: `name` when given, else XLA.

    The Pallas kernels are checked by interpreters and by the compilers of their devices, and have not run on one yet:
    they are there for the asking.
    """
    if name is None:
        return "xla"
    if name not in get_args(Backend):
        raise ValueError(f"attention backend {name!r} is not known; known: {', '.join(get_args(Backend))}")
    return name  # type: ignore[return-value]


def pool_head_size(head_size: int) -> int:
    """Numbers that a pool should have for a head of keys or values, on the device at hand.

    On a TPU a multiple of 128, whatever the backend: attention reads rows of so many there, and for a pool of narrower
    ones, which the compiler stores compactly with pages innermost, it would copy all of it to such rows in every step.
    """
    return round_up(head_size, pallas_tpu.LANES) if pallas_tpu.unsupported_device() is None else head_size


def ragged_paged_attention(
    q: Float[Array, "T H D"],
    k_pages: Float[Array, "P K B E"],
    v_pages: Float[Array, "P K B E"],
    kv_lens: Int32[AnyArray, " S"],
    page_table: Int32[AnyArray, "S N"],
    cu_q_lens: Int32[AnyArray, " S+1"],
    num_seqs: Int32[AnyScalar, ""],
    num_decodes: Int32[AnyScalar, ""],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: Backend = "xla",
    interpret: bool = False,
    schedule: Schedule | None = None,
) -> Float[Array, "T H D"]:
    """Attention of every query over its own sequence's pages.

    Args:
      q: queries of all sequences, rows past `cu_q_lens[num_seqs]` are padding (their result is unspecified).
      k_pages, v_pages: the pool with this step's keys and values; slots that no query sees may hold anything. E is D,
        or D padded by zeros to a multiple of 128 (see `pool_head_size`).
      kv_lens: keys of each sequence, this step's included; rows past `num_seqs` are ignored.
      page_table: pages of each sequence in order; entries of pages that no query sees, past its end or before its
        window, are ignored but must be valid ids.
      cu_q_lens: prefix sums of the query lengths; every sequence below `num_seqs` has q_len >= 1, later entries repeat
        the total.
      num_seqs: sequences there are.
      num_decodes: the first so many sequences have q_len 1 (they may be handled together; 0 is always right). The order
        within them is free, but backends run fastest when neighbours are of like length.
      scale: factor on the scores, usually D ** -0.5. There is no default.
      window: keys a query sees, itself included; None is all.
      soft_cap: scores become `cap * tanh(score / cap)`.
      backend: see `select_backend`. A Pallas kernel that cannot serve the device, the dtype or the shapes gives way to
        XLA, with one warning that says why.
      interpret: run a Pallas kernel in JAX's interpreter, on any device: for tests, it is slow.
      schedule: of `schedule_attention` for these lengths, shapes, window and backend; None makes it here.

    Returns:
      [T, H, D] in q's dtype; scores, softmax and sums are float32.

    Raises:
      ValueError: shapes or dtypes that disagree, no queries or sequences; page ids that the pool does not have, where
        the table is NumPy's (on a device they cannot be looked at).
    """
    _check(q, k_pages, v_pages, kv_lens, page_table, cu_q_lens, window, soft_cap)
    head_size = q.shape[2]
    q = _pad_heads(q, k_pages)
    serving = _serving(backend, q, k_pages, interpret)
    attend = functools.partial(_BACKENDS[serving], scale=scale, window=window, soft_cap=soft_cap)
    if serving in _PALLAS:
        attend = functools.partial(attend, interpret=interpret, schedule=schedule)
    return attend(q, k_pages, v_pages, kv_lens, page_table, cu_q_lens, num_seqs, num_decodes)[..., :head_size]


def schedule_attention(
    q: jax.ShapeDtypeStruct | Array,
    k_pages: jax.ShapeDtypeStruct | Array,
    kv_lens: Int32[AnyArray, " S"],
    cu_q_lens: Int32[AnyArray, " S+1"],
    num_seqs: Int32[AnyScalar, ""],
    num_decodes: Int32[AnyScalar, ""],
    *,
    window: int | None = None,
    backend: Backend = "xla",
    interpret: bool = False,
) -> Schedule | None:
    """What `ragged_paged_attention` derives from the lengths, for all layers of a step that share a window; None where
    the backend derives nothing. Of `q` and `k_pages` only shape and dtype count."""
    q = jax.ShapeDtypeStruct((*q.shape[:2], k_pages.shape[3]), q.dtype)
    serving = _serving(backend, q, k_pages, interpret)
    if serving not in _PALLAS:
        return None
    return _PALLAS[serving].make_schedule(
        q, k_pages, kv_lens, cu_q_lens, num_seqs, num_decodes, window=window, interpret=interpret
    )


def _serving(backend: str, q, k_pages, interpret: bool) -> Backend:
    """`backend`, or XLA where it cannot serve."""
    name = select_backend(backend)
    if name not in _PALLAS:
        return name
    kernel = _PALLAS[name]
    reason = kernel.unsupported(q, k_pages) or (None if interpret else kernel.unsupported_device())
    if reason is None:
        return name
    _warn_once(f"attention gives way from {name!r} to 'xla': {reason}")
    return "xla"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def write_kv(
    k_pages: Float[Array, "P K B E"],
    v_pages: Float[Array, "P K B E"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    page_ids: Int32[AnyArray, " T"],
    offsets: Int32[AnyArray, " T"],
) -> tuple[Float[Array, "P K B E"], Float[Array, "P K B E"]]:
    """The pools with token t's keys and values at slot `offsets[t]` of page `page_ids[t]`; padding names a sink page.
    Heads are padded by zeros to the pool's.

    Ids must be valid (the host checks): XLA would clamp a wrong one into somebody else's page. In place when the pools
    are donated or a loop's carry.
    """
    _, heads, page_size, _ = k_pages.shape
    rows = (page_ids[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)[None]) * page_size + offsets[:, None]

    def put(pages, x):
        flat = pages.reshape(-1, pages.shape[3])
        x = _pad_heads(x, pages).astype(pages.dtype)
        return flat.at[rows].set(x, mode="promise_in_bounds").reshape(pages.shape)

    return put(k_pages, k), put(v_pages, v)


def _pad_heads(x, pages):
    """Zeros after the heads of x [T, N, D], up to the pool's."""
    missing = pages.shape[3] - x.shape[2]
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing))) if missing else x


def _check(q, k_pages, v_pages, kv_lens, page_table, cu_q_lens, window, soft_cap) -> None:
    if q.ndim != 3 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"need q [T, H, D] and k, v pages [P, K, B, D]; got {q.shape=} {k_pages.shape=} {v_pages.shape=}"
        )
    (_, h, d), (_, k, _, pool_d) = q.shape, k_pages.shape
    if pool_d not in (d, round_up(d, pallas_tpu.LANES)) or h % k:
        raise ValueError(f"head size must agree and H be a multiple of K; got {q.shape=} {k_pages.shape=}")
    if q.shape[0] == 0:
        raise ValueError(f"a batch needs at least one query row; got {q.shape=}")
    s = kv_lens.size
    if kv_lens.ndim != 1 or page_table.ndim != 2 or page_table.shape[0] != s or cu_q_lens.shape != (s + 1,):
        raise ValueError(f"rows disagree: {kv_lens.shape=} {page_table.shape=} {cu_q_lens.shape=} (S, [S, N], S + 1)")
    if s == 0:
        raise ValueError(f"a batch needs at least one sequence row; got {kv_lens.shape=}")
    if isinstance(page_table, np.ndarray) and page_table.size:
        first, last = page_table.min(), page_table.max()
        if first < 0 or last >= len(k_pages):
            raise ValueError(f"page ids must be from 0 to {len(k_pages) - 1}; page_table has {first} to {last}")
    if not (q.dtype == k_pages.dtype == v_pages.dtype) or q.dtype not in (jax.numpy.float32, jax.numpy.bfloat16):
        raise ValueError(f"q and pages must share a dtype, float32 or bfloat16; got {q.dtype=} {k_pages.dtype=}")
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be None or >= 1")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"{soft_cap=} must be None or > 0")
