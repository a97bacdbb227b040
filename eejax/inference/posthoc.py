"""The oracle: run every layer and emit from the earliest exit whose gate fires.

With a model without exits this is plain full-depth decoding. It also runs the prefill of every
engine, which needs all layers' keys and values of the prompt.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eejax.gates import router
from eejax.gates.confidence import Memory
from eejax.inference import state as s
from eejax.inference.policy import ExitInput, emit_early, emit_final
from eejax.models import transformer
from eejax.models.cache import KVCache, init_cache, run_segment
from eejax.models.config import ModelConfig


def _pass(weights, config, options, cache, request, x, start, row, count, position, early):
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
    emission, memory = s.undecided(weights, b), Memory.blank(x[:, 0])
    measure, everyone = options.engine == "posthoc", jnp.full((b,), True)
    segments, blocks = [], []
    for e, layers in enumerate(weights.segments):
        x, h, kvs, block = run_segment(
            weights.params,
            layers,
            config,
            e,
            x,
            start,
            cache.segments[e],
            cache.blocks[e],
            axes=weights.axes,
        )
        segments.append(kvs)
        blocks.append(block)
        h = newest(h)
        head = s.reader(weights, config, e, h)
        last = e == weights.last
        look = ExitInput(
            e,
            newest(x),
            head,
            everyone if last else early,
            position,
            request.progress(position),
            router.of_exit(weights.params, config, e),
        )
        if last:
            emission = emit_final(emission, look, request.sampling, measure)
        else:
            emission, memory = emit_early(
                emission, memory, look, request.policy, request.sampling, config, measure
            )
    filled = cache.filled + count[:, None]
    return KVCache(tuple(segments), tuple(blocks), filled), emission


def prefill(
    weights: s.Weights,
    tokens: jax.Array,
    request: s.Request,
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
    x = transformer.embed(weights.params, config, tokens, jnp.arange(t)[None], weights.axes)
    cache = init_cache(config, b, length, len(weights.segments), weights.axes)
    cache, emission = _pass(
        weights,
        config,
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
    cache, emission = _pass(
        weights,
        config,
        options,
        state.cache,
        state.request,
        s.embed_last(weights, config, state),
        state.position,
        jnp.zeros((b,), jnp.int32),
        state.live.astype(jnp.int32),
        state.position + 1,
        jnp.full((b,), True),
    )
    state = state.replace(cache=cache)
    return s.advance(state, emission, jnp.full((b,), config.exit_boundaries[weights.last]))
