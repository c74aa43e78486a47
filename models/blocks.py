"""What layers are made of: sliced weights, norms, matmuls, activations.

Weights and activations into a matmul are in the model's dtype, everything else is float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from sarathi_jax.config import ModelConfig

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class LayerWeights(Mapping[str, Array]):
    """The weights of one layer of a slot: entry `index` of each stack, sliced where it is used."""

    def __init__(self, stacks: dict[str, Array], index: Int32[Array, ""]):
        self.stacks, self.index = stacks, index

    def __getitem__(self, name: str) -> Array:
        return lax.dynamic_index_in_dim(self.stacks[name], self.index, keepdims=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stacks)

    def __len__(self) -> int:
        return len(self.stacks)

    @property
    def dtype(self) -> jnp.dtype:
        """What matmuls run in, though their weights may be stored in int8."""
        return self.stacks["attn_norm"].dtype

    def expert(self, name: str, expert: Int32[Array, ""]) -> Array:
        """The weight of one expert; those of the others are not touched."""
        stack = self.stacks[name]
        start = (self.index, expert, *[jnp.zeros((), jnp.int32)] * (stack.ndim - 2))
        return lax.dynamic_slice(stack, start, (1, 1, *stack.shape[2:]))[0, 0]


def norm(x: Float[Array, "N d"], weights: Mapping[str, Array], name: str, config: ModelConfig) -> Float[Array, "N d"]:
    """The norm `name` of a model of this config: RMSNorm, or LayerNorm with a bias."""
    if config.norm == "rms":
        return rms_norm(x, weights[name], config)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return rms_norm(centred, weights[name], config) + weights[f"{name}_bias"].astype(jnp.float32)[None]


def rms_norm(x: Float[Array, "... d"], scale: Float[Array, " d"], config: ModelConfig) -> Float[Array, "... d"]:
    """RMSNorm in float32."""
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
    if config.norm_offset:
        scale += config.norm_offset
    return x * lax.rsqrt(mean_square + config.norm_eps) * scale


def dot(x: Float[Array, "N ..."], weights: LayerWeights, name: str) -> Float[Array, "N ..."]:
    """x times the weight `name`, with its bias where there is one."""
    return add_bias(product(x, weights, name), weights, name)


def product(x: Float[Array, "N ..."], weights: LayerWeights, name: str) -> Float[Array, "N ..."]:
    """x times the weight `name`, and its scales where it is in int8."""
    y = matmul(x, weights[name].astype(weights.dtype))
    scale = weights.get(f"{name}_scale")
    return y if scale is None else y * scale[None]


def add_bias(y: Float[Array, "N ..."], weights: Mapping[str, Array], name: str) -> Float[Array, "N ..."]:
    """y with the bias of the weight `name`, where there is one."""
    bias = weights.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(jnp.float32)[None]


def matmul(x: Float[Array, "N ..."], w: Float[Array, "*_"]) -> Float[Array, "N ..."]:
    """x's trailing axes contracted with w's leading ones; operands in w's dtype, sums in float32.

    One plain two-dimensional matmul: the CPU's fast path takes no other.
    """
    rows, inner = x.shape[0], x[0].size
    y = lax.dot_general(
        x.reshape(rows, inner).astype(w.dtype), w.reshape(inner, -1), (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return y.reshape(rows, *w.shape[x.ndim - 1 :])
