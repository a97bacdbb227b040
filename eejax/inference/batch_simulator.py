"""Simulator of the early-exit engine: its schedule on recorded exits, with measured costs.

The decisions are the engine's own (`schedule`); the exits of each token are read from a trace. So
the numbers of segments, buckets and spans that run are exactly the engine's. Only their seconds are
a model: `StepCosts`, fitted to runs of the engine itself.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from eejax.common.errors import require, require_count
from eejax.inference.schedule import (
    IN_PLACE,
    INITIAL_ACCEPTANCE,
    PACKED,
    BatchPlan,
    SlotProgress,
    best_drafts,
    segment_demand,
    select_batch,
    select_prefill,
    update_acceptance,
)


@dataclasses.dataclass(frozen=True)
class RequestTrace:
    """A request as it was observed.

    Attributes:
      prompt: tokens of the prompt.
      exits: [n] exit of each token.
      accepted: [n] whether the first exit's token, when it did not emit it, was the one emitted.
      drafts: most tokens drafted.
    """

    prompt: int
    exits: tuple[int, ...]
    accepted: tuple[bool, ...]
    drafts: int = 0

    def __post_init__(self):
        require(
            len(self.exits) == len(self.accepted)
            and self.prompt >= 1
            and len(self.exits) >= 1
            and min(self.exits) >= 0
            and self.drafts >= 0,
            "trace",
            self,
            "must have a prompt, and for each token an exit and whether it was right",
        )


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of an engine step.

    Attributes:
      step: a step that runs nothing.
      layer: [modes] a layer, in place and then with each bucket.
      exit_check: [modes] an exit's head and gates.
      span: attention of a layer for one span.
      chunk: a chunk of prompts.
      chunk_span: one span of a chunk.
      depths: [segments] layers of each segment.
    """

    step: float
    layer: tuple[float, ...]
    exit_check: tuple[float, ...]
    span: float
    chunk: float
    chunk_span: float
    depths: tuple[int, ...]

    def __post_init__(self):
        numbers = (self.step, *self.layer, *self.exit_check, self.span, self.chunk, self.chunk_span)
        require(
            len(self.layer) == len(self.exit_check)
            and all(np.isfinite(n) and n >= 0 for n in numbers),
            "costs",
            self,
            "must be seconds, and as many for `layer` as for `exit_check`",
        )

    def plan(
        self,
        buckets: Sequence[int],
        slots: int,
        fill: int | Sequence[int] = 1,
        patience: int | Sequence[int] = 0,
    ) -> BatchPlan:
        """Return the plan that these costs give for an engine."""
        layers, looks = np.array(self.layer), np.array(self.exit_check)
        depths = np.array(self.depths)[:, None]
        seconds = depths * layers + looks
        spans = depths[:, 0] * self.span
        return BatchPlan.make(
            len(self.depths), slots, buckets, fill, patience, (seconds[:, 0], seconds[:, 1:], spans)
        )

    def seconds(self, work: WorkCounts) -> float:
        """Return the seconds of an amount of work."""
        depths = np.array(self.depths)
        runs = np.asarray(work.runs, float)
        return float(
            self.step * work.steps
            + (depths[:, None] * runs).sum(0) @ np.array(self.layer)
            + runs.sum(0) @ np.array(self.exit_check)
            + self.span * (depths * np.asarray(work.spans, float)).sum()
            + self.chunk * work.chunks
            + self.chunk_span * work.chunk_spans
        )


@dataclasses.dataclass
class WorkCounts:
    """`state.WorkCounters` as numpy numbers."""

    runs: np.ndarray
    spans: np.ndarray
    chunks: int = 0
    chunk_spans: int = 0
    steps: int = 0

    @classmethod
    def blank(cls, segments: int, buckets: int) -> WorkCounts:
        return cls(np.zeros((segments, 1 + buckets), int), np.zeros(segments, int))


@dataclasses.dataclass
class SimulatedBatch:
    """Outcome of a simulation; times are seconds from its start.

    Attributes:
      emitted: for each request, when its tokens were emitted.
      arrived: for each request, when it got its slot.
      counts: the work that was run.
      seconds: duration of the whole simulation.
    """

    emitted: list[list[float]]
    arrived: list[float]
    counts: WorkCounts
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.emitted))

    @property
    def gaps(self) -> np.ndarray:
        """Seconds between consecutive tokens of a request, for all requests."""
        return np.array([b - a for times in self.emitted for a, b in itertools.pairwise(times)])


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """Sizes of an engine that the simulator needs to know (`batch_costs.engine_sizes`).

    Attributes:
      slots: its slots.
      buckets, cap, drafts, chunk: as in `EngineOptions`.
      span, prompt_span: rows of a slot, and of a prompt, that attention takes together.

    Raises:
      ConfigError: for sizes that no engine has.
    """

    slots: int
    buckets: Sequence[int]
    cap: int
    drafts: int
    chunk: int
    span: int
    prompt_span: int

    def __post_init__(self):
        for name in ("slots", "cap", "chunk", "span", "prompt_span"):
            require_count(name, getattr(self, name))
        require_count("drafts", self.drafts, minimum=0)
        reaches = len(self.buckets) > 0 and self.buckets[-1] >= self.cap
        allowed = f"must reach the cap, {self.cap}, at least"
        require(reaches, "buckets", self.buckets, allowed)


