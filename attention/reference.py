"""The oracle: gather each sequence's keys and values densely and call `jax.nn.dot_product_attention`.

Float32 at the highest precision, host loop over sequences, so it cannot be jitted. For tests, not for serving.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

# Lengths are padded up to a multiple of these, so that few programs are compiled, whatever the lengths.
_QUERY_STEP = 256
_KEY_STEP = 1024


def ragged_paged_attention(
    q, k_pages, v_pages, kv_lens, page_table, cu_q_lens, num_seqs, num_decodes, *, scale, window=None, soft_cap=None
):
    """See `api.ragged_paged_attention`; padding rows come back as zeros."""
    del num_decodes  # the rule is the same for every sequence
    dtype = q.dtype
    q, k_pages, v_pages, kv_lens, page_table, cu_q_lens = (
        np.asarray(x) for x in (q, k_pages, v_pages, kv_lens, page_table, cu_q_lens)
    )
    out = np.zeros(q.shape, np.float32)
    for s in range(int(num_seqs)):
        start, stop, kv_len = int(cu_q_lens[s]), int(cu_q_lens[s + 1]), int(kv_lens[s])
        pages = page_table[s, : -(-kv_len // k_pages.shape[2])]
        first = 0 if window is None else max(0, kv_len - (stop - start) + 1 - window)
        query = _padded(q[start:stop], _QUERY_STEP)
        key, value = (_padded(_dense(x, pages, first, kv_len), _KEY_STEP) for x in (k_pages, v_pages))
        position = kv_len - (stop - start) + np.arange(len(query))[:, None]
        mask = np.arange(len(key))[None] <= position
        if window is not None:
            mask &= np.arange(len(key))[None] > position - window
        out[start:stop] = _attend(query, key, value, mask, scale, soft_cap)[: stop - start]
    return jnp.asarray(out, dtype)


def _dense(pages, page_ids, first, kv_len):
    """[P, K, B, D] -> [kv_len, K, D], zeros before key `first`: nobody sees what is there, and 0 * NaN is NaN."""
    dense = np.swapaxes(pages[page_ids], 1, 2).reshape(-1, pages.shape[1], pages.shape[3])[:kv_len]
    dense[:first] = 0
    return dense


def _padded(x, step):
    """`x` in float32, zeros after it up to a multiple of `step` rows."""
    out = np.zeros((-(-len(x) // step) * step, *x.shape[1:]), np.float32)
    out[: len(x)] = x.astype(np.float32)
    return out


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap"))
def _attend(query, key, value, mask, scale, soft_cap):
    """[Q, H, D] x [N, K, D] -> [Q, H, D]."""
    with jax.default_matmul_precision("highest"):
        if soft_cap is None:
            return jax.nn.dot_product_attention(
                query[None], key[None], value[None], mask=mask[None, None], scale=scale
            )[0]
        # dot_product_attention has no cap: plain softmax attention with capped scores.
        groups = query.shape[1] // key.shape[1]
        key, value = (jnp.repeat(x, groups, axis=1) for x in (key, value))
        scores = soft_cap * jnp.tanh(jnp.einsum("qhd,nhd->hqn", query, key) * scale / soft_cap)
        weights = jax.nn.softmax(jnp.where(mask[None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqn,nhd->qhd", weights, value)
