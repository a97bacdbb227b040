"""Positions in attention: rotary angles, ALiBi slopes, and how many a query attends to."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from eejax.models.rotary_config import RotaryConfig


def rotary_frequencies(rotary: RotaryConfig, dims: int) -> tuple[jax.Array, float]:
    """Return inverse wavelengths [dims/2] in radians per position, and the factor on cos and sin.

    Source: Su et al. 2021; scalings as in Llama 3.1, NTK-aware and YaRN (Peng et al. 2023, eq.
    17-23) interpolation.
    """
    exponent = jnp.arange(0, dims, 2, dtype=jnp.float32) / dims
    theta, factor = rotary.theta, rotary.factor
    if rotary.scaling == "ntk":
        theta = theta * factor ** (dims / (dims - 2))
    inv = theta**-exponent
    if rotary.scaling == "linear":
        return inv / factor, 1.0
    if rotary.scaling == "llama3":
        assert rotary.original_context is not None  # `RotaryConfig` requires it
        turns = rotary.original_context * inv / (2 * math.pi)
        smooth = (turns - rotary.low_frequency) / (rotary.high_frequency - rotary.low_frequency)
        smooth = jnp.clip(smooth, 0.0, 1.0)
        return inv * (smooth + (1 - smooth) / factor), 1.0
    if rotary.scaling == "yarn":
        # Index of the dimension that makes `turns` turns over the original context.
        def index(turns):
            return (
                dims
                * math.log(rotary.original_context / (turns * 2 * math.pi))
                / (2 * math.log(rotary.theta))
            )

        low = max(math.floor(index(rotary.beta_fast)), 0)
        high = min(math.ceil(index(rotary.beta_slow)), dims - 1)
        ramp = (jnp.arange(dims // 2, dtype=jnp.float32) - low) / max(high - low, 1e-3)
        ramp = jnp.clip(ramp, 0.0, 1.0)
        return inv * (1 - ramp + ramp / factor), 0.1 * math.log(factor) + 1.0
    return inv, 1.0


def rotary_tables(
    rotary: RotaryConfig, dims: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin, each [b, t, dims/2] float32, at integer `positions` [b, t]."""
    inv, factor = rotary_frequencies(rotary, dims)
    angle = positions.astype(jnp.float32)[..., None] * inv.reshape((1,) * positions.ndim + (-1,))
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array], interleaved: bool) -> jax.Array:
    """Rotate the first dimensions of x [b, t, n, h] by cos and sin [b, t, r/2]."""
    cos, sin = (a[:, :, None, :] for a in rope)
    r = 2 * cos.shape[-1]
    y, rest = x[..., :r].astype(jnp.float32), x[..., r:]
    if interleaved:
        a, b = y[..., 0::2], y[..., 1::2]
        y = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(y.shape)
    else:
        a, b = y[..., : r // 2], y[..., r // 2 :]
        y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    y = y.astype(x.dtype)
    return jnp.concatenate([y, rest], -1) if rest.shape[-1] else y


def alibi_slopes(n_heads: int) -> list[float]:
    """Return the slope of each head (Press et al. 2022), also if the number is not a power of
    two."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (2 * i + 1) / power) for i in range(n_heads - power)]


def mean_visible(length: int, window: int | None) -> float:
    """Return the mean number of positions that queries 0..length-1 attend to.

    A query attends to its own position too.
    """
    w = length if window is None else min(window, length)
    return (w * (w + 1) / 2 + (length - w) * w) / length
