"""Pytree helpers: counting, slicing stacked layers, naming and splitting leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

Tree = Any


def size(tree: Tree) -> int:
    """Return the number of scalars in all leaves (arrays or shape structs)."""
    return sum(int(np.prod(a.shape)) for a in jax.tree.leaves(tree))


def nbytes(tree: Tree) -> int:
    """Return the bytes of all leaves (arrays or shape structs)."""
    return sum(int(np.prod(a.shape)) * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))


def slice_layers(stack: Tree, start: int, stop: int) -> Tree:
    """Return layers start:stop of leaves stacked as [l, ...]."""
    return jax.tree.map(lambda a: a[start:stop], stack)


def unstack(stack: Tree, start: int, stop: int) -> tuple[Tree, ...]:
    """Return layers start:stop of leaves stacked as [l, ...], each as a separate tree."""
    return tuple(jax.tree.map(lambda a, i=i: a[i], stack) for i in range(start, stop))


def split(tree: Tree, chosen: Callable[[str], bool]) -> tuple[Tree, Tree]:
    """Split nested dicts into the leaves whose names are chosen, and the rest.

    A name is like 'exits/exit_3/norm/scale'. Both results keep only dicts that contain leaves.
    Anything but a dict is a leaf.
    """
    leaves = flatten_dict(tree)
    first = {path: leaf for path, leaf in leaves.items() if chosen("/".join(path))}
    rest = {path: leaf for path, leaf in leaves.items() if path not in first}
    return unflatten_dict(first), unflatten_dict(rest)


def join(a: Tree, b: Tree) -> Tree:
    """Merge nested dicts; if both have a leaf, b's is taken."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return b
    both = {k: join(a[k], b[k]) for k in a.keys() & b.keys()}
    return {**a, **b, **both}


def map_chunks(f: Callable[[Tree], Tree], rows: Tree, size: int) -> Tree:
    """Return f(rows), computed for `size` rows at a time.

    Args:
      f: a function whose results are independent by row.
      rows: leaves [n, ...].
      size: number of rows of a call of f. The last ones are padded with zeros.

    Returns:
      Leaves [n, ...].
    """
    n = len(jax.tree.leaves(rows)[0])
    chunk = min(size, n)

    def cut(a: jax.Array) -> jax.Array:
        padded = jnp.pad(a, [(0, -n % chunk)] + [(0, 0)] * (a.ndim - 1))
        return padded.reshape(-1, chunk, *a.shape[1:])

    chunks = jax.lax.map(f, jax.tree.map(cut, rows))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:n], chunks)


def path_name(path: tuple) -> str:
    """Return a name such as 'layers/attn/q' for a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def varying_zero(tree: Tree) -> jax.Array:
    """Return an int32 0 that varies over every mesh axis that some array of the tree varies over.

    Inside a `shard_map`, adding it to another value makes that vary over the same axes, whichever
    they are. XLA removes it.
    """
    zero = jnp.zeros((), jnp.int32)
    for a in jax.tree.leaves(tree):
        kind = jnp.dtype(a.dtype).kind
        bits = a if kind == "b" else a < 0 if kind in "iu" else jnp.signbit(a)
        one = bits[(0,) * bits.ndim] if bits.size else jnp.any(bits)
        zero = zero + one.astype(jnp.int32) * 0
    return zero


def new_leaves(tree: Tree, given: Tree) -> list[Any]:
    """Return the leaves of `tree`, each once, except those that are leaves of `given`."""
    known = {id(a) for a in jax.tree.leaves(given)}
    return list({id(a): a for a in jax.tree.leaves(tree) if id(a) not in known}.values())


def where_rows(rows: jax.Array, new: Tree, old: Tree) -> Tree:
    """Select, for each leaf [b, ...], `new` where `rows` [b], else `old`."""

    def pick(n, o):
        return jnp.where(rows.reshape(-1, *[1] * (n.ndim - 1)), n, o)

    return jax.tree.map(pick, new, old)
