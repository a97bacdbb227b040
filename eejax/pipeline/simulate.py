"""Simulated time of a schedule: operations of given cost, in the order in which the executor runs
them.

A stage begins a step when it has finished the previous one, and so have all stages that it
exchanged values with after it, since an exchange waits for both sides. Those are the two stages
next to it, or fewer if the step has links. Sending takes no time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from eejax.common.errors import require
from eejax.pipeline.schedule import BACKWARD, EXITS, FORWARD, Schedule


@dataclasses.dataclass(frozen=True)
class PassTime:
    """Time of a forward and of a backward pass, in any unit."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __iter__(self) -> Iterator[float]:
        return iter((self.forward, self.backward))

    def __mul__(self, n: float) -> PassTime:
        return PassTime(n * self.forward, n * self.backward)

    def plus(self, other: PassTime) -> PassTime:
        return PassTime(self.forward + other.forward, self.backward + other.backward)


NO_WORK = PassTime()


@dataclasses.dataclass(frozen=True)
class StageCosts:
    """Time of the parts of each stage.

    Attributes:
      layers: [stages], of a stage's layers, with the embedding on stage 0.
      entry: [stages], of the exits on a stage's input.
      inner: [stages], of the exits between the layers of a stage.
      final: of the final exit, on the last stage.
    """

    layers: tuple[PassTime, ...]
    entry: tuple[PassTime, ...]
    inner: tuple[PassTime, ...]
    final: PassTime = NO_WORK

    def __post_init__(self):
        n = len(self.layers)
        require(n >= 1, "StageCosts.layers", self.layers, "must have an entry for each stage")
        for name in ("entry", "inner"):
            found = getattr(self, name)
            require(
                len(found) == n, f"StageCosts.{name}", found, f"must have {n} entries, like layers"
            )
        for name in ("layers", "entry", "inner"):
            for one in getattr(self, name):
                _require_times(f"StageCosts.{name}", one)
        _require_times("StageCosts.final", self.final)

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def without_exits(self) -> StageCosts:
        none = (NO_WORK,) * self.stages
        return dataclasses.replace(self, entry=none, inner=none)

    def of(self, kind: str, stage: int, recompute: bool = False) -> float:
        """Return the time of one operation on a stage.

        With `recompute` a backward pass contains the stage's forward pass, and the last stage has
        no forward pass of its own.
        """
        last = stage == self.stages - 1
        if kind == FORWARD:
            return 0.0 if recompute and last else self.layers[stage].forward
        if kind == EXITS:
            return self.entry[stage].total + (self.final.total if last else 0.0)
        again = self.layers[stage].forward if recompute else 0.0
        return self.layers[stage].backward + again + self.inner[stage].total


def _require_times(field: str, work: PassTime) -> None:
    ok = all(math.isfinite(x) and x >= 0 for x in work)
    require(ok, field, tuple(work), "must be finite times of at least 0")


def stage_costs(
    layers: Sequence[int],
    entry: Sequence[int] = (),
    inner: Sequence[int] = (),
    *,
    layer: PassTime,
    exit: PassTime = NO_WORK,
    final: PassTime = NO_WORK,
    embedding: PassTime = NO_WORK,
) -> StageCosts:
    """Return `StageCosts` from those of single parts, the f and b of EE-LLM's Appendix A.3.

    Args:
      layers: number of layers of each stage.
      entry: number of exits on each stage's input; none by default.
      inner: number of exits inside each stage; none by default.
      layer: the paper's BB, of one layer.
      exit: the paper's EE.
      final: the paper's FE.
      embedding: the paper's IN.
    """

    def count(given):
        return given or (0,) * len(layers)

    own = [layer * n for n in layers]
    if own:
        own[0] = own[0].plus(embedding)

    def exits(given):
        return tuple(exit * n for n in count(given))

    return StageCosts(tuple(own), exits(entry), exits(inner), final)


class TimedOperation(NamedTuple):
    """An operation on a stage, from begin to end."""

    stage: int
    kind: str
    microbatch: int
    begin: float
    end: float


class Bar(NamedTuple):
    """A bar that `analysis.gantt` draws."""

    stage: int
    begin: float
    end: float
    kind: str
    label: str
    critical: bool


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Times of all operations.

    Attributes:
      stages: number of stages.
      ops: all operations.
      critical: one chain of operations, in order of time and without waiting, that lasts for the
        whole `time`.
    """

    stages: int
    ops: tuple[TimedOperation, ...]
    critical: tuple[TimedOperation, ...]

    @property
    def time(self) -> float:
        return max((op.end for op in self.ops), default=0.0)

    @property
    def idle(self) -> np.ndarray:
        """Return [stages], the time in which a stage is idle, from 0 to `time`."""
        busy = np.zeros(self.stages)
        for op in self.ops:
            busy[op.stage] += op.end - op.begin
        return self.time - busy

    def bars(self) -> list[Bar]:
        """Return the operations that take time, for a picture."""
        critical = set(self.critical)
        return [
            Bar(op.stage, op.begin, op.end, op.kind, str(op.microbatch), op in critical)
            for op in self.ops
            if op.end > op.begin
        ]


def step_costs(schedule: Schedule, costs: StageCosts) -> np.ndarray:
    """Return [steps, stages], the time of each stage's operations in each step."""
    of = {
        (kind, i): costs.of(kind, i, schedule.recompute)
        for kind in (FORWARD, EXITS, BACKWARD)
        for i in range(schedule.stages)
    }
    return np.array(
        [[sum(of[op.kind, i] for op in ops) for i, ops in enumerate(s.ops)] for s in schedule.steps]
    )


