"""The oracle: run every layer and emit from the earliest exit whose gate fires.

It also runs the prompts of a generation in one pass, which needs all layers' keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from eejax.gates.confidence import Memory
from eejax.inference.options import EngineOptions
from eejax.inference.policy import Emission
from eejax.inference.schedule import BatchPlan
from eejax.inference.segment import SegmentRunner
from eejax.inference.state import (
    DecodeRecord,
    EngineState,
    RequestRows,
    advance,
    blank,
    newest_row,
)
from eejax.inference.weights import Weights
from eejax.models.cache import KVCache
from eejax.models.config import ModelConfig


class PassRows(NamedTuple):
    """Rows of a pass through all segments.

    Attributes:
      x: [b, w, d], their embeddings.
      start: [b] int32, positions of the first rows.
      row: [b] int32, the row that emits.
      real: [b] int32, rows that are real.
      position: [b] int32, positions of the emitted tokens.
      early: [b] bool, whether early exits may emit.
    """

    x: jax.Array
    start: jax.Array
    row: jax.Array
    real: jax.Array
    position: jax.Array
    early: jax.Array


def _pass(
    runner: SegmentRunner,
    options: EngineOptions,
    cache: KVCache,
    request: RequestRows,
    rows: PassRows,
) -> tuple[KVCache, Emission]:
    """Run rows through all segments and emit tokens.

    Only the engine "posthoc" measures margins: the other engines may spend time only on their
    layers and heads.
    """
    x, b = rows.x, rows.x.shape[0]

    emission, memory = runner.undecided(b), Memory.blank(x[:, 0])
    measure, everyone = options.engine == "posthoc", jnp.full((b,), True)
    segments, blocks = [], []
    for e in range(runner.last + 1):
        x, h, kvs, block = runner.run(e, x, rows.start, cache.segments[e], cache.blocks[e])
        segments.append(kvs)
        blocks.append(block)
        allowed = everyone if e == runner.last else rows.early
        states = newest_row(x, rows.row), newest_row(h, rows.row)
        look = runner.exit_input(e, *states, allowed, rows.position, request)
        emission, memory = runner.decide(emission, memory, look, measure=measure)
    filled = cache.filled + rows.real[:, None]
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

    The first token leaves by an early exit only with `policy.prefill_exit`. That skips the heads
    of later exits once all requests have left, but no layer: the next tokens need the prompt's keys
    and values at every depth. Without it, the heads of the early exits are skipped instead.

    Args:
      plan: plan of the new state.
      tokens: [b, t] int32, right-padded prompts of `request.start` >= 1 tokens.
      request: the requests, one for each slot.
      options: `EngineOptions.resolved`.
      length: positions of cache.

    Returns:
      (the state, the record of the first tokens [b]).
    """
    b, t = tokens.shape
    lengths = request.start
    context = length if options.lookup else 0
    state = blank(
        weights, plan, config=config, options=options, slots=b, length=length, context=context
    )
    runner = SegmentRunner(weights, config)
    rows = PassRows(
        x=runner.embed(tokens, jnp.arange(t)[None]),
        start=jnp.zeros((b,), jnp.int32),
        row=lengths - 1,
        real=lengths,
        position=lengths,
        early=request.policy.prefill_exit & options.leaves_early,
    )
    cache, emission = _pass(runner, options, state.cache, request, rows)
    prompt = state.prompt
    if options.lookup:
        prompt = jax.lax.dynamic_update_slice(prompt, tokens, (0, 0))
        prompt = prompt.at[jnp.arange(b), lengths].set(emission.token)
    state = state.replace(
        cache=cache,
        prompt=prompt,
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
    rows = PassRows(
        x=runner.embed(state.token[:, None], state.position[:, None]),
        start=state.position,
        row=jnp.zeros((b,), jnp.int32),
        real=decodes.astype(jnp.int32),
        position=state.position + 1,
        early=jnp.full((b,), True),
    )
    cache, emission = _pass(runner, options, state.cache, state.request, rows)
    depth = jnp.full((b,), config.exit_boundaries[weights.last])
    return advance(state.replace(cache=cache), emission, depth, decodes)
