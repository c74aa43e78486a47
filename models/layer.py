"""A decoder layer over a hybrid batch and the paged pool: attention, MLP or experts, and how they are joined."""

from __future__ import annotations

from typing import NamedTuple

from jax import lax
from jaxtyping import Array, Float, Int32

from sarathi_jax.arrays import AnyArray, AnyScalar
from sarathi_jax.attention import Backend, Schedule, ragged_paged_attention, write_kv
from sarathi_jax.config import LayerKind, ModelConfig
from sarathi_jax.models.blocks import ACTIVATIONS, LayerWeights, add_bias, dot, norm, product, rms_norm
from sarathi_jax.models.experts import experts
from sarathi_jax.models.rope import rotate


class KVPool(NamedTuple):
    """Keys and values of all layers. Layer l's page p is row `l * (num_pages + 1) + p`; the last page of a layer is its
    sink. E is `attention.pool_head_size` of D."""

    k: Float[Array, "LP K B E"]
    v: Float[Array, "LP K B E"]


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


class Layer(NamedTuple):
    """One layer. `rotation`: cos and sin of its kind for each token; its pages start at row `first_page` of the pool.

    `axis`: that of the mesh which its heads and MLP are split over, each device running this with its own share.
    `schedule`: that of `schedule_attention` for its window.
    """

    config: ModelConfig
    kind: LayerKind
    weights: LayerWeights
    rotation: tuple[Float[Array, "T R"], Float[Array, "T R"]] | None
    first_page: Int32[Array, ""]
    backend: Backend
    axis: str | None = None
    schedule: Schedule | None = None

    def __call__(self, x: Float[Array, "T d"], kv: KVPool, rows: TokenRows) -> tuple[Float[Array, "T d"], KVPool]:
        c, w = self.config, self.weights
        h = norm(x, w, "attn_norm", c)
        o, kv = self._attention(h, kv, rows)
        if c.block == "sequential":
            o = self._whole(o, "o")
            x += norm(o, w, "attn_post_norm", c) if c.post_norms else o
            m = self._whole(self._mlp(norm(x, w, "mlp_norm", c), rows), "down")
            return x + (norm(m, w, "mlp_post_norm", c) if c.post_norms else m), kv
        h = h if c.block == "parallel_shared_norm" else norm(x, w, "mlp_norm", c)
        return x + self._whole(o + self._mlp(h, rows), "o", "down"), kv

    def _whole(self, x: Float[Array, "T d"], *names: str) -> Float[Array, "T d"]:
        """Each device's part of an output to the whole, with the biases of these weights."""
        x = x if self.axis is None else lax.psum(x, self.axis)
        for name in names:
            x = add_bias(x, self.weights, name)
        return x

    def _attention(self, x: Float[Array, "T d"], kv: KVPool, rows: TokenRows) -> tuple[Float[Array, "T d"], KVPool]:
        """Attention's output, of this device's heads, and the pool with these tokens written."""
        c = self.config
        q, k, v = self._heads(dot(x, self.weights, "qkv"))
        kv = KVPool(*write_kv(kv.k, kv.v, k, v, self.first_page + rows.page_ids, rows.offsets))
        o = ragged_paged_attention(
            q.astype(kv.k.dtype), kv.k, kv.v, rows.kv_lens, self.first_page + rows.page_table, rows.cu_q_lens,
            rows.num_seqs, rows.num_decodes, scale=c.head_dim**-0.5 if c.query_scale is None else c.query_scale,
            window=self.kind.window, soft_cap=c.attention_soft_cap, backend=self.backend, schedule=self.schedule,
        )  # fmt: skip
        return product(o.reshape(o.shape[0], c.num_kv_heads, c.num_groups, c.head_dim), self.weights, "o"), kv

    def _heads(self, qkv: Float[Array, "T K G2 D"]):
        """Queries [T, H, D], keys and values [T, K, D]: split, normed and rotated."""
        c = self.config
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        if c.qk_norm:
            q, k = rms_norm(q, self.weights["q_norm"], c), rms_norm(k, self.weights["k_norm"], c)
        q = q.reshape(q.shape[0], c.num_heads, c.head_dim)
        if self.rotation is None:
            return q, k, v
        return rotate(q, *self.rotation), rotate(k, *self.rotation), v

    def _mlp(self, x: Float[Array, "T d"], rows: TokenRows) -> Float[Array, "T d"]:
        c, w = self.config, self.weights
        if self.kind.moe:
            return experts(x, w, c, rows.cu_q_lens[-1])
        act = ACTIVATIONS[c.hidden_act]
        if not c.gated_mlp:
            return product(act(dot(x, w, "up")), w, "down")
        gate_up = dot(x, w, "gate_up")
        return product(act(gate_up[:, 0]) * gate_up[:, 1], w, "down")