def neighbours_time(steps: np.ndarray, links: np.ndarray | None = None) -> float:
    """Return the time of `simulate` alone, for searches.

    Args:
      steps: [steps, stages], time of each stage's operations in each step.
      links: [steps, stages - 1] bool, `Schedule.links`; None if all neighbours exchange.
    """
    ready = np.zeros(steps.shape[1])
    for t, cost in enumerate(steps):
        end = ready + cost
        ready = end.copy()
        low, high = end[:-1], end[1:]
        if links is not None:  # times are at least 0, so a 0 delays no stage
            low, high = low * links[t], high * links[t]
        ready[1:] = np.maximum(ready[1:], low)
        ready[:-1] = np.maximum(ready[:-1], high)
    return float(ready.max(initial=0.0))


def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Simulate a schedule.

    Raises `ConfigError` if `costs` have another number of stages.
    """
    p = schedule.stages
    require(
        costs.stages == p,
        "costs.stages",
        costs.stages,
        f"must be the schedule's number of stages ({p})",
    )

    def waits_for(t: int, i: int) -> list[int]:
        """Return the stages whose end of step t stage i waits for, stage i first.

        So on a tie the critical path stays on the stage.
        """
        link = schedule.links[t]
        below = [i - 1] if i > 0 and link[i - 1] else []
        return [i, *below, *([i + 1] if i < p - 1 and link[i] else [])]

    ends, waited_for, done = [0.0] * p, [], []
    ops: list[TimedOperation] = []
    for t, step in enumerate(schedule.steps):
        near = [waits_for(t - 1, i) if t else [i] for i in range(p)]
        causes = [max(js, key=lambda j: ends[j]) for js in near]
        begins = [ends[j] for j in causes]
        row = []
        for i, todo in enumerate(step.ops):
            now, did = begins[i], []
            for op in todo:
                end = now + costs.of(op.kind, i, schedule.recompute)
                did.append(TimedOperation(i, op.kind, op.microbatch, now, end))
                now = end
            ops += did
            row.append(did)
            begins[i] = now
        ends = begins
        waited_for.append(causes)
        done.append(row)
    critical: list[TimedOperation] = []
    i = max(range(p), key=lambda j: ends[j])
    for causes, row in zip(reversed(waited_for), reversed(done), strict=True):
        critical += [op for op in reversed(row[i]) if op.end > op.begin]
        i = causes[i]
    return Timeline(p, tuple(ops), tuple(reversed(critical)))


class QueuedOperation(Hashable, Protocol):
    """An operation in a queue of `run_queues`."""

    @property
    def kind(self) -> str: ...

    @property
    def microbatch(self) -> int: ...


Queued = TypeVar("Queued", bound=QueuedOperation)


def run_queues(
    queues: Sequence[Sequence[tuple[Queued, float]]],
    before: Callable[[Queued, int], tuple[int, Queued] | None],
) -> Timeline:
    """Run a list of (operation, time) on each stage, in order and without a clock.

    Args:
      queues: [stages] of lists.
      before: (operation, stage) -> the (stage, operation) elsewhere whose result it reads, or None.

    Raises:
      ValueError: if all stages wait for each other.
    """
    found: dict[tuple[int, Queued], TimedOperation] = {}
    cause: dict[tuple[int, Queued], tuple[int, Queued] | None] = {}
    place = [0] * len(queues)
    previous: list[tuple[int, Queued] | None] = [None] * len(queues)
    moved = True
    while moved:
        moved = False
        for i, queue in enumerate(queues):
            while place[i] < len(queue):
                op, cost = queue[place[i]]
                needed = before(op, i)
                if needed is not None and needed not in found:
                    break
                waits = [key for key in (previous[i], needed) if key is not None]
                why = max(waits, key=lambda key: found[key].end, default=None)
                begin = found[why].end if why is not None else 0.0
                found[i, op] = TimedOperation(i, op.kind, op.microbatch, begin, begin + cost)
                cause[i, op] = why
                previous[i] = (i, op)
                place[i] += 1
                moved = True
    stuck = [str(queue[k][0]) for queue, k in zip(queues, place, strict=True) if k < len(queue)]
    if stuck:
        raise ValueError(f"stages wait for each other at {', '.join(stuck)}")
    critical = []
    key = max(found, key=lambda k: found[k].end, default=None)
    while key is not None:
        if found[key].end > found[key].begin:
            critical.append(found[key])
        key = cause[key]
    ops = tuple(sorted(found.values(), key=lambda op: (op.begin, op.stage)))
    return Timeline(len(queues), ops, tuple(reversed(critical)))


def exit_time_overhead(without: Schedule, with_exits: Schedule, costs: StageCosts) -> float:
    """Return how much longer a schedule with early exits takes than one without: 0.01 is 1 %.

    `costs` are those with exits, which the first schedule does not pay.
    """
    base = simulate(without, costs.without_exits).time
    return simulate(with_exits, costs).time / base - 1
