"""The oracle: run every layer and emit from the earliest exit whose gate fires.

It also runs the prompts of a generation in one pass, which needs all layers' keys and values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eejax.gates.confidence import Memory
from eejax.inference.options import EngineOptions
from eejax.inference.schedule import BatchPlan
from eejax.inference.segment import SegmentRunner
from eejax.inference.state import DecodeRecord, EngineState, RequestRows, advance, blank
from eejax.inference.weights import Weights
from eejax.models.cache import KVCache
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

    def newest(a):
        return jnp.take_along_axis(a, row[:, None, None], 1)[:, 0]

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
    weights: Weights,
    plan: BatchPlan,
    tokens: jax.Array,
    request: RequestRows,
    *,
    config: ModelConfig,
    options: EngineOptions,
    length: int,
) -> tuple[EngineState, DecodeRecord]:
    """Run prompts through all loaded layers and emit the first token of each request.

    The first token leaves by an early exit only under `policy.prefill_exit`. That skips the heads
    of later exits once all requests have left, but no layer: the next tokens need the prompt's keys
    and values at every depth. Without it, the heads of the early exits are skipped instead.

    Args:
      plan: the state's.
      tokens: [b, t] int32, right-padded prompts of `request.start` >= 1 tokens.
      request: their requests; a slot each.
      options: `EngineOptions.resolved`.
      length: positions of cache.

    Returns:
      (the state, the record of the first tokens [b]).
    """
    b, t = tokens.shape
    lengths, given = request.start, dict(config=config, options=options)
    state = blank(weights, plan, **given, slots=b, length=length, context=0)
    runner = SegmentRunner(weights, config)
    cache, emission = _pass(
        runner,
        options,
        state.cache,
        request,
        runner.embed(tokens, jnp.arange(t)[None]),
        jnp.zeros((b,), jnp.int32),
        lengths - 1,
        lengths,
        lengths,
        request.policy.prefill_exit & options.leaves_early,
    )
    state = state.replace(
        cache=cache,
        position=lengths - 1,
        remaining=request.limit,
        prompt_len=lengths,
        request=request,
    )
    depth = jnp.full((b,), config.exit_boundaries[weights.last])
    return advance(state, emission, depth, state.live)


def step(
    weights: Weights, state: EngineState, *, config: ModelConfig, options: EngineOptions
) -> tuple[EngineState, DecodeRecord]:
    """Decode one token of every live request through all loaded layers; the record is [b]."""
    b, decodes = state.token.shape[0], state.decodes
    runner = SegmentRunner(weights, config)
    cache, emission = _pass(
        runner,
        options,
        state.cache,
        state.request,
        runner.embed(state.token[:, None], state.position[:, None]),
        state.position,
        jnp.zeros((b,), jnp.int32),
        decodes.astype(jnp.int32),
        state.position + 1,
        jnp.full((b,), True),
    )
    depth = jnp.full((b,), config.exit_boundaries[weights.last])
    return advance(state.replace(cache=cache), emission, depth, decodes)
