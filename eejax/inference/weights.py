"""A model's parameters as engines keep them: by segment, cast and fused."""

from __future__ import annotations

import jax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eejax.common.axes import LOCAL, Axes
from eejax.common.trees import Tree
from eejax.models import exits
from eejax.models.cache import unstack_segments
from eejax.models.config import ModelConfig
from eejax.models.params import for_compute


class Weights(struct.PyTreeNode):
    """Parameters laid out for decoding, in the dtype of computation.

    Attributes:
      segments: for each loaded segment the trees of its layers, unstacked.
      params: all other parameters.
      axes: axes of the mesh, if this is one device's share inside a `shard_map`
        (`inference.sharded`).
      mesh: mesh on which the shares of all devices lie; None on one device.
    """

    segments: tuple[tuple[Tree, ...], ...]
    params: Tree
    axes: Axes = struct.field(pytree_node=False, default=LOCAL)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    @property
    def last(self) -> int:
        """Number of the exit above the last segment, which emits every token that no other did."""
        return len(self.segments) - 1


def prepare(
    params: Tree, config: ModelConfig, num_segments: int | None = None, axes: Axes = LOCAL
) -> Weights:
    """Unstack the layers by segment and cast them once, so that no step copies or casts weights.

    With `num_segments`, parameters above that segment are left out. With `axes`, `params` are one
    device's share.
    """
    n = num_segments or config.n_exits + 1
    params = for_compute(params, config.dtype)
    rest = unlayered_params(params, config, n)
    if not axes.model:  # each shard has rows of every exit's
        rest["exits"] = exits.with_small_heads(rest, config)
    rest["exits"] = exits.fuse(rest["exits"], config, axes)
    return Weights(unstack_segments(params, config, n, axes), rest, axes)


def unlayered_params(params: Tree, config: ModelConfig, n: int) -> Tree:
    """Return the parameters beside their layers that the first n segments need."""
    rest = {k: v for k, v in params.items() if k != "layers"}
    if n <= config.n_exits:
        rest.pop("final", None)
        names = {e.name for e in config.exits[:n]}
        rest["exits"] = {k: v for k, v in rest["exits"].items() if k in names}
    return rest


def colocate(state: Tree, weights: Weights) -> Tree:
    """Place a one-device state where the weights are, so that steps return it there.

    Weights from a checkpoint are bound to a device. A state that is not would have a program
    compiled again, once it is.
    """
    like = jax.tree.leaves(weights)[0]
    if not like.committed or len(like.devices()) > 1:
        return state
    named = isinstance(like.sharding, NamedSharding)
    return jax.device_put(state, NamedSharding(like.sharding.mesh, P()) if named else like.sharding)
