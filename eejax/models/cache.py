"""The KV cache of decoding, and the invariant of how deep it is filled.

A model is cut into segments at its exits (`ModelConfig.segments`). `filled[b, e]` counts the
positions of sequence b whose keys and values exist in every layer of segment e. A position enters
segment e only after segment e - 1, so filled never increases with e; positions filled[e] ..
filled[e-1] - 1 wait at boundary e - 1. Attention masks by position, so rows written beyond `filled`
are never seen before they are written again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from eejax.common.axes import LOCAL, Axes
from eejax.common.trees import Tree, unstack
from eejax.models import fusion, shards
from eejax.models.config import ModelConfig

KeyValue = tuple[jax.Array, jax.Array]


class KVCache(struct.PyTreeNode):
    """A KV cache with one pair of buffers per layer, so that a step never copies another layer's.

    Attributes:
      segments: for each segment, its layers' (keys, values), each [b * k, s, h], which attention
        reads without copying; k counts the heads of this shard (`kv_heads`).
      blocks: for each segment, the (keys, values) of the exit block at its end, or None.
      filled: [b, number of segments] int32.
    """

    segments: tuple[tuple[KeyValue, ...], ...]
    blocks: tuple[KeyValue | None, ...]
    filled: jax.Array

    @property
    def length(self) -> int:
        """Number of positions that each buffer holds."""
        buffers = jax.tree.leaves((self.segments, self.blocks))
        return buffers[0].shape[1] if buffers else 0


def kv_heads(config: ModelConfig, axes: Axes = LOCAL) -> int:
    """Return the number of key and value heads of one shard, at least 1."""
    shards = lax.axis_size(axes.model) if axes.model else 1
    return max(1, config.n_kv_heads // shards)


def varying(tree: Tree, *axes: str | None) -> Tree:
    """Mark values made inside a `shard_map` as varying along mesh axes; axes that are None are
    ignored.

    A loop or a conditional needs carried values of one type.
    """
    named = tuple(axis for axis in axes if axis)
    return jax.tree.map(lambda a: lax.pcast(a, named, to="varying"), tree) if named else tree


def init_cache(
    config: ModelConfig, batch: int, length: int, n_segments: int, axes: Axes = LOCAL
) -> KVCache:
    """Return an empty cache of `length` positions for the first `n_segments` segments.

    On a mesh the cache is this device's: it has the device's heads and its part of the `batch`.
    """
    shape = (batch * kv_heads(config, axes), length, config.head_dim)

    def blank():
        return varying(jnp.zeros(shape, config.dtype), axes.data, axes.model)

    def pair():
        return (blank(), blank())

    segments = config.segments[:n_segments]
    has_block = [e < config.n_exits and config.exits[e].block for e in range(n_segments)]
    return KVCache(
        segments=tuple(tuple(pair() for _ in range(*s)) for s in segments),
        blocks=tuple(pair() if b else None for b in has_block),
        filled=varying(jnp.zeros((batch, n_segments), jnp.int32), axes.data),
    )


def unstack_segments(
    params: Tree, config: ModelConfig, n_segments: int, axes: Axes = LOCAL, first: int = 0
) -> tuple[tuple[Tree, ...], ...]:
    """Return each segment's layers as separate trees with fused projections (`fusion.fuse`).

    A decoding step must not slice a stack, which would copy the weights. On a mesh `params` are
    this shard's, and the key and value head that it needs is taken here once.

    Args:
      params: the model's parameters.
      config: the model's.
      n_segments: number of segments up to the deepest one.
      axes: mesh axes.
      first: number of the first segment to return.
    """

    def own(p):
        return p | {"attn": shards.own_kv_head(p["attn"], config, axes)}

    return tuple(
        tuple(fusion.fuse(own(p)) for p in unstack(params["layers"], *s))
        for s in config.segments[first:n_segments]
    )
