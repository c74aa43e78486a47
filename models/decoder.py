"""The decoder: a transformer over a hybrid batch and a paged KV pool.

Layers are stacked and looped, so compile time does not grow with depth; the pool is a carry of the loops, updated in
place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from sarathi_jax.arrays import AnyArray
from sarathi_jax.attention import Backend, schedule_attention, select_backend
from sarathi_jax.config import ModelConfig
from sarathi_jax.models.blocks import LayerWeights, norm
from sarathi_jax.models.groups import LayerGroup, layer_groups
from sarathi_jax.models.layer import KVPool, Layer, TokenRows
from sarathi_jax.models.rope import rotary_tables
from sarathi_jax.models.weight_specs import slot_prefix


class Decoder(nnx.Module):
    """`weights` by the names of `weights.weight_specs`; all share one dtype.

    With an `axis` of the mesh it is one device's share of a model, as `parts.ModelPart` cuts it: to be called under
    `jax.shard_map`, with that device's weights, pool and configuration.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Array],
        *,
        attention: Backend | None = None,
        axis: str | None = None,
    ):
        if attention == "reference":
            raise ValueError("attention='reference' is the tests' oracle and cannot be compiled; use None or 'xla'")
        self.config = config
        self.axis = axis
        self.attention: Backend = select_backend(attention)
        self.weights = nnx.Dict({name: nnx.Param(array) for name, array in weights.items()})

    @property
    def dtype(self) -> jnp.dtype:
        return self.weights["embed" if "embed" in self.weights else f"{slot_prefix(0)}attn_norm"].dtype

    @property
    def num_logits(self) -> int:
        """Columns of `logits`: those of the vocabulary, and padding that is never drawn."""
        return self._head.shape[0]

    def __call__(
        self, rows: TokenRows, kv: KVPool, x: Float[Array, "T d"] | None = None
    ) -> tuple[Float[Array, "T d"], KVPool]:
        """Hidden states of the last layer (float32, before the final norm), and the pool with these tokens written.

        `x`: those of the layers before, for a part of a model that does not begin with the embedding.
        """
        c = self.config
        kinds = c.layer_kinds
        rotations = {
            rope: rotary_tables(c, rows.positions, rows.prompt_lens, local=rope == "local")
            for rope in dict.fromkeys(kind.rope for kind in kinds if kind.rope)
        }
        # What attention derives from the lengths, once for all layers: XLA would leave it in their loop.
        queries = jax.ShapeDtypeStruct((rows.token_ids.shape[0], c.num_heads, c.head_dim), kv.k.dtype)
        schedules = {
            window: schedule_attention(
                queries, kv.k, rows.kv_lens, rows.cu_q_lens, rows.num_seqs, rows.num_decodes, window=window,
                backend=self.attention,
            )
            for window in {kind.window for kind in kinds}
        }  # fmt: skip
        carry = self._embed(rows) if x is None else x, kv
        for group in layer_groups(kinds):
            carry = self._loop(group, carry, rows, rotations, schedules)
        return carry

    def logits(self, x: Float[Array, "N d"]) -> Float[Array, "N V"]:
        """Logits of hidden states, float32."""
        head = self._head
        top = {name: self.weights[name][...] for name in ("final_norm", "final_norm_bias") if name in self.weights}
        x = norm(x, top, "final_norm", self.config).astype(head.dtype)
        logits = lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        cap = self.config.logit_soft_cap
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        if self.axis is not None:
            logits = lax.all_gather(logits, self.axis, axis=1, tiled=True)
        if logits.shape[1] > self.config.vocab_size:
            is_padding = jnp.arange(logits.shape[1]) >= self.config.vocab_size
            logits = jnp.where(is_padding[None], -jnp.inf, logits)
        return logits

    @property
    def _head(self) -> Float[Array, "V d"]:
        return self.weights["embed" if self.config.tie_embeddings else "head"][...]

    def _embed(self, rows: TokenRows) -> Float[Array, "T d"]:
        c = self.config
        x = self._rows_of_table(rows.token_ids).astype(jnp.float32)
        if c.embed_scale != 1.0:
            x *= jnp.asarray(c.embed_scale, self.dtype).astype(jnp.float32)
        if c.positions == "learned":
            x += self.weights["positions"][...][rows.positions].astype(jnp.float32)
        return x

    def _rows_of_table(self, token_ids: Int32[AnyArray, " T"]) -> Float[Array, "T d"]:
        table = self.weights["embed"][...]
        if self.axis is None:
            return table[token_ids]
        local = token_ids - lax.axis_index(self.axis) * table.shape[0]
        is_here = (local >= 0) & (local < table.shape[0])
        return lax.psum(jnp.where(is_here[:, None], table[jnp.where(is_here, local, 0)], 0), self.axis)

    def _loop(self, group: LayerGroup, carry, rows: TokenRows, rotations: dict, schedules: dict):
        """The layers of one group: its pattern, repeated."""
        stacks = []
        for place in range(len(group.kinds)):
            prefix = slot_prefix(group.first_slot + place)
            names = [name for name in self.weights if name.startswith(prefix)]
            stacks.append({name.removeprefix(prefix): self.weights[name][...] for name in names})
        layer_pages = carry[1].k.shape[0] // self.config.num_layers

        def repeat(i, carry):
            for place, kind in enumerate(group.kinds):
                index = i * len(group.kinds) + (group.first_layer + place)
                layer = Layer(
                    self.config, kind, LayerWeights(stacks[place], i), rotations.get(kind.rope), index * layer_pages,
                    self.attention, self.axis, schedules[kind.window],
                )  # fmt: skip
                carry = layer(carry[0], carry[1], rows)
            return carry

        return lax.fori_loop(0, group.num_repeats, repeat, carry)
