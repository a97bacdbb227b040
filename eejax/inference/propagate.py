"""Early-exit decoding with state propagation, in which no token waits.

A token that leaves at an exit gets its keys and values in all deeper layers at once, from the state
at that exit (CALM; Schuster et al. 2022, section 3.1): of each deeper layer, only the norm and the
projections to keys and values are run. Later tokens attend to these approximations or, with
`EngineOptions.propagate` = "mask", do not attend to such a token in the layers that it skipped. So
this is the one engine whose texts may differ from those of `posthoc`, wherever a token left early.
What a request gets does not depend on the other requests of its batch.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from eejax.gates import router
from eejax.gates.confidence import Memory
from eejax.inference import state as s
from eejax.inference.policy import ExitInput, emit_early, emit_final
from eejax.models.branches import run_branch
from eejax.models.cache import propagate_segment, run_segment
from eejax.models.config import ModelConfig


def step(
    weights: s.Weights, state: s.DecodeState, *, config: ModelConfig, options: s.EngineOptions
) -> tuple[s.DecodeState, s.DecodeRecord]:
    """Decode one token of every live request through as many segments as some request needs.

    The record's `layers` are those that were run completely.
    """
    cache, live, request = state.cache, state.live, state.request
    n, b, start = weights.last, state.token.shape[0], state.position
    segments, blocks = list(cache.segments), list(cache.blocks)
    depth, masks = jnp.int32(config.exit_boundaries[0]), options.propagate == "mask"
    newest = jnp.arange(state.reach.shape[1])[None] == start[:, None]  # [b, s]
    x, h, segments[0], blocks[0] = run_segment(
        weights.params,
        weights.segments[0],
        config,
        0,
        s.embed_last(weights, config, state),
        start,
        segments[0],
        blocks[0],
        axes=weights.axes,
    )
    emission, memory = s.undecided(weights, b), Memory.blank(x[:, 0])

    for e in range(n + 1):
        if e:
            # Who left is carried along where others go deeper, with a state that changes no more:
            # each layer then writes for it what is propagated where nobody goes.
            goes_deeper = live & (emission.exit < 0)
            some = jnp.any(goes_deeper)
            seen = newest | (state.reach >= e) if masks else None
            ways = [partial(_run, weights, config, e, start, goes_deeper, seen)]
            if not masks:
                ways.append(partial(_fill, weights, config, e, start))
            # x and h are one array, as nothing reads the last segment's x: where that is dropped
            # from among the results, XLA's CPU backend copies the caches beside it.
            carried = jnp.concatenate([x, h], 1), segments[e], blocks[e]
            way = jnp.where(some, 1, 0 if masks else 2)
            both, segments[e], blocks[e] = run_branch(way, ways, carried)
            x, h = both[:, :1], both[:, 1:]
            depth = jnp.where(some, config.exit_boundaries[e], depth)
        head = s.reader(weights, config, e, h[:, 0])
        look = ExitInput(
            e,
            x[:, 0],
            head,
            live,
            start + 1,
            request.progress(start + 1),
            router.of_exit(weights.params, config, e),
        )
        if e == n:
            emission = emit_final(emission, look, request.sampling)
        else:
            emission, memory = emit_early(
                emission, memory, look, request.policy, request.sampling, config
            )

    filled = cache.filled + live.astype(jnp.int32)[:, None]
    state = state.replace(
        cache=cache.replace(segments=tuple(segments), blocks=tuple(blocks), filled=filled),
        reach=jnp.where(newest, emission.exit[:, None], state.reach),
    )
    return s.advance(state, emission, jnp.broadcast_to(depth, (b,)))


def _run(weights, config, e, start, goes_deeper, seen, both, kvs, block):
    """Run segment e for the requests that go deeper; a branch of a conditional.

    both [b, 2, d]: the states at the boundary, and behind the exit's block.
    """
    x, h, kvs, block = run_segment(
        weights.params,
        weights.segments[e],
        config,
        e,
        both[:, :1],
        start,
        kvs,
        block,
        active=goes_deeper,
        seen=seen,
        axes=weights.axes,
    )
    return jnp.concatenate([x, h], 1), kvs, block


def _fill(weights, config, e, start, both, kvs, block):
    """Write segment e's keys and values from the states below it; a branch of a conditional."""
    kvs, block = propagate_segment(
        weights.params, weights.segments[e], config, e, both[:, :1], start, kvs, block, weights.axes
    )
    return both, kvs, block
