"""Filling the bubbles of 1F1B with more microbatches (EE-LLM, Appendix C.2).

Part 1: while the first stages wait for their first backward pass, further microbatches go forward
through them alone, up to an early exit, and back. Part 2: while the last stages wait for the end,
further microbatches go forward through all stages and back through the last ones alone. Neither
lengthens the iteration; both make its gradient less noisy. By the paper's count, microbatch i of K
= floor((P - 1) / (f/b + 1)) goes through the first K + 1 - i stages in Part 1 and back through the
last floor(P - i (f/b + 1)) in Part 2, where f and b are the times of a stage's passes.

In the lockstep table of 1F1B, the first steps have no backward pass and the last steps have no
forward pass. Part 1's forward passes have steps of their own between the others; its backward
passes come before those of the other microbatches.

A forward pass of Part 2 must not share a step with the last gradient, because that would delay it.
Let q be a stage counted from the last, and h a step counted from the first one without a forward
pass of a whole microbatch. The last gradient passes stage q at h = q. The inserted microbatch j
(from 0) goes forward in the steps without gradients up to stage q = j, waits there until that
gradient has passed, and goes on at h = 2j - q + 1; its backward pass is at h = 2j + q + 2. After
the last gradient a stage then alternates between a forward pass, after which it exchanges with the
stage above, and a backward pass, after which it exchanges with the stage below. With links for
these exchanges alone, no stage waits for a neighbour that sends nothing, and with equal stages all
of the paper's K microbatches fit, in at most K steps more than 1F1B's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eejax.common.errors import require
from eejax.pipeline.schedule import (
    BACKWARD,
    EXITS,
    FORWARD,
    Operation,
    Route,
    Schedule,
    ScheduleStep,
    one_f_one_b,
)
from eejax.pipeline.simulate import StageCosts, neighbours_time, step_costs

ROUNDING = 1e-9  # relative tolerance; sums in another order differ by less


@dataclasses.dataclass(frozen=True)
class Filled:
    """A filled schedule of `main` whole microbatches, `part1` and `part2` inserted ones.

    Attributes:
      schedule: the table; microbatches are numbered in this order.
      time: simulated time (`simulate`).
      alone: simulated time of the whole microbatches without the inserted ones.
    """

    schedule: Schedule
    main: int
    part1: int
    part2: int
    time: float
    alone: float

    @property
    def inserted(self) -> int:
        return self.part1 + self.part2

    @property
    def loss_factors(self) -> np.ndarray:
        """Factors [stages] of the losses of a stage's exits, for whole and Part 1 microbatches.

        A factor is M / (M + the Part 1 microbatches that come to the stage), so that M losses are
        expected from each exit (Proposition C.2). Losses of Part 2 are not scaled. The final exit's
        factor is 1.
        """
        routes = self.schedule.routes[self.main : self.main + self.part1]
        return self._factors([sum(r.top >= s for r in routes) for s in range(self._stages)])

    @property
    def gradient_factors(self) -> np.ndarray:
        """Factors [stages] of a stage's gradients, summed over all microbatches.

        A factor is M / (M + the Part 2 microbatches whose backward pass comes to the stage). With
        both factors the sum over all microbatches has the expectation of that over M whole ones. A
        parameter that stages share has a gradient on each: scale these before they are added.
        """
        routes = self.schedule.routes[self.main + self.part1 :]
        return self._factors([sum(r.bottom <= s for r in routes) for s in range(self._stages)])

    @property
    def _stages(self) -> int:
        return self.schedule.stages

    def _factors(self, more: Sequence[int]) -> np.ndarray:
        return self.main / (self.main + np.array(more, float))


def max_inserted(stages: int, forward: float, backward: float) -> int:
    """Return the paper's K, the number of microbatches that fit into either part."""
    if backward <= 0:
        return 0
    return math.floor((stages - 1) / (forward / backward + 1) + ROUNDING)


