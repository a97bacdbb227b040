"""The definition of `scatter`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eejax.kernels.norms import NormOptions, norm


def scatter(
    options: NormOptions | None,
    into: jax.Array,
    x: jax.Array,
    place: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """Return `into` [m, d] with rows of x in their places; see `api.scatter`."""
    y = x
    if options is not None:
        assert scale is not None  # `api.scatter` requires one with options
        y = norm(x, scale, bias, options)
    place = jnp.where(place < 0, into.shape[0], place)
    return into.at[place].set(y.astype(into.dtype), mode="drop")
