"""Early-exit decoding with state propagation, in which no token waits.

A token that leaves at an exit gets its keys and values in all deeper layers at once, from the state
at that exit (CALM; Schuster et al. 2022, section 3.1): each deeper layer runs only its norm and its
projections to keys and values. Later tokens attend to these approximations or, with
`EngineOptions.propagate` = "mask", do not attend to such a token in the layers that it skipped. So
this is the one engine with early exits whose texts may differ from those of `posthoc`. A request's
text does not depend on the other requests of its batch.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from eejax.gates.confidence import Memory
from eejax.inference.options import EngineOptions
from eejax.inference.segment import SegmentRunner
from eejax.inference.state import DecodeRecord, EngineState, advance
from eejax.inference.weights import Weights
from eejax.models.branches import run_branch
from eejax.models.config import ModelConfig


def step(
    weights: Weights, state: EngineState, *, config: ModelConfig, options: EngineOptions
) -> tuple[EngineState, DecodeRecord]:
    """Decode one token of every live request through as many segments as some request needs.

    The record's `layers` counts the layers that were run completely.
    """
    cache, live, request = state.cache, state.decodes, state.request
    runner = SegmentRunner(weights, config)
    b, start = state.token.shape[0], state.position
    segments, blocks = list(cache.segments), list(cache.blocks)
    depth, masks = jnp.int32(config.exit_boundaries[0]), options.propagate == "mask"
    newest = jnp.arange(state.reach.shape[1])[None] == start[:, None]  # [b, s]
    x = runner.embed(state.token[:, None], start[:, None])
    x, h, segments[0], blocks[0] = runner.run(0, x, start, segments[0], blocks[0])
    emission, memory = runner.undecided(b), Memory.blank(x[:, 0])

    for e in range(runner.last + 1):
        if e:
            # Where some requests go deeper, those that left are carried along with a state that no
            # longer changes: each layer writes for them what `propagate` would.
            goes_deeper = live & (emission.exit < 0)
            some = jnp.any(goes_deeper)
            visible = newest | (state.reach >= e) if masks else None
            run = partial(runner.run, e, start=start, active=goes_deeper, visible=visible)
            ways = [partial(_run, run)]
            if not masks:
                ways.append(partial(_fill, runner, e, start))
            # x and h are one array. Nothing reads the last segment's x, and if it were dropped from
            # the results, XLA's CPU backend would copy the caches beside it.
            carried = jnp.concatenate([x, h], 1), segments[e], blocks[e]
            way = jnp.where(some, 1, 0 if masks else 2)
            both, segments[e], blocks[e] = run_branch(way, ways, carried)
            x, h = both[:, :1], both[:, 1:]
            depth = jnp.where(some, config.exit_boundaries[e], depth)
        look = runner.exit_input(e, x[:, 0], h[:, 0], live, start + 1, request)
        emission, memory = runner.decide(emission, memory, look)

    filled = cache.filled + live.astype(jnp.int32)[:, None]
    state = state.replace(
        cache=cache.replace(segments=tuple(segments), blocks=tuple(blocks), filled=filled),
        reach=jnp.where(newest & live[:, None], emission.exit[:, None], state.reach),
    )
    return advance(state, emission, jnp.broadcast_to(depth, (b,)), live)


def _run(run, both, kvs, block):
    """Run a segment for the requests that go deeper; a branch of a conditional.

    both [b, 2, d]: the states at the boundary, and behind the exit's block.
    """
    x, h, kvs, block = run(both[:, :1], kvs=kvs, block=block)
    return jnp.concatenate([x, h], 1), kvs, block


def _fill(runner, e, start, both, kvs, block):
    """Write segment e's keys and values from the states below it; a branch of a conditional."""
    return both, *runner.propagate(e, both[:, :1], start, kvs, block)
