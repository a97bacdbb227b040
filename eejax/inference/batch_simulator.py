"""What a batch would take: the scheduler of `batched` on recorded exits, with measured costs.

The decisions are the engine's own (`packing`); what each token does is read off a trace. So the
numbers of segments, buckets and spans that are run are the engine's, and only their seconds are a
model: `Costs`, fitted to runs of the engine itself.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from eejax.common.errors import require, require_count
from eejax.inference.packing import IN_PLACE, PACKED, Plan, Standing, choose, prompts, wish


@dataclasses.dataclass(frozen=True)
class Trace:
    """A request as it was seen. prompt: tokens of it; exits [n]: the exit of each token; right [n]:
    whether the first exit's token, when it did not emit it, was the one emitted; drafts: most
    tokens drafted."""

    prompt: int
    exits: tuple[int, ...]
    right: tuple[bool, ...]
    drafts: int = 0

    def __post_init__(self):
        require(
            len(self.exits) == len(self.right) and self.prompt >= 1 and len(self.exits) >= 1
            and min(self.exits) >= 0 and self.drafts >= 0,
            "trace", self, "must have a prompt, and of each token an exit and whether it was right",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds. sweep: of one that runs nothing; layer [ways]: of a layer in place, then for each
    bucket; look [ways]: of an exit's head and gates; span: of a layer for one span; chunk: of a
    chunk of prompts; chunk_span: of one of its spans. depths [e]: layers of each segment."""

    sweep: float
    layer: tuple[float, ...]
    look: tuple[float, ...]
    span: float
    chunk: float
    chunk_span: float
    depths: tuple[int, ...]

    def __post_init__(self):
        numbers = (self.sweep, *self.layer, *self.look, self.span, self.chunk, self.chunk_span)
        require(
            len(self.layer) == len(self.look) and all(np.isfinite(n) and n >= 0 for n in numbers),
            "costs", self, "must be seconds, and as many of a layer as of a look",
        )  # fmt: skip

    def plan(self, buckets: Sequence[int], slots: int, fill=1, patience=0) -> Plan:
        """What these costs are to the decisions."""
        layers, looks = np.array(self.layer), np.array(self.look)
        depths = np.array(self.depths)[:, None]
        seconds = depths * layers + looks
        spans = depths[:, 0] * self.span
        return Plan.make(
            len(self.depths), slots, buckets, fill, patience, (seconds[:, 0], seconds[:, 1:], spans)
        )

    def seconds(self, work: Counts) -> float:
        """Of so much work."""
        depths = np.array(self.depths)
        runs = np.asarray(work.runs, float)
        return float(
            self.sweep * work.sweeps
            + (depths[:, None] * runs).sum(0) @ np.array(self.layer)
            + runs.sum(0) @ np.array(self.look)
            + self.span * (depths * np.asarray(work.spans, float)).sum()
            + self.chunk * work.chunks + self.chunk_span * work.chunk_spans
        )  # fmt: skip


@dataclasses.dataclass
class Counts:
    """`batched.Work` as numbers."""

    runs: np.ndarray
    spans: np.ndarray
    chunks: int = 0
    chunk_spans: int = 0
    sweeps: int = 0

    @classmethod
    def blank(cls, segments: int, buckets: int) -> Counts:
        return cls(np.zeros((segments, 1 + buckets), int), np.zeros(segments, int))


@dataclasses.dataclass
class Simulated:
    """emitted: for each request, when its tokens came, in seconds from the start; arrived: when its
    prompt was taken up; counts: what was run; seconds: all of it."""

    emitted: list[list[float]]
    arrived: list[float]
    counts: Counts
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.emitted))

    @property
    def gaps(self) -> np.ndarray:
        """Seconds between a request's tokens, of all of them."""
        return np.array([b - a for times in self.emitted for a, b in itertools.pairwise(times)])


