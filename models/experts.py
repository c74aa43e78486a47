"""A mixture of experts: each token through its likeliest gated MLPs, tokens sorted by expert so that matmuls are whole.

Shapes are fixed, the number of rows of each expert is data. Accelerators have `jax.lax.ragged_dot`; on a CPU it
multiplies all rows by all experts, so there a loop walks tiles of rows, each of one expert, and experts that nobody
chose cost nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.blocks import ACTIVATIONS, LayerWeights, dot, matmul

MIN_TILE, MAX_TILE = 8, 128


def experts(
    x: Float[Array, "T d"], weights: LayerWeights, config: ModelConfig, num_tokens: Int32[Array, ""]
) -> Float[Array, "T d"]:
    """The mixture's output for rows of x; those from `num_tokens` on are padding and go to no expert."""
    num_rows, num_chosen, num_experts = x.shape[0], config.experts_per_token, config.num_experts
    probabilities = jax.nn.softmax(dot(x, weights, "router"), axis=-1)
    share, expert = lax.top_k(probabilities, num_chosen)
    if config.norm_topk_prob:
        share /= jnp.sum(share, axis=-1, keepdims=True)
    is_padding = jnp.arange(num_rows)[:, None] >= num_tokens
    expert = jnp.where(is_padding, num_experts, expert).reshape(-1)  # sorted behind the last expert
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.sum(expert[None] == jnp.arange(num_experts)[:, None], axis=1, dtype=jnp.int32)
    x = x[order // num_chosen]
    y = lax.platform_dependent(x, sizes, cpu=_tiles(weights, config), default=_ragged(weights, config))
    y = y[jnp.argsort(order)].reshape(num_rows, num_chosen, -1)
    return jnp.sum(y * share[:, :, None], axis=1)


def _ragged(weights: LayerWeights, config: ModelConfig):
    """Sorted rows [N, d] and the experts' sizes [E] to outputs [N, d]."""
    act = ACTIVATIONS[config.hidden_act]

    def grouped(x: Array, name: str, sizes: Array) -> Array:
        w = weights[name].astype(weights.dtype)
        y = lax.ragged_dot(
            x.astype(w.dtype), w.reshape(w.shape[0], x.shape[-1], -1), sizes, preferred_element_type=jnp.float32
        )
        if (scale := weights.get(f"{name}_scale")) is None:
            return y
        expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")
        return y * scale.reshape(len(scale), -1)[expert]  # of padding rows, anybody's

    def run(x: Float[Array, "N d"], sizes: Int32[Array, " E"]) -> Float[Array, "N d"]:
        gate, up = jnp.split(grouped(x, "experts_gate_up", sizes), 2, axis=-1)
        return grouped(act(gate) * up, "experts_down", sizes)

    return run


def _tiles(weights: LayerWeights, config: ModelConfig):
    """As `_ragged`, a tile of one expert's rows at a time."""
    act = ACTIVATIONS[config.hidden_act]

    def product(x: Array, name: str, expert: Array) -> Array:
        y = matmul(x, weights.expert(name, expert).astype(weights.dtype))
        return y * weights.expert(f"{name}_scale", expert)[None] if f"{name}_scale" in weights.stacks else y

    def run(x: Float[Array, "N d"], sizes: Int32[Array, " E"]) -> Float[Array, "N d"]:
        rows_each = -(-x.shape[0] // config.num_experts)
        tile = min(max(MIN_TILE, 1 << (rows_each - 1).bit_length()), MAX_TILE)
        ends, tile_ends = jnp.cumsum(sizes), jnp.cumsum(-(-sizes // tile))
        padded = jnp.pad(x, ((0, tile), (0, 0)))  # no slice may reach the edge, where it would be shifted

        def one(i, out):
            expert = jnp.searchsorted(tile_ends, i, side="right")
            place = i - (tile_ends[expert] - -(-sizes[expert] // tile))
            first = ends[expert] - sizes[expert] + place * tile
            rows = lax.dynamic_slice_in_dim(padded, first, tile)
            gate_up = product(rows, "experts_gate_up", expert)
            y = product(act(gate_up[:, 0]) * gate_up[:, 1], "experts_down", expert)
            # What hangs over into the next expert's rows is garbage until its own tile has run: tiles go in order.
            return lax.dynamic_update_slice_in_dim(out, y, first, axis=0)

        return lax.fori_loop(0, tile_ends[-1], one, jnp.zeros_like(padded))[: x.shape[0]]

    return run
