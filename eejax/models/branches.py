"""Run one of several bodies on carried buffers, in the form that suits the device's compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eejax.kernels import call


def run_way(number: jax.Array, ways: Sequence[Callable], carry: tuple) -> tuple[Any, ...]:
    """Run the way of this number on what is carried; 0 carries it on as it is.

    XLA's CPU backend copies every carried buffer in a conditional of three or more branches. Its
    GPU backend copies them in the empty branch of every conditional behind the first. So there is
    a chain of two-branch conditionals for the one and a single conditional for the other.

    Args:
      number: [] int32 in 0..len(ways).
      ways: functions of the carried values that return as many of the same types.
      carry: the values.

    Returns:
      the values that the chosen way returns.
    """
    unchanged = lambda *carried: carried
    if call.for_gpu():
        return lax.switch(number, [unchanged, *ways], *carry)
    for i, way in enumerate(ways, 1):
        carry = lax.switch((number == i).astype(jnp.int32), [unchanged, way], *carry)
    return carry


def bucket(sizes: Sequence[int], least: jax.Array) -> jax.Array:
    """Find the first of ascending sizes that is at least `least` [].

    Comparisons with all of them, as a binary search is a loop, which a GPU's host decides.

    Returns:
      [] int32 index; len(sizes) where none is.
    """
    return jnp.sum(jnp.asarray(sizes) < least, dtype=jnp.int32)