def filled(
    costs: StageCosts,
    microbatches: int,
    *,
    part1: int | None = None,
    part2: int | None = None,
    exit_stages: Sequence[int] = (),
    inner_stages: Sequence[int] = (),
    exits: str = "mixed",
    recompute: bool = False,
    tolerance: float = ROUNDING,
) -> Filled:
    """Return `one_f_one_b` of `microbatches` with as many more as fit into the same time.

    An insertion is kept only if the simulated time, with `costs`, grows by no more than the
    fraction `tolerance`. Otherwise the microbatch takes a shorter route, and if none fits nothing
    is inserted. Inserted microbatches have their exits deferred.

    Args:
      costs: time of the parts of each stage.
      microbatches: number of whole microbatches.
      part1: maximum number to insert in part 1; by default the paper's, which is also the limit.
      part2: the same for part 2.
      exit_stages: stages with exits on their input.
      inner_stages: stages with exits between their layers.
      exits: as for `one_f_one_b`.
      recompute: as for `one_f_one_b`.
      tolerance: fraction of the time.
    """
    for name, given in (("part1", part1), ("part2", part2)):
        ok = given is None or (isinstance(given, int) and given >= 0)
        require(ok, name, given, "must be a number of microbatches, or None for as many as fit")
    require(tolerance >= 0, "tolerance", tolerance, "must be at least 0")
    p = costs.stages
    base = one_f_one_b(p, microbatches, exit_stages=exit_stages, exits=exits, recompute=recompute)

    def mean(kind):
        return sum(costs.of(kind, i, recompute) for i in range(p)) / p

    k = max_inserted(p, mean(FORWARD), mean(BACKWARD))
    table = _Table(base, costs, exit_stages, tolerance, more=2 * p)
    with_exit = sorted({*exit_stages, *inner_stages})
    first = table.insert_early(min(k, k if part1 is None else part1), k, with_exit)
    ratio = mean(FORWARD) / mean(BACKWARD) if k else 0.0
    ways = [math.floor(p - i * (ratio + 1) + ROUNDING) for i in range(1, k + 1)]
    second = table.insert_late(ways[:part2])
    schedule = table.schedule()
    return Filled(schedule, microbatches, first, second, table.time, table.alone)


def filled_to(costs: StageCosts, microbatches: int, **settings) -> Filled:
    """Return a schedule of `microbatches` in all, of which few are whole: the same number in less
    time.

    `settings` are those of `filled`. With nothing to insert it is `one_f_one_b`.
    """
    most = {name: settings.pop(name, None) for name in ("part1", "part2")}
    alone = filled(costs, microbatches, part1=0, part2=0, **settings)
    n = filled(costs, microbatches, **most, **settings).inserted
    for inserted in range(min(n, microbatches - 1), 0, -1):
        main = microbatches - inserted
        first = min(filled(costs, main, **most, **settings).part1, inserted)
        found = filled(costs, main, part1=first, part2=inserted - first, **settings)
        if found.inserted == inserted and found.time < alone.time:
            return found
    return alone


