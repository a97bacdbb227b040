"""Reading and writing arrays by indices that are not negative.

Bracket indexing also handles negative indices, which adds four operations for each index; `%` takes
ten where `lax.rem` takes one. The program of an engine's step indexes hundreds of times, and the
time to compile it grows with its operations.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

take_slice = partial(lax.dynamic_slice, allow_negative_indices=False)
"""`lax.dynamic_slice` from indices that are not negative."""
put_slice = partial(lax.dynamic_update_slice, allow_negative_indices=False)
"""`lax.dynamic_update_slice` at indices that are not negative."""


def gather(a: jax.Array, *indices: jax.Array) -> jax.Array:
    """Return a[indices]; an index beyond the end reads the last entry.

    Args:
      a: [n, m, ...].
      indices: integers from 0 on for each of the first axes, arrays of one shape [...].
    """
    return a.at[indices].get(mode="clip", wrap_negative_indices=False)


def gather_each(a: jax.Array, index: jax.Array) -> jax.Array:
    """Return [b, n, ...], entries index[i, j] of each row i of a [b, m, ...].

    Args:
      a: [b, m, ...].
      index: [b, n], integers from 0 on; one beyond the end reads the last entry.
    """
    if a.shape[1] == 1 == index.shape[1]:  # there is nothing else to read
        return a
    return jax.vmap(gather)(a, index)


def ring_index(position: jax.Array, size: int) -> jax.Array:
    """Return position % size, for positions [...] of int32 from -size on."""
    if size == 1:
        return lax.full_like(position, 0)
    return lax.rem(position + size, size)


def chunk_start(i: jax.Array, width: int, length: int) -> jax.Array:
    """Return where chunk i of `length` positions starts.

    The last chunk starts earlier where the length is no multiple of the width: it repeats some
    positions, and none lies behind the end.
    """
    return jnp.minimum(i * width, length - width)
