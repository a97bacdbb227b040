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

from eejax.common.trees import Tree, unstack
from eejax.models import exits, layers
from eejax.models.config import ModelConfig

KeyValue = tuple[jax.Array, jax.Array]


@struct.dataclass
class KVCache:
    """One buffer pair per layer, so that a step never copies another layer's.

    segments: per segment, its layers' (keys, values), each [b * k, s, h], the form attention
        reads without copying.
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


def init_cache(config: ModelConfig, batch: int, length: int, n_segments: int) -> KVCache:
    """An empty cache of `length` positions for the first `n_segments` segments."""
    shape = (batch * config.n_kv_heads, length, config.head_dim)
    pair = lambda: (jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))
    segments = config.segments[:n_segments]
    has_block = [e < config.n_exits and config.exits[e].block for e in range(n_segments)]
    return KVCache(
        segments=tuple(tuple(pair() for _ in range(*s)) for s in segments),
        blocks=tuple(pair() if b else None for b in has_block),
        filled=jnp.zeros((batch, n_segments), jnp.int32),
    )


def unstack_segments(
    params: Tree, config: ModelConfig, n_segments: int
) -> tuple[tuple[Tree, ...], ...]:
    """Each segment's layers as separate trees, projections fused (`layers.fuse`).

    A decoding step must not slice a stack: it would copy the weights.
    """
    return tuple(
        tuple(map(layers.fuse, unstack(params["layers"], *s))) for s in config.segments[:n_segments]
    )


def run_segment(
    params: Tree,
    segment: tuple[Tree, ...],
    config: ModelConfig,
    e: int,
    x: jax.Array,
    start: jax.Array,
    kvs: tuple[KeyValue, ...],
    block: KeyValue | None,
) -> tuple[jax.Array, jax.Array, tuple[KeyValue, ...], KeyValue | None]:
    """Rows x [b, w, d] at positions start [b] .. start + w - 1 through segment e and its exit.

    `segment` holds the unstacked layers; `params` the rest. Returns the boundary state [b, w, d],
    the state the exit's head reads [b, w, d], and the written keys and values. Earlier positions
    of the segment must be filled already.
    """
    buffers = jax.tree.leaves((kvs, block))
    width, length = x.shape[1], buffers[0].shape[1] if buffers else 1
    positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    context = layers.make_context(
        config, positions, key_positions=jnp.arange(length, dtype=jnp.int32)[None], start=start
    )
    first = config.segments[e][0]
    written = []
    for i, (p, kv) in enumerate(zip(segment, kvs, strict=True)):
        window = config.window(first + i)
        x, kv = layers.layer(
            p,
            x,
            config,
            context,
            index=first + i,
            window=window,
            local=window is not None,
            cache=kv,
        )
        written.append(kv)
    h, block = exits.state(params, config, e, x, context, cache=block)
    return x, h, tuple(written), block
