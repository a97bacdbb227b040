"""Keys and values kept while decoding, and the invariant of how deep they reach.

A model is cut into segments at its exits (`ModelConfig.segments`). `filled[b, e]` counts the
positions of sequence b whose keys and values exist in every layer of segment e. A position
enters segment e only after segment e - 1, so filled never increases with e; positions
filled[e] .. filled[e-1] - 1 wait at boundary e - 1. Attention masks by position, so rows
written beyond `filled` are never seen before they are written again.
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
    """One buffer pair per layer, so that a step never copies another layer's.

    segments: per segment, its layers' (keys, values), each [b * k, s, h], the form attention
        reads without copying; k are the shard's own heads (`kv_heads`).
    blocks: per segment, the exit block's (keys, values) at its end, or None.
    filled: [b, number of segments] int32.
    """

    segments: tuple[tuple[KeyValue, ...], ...]
    blocks: tuple[KeyValue | None, ...]
    filled: jax.Array

    @property
    def length(self) -> int:
        """Positions each buffer holds."""
        buffers = jax.tree.leaves((self.segments, self.blocks))
        return buffers[0].shape[1] if buffers else 0


def kv_heads(config: ModelConfig, axes: Axes = LOCAL) -> int:
    """Key and value heads of one shard: at least the one that its query heads read."""
    shards = lax.axis_size(axes.model) if axes.model else 1
    return max(1, config.n_kv_heads // shards)


def varying(tree: Tree, *axes: str | None) -> Tree:
    """Values made inside of a `shard_map` as such that may differ along mesh axes, of which None
    are none: what a loop or a conditional carries has to be of one type."""
    named = tuple(axis for axis in axes if axis)
    return jax.tree.map(lambda a: lax.pcast(a, named, to="varying"), tree) if named else tree


def init_cache(
    config: ModelConfig, batch: int, length: int, n_segments: int, axes: Axes = LOCAL
) -> KVCache:
    """An empty cache of `length` positions for the first `n_segments` segments.

    On a mesh it is a device's own: of its heads, and of its part of the `batch`.
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
    """Each segment's layers as separate trees, projections fused (`fusion.fuse`); those of segments
    from the first on.

    A decoding step must not slice a stack: it would copy the weights. On a mesh `params` are this
    shard's, which takes the key and value head it needs once and for all.
    """

    def own(p):
        return p | {"attn": shards.own_kv_head(p["attn"], config, axes)}

    return tuple(
        tuple(fusion.fuse(own(p)) for p in unstack(params["layers"], *s))
        for s in config.segments[first:n_segments]
    )
