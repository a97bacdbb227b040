"""Filling the bubbles of 1F1B with more microbatches (EE-LLM, Appendix C.2).

Part 1: while the first stages wait for their first backward pass, further microbatches go forward
through them alone, up to an early exit, and back. Part 2: while the last stages wait for the end,
further microbatches go forward through all stages and back through the last ones alone. Neither
makes an iteration longer; both make its gradient less noisy. By the paper's count, microbatch i
of K = floor((P - 1) / (f/b + 1)) goes through the first K + 1 - i stages in Part 1 and back through
the last floor(P - i (f/b + 1)) in Part 2, f and b being a stage's forward and backward pass.

In the lockstep table 1F1B leaves the backward pass of the first steps free and the forward pass of
the last ones. So Part 2 needs no further steps to begin with, and of Part 1 only the forward passes
do: these have steps of their own, on channel 1, while the backward passes come before those of the
other microbatches on channel 0. With equal stages that makes room for all of the paper's Part 1 and
for the first microbatch of its Part 2. Any further one would have to wait on its way up until the
last gradients have passed it on their way down, and no value waits between two steps of its
channel; a final exit that makes the last stage the slowest leaves room for more.
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
    Op,
    Route,
    Schedule,
    Step,
    one_f_one_b,
)
from eejax.pipeline.simulate import Costs, neighbours_time, step_costs

ROUNDING = 1e-9  # relative; sums in another order differ by less


@dataclasses.dataclass(frozen=True)
class Filled:
    """A filled schedule of `main` whole microbatches, `part1` and `part2` inserted ones.

    Microbatches are numbered in this order. time: simulated, by the clock "neighbours"; alone: that
    of the whole microbatches without the others.
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
        """[stages]: what to multiply the losses of the exits on a stage with, for whole and Part 1
        microbatches; those of Part 2 are left as they are. The final exit's is 1.

        M / (M + the Part 1 microbatches that come to the stage): so that M losses are expected
        from each exit (Proposition C.2).
        """
        routes = self.schedule.routes[self.main : self.main + self.part1]
        return self._factors([sum(r.top >= s for r in routes) for s in range(self._stages)])

    @property
    def gradient_factors(self) -> np.ndarray:
        """[stages]: what to multiply the gradients of a stage with, summed over all microbatches.

        M / (M + the Part 2 microbatches whose backward pass comes to the stage). With both
        factors the sum over all microbatches has the expectation of that over M whole ones.
        A parameter that stages share has a gradient on each: scale these before they are added.
        """
        routes = self.schedule.routes[self.main + self.part1 :]
        return self._factors([sum(r.bottom <= s for r in routes) for s in range(self._stages)])

    @property
    def _stages(self) -> int:
        return self.schedule.stages

    def _factors(self, more: Sequence[int]) -> np.ndarray:
        return self.main / (self.main + np.array(more, float))


def most_inserted(stages: int, forward: float, backward: float) -> int:
    """The paper's K: how many microbatches fit into either part."""
    if backward <= 0:
        return 0
    return math.floor((stages - 1) / (forward / backward + 1) + ROUNDING)


