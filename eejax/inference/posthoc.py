"""The oracle: run every layer and emit from the earliest exit whose gate fires.

It also runs the prompts of a generation, which need all layers' keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.indexing import chunk_start, take_slice
from eejax.common.trees import where_rows
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
from eejax.kernels import call
from eejax.models.cache import KVCache, varying
from eejax.models.config import ModelConfig

PREFILL_CHUNKS = {"cpu": 128, "gpu": 2048}
"""Maximum positions of a prompt that run together, by device.

SmolLM2-135M on two cores runs prompts of 260 to 928 tokens 1.2 to 2 times as fast in chunks of 128
as at once; chunks of 64 and 256 gain nothing over all these lengths. The number for a GPU is an
assumption: nothing was measured there.
"""


class LastStates(NamedTuple):
    """States [b, d] of a row of every request, after each segment.

    Attributes:
      boundary: states at the segment's boundary.
      exit: states after the exit's block, equal to these for an exit without one.
    """

    boundary: tuple[jax.Array, ...]
    exit: tuple[jax.Array, ...]


def _run_segments(
    runner: SegmentRunner, cache: KVCache, x: jax.Array, start: jax.Array, row: jax.Array
) -> tuple[KVCache, LastStates]:
    """Run rows through all segments; return the cache and the states of one row of each request.

    Args:
      cache: keys and values; `filled` is not changed.
      x: [b, w, d] embeddings.
      start: [b] int32, positions of the first rows.
      row: [b] int32, the rows whose states are returned.
    """
    segments, blocks, boundary, behind = [], [], [], []
    for e in range(runner.last + 1):
        x, h, kvs, block = runner.run(e, x, start, cache.segments[e], cache.blocks[e])
        segments.append(kvs)
        blocks.append(block)
        boundary.append(newest_row(x, row))
        behind.append(newest_row(h, row))
    cache = KVCache(tuple(segments), tuple(blocks), cache.filled)
    return cache, LastStates(tuple(boundary), tuple(behind))


def _emit(
    runner: SegmentRunner,
    options: EngineOptions,
    states: LastStates,
    position: jax.Array,
    early: jax.Array,
    request: RequestRows,
) -> Emission:
    """Emit a token of every request, from the earliest exit whose gate fires.

    Only the engine "posthoc" measures margins: the other engines may spend time only on their
    layers and heads.

    Args:
      position: [b] int32, positions of the tokens.
      early: [b] bool, requests that early exits may emit for.
    """
    b = len(position)
    emission, memory = runner.undecided(b), Memory.blank(states.boundary[0])
    measure, everyone = options.engine == "posthoc", jnp.full((b,), True)
    for e, (x, h) in enumerate(zip(states.boundary, states.exit, strict=True)):
        allowed = everyone if e == runner.last else early
        look = runner.exit_input(e, x, h, allowed, position, request)
        emission, memory = runner.decide(emission, memory, look, measure=measure)
    return emission


def _run_prompts(
    runner: SegmentRunner, cache: KVCache, tokens: jax.Array, lengths: jax.Array
) -> tuple[KVCache, LastStates]:
    """Run prompts [b, t] of `lengths` [b] tokens; return the cache and the states of their last
    rows.

    Prompts are padded to few lengths, but chunks that begin behind the longest one are skipped.
    """
    b, t = tokens.shape
    chunks = -(-t // PREFILL_CHUNKS["gpu" if call.for_gpu() else "cpu"])
    width = -(-t // chunks)

    def run_chunk(cache, start):
        own = take_slice(tokens, (0, start), (b, width))
        x = runner.embed(own, start + jnp.arange(width)[None])
        row = jnp.clip(lengths - 1 - start, 0, width - 1)
        return _run_segments(runner, cache, x, jnp.full((b,), start), row)

    if chunks == 1:
        return run_chunk(cache, jnp.int32(0))

    def body(carry):
        i, cache, last = carry
        start = chunk_start(i, width, t)
        cache, states = run_chunk(cache, start)
        here = (lengths > start) & (lengths <= start + width)
        return i + 1, cache, where_rows(here, states, last)

    zero = jnp.zeros((b, runner.config.d_model), runner.config.dtype)
    zero = (varying(zero, runner.weights.axes.data),) * (runner.last + 1)
    _, cache, last = lax.while_loop(
        lambda carry: carry[0] * width < jnp.max(lengths),
        body,
        (jnp.int32(0), cache, LastStates(zero, zero)),
    )
    return cache, last


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
    b = len(tokens)
    lengths = request.start
    context = length if options.lookup else 0
    state = blank(
        weights, plan, config=config, options=options, slots=b, length=length, context=context
    )
    runner = SegmentRunner(weights, config)
    cache, last = _run_prompts(runner, state.cache, tokens, lengths)
    early = request.policy.prefill_exit & options.leaves_early
    emission = _emit(runner, options, last, lengths, early, request)
    prompt = state.prompt
    if options.lookup:
        prompt = jax.lax.dynamic_update_slice(prompt, tokens, (0, 0))
        prompt = prompt.at[jnp.arange(b), lengths].set(emission.token)
    state = state.replace(
        cache=cache.replace(filled=cache.filled + lengths[:, None]),
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
    b = len(state.token)
    runner = SegmentRunner(weights, config)
    x = runner.embed(state.token[:, None], state.position[:, None])
    row = jnp.zeros((b,), jnp.int32)
    cache, last = _run_segments(runner, state.cache, x, state.position, row)
    early = jnp.full((b,), True)
    emission = _emit(runner, options, last, state.position + 1, early, state.request)
    filled = cache.filled + state.decodes[:, None].astype(jnp.int32)
    depth = jnp.full((b,), config.exit_boundaries[weights.last])
    decoded = state.replace(cache=cache.replace(filled=filled))
    return advance(decoded, emission, depth, state.decodes)
