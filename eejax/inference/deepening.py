"""Adding segments to an engine while its requests run, without running their prompts again.

HELIOS (Kumar et al., 2025) loads as many layers as most tokens need, and more where those were too
few. An engine with `EngineOptions.can_deepen` keeps the states behind its last segment; the keys
and values of the segments above are filled in from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.errors import require
from eejax.common.indexing import chunk_start
from eejax.common.trees import Tree
from eejax.inference.decoding import default_plan
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.engine_step import PROMPT_SPAN
from eejax.inference.segment import SegmentRunner
from eejax.inference.state import EngineState
from eejax.inference.weights import Weights, colocate, unlayered_params
from eejax.models import exits, fusion
from eejax.models.cache import KVCache, init_cache, unstack_segments
from eejax.models.config import ModelConfig
from eejax.models.params import for_compute


def on_host(params: Tree, config: ModelConfig) -> Tree:
    """Return a training tree in host memory, cast and with fused projections.

    Its parts can move to the device as they are. It is still a training tree and is accepted
    wherever one is; a tree that was prepared before is returned unchanged.
    """
    return fused(jax.device_get(params), config)


def fused(params: Tree, config: ModelConfig) -> Tree:
    """Cast a training tree and fuse its projections."""
    params = for_compute(params, config.dtype)
    own = dict(layers=fusion.fuse(params["layers"]), exits=exits.fuse(params["exits"], config))
    return params | own


def more_weights(weights: Weights, host: Tree, config: ModelConfig, depth: int) -> Weights:
    """Return an engine's weights with `depth` segments, of a model that `on_host` made.

    It returns at once: the new weights move to the device while the engine runs.
    """
    have, most = len(weights.segments), config.n_exits + 1
    require(have < depth <= most, "depth", depth, f"must be in {have + 1}..{most}")
    new, there = unstack_segments(host, config, depth, first=have), weights.params
    apart = unlayered_params(host, config, depth)
    added = {k: v for k, v in apart.pop("exits").items() if k not in there["exits"]}
    # Tables that are loaded already are not moved again.
    added = exits.with_small_heads(host | there | {"exits": added}, config)
    apart = {k: v for k, v in apart.items() if k not in there}
    new, apart, added = jax.device_put((new, apart, added))
    apart |= there | {"exits": there["exits"] | added}
    return weights.replace(segments=(*weights.segments, *new), params=apart)


def select_slots(engine: EarlyExitEngine, state: EngineState, rows: Sequence[int]):
    """Return (engine, state) with the slots `rows`, in this order; a slot may be repeated.

    The plan is the default one of so many slots. The old state is freed array by array, so that
    little more than one state exists at a time.
    """
    plan = default_plan(engine.config, engine.options, len(rows))
    other = dataclasses.replace(engine, slots=len(rows), plan=plan)
    chosen = jnp.asarray(rows)

    def taken(a):
        own = _rows(a, chosen, slots=engine.slots)
        jax.block_until_ready(own)
        a.delete()
        return own

    alike = dict(clock=state.clock, work=state.work, plan=plan)
    own = jax.tree.map(taken, state.replace(**dict.fromkeys(alike))).replace(**alike)
    return other, colocate(own, engine.weights)


@partial(jax.jit, static_argnames="slots")
def _rows(a, rows, *, slots: int):
    # Buffers of keys and values have the heads of all slots in one axis, slot by slot.
    each, *shape = len(a) // slots, *a.shape[1:]
    return a.reshape(slots, each, *shape)[rows].reshape(len(rows) * each, *shape)


def deepen(
    engine: EarlyExitEngine, state: EngineState, weights: Weights
) -> tuple[EarlyExitEngine, EngineState]:
    """Return the engine with more segments, and its state, as if it had always had them.

    The plan is the default one of so many segments. Emitted tokens stay as they are. One program is
    compiled for each pair of depths. Raises ConfigError if the states that it needs were not kept.
    """
    depth, options = len(weights.segments), engine.options
    boundary = state.boundary
    require(
        boundary is not None,
        "can_deepen",
        options.can_deepen,
        "must be True, and segments must be left to add, in an engine that grows",
    )
    assert boundary is not None
    require(engine.mesh is None, "mesh", engine.mesh, "must be None for an engine that grows")
    options = dataclasses.replace(options, num_segments=depth)
    plan = default_plan(engine.config, options, engine.slots)
    grown = dataclasses.replace(engine, weights=weights, options=options, plan=plan)
    keep, have = depth <= engine.config.n_exits, engine.num_segments
    segments, blocks, above = _filled(
        weights,
        boundary,
        state.cache.filled[:, -1],
        have=have,
        config=engine.config,
        keep=keep,
    )
    more = depth - have
    behind = jnp.repeat(state.cache.filled[:, -1:], more, 1)
    cache = KVCache(
        (*state.cache.segments, *segments),
        (*state.cache.blocks, *blocks),
        jnp.concatenate([state.cache.filled, behind], 1),
    )
    slots, _, d = boundary.shape
    rings = tuple(jnp.zeros((slots, options.cap, d), boundary.dtype) for _ in range(more))

    def wide(a):
        return jnp.pad(a, [(0, more), *[(0, 0)] * (a.ndim - 1)])

    work = state.work.replace(runs=wide(state.work.runs), spans=wide(state.work.spans))
    state = state.replace(
        cache=cache, waiting=(*state.waiting, *rings), boundary=above, work=work, plan=plan
    )
    return grown, colocate(state, weights)


@partial(jax.jit, static_argnames=("have", "config", "keep"))
def _filled(weights, boundary, filled, *, have: int, config: ModelConfig, keep: bool):
    """Fill in segments from number `have` on, from the states below them.

    The first `filled` [slots] positions are run. Returns (keys and values of the segments, those of
    their exits' blocks, the states behind them if they are to be kept).
    """
    slots, length, _ = boundary.shape
    depth, width = len(weights.segments), min(PROMPT_SPAN, length)
    runner = SegmentRunner(weights, config)
    fresh = init_cache(config, slots, length, depth, weights.axes)

    def chunk(i, carry):
        segments, blocks, above = carry
        begin = chunk_start(i, width, length)
        x = lax.dynamic_slice(boundary, (0, begin, 0), (slots, width, boundary.shape[2]))
        start, new = jnp.full((slots,), begin), []
        for e, kvs, block in zip(range(have, depth), segments, blocks, strict=True):
            x, _, *written = runner.run(e, x, start, kvs, block)
            new.append(written)
        above = lax.dynamic_update_slice(above, x, (0, begin, 0)) if keep else above
        return tuple(kvs for kvs, _ in new), tuple(block for _, block in new), above

    above = jnp.zeros_like(boundary) if keep else None
    count = (jnp.max(filled) + width - 1) // width
    return lax.fori_loop(0, count, chunk, (fresh.segments[have:], fresh.blocks[have:], above))
