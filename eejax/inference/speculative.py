"""Self-speculative decoding: an early exit drafts tokens, the layers above verify them at once.

As in LayerSkip (Elhoushi et al. 2024, section 4.3), drafting and verification share keys, values
and states. The layers below the draft exit run once for every token, one after the other; their
states at its boundary are kept, and one pass of the layers above takes them all. The final exit
emits: greedy tokens are those of the engine "full", sampled ones have the same distribution
(`sampling.verify_drafts`). Keys and values of rejected drafts lie beyond `filled` and are
overwritten before any token attends to them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.trees import size
from eejax.gates.confidence import max_probability
from eejax.inference import state as s
from eejax.inference.policy import log_probability
from eejax.inference.sampling import argmax, sample_draft, verify_drafts
from eejax.inference.segment import SegmentRunner
from eejax.models import exits, params
from eejax.models.branches import first_bucket, run_branch
from eejax.models.cache import varying
from eejax.models.config import ModelConfig

FRESH = 0.2  # weight of one more draft in the running share of accepted ones
# What that share grows by towards 1 in a step without drafts, so that they are tried again: in vain
# once in some ten steps or more, where they are never accepted.
REVIVAL = 0.01


class Drafts(NamedTuple):
    """Rows of the last emitted token and the drafts behind it; m = gamma + 1 for each request.

    Attributes:
      tokens: [b, m] int32.
      states: [b, m, d], their states at the boundary.
      logits: [b, gamma, v], from which each draft was drawn.
    """

    tokens: jax.Array
    states: jax.Array
    logits: jax.Array


class Verification(NamedTuple):
    """Outcome of a verification.

    Attributes:
      accepted: [b] int32, accepted drafts.
      token: [b, m] int32, emitted tokens, real up to index `accepted`; that one is the final
        exit's.
      logprob, confidence: [b, m], as in `DecodeRecord`.
    """

    accepted: jax.Array
    token: jax.Array
    logprob: jax.Array
    confidence: jax.Array


def step(
    weights: s.Weights, state: s.DecodeState, *, config: ModelConfig, options: s.EngineOptions
) -> tuple[s.DecodeState, s.DecodeRecord]:
    """Decode 1 to gamma + 1 tokens of every live request; records are [gamma + 1, b].

    Each request has its own number of drafts. The step runs the largest of them, k, and the others
    ignore drafts beyond their own. Its `layers` are (k + 1) times those below the draft exit and
    once those above it.
    """
    b, most = state.token.shape[0], options.gamma + 1
    cache, live, request = state.cache, state.live, state.request
    position = state.position
    # Never more than could be emitted: one token of a step is not drafted.
    count = jnp.minimum(_lengths(config, state, options), state.remaining - 1)
    count = jnp.maximum(count, 0)
    deepest = jnp.max(count)

    runner = SegmentRunner(weights, config)
    drafts, below, block = _draft(runner, options, state, deepest)

    zero = varying(jnp.zeros((b, most), jnp.float32), weights.axes.data)
    verdict = Verification(count, drafts.tokens, zero, zero)
    carried = (verdict, cache.segments[1], cache.blocks[1])
    verification = partial(_verify, runner)
    ways = [
        partial(verification, width, drafts, count, position, request.sampling)
        for width in options.widths
    ]
    verdict, above, _ = run_branch(1 + first_bucket(options.widths, deepest + 1), ways, carried)

    # What is emitted ends with the first stop token.
    order = jnp.arange(most)[None]
    is_stop = jnp.any(verdict.token[..., None] == request.stop_token_ids[:, None], -1)
    stopped = jnp.cumsum(is_stop.astype(jnp.int32), -1) - is_stop.astype(jnp.int32)
    emits = live[:, None] & (order <= verdict.accepted[:, None]) & (stopped == 0)  # [b, m]
    n = jnp.sum(emits.astype(jnp.int32), -1)
    ended = jnp.any(is_stop & emits, -1)

    first = emits & (order == 0)
    layers = config.n_layers + deepest * config.exit_boundaries[0]
    record = s.DecodeRecord(
        token=jnp.where(emits, verdict.token, -1),
        logprob=verdict.logprob,
        confidence=verdict.confidence,
        exit=jnp.where(emits, weights.last, -1),
        layers=jnp.where(first, layers, 0).astype(jnp.int32),
        margin=jnp.full_like(zero, jnp.inf),
        drafted=jnp.where(first, count[:, None], 0),
        accepted=(emits & (order < verdict.accepted[:, None])).astype(jnp.int32),
    )
    last = jnp.take_along_axis(verdict.token, jnp.maximum(n - 1, 0)[:, None], 1)[:, 0]
    state = state.replace(
        cache=cache.replace(
            segments=(below, above), blocks=(block, None), filled=cache.filled + n[:, None]
        ),
        acceptance=_acceptance(state.acceptance, count, verdict.accepted),
        token=jnp.where(live, last, state.token),
        position=position + n,
        remaining=jnp.where(ended, 0, state.remaining - n),
    )
    return state, jax.tree.map(jnp.transpose, record)


def _draft(runner, options, state, deepest):
    """Draft `deepest` tokens for every request, and run the layers below the exit for the last one.

    Returns (Drafts, keys and values of these layers, those of the exit's block).
    """
    b, sampling, config = state.token.shape[0], state.request.sampling, runner.config
    own = lambda a: varying(a, runner.weights.axes.data)
    drafts = Drafts(
        jnp.zeros((b, options.gamma + 1), jnp.int32).at[:, 0].set(state.token),
        own(jnp.zeros((b, options.gamma + 1, config.d_model), config.dtype)),
        own(jnp.zeros((b, options.gamma, config.padded_vocab), jnp.float32)),
    )

    def one(carry):
        i, drafts, kvs, block = carry
        at = state.position + i
        token = lax.dynamic_index_in_dim(drafts.tokens, i, 1)
        x = runner.embed(token, at[:, None])
        x, h, kvs, block = runner.run(0, x, at, kvs, block)
        states = lax.dynamic_update_slice_in_dim(drafts.states, x, i, 1)

        def more(tokens, logits):
            read = runner.reader(0, h[:, 0]).logits()
            drafted, allowed = sample_draft(read, sampling, at + 1)
            put = lambda a, new, i: lax.dynamic_update_slice_in_dim(a, new[:, None], i, 1)
            return put(tokens, drafted, i + 1), put(logits, allowed, i)

        tokens, logits = lax.switch(
            (i < deepest).astype(jnp.int32), [lambda *c: c, more], drafts.tokens, drafts.logits
        )
        return i + 1, Drafts(tokens, states, logits), kvs, block

    carry = (jnp.int32(0), drafts, state.cache.segments[0], state.cache.blocks[0])
    return lax.while_loop(lambda c: c[0] <= deepest, one, carry)[1:]


def _verify(runner, width, drafts, count, position, sampling, verdict, kvs, block):
    """Run the first `width` rows through the layers above the exit; a branch of a conditional."""
    b, most = drafts.tokens.shape
    _, h, kvs, block = runner.run(1, drafts.states[:, :width], position, kvs, block)
    logits = runner.reader(1, h.reshape(b * width, -1)).logits()
    logits = logits.reshape(b, width, -1)
    proposed = drafts.tokens[:, 1:width]
    accepted, own = verify_drafts(
        logits, drafts.logits[:, : width - 1], proposed, count, sampling, position + 1
    )
    token = jnp.where(
        jnp.arange(width)[None] == accepted[:, None],
        own[:, None],
        jnp.pad(proposed, [(0, 0), (0, 1)]),
    )
    whole = lambda a: jnp.pad(a, [(0, 0), (0, most - width)])
    verdict = Verification(
        accepted,
        whole(token),
        whole(log_probability(logits, token)),
        whole(max_probability(logits)),
    )
    return verdict, kvs, block


def _lengths(config, state, options) -> jax.Array:
    """Return [b], the number of drafts that promises the most tokens for a step's time.

    With a share a of drafts accepted, k drafts give 1 + a + .. + a^k tokens (Leviathan et al. 2023,
    eq. 1) in the time of 1 + c k full steps. It is 0 where no number beats a full step, and where
    drafting is paused.
    """
    paused = state.request.policy.paused
    if not options.adapt:
        return jnp.where(paused, 0, options.gamma)
    drafts = jnp.arange(options.gamma + 1)[None].astype(jnp.float32)
    tokens = jnp.cumsum(state.acceptance[:, None] ** drafts, -1)
    return jnp.where(paused, 0, argmax(tokens / (1.0 + _cost(config) * drafts)))


def _cost(config: ModelConfig) -> float:
    """Return the time of a draft over that of a full step, from the weights that each reads.

    It is that of the whole model, so that a mesh drafts as many as one device.
    """
    declared = params.abstract(config)
    layer = size(params.layer(config))
    own = {k: v for k, v in exits.exit_params(declared, config, 0).items() if k != "head"}
    below = (
        config.exit_boundaries[0] * layer + size(own) + size(exits.head(declared, config, 0).table)
    )
    return below / (config.n_layers * layer + size(exits.head(declared, config, 1).table))


def _acceptance(share: jax.Array, count: jax.Array, accepted: jax.Array) -> jax.Array:
    """Return [b], the running share of accepted drafts, up to the first rejected one."""
    tried = jnp.minimum(accepted + 1, count).astype(jnp.float32)
    fresh = accepted.astype(jnp.float32) / jnp.maximum(tried, 1.0)
    keep = (1.0 - FRESH) ** tried
    return jnp.where(
        count > 0, keep * share + (1.0 - keep) * fresh, share + REVIVAL * (1.0 - share)
    )
