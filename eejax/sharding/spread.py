"""Parameters that lie in parts on the devices of a mesh axis, and are gathered where they are used.

Fully sharded data parallelism (Rajbhandari et al. 2020, ZeRO-3; Zhao et al. 2023), inside a manual
`shard_map`: the forward pass gathers a parameter, and the transpose of that gives each device the
sum of its own part of the gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from eejax.common.trees import Tree


class Spread(flax.struct.PyTreeNode):
    """This device's part of a float32 parameter that is split over a mesh axis.

    Attributes:
      part: the local array.
      dim: the dimension that is split, counted from the end, so that it is the same for a stack of
        layers and for one of them.
      axis: the mesh axis.
      dtype: dtype in which the parameter is gathered.
    """

    part: jax.Array
    dim: int = flax.struct.field(pytree_node=False)
    axis: str = flax.struct.field(pytree_node=False)
    dtype: Any = flax.struct.field(pytree_node=False, default=jnp.float32)

    def astype(self, dtype: Any) -> Spread:
        """Return a parameter that is gathered as `dtype`; its part and gradient stay float32."""
        return self.replace(dtype=jnp.dtype(dtype))


def is_spread(node: Any) -> bool:
    """Return whether a node of a tree is a `Spread`, for `jax.tree.map`'s is_leaf."""
    return isinstance(node, Spread)


def parted(tree: Tree, specs: Tree, axis: str) -> Tree:
    """Return local arrays that their specs split over `axis` as `Spread`, and the others as they
    are."""

    def one(a: jax.Array, spec: PartitionSpec):
        return Spread(a, spec.index(axis) - a.ndim, axis) if axis in spec else a

    return jax.tree.map(one, tree, specs)


def gathered(tree: Tree) -> Tree:
    """Return the tree with every `Spread` gathered."""

    def one(a):
        return _gather(a.part, a.dim, a.axis, a.dtype) if is_spread(a) else a

    return jax.tree.map(one, tree, is_leaf=is_spread)


def parts(tree: Tree) -> Tree:
    """Return the tree with the part of every `Spread`, the inverse of `parted`."""
    return jax.tree.map(lambda a: a.part if is_spread(a) else a, tree, is_leaf=is_spread)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(part: jax.Array, dim: int, axis: str, dtype: Any) -> jax.Array:
    """Gather a parameter in the dtype of computation; its gradient is always summed in float32."""
    return lax.all_gather(part.astype(dtype), axis, axis=part.ndim + dim, tiled=True)


def _scatter(dim: int, axis: str, dtype: Any, _, g: jax.Array) -> tuple[jax.Array]:
    g = g.astype(jnp.float32)
    return (lax.psum_scatter(g, axis, scatter_dimension=g.ndim + dim, tiled=True),)


_gather.defvjp(lambda part, *how: (_gather(part, *how), None), _scatter)
