"""Values kept between steps: slots of rings, and residuals of a backward pass without
parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.axes import PIPE
from eejax.common.trees import Tree


def split_vjp(fun: Callable, stack: Tree, x: jax.Array, closed: Tree):
    """Return `jax.vjp(fun, stack, x)` as (output, residuals, restore).

    The VJP is a pytree of residuals. A residual that is saved unchanged is the caller's own array,
    so parameters, x and `closed` (values that fun closes over, such as rotary tables) are
    recognised by identity and left out; restore(residuals, stack, x, closed) is the pullback.
    Values that fun derives from them are kept as residuals: cast, unstack and flatten weights
    beforehand.
    """
    out, pullback = jax.vjp(fun, stack, x)
    leaves, tree = jax.tree.flatten(pullback)
    index = {id(a): i for i, a in enumerate(jax.tree.leaves((stack, x, closed)))}
    where = [index.get(id(a)) for a in leaves]
    unique: dict[int, int] = {}
    kept = []
    for a, i in zip(leaves, where, strict=True):
        if i is None and id(a) not in unique:
            unique[id(a)] = len(kept)
            kept.append(a)
    places = [
        ("known", i) if i is not None else ("kept", unique[id(a)])
        for a, i in zip(leaves, where, strict=True)
    ]

    def restore(residuals, stack, x, closed):
        values = {"known": jax.tree.leaves((stack, x, closed)), "kept": residuals}
        return jax.tree.unflatten(tree, [values[of][i] for of, i in places])

    return out, kept, restore


def ring(n: int, like: Tree) -> Tree:
    """Return n blank slots for each leaf, which vary over the mesh as the leaf does."""
    return jax.tree.map(lambda a: jnp.zeros_like(jnp.broadcast_to(a, (n, *a.shape))), like)


def put(ring: Tree, value: Tree, slot: jax.Array | int) -> Tree:
    """Return the ring with a value in one slot."""

    def write(r, a):
        return lax.dynamic_update_index_in_dim(r, a.astype(r.dtype), slot, 0)

    return jax.tree.map(write, ring, value)


def get(ring: Tree, slot: jax.Array | int) -> Tree:
    """Return the value in one slot of the ring."""
    return jax.tree.map(lambda r: lax.dynamic_index_in_dim(r, slot, 0, keepdims=False), ring)


def when(active: jax.Array, work: Callable, *carried):
    """Return work(*carried) if active, else `carried` unchanged.

    The pass-through is the first branch: only then XLA carries buffers through without a copy.
    """
    return lax.switch(active.astype(jnp.int32), [lambda *c: c, work], *carried)


def send(a: jax.Array, n: int, up: bool, links: Sequence[bool] | None = None) -> jax.Array:
    """Return the array that arrives from the stage below (`up`) or above, zeros if none does.

    Args:
      a: the array that this stage sends.
      n: number of stages.
      up: whether to send to the stage above.
      links: [n - 1], whether stages i and i + 1 exchange values; None if all do.
    """
    linked = [i for i in range(n - 1) if links is None or links[i]]
    pairs = [(i, i + 1) if up else (i + 1, i) for i in linked]
    return lax.ppermute(a, PIPE, pairs)
