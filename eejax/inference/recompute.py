"""Early-exit decoding that skips layers with exact keys and values (KV recomputation).

A token that leaves at an exit waits at that boundary with its hidden state. The next token that
goes deeper carries the waiting ones along as extra rows, from their boundary and not from layer 0
(Bae et al. 2023; EE-LLM's variant includes them in every pass, section 4). Tokens, exits, keys and
values equal those of `posthoc`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from eejax.gates.confidence import Memory
from eejax.inference import state as s
from eejax.inference.segment import SegmentRunner
from eejax.models.branches import first_bucket, run_branch
from eejax.models.cache import KVCache
from eejax.models.config import ModelConfig


def _store(ring: jax.Array, rows: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Write rows [b, w, d] of positions start [b] onward to a ring [b, cap, d], at index p % cap.

    Only the first `count` [b] rows are written.
    """
    cap, width = ring.shape[1], rows.shape[1]
    # Slot i takes row (i - start) mod cap, if that row is real.
    row = (jnp.arange(cap)[None] - start[:, None]) % cap
    taken = jnp.take_along_axis(rows, jnp.minimum(row, width - 1)[..., None], 1)
    return jnp.where((row < count[:, None])[..., None], taken, ring)


def _rows(ring: jax.Array, start: jax.Array, width: int) -> jax.Array:
    """Return [b, w, d], the states that wait at positions start [b] onward."""
    slots = (start[:, None] + jnp.arange(width)[None]) % ring.shape[1]
    return jnp.take_along_axis(ring, slots[..., None], 1)


def step(
    weights: s.Weights, state: s.DecodeState, *, config: ModelConfig, options: s.EngineOptions
) -> tuple[s.DecodeState, s.DecodeRecord]:
    """Decode one token of every live request through as many segments as some request needs."""
    cache, live, request = state.cache, state.live, state.request
    runner = SegmentRunner(weights, config)
    n, b = runner.last, state.token.shape[0]
    filled, position = cache.filled, state.position + 1
    segments, blocks, waiting = list(cache.segments), list(cache.blocks), list(state.waiting)
    depth = jnp.int32(config.exit_boundaries[0])

    # Segment 0: the new token's row, always.
    x = runner.embed(state.token[:, None], state.position[:, None])
    x, h, segments[0], blocks[0] = runner.run(0, x, filled[:, 0], segments[0], blocks[0])
    if n:
        waiting[0] = _store(waiting[0], x, filled[:, 0], live.astype(jnp.int32))
    filled = filled.at[:, 0].add(live.astype(jnp.int32))
    x, h = x[:, 0], h[:, 0]
    forced = live & (filled[:, 0] - filled[:, n] >= options.cap)
    emission, memory = runner.undecided(b), Memory.blank(x)

    for e in range(n + 1):
        if e:
            goes_deeper = live & ((emission.exit < 0) | forced)
            backlog = jnp.max(jnp.where(goes_deeper, filled[:, e - 1] - filled[:, e], 0))
            after = waiting[e] if e < n else jnp.zeros_like(x, shape=(b, 0, config.d_model))
            carried = (x, h, filled, segments[e], blocks[e], after)
            deeper = partial(_deeper, runner, e)
            ways = [partial(deeper, w, live, goes_deeper, waiting[e - 1]) for w in options.widths]
            way = jnp.where(backlog > 0, 1 + first_bucket(options.widths, backlog), 0)
            x, h, filled, segments[e], blocks[e], after = run_branch(way, ways, carried)
            if e < n:
                waiting[e] = after
            depth = jnp.where(backlog > 0, config.exit_boundaries[e], depth)
        emission, memory = runner.decide(e, emission, memory, x, h, live, position, request)

    state = state.replace(
        cache=KVCache(tuple(segments), tuple(blocks), filled), waiting=tuple(waiting)
    )
    return s.advance(state, emission, jnp.broadcast_to(depth, (b,)))


def _deeper(runner, e, width, live, goes_deeper, before, x, h, filled, kvs, block, after):
    """Run `width` rows of each request through segment e; a branch of a conditional.

    Requests that do not go deeper themselves let their oldest waiting rows join, which only
    shortens their backlog.

    before, after: states waiting at the boundaries below and above. x, h [b, d]: the newest token
    at this boundary, and behind its exit's block.
    """
    start = filled[:, e]
    count = jnp.where(live, jnp.minimum(filled[:, e - 1] - start, width), 0)
    rows, states, kvs, block = runner.run(e, _rows(before, start, width), start, kvs, block)
    if after.shape[1]:
        after = _store(after, rows, start, count)
    last = jnp.maximum(count - 1, 0)[:, None, None]  # of a request that goes: its newest token
    newest = lambda rows, old: jnp.where(
        goes_deeper[:, None], jnp.take_along_axis(rows, last, 1)[:, 0], old
    )
    return newest(rows, x), newest(states, h), filled.at[:, e].add(count), kvs, block, after