class _Table:
    """A schedule under construction: its operations and their times.

    Its main steps are those of `base` and `more` after them. Before each there is room for an extra
    step.
    """

    def __init__(
        self,
        base: Schedule,
        costs: StageCosts,
        exit_stages: Sequence[int],
        tolerance: float,
        more: int,
    ):
        p = base.stages
        self.base, self.exit_stages = base, frozenset(exit_stages) | {p - 1}
        self.routes = list(base.routes)
        self.main = [[list(ops) for ops in step.ops] for step in base.steps]
        self.main += [[[] for _ in range(p)] for _ in range(more)]
        self.extra = [[[] for _ in range(p)] for _ in self.main]
        # [steps, 2, stages]: time of each pair of an extra and a main step.
        self.costs = np.zeros((len(self.main), 2, p))
        self.costs[: len(base.steps), 1] = step_costs(base, costs)
        # [steps, 2, stages - 1]: whether a value crosses between two stages after a step.
        self.crossings = np.zeros((len(self.main), 2, p - 1), bool)
        self.crossings[: len(base.steps), 1] = base.crossings
        self.first_narrow = len(self.main)  # from this pair on, only stages with values are linked
        self.of = {
            (kind, i): costs.of(kind, i, base.recompute)
            for kind in (FORWARD, EXITS, BACKWARD)
            for i in range(p)
        }
        self.time = self.alone = self._time(self.costs, self.crossings)
        self.bound = self.alone * (1 + tolerance)

    def _time(self, costs: np.ndarray, crossings: np.ndarray) -> float:
        """Return the simulated time. An extra step without operations does not exist."""
        rows = costs.reshape(-1, costs.shape[-1])
        there = np.asarray(rows.any(axis=1))
        there[1::2] = True
        links = crossings.copy()
        links[: self.first_narrow] = True
        return neighbours_time(rows[there], links.reshape(len(rows), -1)[there])

    def _ops(
        self, route: Route, forward: list[tuple[int, int]], backward: list[int]
    ) -> list[tuple[int, int, int, str]]:
        """List a microbatch's operations as (step, 0 for extra or 1 for main, stage, kind).

        Args:
          route: the stages that it visits.
          forward: the first two entries for each stage from 0 on.
          backward: main steps from the route's top down to its bottom.
        """
        ops = [(at, which, i, FORWARD) for i, (at, which) in enumerate(forward)]
        last = self.base.stages - 1
        for i, at in zip(range(route.top, route.bottom - 1, -1), backward, strict=True):
            if i in self.exit_stages:
                # The final exit reads the output of its step's forward pass, or the recomputed one.
                first = i == last and not self.base.recompute
                read_at, which = forward[i] if first else (at, 1)
                ops.append((read_at, which, i, EXITS))
            ops.append((at, 1, i, BACKWARD))
        return ops

    def _trial(self, route: Route, ops: list[tuple[int, int, int, str]]) -> tuple | None:
        """Return (costs, crossings, time) with these operations, None if they take too long."""
        costs, crossings = self.costs.copy(), self.crossings.copy()
        for at, which, i, kind in ops:
            costs[at, which, i] += self.of[kind, i]
            if kind == FORWARD and i < route.top:
                crossings[at, which, i] = True
            if kind == BACKWARD and i > route.bottom:
                crossings[at, which, i - 1] = True
        time = self._time(costs, crossings)
        return (costs, crossings, time) if time <= self.bound else None

    def _insert(self, route: Route, ops: list[tuple[int, int, int, str]]) -> bool:
        """Insert a microbatch if the time allows it, and return whether it did."""
        trial = self._trial(route, ops)
        if trial is None:
            return False
        self.costs, self.crossings, self.time = trial
        for at, which, i, kind in ops:
            (self.main if which else self.extra)[at][i].append(Operation(kind, len(self.routes)))
        self.routes.append(route)
        return True

    def insert_early(self, n: int, deepest: int, with_exit: Sequence[int]) -> int:
        """Insert Part 1 and return its number of microbatches.

        Their backward passes continue the order of the others before its beginning: -1, -2, ...

        Args:
          n: maximum number of microbatches to insert.
          deepest: number of stages of the first one.
          with_exit: stages with exits, in order.
        """
        p = self.base.stages
        starts, places = set(), set()

        def way(stages: int, start: int, place: int):
            backward = [2 * p - 2 - i - place for i in reversed(range(stages))]
            route = Route(stages - 1)
            return route, self._ops(route, [(start + i, 0) for i in range(stages)], backward)

        def insert(stages: int, wanted: int) -> bool:
            """Find room for `stages` stages, and use that of the first `wanted`."""
            for place in (k for k in range(1, 2 * p) if k not in places):
                # The top stage's backward pass is in the pair of steps of its forward, or later.
                for start in range(2 * p - 2 * stages - place + 1):
                    if start in starts or start + stages > len(self.main):
                        continue
                    found = self._trial(*way(stages, start, place))
                    if found and self._insert(*way(wanted, start, place)):
                        starts.add(start)
                        places.add(place)
                        return True
            return False

        for done in range(n):
            whole = deepest - done
            ways = [s + 1 for s in reversed(with_exit) if s < whole]
            # Room for the paper's route leaves room for the next ones. If there is none, the route
            # to an earlier exit may fit.
            tries = [(whole, ways[0]), *((s, s) for s in ways)] if ways else []
            if not any(insert(*one) for one in tries):
                return done
        return n

    def insert_late(self, ways: Sequence[int]) -> int:
        """Insert Part 2 and return its number of microbatches.

        Args:
          ways: [n], number of stages of the backward pass of each microbatch.
        """
        p, whole = self.base.stages, self.base.microbatches
        zero = whole + p - 2  # the last main step in which a whole microbatch goes forward
        self.first_narrow = zero + 1

        def insert(j: int, stages: int) -> bool:
            """Insert a microbatch as the j-th of the module's order."""
            forward = [zero + (j - q + 1 if j < q else 2 * j - q + 1) for q in reversed(range(p))]
            backward = [zero + 2 * j + q + 2 for q in range(stages)]
            if backward[-1] >= len(self.main):
                return False
            route = Route(p - 1, p - stages)
            return self._insert(route, self._ops(route, [(at, 1) for at in forward], backward))

        place, done = 0, 0  # a microbatch that does not fit here may fit one place later
        for way in ways:
            tries = [(j, stages) for stages in range(way, 0, -1) for j in range(place, p)]
            found = next((j for j, stages in tries if insert(j, stages)), None)
            if found is None:
                break
            place, done = found + 1, done + 1
        if not done:
            self.first_narrow = len(self.main)
        return done

    def schedule(self) -> Schedule:
        """Return the schedule without its empty steps."""
        order = (FORWARD, EXITS, BACKWARD)
        steps = []
        for t, pair in enumerate(zip(self.extra, self.main, strict=True)):
            for is_main, row in enumerate(pair):
                if not any(row) and not (is_main and t < len(self.base.steps)):
                    continue
                ops = tuple(tuple(sorted(o, key=lambda op: order.index(op.kind))) for o in row)
                links = None
                if t >= self.first_narrow:
                    links = tuple(map(bool, self.crossings[t, is_main]))
                steps.append(ScheduleStep(ops, links))
        return Schedule(
            f"filled {self.base.name}",
            self.base.stages,
            tuple(steps),
            tuple(self.routes),
            self.base.recompute,
        )