def filled(
    costs: Costs,
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
    """`one_f_one_b` of `microbatches` with as many more as fit into the same time.

    An insertion stays only where the simulated time, by the clock "neighbours" and the given
    costs, grows by no more than the fraction `tolerance`; else the microbatch takes a shorter way,
    and where none fits nothing is inserted. part1, part2: at most so many; by default the paper's
    number, which is also the most. exit_stages: with exits on what enters them; inner_stages: with
    exits between their layers. exits, recompute: as for `one_f_one_b`; inserted microbatches have
    their exits deferred.
    """
    for name, given in (("part1", part1), ("part2", part2)):
        ok = given is None or (isinstance(given, int) and given >= 0)
        require(ok, name, given, "must be a number of microbatches, or None for as many as fit")
    require(tolerance >= 0, "tolerance", tolerance, "must be at least 0")
    p = costs.stages
    base = one_f_one_b(
        p, microbatches, exit_stages=exit_stages, exits=exits, recompute=recompute
    )  # fmt: skip
    mean = lambda kind: sum(costs.of(kind, i, recompute) for i in range(p)) / p
    k = most_inserted(p, mean(FORWARD), mean(BACKWARD))
    table = _Table(base, costs, exit_stages, tolerance, more=2 * p)
    with_exit = sorted({*exit_stages, *inner_stages})
    first = table.insert_early(min(k, k if part1 is None else part1), k, with_exit)
    ratio = mean(FORWARD) / mean(BACKWARD) if k else 0.0
    ways = [math.floor(p - i * (ratio + 1) + ROUNDING) for i in range(1, k + 1)]
    second = table.insert_late(ways[:part2])
    schedule = table.schedule()
    return Filled(schedule, microbatches, first, second, table.time, table.alone)


def filled_to(costs: Costs, microbatches: int, **settings) -> Filled:
    """`microbatches` in all, few of them whole: the same number in less time. settings: those of
    `filled`. With nothing to insert it is `one_f_one_b`.
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
    """A schedule under way: its operations and their times, steps on channel 0 in order, each with
    room before it for a step on channel 1."""

    def __init__(
        self,
        base: Schedule,
        costs: Costs,
        exit_stages: Sequence[int],
        tolerance: float,
        more: int,
    ):
        p = base.stages
        self.base, self.exit_stages = base, frozenset(exit_stages) | {p - 1}
        self.routes = list(base.routes)
        empty = lambda: [[] for _ in range(p)]
        self.main = [[list(ops) for ops in step.ops] for step in base.steps]
        self.main += [empty() for _ in range(more)]
        self.extra = [empty() for _ in self.main]
        # What each (extra, main) pair of steps takes [steps, 2, stages].
        self.costs = np.zeros((len(self.main), 2, p))
        self.costs[: len(base.steps), 1] = step_costs(base, costs)
        self.of = {
            (kind, i): costs.of(kind, i, base.recompute)
            for kind in (FORWARD, EXITS, BACKWARD)
            for i in range(p)
        }
        self.time = self.alone = self._time(self.costs)
        self.bound = self.alone * (1 + tolerance)

    def _time(self, costs: np.ndarray) -> float:
        """A step without operations on channel 1 is none, and waits for nobody."""
        rows = costs.reshape(-1, costs.shape[-1])
        there = rows.any(axis=1)
        there[1::2] = True
        return neighbours_time(rows[there])

    def _ops(
        self, route: Route, forward: list[tuple[int, int]], backward: list[int]
    ) -> list[tuple[int, int, int, str]]:
        """(step, 0 for extra or 1 for main, stage, kind) of a microbatch. forward: the first two
        for each stage from 0 on; backward: main steps from the route's top down to its bottom."""
        ops = [(at, which, i, FORWARD) for i, (at, which) in enumerate(forward)]
        for i, at in zip(range(route.top, route.bottom - 1, -1), backward, strict=True):
            if i in self.exit_stages:
                ops.append((at, 1, i, EXITS))
            ops.append((at, 1, i, BACKWARD))
        return ops

    def _fits(self, ops: list[tuple[int, int, int, str]]) -> bool:
        """Whether the time allows these operations beside the others, kept in `trial` if so."""
        trial = self.costs.copy()
        for at, which, i, kind in ops:
            trial[at, which, i] += self.of[kind, i]
        time = self._time(trial)
        if time > self.bound:
            return False
        self.trial = trial, time
        return True

    def _insert(self, route: Route, ops: list[tuple[int, int, int, str]]) -> bool:
        if not self._fits(ops):
            return False
        self.costs, self.time = self.trial
        for at, which, i, kind in ops:
            (self.main if which else self.extra)[at][i].append(Op(kind, len(self.routes)))
        self.routes.append(route)
        return True

    def insert_early(self, n: int, deepest: int, with_exit: Sequence[int]) -> int:
        """Part 1. The order of the backward passes goes on before its beginning: -1, -2, ..."""
        p = self.base.stages
        starts, places = set(), set()

        def way(stages: int, start: int, place: int):
            backward = [2 * p - 2 - i - place for i in reversed(range(stages))]
            route = Route(stages - 1)
            return route, self._ops(route, [(start + i, 0) for i in range(stages)], backward)

        def insert(stages: int, wanted: int) -> bool:
            """Finds room for `stages` stages and takes that of the first `wanted`."""
            for place in (k for k in range(1, 2 * p) if k not in places):
                # The top's backward pass comes in the same pair of steps as its forward, or later.
                for start in range(2 * p - 2 * stages - place + 1):
                    if start in starts or start + stages > len(self.main):
                        continue
                    found = self._fits(way(stages, start, place)[1])
                    if found and self._insert(*way(wanted, start, place)):
                        starts.add(start)
                        places.add(place)
                        return True
            return False

        for done in range(n):
            whole = deepest - done
            ways = [s + 1 for s in reversed(with_exit) if s < whole]
            # Room for the paper's way leaves the next ones theirs. Where there is none, an exit
            # farther back may fit.
            tries = [(whole, ways[0]), *((s, s) for s in ways)] if ways else []
            if not any(insert(*one) for one in tries):
                return done
        return n

    def insert_late(self, ways: Sequence[int]) -> int:
        """Part 2: ways[n] is the number of stages of the backward pass of the n-th microbatch."""
        p = self.base.stages
        start = self.base.microbatches

        def begin(stages: int) -> int | None:
            for at in range(start, len(self.main) - 2 * p + 2):
                forward = [(at + i, 1) for i in range(p)]
                backward = [at + 2 * p - 2 - i for i in reversed(range(p - stages, p))]
                route = Route(p - 1, p - stages)
                if self._insert(route, self._ops(route, forward, backward)):
                    return at
            return None

        for done, way in enumerate(ways):
            found = (begin(stages) for stages in range(way, 0, -1))
            at = next((at for at in found if at is not None), None)
            if at is None:
                return done
            start = at + 1
        return len(ways)

    def schedule(self) -> Schedule:
        order = (FORWARD, EXITS, BACKWARD)
        steps = []
        for t, pair in enumerate(zip(self.extra, self.main, strict=True)):
            for channel, row in zip((1, 0), pair, strict=True):
                if any(row) or (channel == 0 and t < len(self.base.steps)):
                    ops = (tuple(sorted(o, key=lambda op: order.index(op.kind))) for o in row)
                    steps.append(Step(channel, tuple(ops)))
        return Schedule(
            f"filled {self.base.name}", self.base.stages, tuple(steps), tuple(self.routes),
            self.base.recompute,
        )  # fmt: skip
