"""Rotary positions with Hugging Face's frequency scalings (default, linear, dynamic, llama3, yarn)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from sarathi_jax.arrays import AnyArray
from sarathi_jax.config import ModelConfig


def rotary_tables(
    config: ModelConfig, positions: Int32[AnyArray, " T"], prompt_lens: Int32[AnyArray, " T"]
) -> tuple[Float[Array, "T R"], Float[Array, "T R"]]:
    """cos and sin for each token, float32.

    `prompt_lens` is the prompt length of each token's request: under "dynamic" the base grows with the sequence, and a
    token's keys were rotated when the sequence was `max(prompt_len, position + 1)` long. So a prompt cut into chunks
    gets the very angles of a whole one.
    """
    scaling = config.rope_scaling
    if scaling.kind == "dynamic":
        original = scaling.original_max_position
        assert original is not None
        length = jnp.maximum(jnp.maximum(prompt_lens, positions + 1), original).astype(jnp.float32)
        dim = config.head_dim
        stretch = (scaling.factor * length / original - (scaling.factor - 1.0)) ** (dim / (dim - 2))
        exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        inv_freq = 1.0 / (config.rope_theta * stretch[:, None]) ** exponent[None]
        factor = 1.0
    else:
        freqs, factor = inverse_frequencies(config)
        inv_freq = jnp.asarray(freqs)[None]
    angles = positions.astype(jnp.float32)[:, None] * inv_freq
    return jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor)


def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """f32[D/2] inverse frequencies of every kind but "dynamic", and the factor on cos and sin (yarn's)."""
    scaling, dim = config.rope_scaling, config.head_dim
    inv_freq = 1.0 / config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    factor = 1.0
    if scaling.kind == "linear":
        inv_freq = inv_freq / scaling.factor
    elif scaling.kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling)
    elif scaling.kind == "yarn":
        inv_freq, factor = _yarn(inv_freq, config)
    return inv_freq.astype(np.float32), factor


def _llama3(inv_freq: np.ndarray, scaling) -> np.ndarray:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a ramp between."""
    wavelength = 2 * np.pi / inv_freq
    turns = scaling.original_max_position / wavelength
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = np.clip(ramp, 0.0, 1.0)
    return inv_freq * (ramp + (1.0 - ramp) / scaling.factor)


def _yarn(inv_freq: np.ndarray, config: ModelConfig) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, and scale the attention's temperature."""
    scaling, dim = config.rope_scaling, config.head_dim
    original = scaling.original_max_position
    assert original is not None

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    keep = 1.0 - np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    inv_freq = inv_freq / scaling.factor * (1.0 - keep) + inv_freq * keep

    def temperature(mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0

    factor = scaling.attention_factor
    if factor is None:
        if scaling.mscale and scaling.mscale_all_dim:
            factor = temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
        else:
            factor = temperature()
    return inv_freq, factor


def rotate(x: Float[Array, "T N D"], cos: Float[Array, "T R"], sin: Float[Array, "T R"]) -> Float[Array, "T N D"]:
    """Rotate dimension i with dimension i + D/2 (Hugging Face's order); x is float32."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jax.lax.concatenate([first * cos - second * sin, second * cos + first * sin], 2)
