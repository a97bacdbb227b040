"""What the work of `batched` takes here, measured with the engine itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from eejax.inference.batch_simulator import Costs, Counts, fit
from eejax.inference.batched import Work
from eejax.inference.batched_slots import BatchedEngine
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

    Plans change decisions alone, and no text; nothing here changes the engine.
    """
    rng = np.random.default_rng(seed)
    config, slots, segments = engine.config, engine.slots, engine.max_depth
    found: list[tuple[Counts, float]] = []
    state, left = engine.start(), np.zeros(slots, int)
    buckets = engine.options.buckets
    while len(found) < calls:
        if not left.any() or rng.random() < 0.1:
            few = int(rng.integers(1, slots + 1)) if rng.random() < 0.5 else slots
            chosen = rng.permutation(slots)[:few].tolist()
            texts = [list(prompts[int(rng.integers(len(prompts)))]) for _ in chosen]
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
        if work.sweeps == steps:
            found.append((work, took))
    return found[calls // 8 :]  # the first ones compile, and warm up


def measure(engine: BatchedEngine, prompts: Sequence[Sequence[int]], **kwargs) -> Costs:
    """The costs of an engine on this machine; arguments as `samples`'."""
    last = engine.config.n_layers
    ends = [min(stop, last) for stop in engine.config.stops[: engine.max_depth]]
    depths = np.diff([0, *ends]).tolist()
    found = samples(engine, prompts, **kwargs)
    return fit(found, depths, engine.slots, engine.options.buckets)
