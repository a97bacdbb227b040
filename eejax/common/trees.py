"""Pytree helpers: counting, slicing stacked layers, naming leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


def size(tree: Tree) -> int:
    """Number of scalars in all leaves (arrays or shape structs)."""
    return sum(int(np.prod(a.shape)) for a in jax.tree.leaves(tree))


def nbytes(tree: Tree) -> int:
    """Bytes of all leaves (arrays or shape structs)."""
    return sum(int(np.prod(a.shape)) * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))


def slice_layers(stack: Tree, start: int, stop: int) -> Tree:
    """Layers start:stop of leaves stacked as [l, ...]."""
    return jax.tree.map(lambda a: a[start:stop], stack)


def unstack(stack: Tree, start: int, stop: int) -> tuple[Tree, ...]:
    """Layers start:stop of leaves stacked as [l, ...], each as a tree of its own."""
    return tuple(jax.tree.map(lambda a, i=i: a[i], stack) for i in range(start, stop))


def path_name(path: tuple) -> str:
    """'layers/attn/q' for a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
