"""Running one of several bodies on carried buffers, in the form that suits the device's
compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eejax.kernels import call


def run_branch(
    index: jax.Array, branches: Sequence[Callable], carry: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run one of several branches on a carry, or none of them.

    XLA's CPU backend copies every carried buffer in a conditional of three or more branches. Its
    GPU backend copies them in the empty branch of every conditional behind the first. So the CPU
    gets a chain of two-branch conditionals, and the GPU a single conditional.

    Args:
      index: [] int32 in 0..len(branches). 0 returns the carry unchanged, i runs branches[i - 1].
      branches: functions of the carried values that return values of the same types.
      carry: the values.

    Returns:
      The values that the branch returns.
    """

    def unchanged(*carried):
        return carried

    if call.for_gpu():
        return lax.switch(index, [unchanged, *branches], *carry)
    for i, branch in enumerate(branches, 1):
        carry = lax.switch((index == i).astype(jnp.int32), [unchanged, branch], *carry)
    return carry


def run_where(condition: jax.Array, body: Callable[[Any], Any], carry: Any) -> Any:
    """Run a body on a carry if a condition holds.

    It is a loop of at most one round, because XLA's GPU backend copies carried buffers in both
    branches of a conditional that contains other conditionals.

    Args:
      condition: [] bool.
      body: function of the carry that returns one of the same types.
      carry: the values.

    Returns:
      What the body returns, or the carry unchanged.
    """

    def once(state):
        return (~state[0], body(state[1]))

    return lax.while_loop(lambda state: state[0], once, (condition, carry))[1]


def first_bucket(sizes: Sequence[int], count: jax.Array) -> jax.Array:
    """Find the first bucket that holds a count.

    It compares with all sizes: a binary search is a loop, whose rounds a GPU's host decides.

    Args:
      sizes: bucket sizes, ascending.
      count: [] integer.

    Returns:
      [] int32 index; len(sizes) where no bucket holds it.
    """
    return jnp.sum(jnp.asarray(sizes) < count, dtype=jnp.int32)
