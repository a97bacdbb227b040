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
from eejax.models import attention, exits, layers, shards
from eejax.models.config import ModelConfig

KeyValue = tuple[jax.Array, jax.Array]


@struct.dataclass
class KVCache:
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
    blank = lambda: varying(jnp.zeros(shape, config.dtype), axes.data, axes.model)
    pair = lambda: (blank(), blank())
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
    """Each segment's layers as separate trees, projections fused (`layers.fuse`); those of segments
    from the first on.

    A decoding step must not slice a stack: it would copy the weights. On a mesh `params` are this
    shard's, which takes the key and value head it needs once and for all.
    """
    own = lambda p: p | {"attn": shards.own_kv_head(p["attn"], config, axes)}
    return tuple(
        tuple(layers.fuse(own(p)) for p in unstack(params["layers"], *s))
        for s in config.segments[first:n_segments]
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
    *,
    active: jax.Array | None = None,
    seen: jax.Array | None = None,
    axes: Axes = LOCAL,
) -> tuple[jax.Array, jax.Array, tuple[KeyValue, ...], KeyValue | None]:
    """Rows x [b, w, d] at positions start [b] .. start + w - 1 through segment e and its exit.

    `segment` holds the unstacked layers; `params` the rest. Returns the boundary state [b, w, d],
    that behind the exit's block (`exits.attend`) [b, w, d], and the written keys and values.
    Earlier positions of the segment must be filled already.

    active [b]: sequences whose states the layers change; the others' stay what they are, and so do
    the keys and values of each layer written for them (`propagate_segment`'s). seen [b, s]:
    positions of the buffers that may be attended to. By default all.
    """
    context = _context(config, x, start, kvs, block, seen)
    return _run(params, segment, config, e, x, context, kvs, block, active, axes)


def run_packed(
    params: Tree,
    segment: tuple[Tree, ...],
    config: ModelConfig,
    e: int,
    x: jax.Array,
    packed: attention.PackedRows,
    kvs: tuple[KeyValue, ...],
    block: KeyValue | None,
    *,
    axes: Axes = LOCAL,
) -> tuple[jax.Array, jax.Array, tuple[KeyValue, ...], KeyValue | None]:
    """Run packed rows x [t, 1, d] of some of the cache's sequences; otherwise as `run_segment`."""
    keys = jnp.arange(_positions(kvs, block), dtype=jnp.int32)[None]
    context = layers.make_context(
        config, packed.position[:, None], key_positions=keys, packed=packed
    )
    return _run(params, segment, config, e, x, context, kvs, block, None, axes)


def _run(params, segment, config, e, x, context, kvs, block, active, axes):
    """A segment's layers, and its exit's, of one pass."""
    first = config.segments[e][0]
    written = []
    for i, (p, kv) in enumerate(zip(segment, kvs, strict=True)):
        window = config.window(first + i)
        before = x
        x, kv = layers.layer(
            p,
            x,
            config,
            context,
            index=first + i,
            window=window,
            rope=config.rope(first + i),
            cache=kv,
            axes=axes,
        )
        if active is not None:
            x = jnp.where(active[:, None, None], x, before)
        written.append(kv)
    h, block = exits.attend(params, config, e, x, context, cache=block, axes=axes)
    return x, h, tuple(written), block


def propagate_segment(
    params: Tree,
    segment: tuple[Tree, ...],
    config: ModelConfig,
    e: int,
    x: jax.Array,
    start: jax.Array,
    kvs: tuple[KeyValue, ...],
    block: KeyValue | None,
    axes: Axes = LOCAL,
) -> tuple[tuple[KeyValue, ...], KeyValue | None]:
    """Segment e's keys and values, and its exit block's, with those of rows x [b, w, d] written.

    As `run_segment`, but every layer reads x itself, the state of a boundary below, in place of the
    state under it: no attention and no MLP is run (but for an exit's own MLP below its block).
    State propagation (CALM; Schuster et al. 2022, section 3.1).
    """
    context = _context(config, x, start, kvs, block)
    first = config.segments[e][0]
    written = tuple(
        _write_heads(p, x, config, context, config.rope(first + i), kv, axes)
        for i, (p, kv) in enumerate(zip(segment, kvs, strict=True))
    )
    if block is not None:
        p = exits.exit_params(params, config, e)
        x = exits.after_mlp(p, x, config, axes)
        block = _write_heads(p["block"], x, config, context, config.exit_rope(e), block, axes)
    return written, block


def _context(config, x, start, kvs, block, seen=None) -> layers.LayerContext:
    """Return the context of rows x [b, w, d] at positions start [b] onward, beside the buffers."""
    positions = start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    keys = jnp.arange(_positions(kvs, block), dtype=jnp.int32)[None]
    return layers.make_context(config, positions, key_positions=keys, start=start, seen=seen)


def _positions(kvs, block) -> int:
    """Return the number of positions that the buffers hold."""
    buffers = jax.tree.leaves((kvs, block))
    return buffers[0].shape[1] if buffers else 1


def _write_heads(p, x, config, context, rope, kv, axes) -> KeyValue:
    """Write the keys and values that `layers.layer` writes for x, and compute nothing else of it.

    Queries are computed too where the projections are fused, and dropped: a product with the other
    columns of the matrix alone would first copy them, which takes ten times as long on a CPU.
    """
    h = layers.norm(p["attn_norm"], x, config) if "attn_norm" in p else x
    _, k, v = layers.heads(p["attn"], h, config, context, rope, axes)
    return attention.write(kv, k, v, context.start)
