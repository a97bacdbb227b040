"""The definition of `compact`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def compact(keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (order [n] int32, counts [2] int32); see `api.compact`."""
    n = keep.shape[0]
    row, upto = jnp.arange(n, dtype=jnp.int32), jnp.cumsum(keep.astype(jnp.int32))
    kept = upto[-1]
    # Computed without a sort, which takes XLA ten times as long.
    place = jnp.where(keep, upto - 1, kept + row - upto)
    order = jnp.zeros_like(row).at[place].set(row, unique_indices=True)
    return order, jnp.stack([kept, n - kept])
