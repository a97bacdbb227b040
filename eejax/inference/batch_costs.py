"""Measured costs of the early-exit engine on this machine, and its best plan."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from eejax.common.axes import DATA
from eejax.common.errors import require, require_count
from eejax.inference.batch_simulator import (
    EngineSizes,
    RequestTrace,
    SimulatedBatch,
    StepCosts,
    WorkCounts,
    best_plan,
    fit,
)
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.engine_step import PROMPT_SPAN
from eejax.inference.options import drafts_at_once
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import SamplingParams
from eejax.inference.schedule import BatchPlan
from eejax.inference.segment_branches import SPAN
from eejax.inference.slot_engine import STEPS_PER_CALL
from eejax.inference.state import RequestRows, WorkCounters

THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 1.0)


def require_one_shard(engine: EarlyExitEngine) -> None:
    """Raise ConfigError for slots on several data shards, whose counters are summed."""
    shards = 1 if engine.mesh is None else engine.mesh.shape[DATA]
    require(
        shards == 1,
        "mesh.data",
        shards,
        "must be 1 for an engine that is measured and planned for",
        "Measure an engine with the slots of one data shard.",
    )


def work_between(after: WorkCounters, before: WorkCounters) -> WorkCounts:
    """Return the work between two states, whose counters wrap around at 2^32."""
    less = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after, before)
    return WorkCounts(
        less.runs.astype(int),
        less.spans.astype(int),
        int(less.chunks),
        int(less.chunk_spans),
        int(less.steps),
    )


def samples(
    engine: EarlyExitEngine,
    prompts: Sequence[Sequence[int]],
    calls: int = 160,
    steps: int = 4,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[WorkCounts, float]]:
    """Measure calls of random work: a list of (work, seconds).

    Plans, thresholds, drafts and prompts are drawn at random. Plans change no text, and the engine
    stays as it is. Raises ConfigError if there are no prompts or no calls, and for several data
    shards.
    """
    require_one_shard(engine)
    require_count("calls", calls)
    require(len(prompts) > 0, "prompts", prompts, "must be one at least")
    rng = np.random.default_rng(seed)
    config, slots, segments = engine.config, engine.slots, engine.num_segments
    found: list[tuple[WorkCounts, float]] = []
    state, left = engine.start(), np.zeros(slots, int)
    buckets = engine.options.buckets
    max_prompt = max(1, engine.context // 2)  # leaves room to decode
    while len(found) < calls:
        if not left.any() or rng.random() < 0.1:
            few = int(rng.integers(1, slots + 1)) if rng.random() < 0.5 else slots
            chosen = rng.permutation(slots)[:few].tolist()
            texts = [list(prompts[int(rng.integers(len(prompts)))])[:max_prompt] for _ in chosen]
            limit = [engine.context - len(t) for t in texts]
            policy = ExitPolicy.make(
                config,
                few,
                rng.choice(THRESHOLDS, (few, 1)).repeat(config.n_exits, 1),
                drafts=rng.integers(0, engine.options.max_drafts + 1, few).tolist(),
            )
            request = RequestRows.make(
                config, [len(t) for t in texts], limit, policy, SamplingParams.make(few)
            )
            rows, _ = engine.prefill(texts, request)
            state = engine.insert(engine.free(state, range(slots)), rows, chosen)
        way = rng.choice(1 + len(buckets), p=[0.5] + [0.5 / len(buckets)] * len(buckets))
        seconds = np.ones(1 + len(buckets))
        seconds[1:] = rng.random(len(buckets)) * 2 + np.arange(len(buckets)) * 0.1
        seconds[way] *= 0.1
        grid = np.broadcast_to(seconds, (segments, len(seconds)))
        plan = BatchPlan.make(
            segments,
            slots,
            buckets,
            int(rng.integers(1, slots + 2)),
            int(rng.integers(0, 6)),
            (grid[:, 0], grid[:, 1:], np.zeros(segments)),
        )
        state = jax.block_until_ready(state.replace(plan=plan))
        before = jax.tree.map(np.array, state.work)
        begin = clock()
        state, record = engine.generate(state, steps)
        jax.block_until_ready((state, record))
        took = clock() - begin
        left = np.asarray(state.remaining)
        work = work_between(state.work, before)
        if work.steps:
            found.append((work, took))
    return found[calls // 8 :]  # the first ones compile, and warm up


def measure(engine: EarlyExitEngine, prompts: Sequence[Sequence[int]], **kwargs) -> StepCosts:
    """Measure the costs of an engine on this machine; arguments as `samples`."""
    last = engine.config.n_layers
    ends = [
        min(boundary, last) for boundary in engine.config.exit_boundaries[: engine.num_segments]
    ]
    depths = np.diff([0, *ends]).tolist()
    found = samples(engine, prompts, **kwargs)
    return fit(found, depths, engine.slots, engine.options.buckets)


def engine_sizes(engine: EarlyExitEngine) -> EngineSizes:
    """Return the sizes of an engine that `simulate` and `best_plan` need.

    Raises ConfigError for an engine on several data shards, or one that looks up drafts: how often
    a text repeats itself is not simulated.
    """
    require_one_shard(engine)
    options = engine.options
    require(not options.lookup, "lookup", options.lookup, "must be 0 where an engine is simulated")
    return EngineSizes(
        slots=engine.slots,
        buckets=options.buckets,
        cap=options.cap,
        drafts=options.max_drafts,
        chunk=options.prompt_rows,
        span=SPAN,
        prompt_span=PROMPT_SPAN,
        drafts_at_once=drafts_at_once(options, engine.slots),
    )


class TunedEngine(NamedTuple):
    """An engine with the plan that was found for it.

    Attributes:
      drafts: drafts that requests should allow.
      costs: measured costs of the engine.
      simulated: predicted outcome.
    """

    engine: EarlyExitEngine
    drafts: int
    costs: StepCosts
    simulated: SimulatedBatch


def tune(
    engine: EarlyExitEngine,
    prompts: Sequence[Sequence[int]],
    *,
    bound: float | None = None,
    costs: StepCosts | None = None,
    new: int = 64,
    stop_token_ids: Sequence[int] = (),
    **rules,
) -> TunedEngine:
    """Find the plan with the most tokens a second for requests like these.

    It takes a few seconds longer than `measure`, or a few seconds if `costs` are given.

    Args:
      prompts: token ids of typical prompts; as many as there are slots are enough.
      new: tokens to decode for each prompt, which show by which exits they leave.
      bound: as in `best_plan`, in seconds.
      rules: arguments of `ExitPolicy.make` but `drafts`, which are found.

    Raises:
      ConfigError: as `prefill`, where there are no prompts, and for several data shards.
    """
    traces = trace_requests(
        engine, prompts, new, stop_token_ids, **rules
    )  # before the measurement, because it checks the arguments
    costs = measure(engine, prompts) if costs is None else costs
    found = best_plan(traces, costs, engine_sizes(engine), bound=bound)
    own = {name: getattr(engine.plan, name) for name in ("draft_cost", "verify_cost", "acceptance")}
    plan = found.plan.replace(**own)  # by which drafts adapt
    engine = dataclasses.replace(engine, plan=plan)
    return TunedEngine(engine, found.drafts, costs, found.simulated)


def trace_requests(
    engine: EarlyExitEngine,
    prompts: Sequence[Sequence[int]],
    new: int,
    stop_token_ids: Sequence[int] = (),
    **rules,
) -> list[RequestTrace]:
    """Trace what the engine decodes for a batch of prompts, with as many drafts as it can make.

    Where nothing was drafted from a token, it is unknown whether a draft would have been accepted.
    Such drafts are taken to be accepted as often as the others. Raises as `tune`.
    """
    require_one_shard(engine)
    require(len(prompts) > 0, "prompts", prompts, "must be one at least")
    require_count("new", new)
    require("drafts" not in rules, "drafts", rules.get("drafts"), "must be left to the plan")
    slots, config, drafts = engine.slots, engine.config, engine.options.max_drafts
    texts = [list(prompts[i % len(prompts)]) for i in range(slots)]
    limits = [min(new, engine.context - len(t)) for t in texts]
    policy = ExitPolicy.make(config, slots, drafts=drafts, **rules)
    lengths = [len(t) for t in texts]
    sampling = SamplingParams.make(slots)
    request = RequestRows.make(config, lengths, limits, policy, sampling, stop_token_ids)
    rows, _ = engine.prefill(texts, request)
    state = engine.insert(engine.start(), rows, range(slots))
    hold = engine.plan.replace(
        fill=np.full(engine.num_segments, slots + 1, np.int32),
        patience=np.full(engine.num_segments, drafts, np.int32),
    )
    state, records = state.replace(plan=hold), []
    while np.asarray(state.live).any():
        state, record = engine.generate(state, STEPS_PER_CALL)
        records.append(record)
    whole = {
        name: np.concatenate([np.asarray(getattr(r, name)) for r in records])
        for name in ("exit", "drafted", "accepted")
    }
    drafted = whole["drafted"].sum()
    share = float(whole["accepted"].sum() / drafted) if drafted else 0.0
    rng, traces = np.random.default_rng(0), []
    for i, text in enumerate(texts):
        there = whole["exit"][:, i] >= 0
        tried = whole["drafted"][there, i] > 0
        right = np.where(tried, whole["accepted"][there, i] > 0, rng.random(len(tried)) < share)
        exits = tuple(whole["exit"][there, i].tolist())
        traces.append(RequestTrace(len(text), exits, tuple(right.tolist())))
    return traces
