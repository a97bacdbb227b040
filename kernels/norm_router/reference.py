"""The definition of `norm_router`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eejax.kernels.norms import NormOptions, norm


def logit(
    options: NormOptions,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    down: jax.Array,
    up: jax.Array,
    up_bias: jax.Array,
) -> jax.Array:
    """Compute float32 up . silu(norm(x) @ down) + up_bias [...] of x [..., d].

    Products are in x's dtype, accumulated in float32.
    """
    h = norm(x, scale, bias, options)
    h = jnp.einsum("...d,dr->...r", h, down.astype(x.dtype), preferred_element_type=jnp.float32)
    # Rounded like the matrix, so that training matches serving.
    up = up.astype(x.dtype).astype(jnp.float32)
    return jnp.einsum("...r,r->...", jax.nn.silu(h), up) + up_bias.astype(jnp.float32)


def norm_router(options: NormOptions, x, scale, bias, down, up, up_bias, threshold):
    """Return (confidence [n] float32, leaves [n] bool); see `api.norm_router`."""
    confidence = jax.nn.sigmoid(logit(options, x, scale, bias, down, up, up_bias))
    return confidence, leaves(confidence, threshold)


def leaves(confidence: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return whether a confidence reaches its threshold; none reaches 1."""
    return (confidence >= threshold) & (threshold < 1)
