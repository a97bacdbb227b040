"""What the work of `batched` takes here, measured with the engine itself, and the plan for it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eejax.common.errors import require, require_count
from eejax.inference.batch_simulator import Costs, Counts, Simulated, Trace, best_plan, fit
from eejax.inference.batched import PROMPT_SPAN, SPAN
from eejax.inference.batched_slots import BatchedEngine
from eejax.inference.batched_state import Work
from eejax.inference.engine import CALL
from eejax.inference.packing import Plan
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import Sampling
from eejax.inference.state import Request

THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 1.0)


def counts(after: Work, before: Work) -> Counts:
    """Work between two states, whose numbers begin anew at 2^32."""
    less = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after, before)
    return Counts(
        less.runs.astype(int), less.spans.astype(int),
        int(less.chunks), int(less.chunk_spans), int(less.sweeps),
    )  # fmt: skip


def samples(
    engine: BatchedEngine,
    prompts: Sequence[Sequence[int]],
    calls: int = 160,
    steps: int = 4,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[Counts, float]]:
    """Work, and the seconds it took, of calls in which the engine is made to do all kinds of it:
    by plans, thresholds and drafts at random, for prompts that come and go at random.

    Plans change decisions alone, and no text; nothing here changes the engine. Raises ConfigError
    where there are no prompts, or no calls.
    """
    require_count("calls", calls)
    require(len(prompts) > 0, "prompts", prompts, "must be one at least")
    rng = np.random.default_rng(seed)
    config, slots, segments = engine.config, engine.slots, engine.max_depth
    found: list[tuple[Counts, float]] = []
    state, left = engine.start(), np.zeros(slots, int)
    buckets = engine.options.buckets
    most = max(1, engine.context // 2)  # of a prompt: room to decode
    while len(found) < calls:
        if not left.any() or rng.random() < 0.1:
            few = int(rng.integers(1, slots + 1)) if rng.random() < 0.5 else slots
            chosen = rng.permutation(slots)[:few].tolist()
            texts = [list(prompts[int(rng.integers(len(prompts)))])[:most] for _ in chosen]
            limit = [engine.context - len(t) for t in texts]
            policy = ExitPolicy.make(
                config, few, rng.choice(THRESHOLDS, (few, 1)).repeat(config.n_exits, 1),
                drafts=rng.integers(0, engine.options.drafts + 1, few).tolist(),
            )  # fmt: skip
            request = Request.make(
                config, [len(t) for t in texts], limit, policy, Sampling.make(few)
            )
            rows, _ = engine.prefill(texts, request)
            state = engine.insert(engine.free(state, range(slots)), rows, chosen)
        way = rng.choice(1 + len(buckets), p=[0.5] + [0.5 / len(buckets)] * len(buckets))
        seconds = np.ones(1 + len(buckets))
        seconds[1:] = rng.random(len(buckets)) * 2 + np.arange(len(buckets)) * 0.1
        seconds[way] *= 0.1
        grid = np.broadcast_to(seconds, (segments, len(seconds)))
        plan = Plan.make(
            segments, slots, buckets, int(rng.integers(1, slots + 2)), int(rng.integers(0, 6)),
            (grid[:, 0], grid[:, 1:], np.zeros(segments)),
        )  # fmt: skip
        state = jax.block_until_ready(state.replace(plan=plan))
        before = jax.tree.map(np.array, state.work)
        begin = clock()
        state, record = engine.generate(state, steps)
        jax.block_until_ready((state, record))
        took = clock() - begin
        left = np.asarray(state.remaining)
        work = counts(state.work, before)
        if work.sweeps:
            found.append((work, took))
    return found[calls // 8 :]  # the first ones compile, and warm up


def measure(engine: BatchedEngine, prompts: Sequence[Sequence[int]], **kwargs) -> Costs:
    """The costs of an engine on this machine; arguments as `samples`'."""
    last = engine.config.n_layers
    ends = [min(stop, last) for stop in engine.config.stops[: engine.max_depth]]
    depths = np.diff([0, *ends]).tolist()
    found = samples(engine, prompts, **kwargs)
    return fit(found, depths, engine.slots, engine.options.buckets)


def settings(engine: BatchedEngine) -> dict[str, Any]:
    """What of an engine `simulate` and `best_plan` have to know."""
    options = engine.options
    return dict(
        slots=engine.slots, buckets=options.buckets, cap=options.cap, drafts=options.drafts,
        chunk=options.chunk, span=SPAN, prompt_span=PROMPT_SPAN,
    )  # fmt: skip


class Tuned(NamedTuple):
    """An engine with the plan found for it, the drafts that requests should allow, its costs, and
    what the simulator promises."""

    engine: BatchedEngine
    drafts: int
    costs: Costs
    simulated: Simulated


def tune(
    engine: BatchedEngine,
    prompts: Sequence[Sequence[int]],
    *,
    bound: float | None = None,
    costs: Costs | None = None,
    new: int = 64,
    stop_tokens: Sequence[int] = (),
    **rules,
) -> Tuned:
    """The plan of the most tokens a second for requests like these, by exits like `rules`.

    prompts: as many as there are slots are enough; of each, `new` tokens are decoded to see where
    they leave. bound: as `best_plan`'s, in seconds; rules: `ExitPolicy.make`'s but for `drafts`,
    which are found. Takes as long as `measure`, unless `costs` are known, and a few seconds more.
    Raises as `prefill`, and ConfigError where there are no prompts.
    """
    traces = watch(engine, prompts, new, stop_tokens, **rules)  # first: it checks what is given
    costs = measure(engine, prompts) if costs is None else costs
    found = best_plan(traces, costs, bound=bound, **settings(engine))
    engine = dataclasses.replace(engine, plan=found.plan)
    return Tuned(engine, found.drafts, costs, found.simulated)


def watch(
    engine: BatchedEngine,
    prompts: Sequence[Sequence[int]],
    new: int,
    stop_tokens: Sequence[int] = (),
    **rules,
) -> list[Trace]:
    """Traces of what the engine decodes for a batch of prompts, drafting as much as it can.

    Of a token before which nothing was drafted it is not known whether its draft had been right:
    such are right as often as the others. Raises as `tune`.
    """
    require(len(prompts) > 0, "prompts", prompts, "must be one at least")
    require_count("new", new)
    require("drafts" not in rules, "drafts", rules.get("drafts"), "must be left to the plan")
    slots, config, drafts = engine.slots, engine.config, engine.options.drafts
    texts = [list(prompts[i % len(prompts)]) for i in range(slots)]
    limits = [min(new, engine.context - len(t)) for t in texts]
    policy = ExitPolicy.make(config, slots, drafts=drafts, **rules)
    lengths = [len(t) for t in texts]
    request = Request.make(config, lengths, limits, policy, Sampling.make(slots), stop_tokens)
    rows, _ = engine.prefill(texts, request)
    state = engine.insert(engine.start(), rows, range(slots))
    hold = engine.plan.replace(
        fill=np.full(engine.max_depth, slots + 1, np.int32),
        patience=np.full(engine.max_depth, drafts, np.int32),
    )
    state, records = state.replace(plan=hold), []
    while np.asarray(state.live).any():
        state, record = engine.generate(state, CALL)
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
        traces.append(Trace(len(text), exits, tuple(right.tolist())))
    return traces
