"""The oracle: run every layer and emit from the earliest exit whose gate fires.

With a model without exits this is plain full-depth decoding. It also runs the prefill of every
engine, which needs all layers' keys and values of the prompt.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eejax.gates.confidence import Memory
from eejax.inference import state as s
from eejax.inference.segment import SegmentRunner
from eejax.models.cache import KVCache, init_cache
from eejax.models.config import ModelConfig


def _pass(runner, options, cache, request, x, start, row, count, position, early):
    """Run x [b, w, d] at positions start [b] onward through all segments; emit from row [b].

    Only the engine "posthoc" measures margins: the others must take the time of their layers and
    heads alone.

    Args:
      count: [b] rows that are real.
      position: [b] positions of the emitted tokens.
      early: [b] early exits may emit.
    """
    b = x.shape[0]
    newest = lambda a: jnp.take_along_axis(a, row[:, None, None], 1)[:, 0]
    emission, memory = runner.undecided(b), Memory.blank(x[:, 0])
    measure, everyone = options.engine == "posthoc", jnp.full((b,), True)
    segments, blocks = [], []
    for e in range(runner.last + 1):
        x, h, kvs, block = runner.run(e, x, start, cache.segments[e], cache.blocks[e])
        segments.append(kvs)
        blocks.append(block)
        allowed = everyone if e == runner.last else early
        emission, memory = runner.decide(
            e, emission, memory, newest(x), newest(h), allowed, position, request, measure=measure
        )
    filled = cache.filled + count[:, None]
    return KVCache(tuple(segments), tuple(blocks), filled), emission


def prefill(
    weights: s.Weights,
    tokens: jax.Array,
    request: s.RequestRows,
    *,
    config: ModelConfig,
    options: s.EngineOptions,
    length: int,
) -> tuple[s.DecodeState, s.DecodeRecord]:
    """Run prompts through all loaded layers and emit the first token of each request.

    The first token leaves by an early exit only under `policy.prefill_exit`. That skips the heads
    of later exits once all requests have left, but no layer: the next tokens need the prompt's keys
    and values at every depth. Without it, the heads of the early exits are skipped instead.

    tokens [b, t]: right-padded prompts of `request.start` >= 1 tokens. `length` positions of cache
    are kept.
    """
    b, t = tokens.shape
    lengths = request.start
    runner = SegmentRunner(weights, config)
    x = runner.embed(tokens, jnp.arange(t)[None])
    cache = init_cache(config, b, length, len(weights.segments), weights.axes)
    cache, emission = _pass(
        runner,
        options,
        cache,
        request,
        x,
        jnp.zeros((b,), jnp.int32),
        lengths - 1,
        lengths,
        lengths,
        request.policy.prefill_exit & options.leaves_early,
    )
    state = s.blank(weights, config, options, cache, request)
    return s.advance(state, emission, jnp.full((b,), config.exit_boundaries[weights.last]))


def step(
    weights: s.Weights, state: s.DecodeState, *, config: ModelConfig, options: s.EngineOptions
) -> tuple[s.DecodeState, s.DecodeRecord]:
    """Decode one token of every live request through all loaded layers."""
    b = state.token.shape[0]
    runner = SegmentRunner(weights, config)
    cache, emission = _pass(
        runner,
        options,
        state.cache,
        state.request,
        runner.embed(state.token[:, None], state.position[:, None]),
        state.position,
        jnp.zeros((b,), jnp.int32),
        state.live.astype(jnp.int32),
        state.position + 1,
        jnp.full((b,), True),
    )
    state = state.replace(cache=cache)
    return s.advance(state, emission, jnp.full((b,), config.exit_boundaries[weights.last]))