def simulate(
    traces: Sequence[Trace], plan: Plan, costs: Costs, *, slots: int, buckets: Sequence[int],
    cap: int, drafts: int, chunk: int, span: int, prompt_span: int, steps: int = 1,
) -> Simulated:  # fmt: skip
    """Requests in order, each as soon as a slot is free; slots are filled after every `steps`
    sweeps, and when all are free. The other arguments are the engine's (`batch_costs.settings`).

    Raises ConfigError for arguments that no engine has, or that are not those of the costs.
    """
    counted = dict(slots=slots, cap=cap, chunk=chunk, span=span, prompt_span=prompt_span)
    for name, value in (counted | dict(steps=steps)).items():
        require_count(name, value)
    require_count("drafts", drafts, least=0)
    n = len(costs.depths) - 1
    known = len(costs.layer) - 1
    require(len(buckets) == known, "buckets", buckets, f"must be {known}, whose costs are known")
    require(buckets[-1] >= cap, "buckets", buckets, f"must reach the cap, {cap}, at least")
    require(
        np.shape(plan.packed) == (n + 1, known), "plan", plan,
        f"must be of the costs' {n + 1} segments and {known} buckets",
    )  # fmt: skip
    deepest = max((max(t.exits) for t in traces), default=0)
    require(
        deepest <= n, "traces", f"exit {deepest}", f"must be of exits 0..{n}, whose costs are known"
    )
    filled = np.zeros((slots, n + 1), int)
    position, remaining, given, since, most = (np.zeros(slots, int) for _ in range(5))
    holder = np.full(slots, -1)
    waiting = iter(range(len(traces)))
    emitted: list[list[float]] = [[] for _ in traces]
    arrived = [0.0] * len(traces)
    counts, now, clock, refilled = Counts.blank(n + 1, len(buckets)), 0.0, 0, 0
    guessed: set[tuple[int, int]] = set()  # slots and rows behind which a draft is read
    standing = lambda: Standing(filled, position, remaining, given)

    def decided(i: int, row: int, e: int) -> bool:
        """Whether the exits up to e decide what follows row `row` of slot i."""
        trace = traces[holder[i]]
        token = row - trace.prompt + 1
        return token < len(trace.exits) and trace.exits[token] <= e

    def begin(begins: np.ndarray) -> None:
        """Notes whose next row reads a token that no exit has decided."""
        for i in np.flatnonzero(begins & (filled[:, 0] > position)):
            row = filled[i, 0] - 1
            if not decided(i, row, int((filled[i] > row).sum()) - 1):
                guessed.add((i, row))

    def settle() -> None:
        """As `batched.settle`."""
        for i in np.flatnonzero((remaining > 0) & (filled[:, 0] > position)):
            trace = traces[holder[i]]
            while remaining[i] and filled[i, 0] > position[i]:
                seen = int((filled[i] > position[i]).sum()) - 1
                if not decided(i, position[i], seen):
                    break
                token = position[i] - trace.prompt + 1
                drafted = (i, position[i]) in guessed
                guessed.discard((i, position[i]))
                emitted[holder[i]].append(-1.0)  # its time is set when the sweep is over
                position[i] += 1
                remaining[i] -= 1
                if drafted and not trace.right[token] and filled[i, 0] > position[i]:
                    guessed.difference_update([(i, r) for r in range(position[i], filled[i, 0])])
                    filled[i] = np.minimum(filled[i], position[i])

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
                    since[i], arrived[r] = clock, now
        if not (remaining > 0).any():
            break
        work = Counts.blank(n + 1, len(buckets))
        work.sweeps = 1
        for e in range(n + 1):
            at = standing()
            before = position.copy(), at.stage
            begins = at.begins(cap, most)
            if e == 0:
                begin(begins)
            wished = wish(np, e, at, cap, begins)
            chosen = choose(np, plan, e, buckets, span, wished, clock - since)
            if chosen.way:
                work.runs[e, chosen.way - IN_PLACE] += 1
                work.spans[e] += chosen.spans if chosen.way >= PACKED else 0
                filled[:, e] += chosen.count
                settle()
            moved = (position != before[0]) | (standing().stage != before[1])
            since[moved] = clock
        prompting = standing().prompting
        if prompting.any():
            count, _ = prompts(np, standing(), since, chunk)
            done = prompting & (filled[:, 0] + count == given)
            work.chunks, work.chunk_spans = 1, int((-(-count // min(prompt_span, chunk))).sum())
            filled += count[:, None]
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
        for name in ("runs", "spans", "chunks", "chunk_spans", "sweeps"):
            setattr(counts, name, getattr(counts, name) + getattr(work, name))
    return Simulated(emitted, arrived, counts, now)


def fit(
    samples: Iterable[tuple[Counts, float]],
    depths: Sequence[int],
    slots: int,
    buckets: Sequence[int],
) -> Costs:
    """The costs that explain what samples of work took, by least squares of their relative errors.

    None is below 0, and packed rows and looks are straight lines in their number: what each bucket
    takes by itself could not be told apart from so few and such noisy samples. Raises ConfigError
    where there are no samples.
    """
    from scipy.optimize import nnls

    weight, sizes = np.array(depths, float), np.array([slots, *buckets], float)
    rows, seconds = [], []
    for counts, took in samples:
        runs = np.asarray(counts.runs, float)
        layers, looks = weight @ runs, runs.sum(0)
        rows.append([
            counts.sweeps, layers[0], layers[1:].sum(), layers[1:] @ sizes[1:], looks.sum(),
            looks @ sizes, weight @ np.asarray(counts.spans, float), counts.chunks,
            counts.chunk_spans,
        ])  # fmt: skip
        seconds.append(took)
    require(bool(rows), "samples", rows, "must be of one call at least")
    a, b = np.array(rows), np.array(seconds)
    x, _ = nnls(a / b[:, None], np.ones(len(b)))
    sweep, in_place, layer, row, look, look_row, *rest = map(float, x)
    return Costs(
        sweep, (in_place, *(layer + row * sizes[1:]).tolist()),
        tuple((look + look_row * sizes).tolist()), *rest, tuple(int(d) for d in depths),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to run a batch, and what it promises. drafts: of every request."""

    plan: Plan
    drafts: int
    simulated: Simulated


def best_plan(
    traces: Sequence[Trace], costs: Costs, *, slots: int, buckets: Sequence[int], drafts: int,
    bound: float | None = None, **engine,
) -> Choice:  # fmt: skip
    """The plan of the most tokens a second, of some that hold requests back by numbers of slots and
    of sweeps, and that draft up to so many tokens or none.

    bound: seconds that 99 in 100 of the tokens may take after the one before; where no plan keeps
    it, the one that comes nearest. The other arguments are `simulate`'s. Raises as it does, and
    where there are no traces.
    """
    require(len(traces) > 0, "traces", traces, "must be of one request at least")
    require(bound is None or bound >= 0, "bound", bound, "must be seconds, or None")
    fills = sorted({1, *(-(-slots * part // 4) for part in (1, 2, 3)), slots + 1})
    tried = []
    for most in sorted({0, drafts // 2, drafts}):
        own = [dataclasses.replace(t, drafts=most) for t in traces]
        for fill, patience in itertools.product(fills, (1, 2, 4, 6)):
            if fill == 1 and patience > 1:  # nobody waits
                continue
            # Who is held back is so before the first segment that not all go through.
            holds = [1, fill, *(1 for _ in costs.depths[2:])][: len(costs.depths)]
            plan = costs.plan(buckets, slots, holds, patience)
            result = simulate(
                own, plan, costs, slots=slots, buckets=buckets, drafts=drafts, **engine
            )
            gaps = result.gaps
            late = float(np.quantile(gaps, 0.99)) if bound is not None and gaps.size else 0.0
            over = max(0.0, late - bound) if bound is not None else 0.0
            tried.append((over, result.seconds / result.tokens, len(tried), plan, most, result))
    *_, plan, most, result = min(tried, key=lambda t: t[:3])
    return Choice(plan, most, result)
