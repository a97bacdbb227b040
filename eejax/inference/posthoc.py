"""The oracle: run every layer, emit from the earliest exit whose gate fires.

With a model without exits this is plain full-depth decoding. It also does every engine's
prefill, which needs all layers' keys and values of the prompt.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eejax.gates import confidence
from eejax.inference import state as s
from eejax.inference.policy import Emission, ExitPolicy, consider
from eejax.inference.sampling import Sampling, argmax
from eejax.models import transformer
from eejax.models.cache import KVCache, init_cache, run_segment
from eejax.models.config import ModelConfig


def _margin(
    margin: jax.Array, logits: jax.Array, policy: ExitPolicy | None, e: int, fired: jax.Array
):
    """The smallest distance to another outcome, updated by exit e where it was considered."""
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    others = jnp.where(index == argmax(logits)[:, None], -jnp.inf, logits)
    gap = jnp.where(fired, jnp.max(logits, -1) - jnp.max(others, -1), jnp.inf)
    if policy is not None:
        distance = jnp.abs(confidence.max_probability(logits) - policy.thresholds[:, e])
        gap = jnp.minimum(gap, jnp.where(policy.may_fire(e), distance, jnp.inf))
    return jnp.minimum(margin, gap)


def _pass(
    weights,
    config,
    options,
    cache: KVCache,
    x,
    start,
    row,
    count,
    policy,
    sampling,
    position,
    early,
):
    """x [b, w, d] at positions start [b] onward through all segments; emits from row [b].

    count [b]: rows that are real; early [b]: whether early exits may emit. Only the engine
    "posthoc" measures margins: the others' time is that of their layers and heads.
    """
    b = x.shape[0]
    emission = Emission.undecided(b)
    margin = jnp.full((b,), jnp.inf)
    segments, blocks = [], []
    for e, layers in enumerate(weights.segments):
        x, h, kvs, block = run_segment(
            weights.params, layers, config, e, x, start, cache.segments[e], cache.blocks[e]
        )
        segments.append(kvs)
        blocks.append(block)
        h = jnp.take_along_axis(h, row[:, None, None], 1)[:, 0]
        final = e == config.n_exits
        gate, undecided = None if final else policy, emission.exit < 0
        allowed = undecided if final else undecided & early

        def emit(emission, margin, e=e, h=h, gate=gate, allowed=allowed):
            logits = s.step_logits(weights, config, e, h)
            emission = consider(emission, e, logits, allowed, gate, sampling, position)
            if options.engine == "posthoc":
                seen = _margin(margin, logits, gate, e, emission.exit == e)
                margin = jnp.where(allowed, seen, margin)
            return emission, margin

        # A head that no request can leave by is a large product for nothing.
        wanted = allowed if final else allowed & policy.may_fire(e)
        skip = lambda *c: c
        emission, margin = jax.lax.cond(jnp.any(wanted), emit, skip, emission, margin)
    filled = cache.filled + count[:, None]
    return KVCache(tuple(segments), tuple(blocks), filled), emission, margin


def prefill(
    weights: s.Weights,
    tokens: jax.Array,
    lengths: jax.Array,
    max_new: jax.Array,
    policy: ExitPolicy,
    sampling: Sampling,
    stops: jax.Array,
    *,
    config: ModelConfig,
    options: s.EngineOptions,
    length: int,
) -> tuple[s.DecodeState, s.Record]:
    """The prompts' pass through all layers; emits the first token of each request.

    tokens [b, t] right-padded prompts of `lengths` [b] >= 1; `length` positions of cache are
    kept. The first token leaves by an early exit only under `policy.prefill_exit`. That skips
    the heads of the exits behind it where all requests left, but no layer: the tokens to come
    need the prompt's keys and values at every depth. Without it the early exits' heads are
    skipped instead.
    """
    b, t = tokens.shape
    x = transformer.embed(weights.params, config, tokens, jnp.arange(t)[None])
    cache = init_cache(config, b, length, config.n_exits + 1)
    cache, emission, margin = _pass(
        weights,
        config,
        options,
        cache,
        x,
        jnp.zeros((b,), jnp.int32),
        lengths - 1,
        lengths,
        policy,
        sampling,
        lengths,
        policy.prefill_exit,
    )
    n_waiting = config.n_exits if options.engine == "recompute" else 0
    state = s.DecodeState(
        cache=cache,
        waiting=tuple(
            jnp.zeros((b, options.cap, config.d_model), x.dtype) for _ in range(n_waiting)
        ),
        token=jnp.zeros((b,), jnp.int32),
        position=lengths - 1,
        remaining=max_new,
    )
    return s.advance(state, emission, stops, jnp.full((b,), config.n_layers), margin)


def step(
    weights: s.Weights,
    state: s.DecodeState,
    policy: ExitPolicy,
    sampling: Sampling,
    stops: jax.Array,
    *,
    config: ModelConfig,
    options: s.EngineOptions,
) -> tuple[s.DecodeState, s.Record]:
    """One token for every live request, through all layers."""
    b = state.token.shape[0]
    live = state.live
    cache, emission, margin = _pass(
        weights,
        config,
        options,
        state.cache,
        s.embed_last(weights, config, state),
        state.position,
        jnp.zeros((b,), jnp.int32),
        live.astype(jnp.int32),
        policy,
        sampling,
        state.position + 1,
        jnp.full((b,), True),
    )
    state = state.replace(cache=cache)
    return s.advance(state, emission, stops, jnp.full((b,), config.n_layers), margin)
