"""Decoding loops: steps of an engine in one compiled program, on one device or a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from eejax.inference import posthoc, propagate, sharded
from eejax.inference.engine_step import engine_step, prefill_step
from eejax.inference.logits_params import TopLogprobs
from eejax.inference.options import EngineOptions, draft_cost, verify_cost
from eejax.inference.schedule import INITIAL_EXIT_ACCEPTANCE, BatchPlan
from eejax.inference.state import DecodeRecord, EngineState
from eejax.inference.weights import Weights
from eejax.models.cache import varying
from eejax.models.config import ModelConfig

STEPS = {"posthoc": posthoc.step, "propagate": propagate.step}
"""Steps of the engines that `engine_step` does not run."""


def default_plan(config: ModelConfig, options: EngineOptions, slots: int) -> BatchPlan:
    """Return the plan of `EngineOptions.resolved` options, by numbers of rows.

    "speculative" verifies drafts when no slot can make another one.
    """
    segments = options.num_segments or config.n_exits + 1
    waits = options.engine == "speculative"
    known = config.exits[0].acceptance if config.exits else None
    return BatchPlan.make(
        segments,
        slots,
        options.buckets,
        fill=slots + 1 if waits else 1,
        patience=options.max_drafts if waits else 0,
        draft_cost=draft_cost(config, options),
        verify_cost=verify_cost(config, options, slots),
        acceptance=INITIAL_EXIT_ACCEPTANCE if known is None else known,
    )


def step(
    weights: Weights,
    state: EngineState,
    *,
    config: ModelConfig,
    options: EngineOptions,
    prompts: bool,
) -> tuple[EngineState, DecodeRecord]:
    """Run a step of any engine without stages. Records are [options.draft_rows + 1, slots].

    prompts: whether requests may bring prompts that have not run.
    """
    if run := STEPS.get(options.engine):
        state, record = run(weights, state, config=config, options=options)
        record = jax.tree.map(lambda a: a[None], record)
        if prompts:
            state, first = prefill_step(weights, state, config=config, options=options)
            emits = first.exit >= 0
            record = jax.tree.map(partial(jnp.where, emits), first, record)
    else:
        state, record = engine_step(weights, state, config=config, options=options, prompts=prompts)
    return state.replace(clock=state.clock + 1), record


@partial(
    jax.jit,
    static_argnames=("config", "options", "size", "prompts"),
    donate_argnames="state",
)
def decode(
    weights: Weights,
    state: EngineState,
    n: jax.Array | np.int32,
    *,
    config: ModelConfig,
    options: EngineOptions,
    size: int,
    prompts: bool = False,
) -> tuple[EngineState, DecodeRecord]:
    """Run up to `n` steps, at most `size`, in one compiled loop.

    The loop stops when all requests are finished. Records are [size (options.draft_rows + 1),
    slots], with exit -1 where no token was emitted, as in steps that did not run. `state` is
    donated. On a mesh (`weights.mesh`), each data shard runs the steps of its own requests.
    """
    run = partial(step, config=config, options=options, prompts=prompts)
    mesh = weights.mesh
    if mesh is None:
        return loop(run, size, weights, state, n)
    axes, specs = weights.axes, sharded.state(weights.axes)
    local = partial(_on_shard, run, size)
    given = (sharded.weights(config, options.num_segments, mesh), specs, P())
    return sharded.shard(local, mesh, given, (specs, P(None, axes.data)))(weights, state, n)


def _on_shard(run, size, weights, state, n) -> tuple[EngineState, DecodeRecord]:
    """Run `loop` on a device's own requests, and sum the counters over all data shards."""
    data, work, clock = weights.axes.data, state.work, state.clock
    if not data:
        return loop(run, size, weights, state, n)
    state = state.replace(work=varying(work, data), clock=varying(clock, data))
    state, record = loop(run, size, weights, state, n)
    counted = jax.tree.map(lambda a, b: b + lax.psum(a - b, data), state.work, work)
    # A shard's clock stops once all its requests are finished.
    return state.replace(work=counted, clock=lax.pmax(state.clock, data)), record


def loop(run: Callable, size: int, weights, state, n: jax.Array | np.int32):
    """Run up to `n` steps, at most `size`, of a device's own requests until all are finished.

    Returns the state and records [size m, b] of steps that emit up to m tokens each, as `decode`.
    """
    run = jax.jit(run)  # traced once, for the shapes of its record and for the loop
    shapes = jax.eval_shape(run, weights, state)[1]
    blank = jax.tree.map(lambda r: jnp.zeros(r.shape, r.dtype), shapes)
    none = jnp.full_like(blank.exit, -1)
    one = _packed(blank._replace(token=none, exit=none))
    records = jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *a.shape)), one)
    records = varying(records, weights.axes.data)
    most = jnp.minimum(n, size)

    def body(carry):
        i, state, records = carry
        state, record = run(weights, state)
        records = jax.tree.map(
            lambda a, r: lax.dynamic_update_index_in_dim(a, r, i, 0), records, _packed(record)
        )
        return i + 1, state, records

    steps, state, records = lax.while_loop(
        lambda c: (c[0] < most) & jnp.any(c[1].live), body, (jnp.int32(0), state, records)
    )
    work = state.work.replace(steps=state.work.steps + steps.astype(jnp.uint32))

    def flat(a):
        return a.reshape(-1, *a.shape[2:])

    return state.replace(work=work), jax.tree.map(flat, _unpacked(records, shapes))


def _packed(record: DecodeRecord) -> tuple[jax.Array, TopLogprobs | None]:
    """Stack a record's fields [...] as one array [fields, ...] of int32, but for `top_logprobs`.

    A step then writes them all by one kernel.
    """
    fields = record._replace(top_logprobs=None)
    bits = [lax.bitcast_convert_type(a, jnp.int32) for a in jax.tree.leaves(fields)]
    return jnp.stack(bits), record.top_logprobs


def _unpacked(packed: tuple, like: DecodeRecord) -> DecodeRecord:
    """Return the record of arrays [size, ...] that `_packed` made, one step an entry."""
    bits, top_logprobs = packed
    leaves, tree = jax.tree.flatten(like._replace(top_logprobs=None))
    own = [lax.bitcast_convert_type(bits[:, i], a.dtype) for i, a in enumerate(leaves)]
    return jax.tree.unflatten(tree, own)._replace(top_logprobs=top_logprobs)