def simulate(
    traces: Sequence[RequestTrace],
    plan: BatchPlan,
    costs: StepCosts,
    engine: EngineSizes,
    *,
    steps: int = 1,
) -> SimulatedBatch:
    """Simulate requests that start in order, each as soon as a slot is free.

    Slots are filled after every `steps` steps, and when all are free.

    Raises:
      ConfigError: for sizes, a plan or exits that do not match the costs.
    """
    require_count("steps", steps)
    slots, buckets, drafts = engine.slots, engine.buckets, engine.drafts
    cap, chunk, prompt_span = engine.cap, engine.chunk, engine.prompt_span
    n = len(costs.depths) - 1
    known = len(costs.layer) - 1
    require(len(buckets) == known, "buckets", buckets, f"must be {known}, whose costs are known")
    require(
        np.shape(plan.packed) == (n + 1, known),
        "plan",
        plan,
        f"must have the {n + 1} segments and {known} buckets of the costs",
    )
    deepest = max((max(t.exits) for t in traces), default=0)
    require(
        deepest <= n,
        "traces",
        f"exit {deepest}",
        f"must have exits in 0..{n}, whose costs are known",
    )
    filled = np.zeros((slots, n + 1), int)
    position, remaining, given, since, most = (np.zeros(slots, int) for _ in range(5))
    holder, share = np.full(slots, -1), np.full(slots, INITIAL_ACCEPTANCE, np.float32)
    waiting = iter(range(len(traces)))
    emitted: list[list[float]] = [[] for _ in traces]
    arrived = [0.0] * len(traces)
    counts, now, clock, refilled = WorkCounts.blank(n + 1, len(buckets)), 0.0, 0, 0
    guessed: set[tuple[int, int]] = set()  # (slot, row) whose next row reads a draft

    def progress():
        return SlotProgress(filled, position, remaining, given)

    def decided(i: int, row: int, e: int) -> bool:
        """Return whether the exits up to e decide what follows row `row` of slot i."""
        trace = traces[holder[i]]
        token = row - trace.prompt + 1
        return token < len(trace.exits) and trace.exits[token] <= e

    def begin(can_start: np.ndarray) -> None:
        """Record that the next row reads a token that no exit has decided."""
        for i in np.flatnonzero(can_start & (filled[:, 0] > position)).tolist():
            row = int(filled[i, 0]) - 1
            if not decided(i, row, int((filled[i] > row).sum()) - 1):
                guessed.add((i, row))

    def learn(tried: np.ndarray, right: np.ndarray, emits: np.ndarray) -> None:
        """Learn how many drafts were right, of the slots that emitted tokens."""
        share[emits] = update_acceptance(np, share, tried, right)[emits]

    def commit_tokens() -> None:
        """Emit decided tokens, as `engine_step.commit_tokens`."""
        begun, tried, right = position.copy(), np.zeros(slots, int), np.zeros(slots, int)
        for i in np.flatnonzero((remaining > 0) & (filled[:, 0] > position)).tolist():
            trace = traces[holder[i]]
            while remaining[i] and filled[i, 0] > position[i]:
                seen = int((filled[i] > position[i]).sum()) - 1
                if not decided(i, int(position[i]), seen):
                    break
                token = position[i] - trace.prompt + 1
                drafted = (i, position[i]) in guessed
                tried[i] += drafted
                right[i] += drafted and trace.accepted[token]
                guessed.discard((i, position[i]))
                emitted[holder[i]].append(-1.0)  # its time is set when the step is over
                position[i] += 1
                remaining[i] -= 1
                if drafted and not trace.accepted[token] and filled[i, 0] > position[i]:
                    guessed.difference_update([(i, r) for r in range(position[i], filled[i, 0])])
                    filled[i] = np.minimum(filled[i], position[i])
        learn(tried, right, position > begun)

    while True:
        if (clock - refilled) % steps == 0 or not (remaining > 0).any():
            refilled = clock
            for i in np.flatnonzero(remaining == 0):
                holder[i] = r = next(waiting, -1)
                filled[i], given[i], position[i] = 0, 0, 0
                if r >= 0:
                    trace = traces[r]
                    given[i], position[i] = trace.prompt, trace.prompt - 1
                    remaining[i], most[i] = len(trace.exits), min(trace.drafts, drafts)
                    since[i], arrived[r], share[i] = clock, now, INITIAL_ACCEPTANCE
        if not (remaining > 0).any():
            break
        work = WorkCounts.blank(n + 1, len(buckets))
        work.steps = 1
        allowed = best_drafts(np, share, plan.draft_cost, most, drafts)
        for e in range(n + 1):
            at = progress()
            before = position.copy(), at.next_segment
            can_start = at.can_start(cap, allowed)
            if e == 0:
                begin(can_start)
            demand = segment_demand(np, e, at, cap, can_start)
            batch = select_batch(np, plan, e, buckets, engine.span, demand, clock - since)
            if batch.mode:
                work.runs[e, batch.mode - IN_PLACE] += 1
                work.spans[e] += batch.spans if batch.mode >= PACKED else 0
                filled[:, e] += batch.rows
                commit_tokens()
            moved = (position != before[0]) | (progress().next_segment != before[1])
            since[moved] = clock
        in_prefill = progress().in_prefill
        if in_prefill.any():
            count, _ = select_prefill(np, progress(), since, chunk)
            done = in_prefill & (filled[:, 0] + count == given)
            work.chunks, work.chunk_spans = 1, int((-(-count // min(prompt_span, chunk))).sum())
            filled += count[:, None]
            learn(np.zeros(slots, int), np.zeros(slots, int), done)
            for i in np.flatnonzero(done):
                emitted[holder[i]].append(-1.0)
                position[i] += 1
                remaining[i] -= 1
                since[i] = clock
        now += costs.seconds(work)
        clock += 1
        for times in (emitted[r] for r in holder if r >= 0):
            for j in range(len(times) - 1, -1, -1):
                if times[j] >= 0:
                    break
                times[j] = now
        for name in ("runs", "spans", "chunks", "chunk_spans", "steps"):
            setattr(counts, name, getattr(counts, name) + getattr(work, name))
    return SimulatedBatch(emitted, arrived, counts, now)


def fit(
    samples: Iterable[tuple[WorkCounts, float]],
    depths: Sequence[int],
    slots: int,
    buckets: Sequence[int],
) -> StepCosts:
    """Fit costs to samples of work, by least squares of their relative errors.

    No cost is negative, and those of packed rows and of exits are linear in the number of rows: the
    samples are too few and too noisy to fit each bucket by itself. Raises ConfigError if there are
    no samples.
    """
    from scipy.optimize import nnls

    weight, sizes = np.array(depths, float), np.array([slots, *buckets], float)
    rows, seconds = [], []
    for counts, took in samples:
        runs = np.asarray(counts.runs, float)
        layers, looks = weight @ runs, runs.sum(0)
        rows.append(
            [
                counts.steps,
                layers[0],
                layers[1:].sum(),
                layers[1:] @ sizes[1:],
                looks.sum(),
                looks @ sizes,
                weight @ np.asarray(counts.spans, float),
                counts.chunks,
                counts.chunk_spans,
            ]
        )
        seconds.append(took)
    require(bool(rows), "samples", rows, "must have at least one call")
    a, b = np.array(rows), np.array(seconds)
    x, _ = nnls(a / b[:, None], np.ones(len(b)))
    step, in_place, layer, row, look, look_row, span, chunk, chunk_span = map(float, x)
    return StepCosts(
        step,
        (in_place, *(layer + row * sizes[1:]).tolist()),
        tuple((look + look_row * sizes).tolist()),
        span,
        chunk,
        chunk_span,
        tuple(int(d) for d in depths),
    )


@dataclasses.dataclass(frozen=True)
class BatchSetting:
    """A way to run a batch: its plan, the drafts of every request, and the simulated outcome."""

    plan: BatchPlan
    drafts: int
    simulated: SimulatedBatch


def best_plan(
    traces: Sequence[RequestTrace],
    costs: StepCosts,
    engine: EngineSizes,
    *,
    bound: float | None = None,
) -> BatchSetting:
    """Find the plan with the most tokens a second.

    Plans that delay requests for some numbers of slots and of steps are simulated, each with no
    drafts, with half of the engine's, and with all.

    Args:
      traces: requests to simulate.
      costs: costs of the engine's steps.
      engine: its sizes.
      bound: 99th percentile of the seconds between two tokens that a plan must keep; if none does,
        the plan that comes nearest is chosen.

    Raises:
      ConfigError: as `simulate`, and if there are no traces.
    """
    slots, drafts = engine.slots, engine.drafts
    require(len(traces) > 0, "traces", traces, "must have at least one request")
    require(bound is None or bound >= 0, "bound", bound, "must be seconds, or None")
    fills = sorted({1, *(-(-slots * part // 4) for part in (1, 2, 3)), slots + 1})
    tried = []
    for most in sorted({0, drafts // 2, drafts}):
        own = [dataclasses.replace(t, drafts=most) for t in traces]
        for fill, patience in itertools.product(fills, (1, 2, 4, 6)):
            if fill == 1 and patience > 1:  # no slot waits, so patience changes nothing
                continue
            # Slots are delayed below the second segment, the first that not all of them run.
            holds = [1, fill, *(1 for _ in costs.depths[2:])][: len(costs.depths)]
            plan = costs.plan(engine.buckets, slots, holds, patience)
            result = simulate(own, plan, costs, engine)
            gaps = result.gaps
            late = float(np.quantile(gaps, 0.99)) if bound is not None and gaps.size else 0.0
            over = max(0.0, late - bound) if bound is not None else 0.0
            tried.append((over, result.seconds / result.tokens, len(tried), plan, most, result))
    *_, plan, most, result = min(tried, key=lambda t: t[:3])
    return BatchSetting(plan, most, result)
