"""Arrays: reading and writing by indices that are known to lie within an array.

Indexing by brackets counts negative indices from the end, which takes four operations more for each
index, and `%` takes ten in place of one. The program of an engine does so hundreds of times, and
the time to compile it goes with its operations.
"""

from __future__ import annotations

from functools import partial

import jax
from jax import lax

take_slice = partial(lax.dynamic_slice, allow_negative_indices=False)
"""`lax.dynamic_slice` from indices that are not negative."""
put_slice = partial(lax.dynamic_update_slice, allow_negative_indices=False)
"""`lax.dynamic_update_slice` at indices that are not negative."""


def take(a: jax.Array, *indices: jax.Array) -> jax.Array:
    """Return a[indices]; an index beyond the end reads the last entry.

    Args:
      a: [n, m, ...].
      indices: integers from 0 on for each of the first axes, arrays of one shape [...].
    """
    return a.at[indices].get(mode="clip", wrap_negative_indices=False)


def take_each(a: jax.Array, index: jax.Array) -> jax.Array:
    """Return [b, n, ...], entries index[i, j] of each row i of a [b, m, ...].

    Args:
      a: [b, m, ...].
      index: [b, n], integers from 0 on; one beyond the end reads the last entry.
    """
    if a.shape[1] == 1 == index.shape[1]:
        return a
    return jax.vmap(take)(a, index)


def ring_index(position: jax.Array, size: int) -> jax.Array:
    """Return position % size, for positions [...] of int32 from -size on."""
    if size == 1:
        return lax.full_like(position, 0)
    return lax.rem(position + size, size)
