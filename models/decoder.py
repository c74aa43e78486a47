"""The decoder: a Llama-family transformer over a hybrid batch and a paged KV pool.

Layers are stacked and looped, so compile time does not grow with depth; the pool is a carry of the loop, updated in
place. Weights and activations into a matmul are in the model's dtype, everything else is float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from sarathi_jax.arrays import AnyArray, AnyScalar
from sarathi_jax.attention import Backend, ragged_paged_attention, select_backend, write_kv
from sarathi_jax.config import ModelConfig
from sarathi_jax.models.rope import rotary_tables, rotate


class KVPool(NamedTuple):
    """Keys and values of all layers. Layer l's page p is row `l * (num_pages + 1) + p`; the last page of a layer is its
    sink."""

    k: Float[Array, "LP K B D"]
    v: Float[Array, "LP K B D"]


class TokenRows(NamedTuple):
    """The tokens of one step, packed; rows past the last chunk are padding and write to the sink page.

    page_ids and offsets say where each token's key and value go; page_table, kv_lens, cu_q_lens, num_seqs and
    num_decodes are the attention call's.
    """

    token_ids: Int32[AnyArray, " T"]
    positions: Int32[AnyArray, " T"]
    prompt_lens: Int32[AnyArray, " T"]
    page_ids: Int32[AnyArray, " T"]
    offsets: Int32[AnyArray, " T"]
    page_table: Int32[AnyArray, "S N"]
    kv_lens: Int32[AnyArray, " S"]
    cu_q_lens: Int32[AnyArray, " S+1"]
    num_seqs: Int32[AnyScalar, ""]
    num_decodes: Int32[AnyScalar, ""]


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Decoder(nnx.Module):
    """`weights` by the names of `weights.weight_specs`; all share one dtype."""

    def __init__(self, config: ModelConfig, weights: dict[str, Array], *, attention: Backend | None = None):
        if attention == "reference":
            raise ValueError("attention='reference' is the tests' oracle and cannot be compiled; use None or 'xla'")
        self.config = config
        self.attention: Backend = select_backend(attention)
        self.weights = nnx.Dict({name: nnx.Param(array) for name, array in weights.items()})

    @property
    def dtype(self) -> jnp.dtype:
        return self.weights["embed"].dtype

    def __call__(self, rows: TokenRows, kv: KVPool) -> tuple[Float[Array, "T d"], KVPool]:
        """Hidden states of the last layer (float32, before the final norm), and the pool with these tokens written."""
        c = self.config
        cos, sin = rotary_tables(c, rows.positions, rows.prompt_lens)
        layer_pages = kv.k.shape[0] // c.num_layers

        def layer(i, carry):
            x, kv = carry
            w = lambda name: lax.dynamic_index_in_dim(self.weights[name][...], i, keepdims=False)
            has = lambda name: name in self.weights

            qkv = _dot(_norm(x, w("attn_norm"), c), w("qkv"), w("qkv_bias") if has("qkv_bias") else None)
            q, k, v = self._heads(qkv, cos, sin, w)
            first = i * layer_pages
            kv = KVPool(*write_kv(kv.k, kv.v, k, v, first + rows.page_ids, rows.offsets))
            o = ragged_paged_attention(
                q.astype(kv.k.dtype), kv.k, kv.v, rows.kv_lens, first + rows.page_table, rows.cu_q_lens,
                rows.num_seqs, rows.num_decodes, scale=c.head_dim**-0.5, window=c.sliding_window,
                soft_cap=c.attention_soft_cap, backend=self.attention,
            )  # fmt: skip
            o = o.reshape(o.shape[0], c.num_kv_heads, c.num_groups, c.head_dim)
            x += _dot(o, w("o"), w("o_bias") if has("o_bias") else None)

            gate_up = _dot(_norm(x, w("mlp_norm"), c), w("gate_up"), w("gate_up_bias") if has("gate_up_bias") else None)
            h = _ACTIVATIONS[c.hidden_act](gate_up[:, 0]) * gate_up[:, 1]
            x += _dot(h, w("down"), w("down_bias") if has("down_bias") else None)
            return x, kv

        x = self.weights["embed"][...][rows.token_ids].astype(jnp.float32)
        return lax.fori_loop(0, c.num_layers, layer, (x, kv))

    def logits(self, x: Float[Array, "N d"]) -> Float[Array, "N V"]:
        """Logits of hidden states, float32."""
        head = self.weights["embed" if self.config.tie_embeddings else "head"][...]
        x = _norm(x, self.weights["final_norm"][...], self.config).astype(head.dtype)
        logits = lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _heads(self, qkv: Float[Array, "T K G2 D"], cos, sin, w):
        """Queries [T, H, D], keys and values [T, K, D]: split, normed (Qwen3) and rotated."""
        c = self.config
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        if c.qk_norm:
            q, k = _norm(q, w("q_norm"), c), _norm(k, w("k_norm"), c)
        q = q.reshape(q.shape[0], c.num_heads, c.head_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


def _norm(x: Float[Array, "... d"], scale: Float[Array, " d"], config: ModelConfig) -> Float[Array, "... d"]:
    """RMSNorm in float32."""
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
    return x * lax.rsqrt(mean_square + config.rms_norm_eps) * scale


def _dot(x, w, bias=None):
    """x's trailing axes contracted with w's leading ones; operands in w's dtype, sums in float32.

    One plain two-dimensional matmul: the CPU's fast path takes no other.
    """
    rows, inner = x.shape[0], x[0].size
    tail = w.shape[x.ndim - 1 :]
    y = lax.dot_general(
        x.reshape(rows, inner).astype(w.dtype), w.reshape(inner, -1), (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    y = y.reshape(rows, *tail)
    return y if bias is None else y + bias.astype(jnp.float32)[None]
