"""Rotary positions with Hugging Face's frequency scalings (default, linear, dynamic, llama3, yarn, longrope)."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from sarathi_jax.arrays import AnyArray
from sarathi_jax.config import ModelConfig, RopeScaling


def rotary_tables(
    config: ModelConfig, positions: Int32[AnyArray, " T"], prompt_lens: Int32[AnyArray, " T"], *, local: bool = False
) -> tuple[Float[Array, "T R"], Float[Array, "T R"]]:
    """cos and sin for each token, float32; `local` those of the layers with a base of their own, which is not scaled.

    `prompt_lens` is the prompt length of each token's request: under "dynamic" the base grows with the sequence, and a
    token's keys were rotated when the sequence was `max(prompt_len, position + 1)` long. So a prompt cut into chunks
    gets the very angles of a whole one. Likewise the choice of factors under "longrope".
    """
    if local:
        assert config.local_rope_theta is not None
        config = replace(config, rope_theta=config.local_rope_theta, rope_scaling=RopeScaling())
    scaling, dim = config.rope_scaling, _rotary_dim(config)
    if scaling.kind == "dynamic":
        original = scaling.original_max_position
        assert original is not None
        length = jnp.maximum(jnp.maximum(prompt_lens, positions + 1), original).astype(jnp.float32)
        stretch = (scaling.factor * length / original - (scaling.factor - 1.0)) ** (dim / (dim - 2))
        exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        inv_freq = 1.0 / (config.rope_theta * stretch[:, None]) ** exponent[None]
        factor = 1.0
    elif scaling.kind == "longrope":
        short, factor = inverse_frequencies(config)
        long, _ = inverse_frequencies(config, long=True)
        assert scaling.original_max_position is not None
        is_long = jnp.maximum(prompt_lens, positions + 1) > scaling.original_max_position
        inv_freq = jnp.where(is_long[:, None], jnp.asarray(long)[None], jnp.asarray(short)[None])
    else:
        freqs, factor = inverse_frequencies(config)
        inv_freq = jnp.asarray(freqs)[None]
    angles = positions.astype(jnp.float32)[:, None] * inv_freq
    return jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor)


def inverse_frequencies(config: ModelConfig, *, long: bool = False) -> tuple[np.ndarray, float]:
    """f32[R] inverse frequencies of every kind but "dynamic", and the factor on cos and sin (yarn, longrope).

    `long`: those of sequences longer than the trained context (longrope).
    """
    scaling, dim = config.rope_scaling, _rotary_dim(config)
    inv_freq = 1.0 / config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    factor = 1.0
    if scaling.kind == "linear":
        inv_freq = inv_freq / scaling.factor
    elif scaling.kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling)
    elif scaling.kind == "yarn":
        inv_freq, factor = _yarn(inv_freq, config)
    elif scaling.kind == "longrope":
        inv_freq = inv_freq / np.asarray(scaling.long_factors if long else scaling.short_factors)
        factor = _longrope_temperature(scaling)
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
    scaling, dim = config.rope_scaling, _rotary_dim(config)
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


def _longrope_temperature(scaling: RopeScaling) -> float:
    """LongRoPE (Ding et al. 2024), where the config gives no factor of its own."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    assert scaling.original_max_position is not None
    if scaling.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(scaling.factor) / math.log(scaling.original_max_position))


def _rotary_dim(config: ModelConfig) -> int:
    return config.head_dim if config.rotary_dim is None else config.rotary_dim


def rotate(x: Float[Array, "T N D"], cos: Float[Array, "T R"], sin: Float[Array, "T R"]) -> Float[Array, "T N D"]:
    """Rotate dimension i with dimension i + R of the first 2 R (Hugging Face's order); x is float32."""
    size = cos.shape[1]
    first, second = x[..., :size], x[..., size : 2 * size]
    cos, sin = cos[:, None], sin[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    rest = [x[..., 2 * size :]] if 2 * size < x.shape[-1] else []
    return jax.lax.concatenate(turned + rest, 2)
