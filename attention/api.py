"""The attention call: one ragged batch of decodes and chunks over a paged KV cache.

The convention is that of ragged paged attention on TPUs. All queries stand in one axis; sequence s owns rows
`cu_q_lens[s]:cu_q_lens[s+1]`, and they are its last tokens: query i stands at position `kv_len - q_len + i` and sees
the keys up to itself. A decode is q_len 1, a chunk is longer; nothing says "prefill".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import jax
from jaxtyping import Array, Float, Int32

from sarathi_jax.arrays import AnyArray, AnyScalar
from sarathi_jax.attention import reference, xla

Backend = Literal["xla", "reference"]
AttentionFn = Callable[..., Float[Array, "T H D"]]

_BACKENDS: dict[str, AttentionFn] = {"xla": xla.ragged_paged_attention, "reference": reference.ragged_paged_attention}


def select_backend(name: str | None = None) -> Backend:
    """The backend to use: `name` when given, else the best that this build has for the platform (XLA everywhere)."""
    if name is None:
        return "xla"
    if name not in get_args(Backend):
        raise ValueError(f"attention backend {name!r} is not known; known: {', '.join(get_args(Backend))}")
    return name  # type: ignore[return-value]


def ragged_paged_attention(
    q: Float[Array, "T H D"],
    k_pages: Float[Array, "P K B D"],
    v_pages: Float[Array, "P K B D"],
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
) -> Float[Array, "T H D"]:
    """Attention of every query over its own sequence's pages.

    Args:
      q: queries of all sequences, rows past `cu_q_lens[num_seqs]` are padding (their result is unspecified).
      k_pages, v_pages: the pool with this step's keys and values; slots that no sequence reaches may hold anything.
      kv_lens: keys of each sequence, this step's included; rows past `num_seqs` are ignored.
      page_table: pages of each sequence in order; entries past `ceil(kv_len / B)` are ignored but must be valid ids.
      cu_q_lens: prefix sums of the query lengths; every sequence below `num_seqs` has q_len >= 1, later entries repeat
        the total.
      num_seqs: sequences there are.
      num_decodes: the first so many sequences have q_len 1 (they may be handled together; 0 is always right). The order
        within them is free, but backends run fastest when neighbours are of like length.
      scale: factor on the scores, usually D ** -0.5. There is no default.
      window: keys a query sees, itself included; None is all.
      soft_cap: scores become `cap * tanh(score / cap)`.
      backend: see `select_backend`.

    Returns:
      [T, H, D] in q's dtype; scores, softmax and sums are float32.

    Raises:
      ValueError: shapes or dtypes that disagree.
    """
    _check(q, k_pages, v_pages, kv_lens, page_table, cu_q_lens, window, soft_cap)
    return _BACKENDS[select_backend(backend)](
        q, k_pages, v_pages, kv_lens, page_table, cu_q_lens, num_seqs, num_decodes,
        scale=scale, window=window, soft_cap=soft_cap,
    )  # fmt: skip


def write_kv(
    k_pages: Float[Array, "P K B D"],
    v_pages: Float[Array, "P K B D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    page_ids: Int32[AnyArray, " T"],
    offsets: Int32[AnyArray, " T"],
) -> tuple[Float[Array, "P K B D"], Float[Array, "P K B D"]]:
    """The pools with token t's keys and values at slot `offsets[t]` of page `page_ids[t]`; padding names a sink page.

    Ids must be valid (the host checks): XLA would clamp a wrong one into somebody else's page. In place when the pools
    are donated or a loop's carry.
    """
    put = lambda pages, x: pages.at[page_ids, :, offsets, :].set(x.astype(pages.dtype), mode="promise_in_bounds")
    return put(k_pages, k), put(v_pages, v)


def _check(q, k_pages, v_pages, kv_lens, page_table, cu_q_lens, window, soft_cap) -> None:
    if q.ndim != 3 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"need q [T, H, D] and k, v pages [P, K, B, D]; got {q.shape=} {k_pages.shape=} {v_pages.shape=}"
        )
    (_, h, d), (_, k, _, d_kv) = q.shape, k_pages.shape
    if d != d_kv or h % k:
        raise ValueError(f"head size must agree and H be a multiple of K; got {q.shape=} {k_pages.shape=}")
    if q.shape[0] == 0:
        raise ValueError(f"a batch needs at least one query row; got {q.shape=}")
    s = kv_lens.size
    if kv_lens.ndim != 1 or page_table.ndim != 2 or page_table.shape[0] != s or cu_q_lens.shape != (s + 1,):
        raise ValueError(f"rows disagree: {kv_lens.shape=} {page_table.shape=} {cu_q_lens.shape=} (S, [S, N], S + 1)")
    if not (q.dtype == k_pages.dtype == v_pages.dtype) or q.dtype not in (jax.numpy.float32, jax.numpy.bfloat16):
        raise ValueError(f"q and pages must share a dtype, float32 or bfloat16; got {q.dtype=} {k_pages.dtype=}")
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be None or >= 1")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"{soft_cap=} must be None or > 0")
