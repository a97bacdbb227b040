"""Simulator of the early-exit engine: its schedule on recorded exits, with measured costs.

The decisions are the engine's own (`schedule`); the exits of each token are read from a trace. So
the numbers of segments, buckets and spans that run are exactly the engine's. Only the times are
modelled, by `StepCosts`, fitted to runs of the engine itself.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from eejax.common.errors import require, require_count
from eejax.inference.schedule import (
    IN_PLACE,
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
      drafts_at_once: as `options.drafts_at_once`.

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
    drafts_at_once: bool = False

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
    buckets, n, known = engine.buckets, len(costs.depths) - 1, len(costs.layer) - 1
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
    simulation = _Simulation(traces, plan, costs, engine)
    refilled = 0
    while True:
        if (simulation.clock - refilled) % steps == 0 or not simulation.live:
            refilled = simulation.clock
            simulation.fill_slots()
        if not simulation.live:
            return simulation.result
        simulation.step()


class _Simulation:
    """Slots and their requests, which `simulate` runs step by step.

    Arrays are [slots], `filled` [slots, segments]. A slot's request is `holder`, -1 where none is.
    `guessed` has (slot, row) where the row behind this one reads a draft.
    """

    def __init__(
        self,
        traces: Sequence[RequestTrace],
        plan: BatchPlan,
        costs: StepCosts,
        engine: EngineSizes,
    ):
        self.traces, self.plan, self.costs, self.engine = traces, plan, costs, engine
        self.segments, slots = len(costs.depths), engine.slots
        self.filled = np.zeros((slots, self.segments), int)
        zeros = (np.zeros(slots, int) for _ in range(5))
        self.position, self.remaining, self.prompt_len, self.since, self.max_drafts = zeros
        self.holder = np.full(slots, -1)
        self.acceptance = np.full(slots, plan.acceptance, np.float32)
        self.guessed: set[tuple[int, int]] = set()
        self.waiting = iter(range(len(traces)))
        self.emitted: list[list[float]] = [[] for _ in traces]
        self.arrived = [0.0] * len(traces)
        self.counts, self.now, self.clock = self._no_work(), 0.0, 0

    def _no_work(self) -> WorkCounts:
        return WorkCounts.blank(self.segments, len(self.engine.buckets))

    @property
    def live(self) -> bool:
        """True if a slot has a request that is not finished."""
        return bool((self.remaining > 0).any())

    @property
    def progress(self) -> SlotProgress:
        return SlotProgress(self.filled, self.position, self.remaining, self.prompt_len)

    @property
    def result(self) -> SimulatedBatch:
        return SimulatedBatch(self.emitted, self.arrived, self.counts, self.now)

    def fill_slots(self) -> None:
        """Start waiting requests in free slots."""
        for i in np.flatnonzero(self.remaining == 0):
            self.holder[i] = r = next(self.waiting, -1)
            self.filled[i], self.prompt_len[i], self.position[i] = 0, 0, 0
            if r >= 0:
                trace = self.traces[r]
                self.prompt_len[i], self.position[i] = trace.prompt, trace.prompt - 1
                self.remaining[i] = len(trace.exits)
                self.max_drafts[i] = min(trace.drafts, self.engine.drafts)
                self.since[i], self.arrived[r] = self.clock, self.now
                self.acceptance[i] = self.plan.acceptance

    def step(self) -> None:
        """Run an engine step, as `engine_step.engine_step`."""
        work = self._no_work()
        work.steps = 1
        cost, verify, most = self.plan.draft_cost, self.plan.verify_cost, self.engine.drafts
        drafts = best_drafts(np, self.acceptance, cost, verify, self.max_drafts, most)
        first = 0
        if self.engine.drafts_at_once:
            first = 1
            while self.progress.can_start(self.engine.cap, drafts).any():
                self._advance_segment(0, drafts, work)
        for e in range(first, self.segments):
            self._advance_segment(e, drafts, work)
        if self.progress.in_prefill.any():
            self._advance_prefill(work)
        self.now += self.costs.seconds(work)
        self.clock += 1
        for times in (self.emitted[r] for r in self.holder if r >= 0):
            for j in range(len(times) - 1, -1, -1):
                if times[j] >= 0:
                    break
                times[j] = self.now
        for name in ("runs", "spans", "chunks", "chunk_spans", "steps"):
            setattr(self.counts, name, getattr(self.counts, name) + getattr(work, name))

    def _advance_segment(self, e: int, drafts: np.ndarray, work: WorkCounts) -> None:
        """Run segment e for the slots that the schedule selects, each with at most its `drafts`."""
        engine, before = self.engine, self.progress
        position, next_segment = self.position.copy(), before.next_segment
        can_start = before.can_start(engine.cap, drafts)
        if e == 0:
            self._begin_rows(can_start)
        demand = segment_demand(np, e, before, engine.cap, can_start)
        waited = self.clock - self.since
        batch = select_batch(np, self.plan, e, engine.buckets, engine.span, demand, waited)
        if batch.mode:
            work.runs[e, batch.mode - IN_PLACE] += 1
            work.spans[e] += batch.spans if batch.mode >= PACKED else 0
            self.filled[:, e] += batch.rows
            self._commit_tokens()
        moved = (self.position != position) | (self.progress.next_segment != next_segment)
        self.since[moved] = self.clock

    def _advance_prefill(self, work: WorkCounts) -> None:
        """Run a chunk of prompts."""
        chunk, progress = self.engine.chunk, self.progress
        count, _ = select_prefill(np, progress, self.since, chunk)
        done = progress.in_prefill & (self.filled[:, 0] + count == self.prompt_len)
        spans = -(-count // min(self.engine.prompt_span, chunk))
        work.chunks, work.chunk_spans = 1, int(spans.sum())
        self.filled += count[:, None]
        none = np.zeros(self.engine.slots, int)
        self._learn(none, none, done)
        for i in np.flatnonzero(done).tolist():
            self._emit(i)
            self.since[i] = self.clock

    def _emit(self, i: int) -> None:
        """Emit a token of slot i; its time is set when the step is over."""
        self.emitted[self.holder[i]].append(-1.0)
        self.position[i] += 1
        self.remaining[i] -= 1

    def _decided(self, i: int, row: int) -> bool:
        """Return whether the exits above row `row` of slot i have decided what follows it."""
        trace, e = self.traces[self.holder[i]], int((self.filled[i] > row).sum()) - 1
        token = row - trace.prompt + 1
        return token < len(trace.exits) and trace.exits[token] <= e

    def _begin_rows(self, can_start: np.ndarray) -> None:
        """Record that the next row reads a token that no exit has decided."""
        for i in np.flatnonzero(can_start & (self.filled[:, 0] > self.position)).tolist():
            row = int(self.filled[i, 0]) - 1
            if not self._decided(i, row):
                self.guessed.add((i, row))

    def _learn(self, tried: np.ndarray, right: np.ndarray, emits: np.ndarray) -> None:
        """Learn how many drafts were right, of the slots that emitted tokens."""
        self.acceptance[emits] = update_acceptance(np, self.acceptance, tried, right)[emits]

    def _commit_tokens(self) -> None:
        """Emit decided tokens, as `engine_step.commit_tokens`."""
        filled, position = self.filled, self.position
        begun = position.copy()
        tried, right = (np.zeros(self.engine.slots, int) for _ in range(2))
        for i in np.flatnonzero((self.remaining > 0) & (filled[:, 0] > position)).tolist():
            trace = self.traces[self.holder[i]]
            while self.remaining[i] and filled[i, 0] > position[i]:
                row = int(position[i])
                if not self._decided(i, row):
                    break
                drafted = (i, row) in self.guessed
                accepted = drafted and trace.accepted[row - trace.prompt + 1]
                tried[i] += drafted
                right[i] += accepted
                self.guessed.discard((i, row))
                self._emit(i)
                if drafted and not accepted and filled[i, 0] > position[i]:
                    rejected = range(position[i], filled[i, 0])
                    self.guessed.difference_update([(i, r) for r in rejected])
                    filled[i] = np.minimum(filled[i], position[i])
        self._learn(tried, right, position > begun)


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
