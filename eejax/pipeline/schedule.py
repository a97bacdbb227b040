"""Schedules of pipeline parallelism as tables, without JAX.

A schedule lists steps. In a step every stage runs a short list of operations in order, and then
sends its newest hidden state to the stage above and its newest gradient to the stage below. An
arrival waits in a slot until an operation of a later step reads it. The same table drives the
executor (`pipeline.runner`), the simulator and the pictures.

Stages are numbered from 0, microbatches from 0. The lockstep 1F1B table: stage i runs the forward
pass of microbatch m at step m + i and its backward pass at step m + 2P - 2 - i, so that M + 2P - 2
steps have the critical path (P - 1) f + M (f + b) + (P - 1) b of 1F1B (EE-LLM, Appendix A.3.1).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from eejax.common.errors import require, require_one_of

ExitTiming = Literal["mixed", "aligned", "deferred"]
EXIT_POLICIES: tuple[ExitTiming, ...] = get_args(ExitTiming)
FORWARD, EXITS, BACKWARD = "forward", "exits", "backward"
IDLE = -1


class Operation(NamedTuple):
    """One operation: FORWARD, EXITS or BACKWARD of a microbatch on a stage.

    EXITS are those at the edges of a stage: on its input, and on the last stage on its output.
    Exits inside a stage belong to its BACKWARD.
    """

    kind: str
    microbatch: int


class ScheduleStep(NamedTuple):
    """One step of every stage, and the exchange after it.

    Attributes:
      ops: [stages], the operations of each stage in order.
      links: [stages - 1], whether stages i and i + 1 exchange values after the step and so wait for
        each other; None if all neighbours do.
    """

    ops: tuple[tuple[Operation, ...], ...]
    links: tuple[bool, ...] | None = None

    def linked(self, i: int) -> bool:
        """Return whether stages i and i + 1 exchange values after the step."""
        return self.links is None or self.links[i]


class Route(NamedTuple):
    """Stages that a microbatch visits: forward through 0 .. top, backward through top .. bottom."""

    top: int
    bottom: int = 0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A table of steps for `stages` stages.

    Attributes:
      routes: the route of each microbatch.
      recompute: whether stages are run again in their backward pass (full rematerialisation); the
        last stage then has no forward pass of its own.
    """

    name: str
    stages: int
    steps: tuple[ScheduleStep, ...]
    routes: tuple[Route, ...]
    recompute: bool = False

    @property
    def microbatches(self) -> int:
        return len(self.routes)

    @functools.cached_property
    def crossings(self) -> np.ndarray:
        """True if a value crosses from stage i to i + 1 or back after a step, [steps, stages - 1]
        bool.

        A state crosses after its forward pass on a stage, a gradient after its backward pass.
        """
        out = np.zeros((len(self.steps), max(self.stages - 1, 0)), bool)
        for (kind, m, i), t in self.when.items():
            if kind == FORWARD and i < self.routes[m].top:
                out[t, i] = True
            if kind == BACKWARD and i > self.routes[m].bottom:
                out[t, i - 1] = True
        return out

    @functools.cached_property
    def links(self) -> np.ndarray:
        """Stages i and i + 1 that exchange values after each step, [steps, stages - 1] bool."""
        pairs = range(self.stages - 1)
        table = [[step.linked(i) for i in pairs] for step in self.steps]
        return np.array(table, bool).reshape(len(self.steps), len(pairs))

    @functools.cached_property
    def when(self) -> dict[tuple[str, int, int], int]:
        """Step of each operation: (kind, microbatch, stage) -> step."""
        return {
            (op.kind, op.microbatch, stage): t
            for t, step in enumerate(self.steps)
            for stage, ops in enumerate(step.ops)
            for op in ops
        }

    def check(self) -> None:
        """Raise `ValueError` if an operation is missing, doubled, too early or too late.

        A value crosses to the next stage after the step that made it, over a link of that step, and
        is read in a later step.
        """
        done = [
            (op.kind, op.microbatch, i) for s in self.steps for i, o in enumerate(s.ops) for op in o
        ]
        if len(done) != len(set(done)):
            raise ValueError(f"{self.name}: an operation is done twice")
        for m, route in enumerate(self.routes):
            order = [(FORWARD, i) for i in range(route.top + 1)]
            order += [(BACKWARD, i) for i in range(route.top, route.bottom - 1, -1)]
            times = []
            for kind, i in order:
                if (kind, m, i) not in self.when:
                    raise ValueError(f"{self.name}: no {kind} of microbatch {m} on stage {i}")
                times.append(self.when[kind, m, i])
            for (kind, i), a, b in zip(order[1:], times, times[1:], strict=False):
                same_stage = kind == BACKWARD and i == route.top
                if not (b >= a if same_stage else b > a):
                    raise ValueError(
                        f"{self.name}: {kind} of {m} on stage {i} at step {b}, after {a}"
                    )
                lower = i - 1 if kind == FORWARD else i
                if not (same_stage or self.steps[a].linked(lower)):
                    raise ValueError(
                        f"{self.name}: {kind} of {m} on stage {i} needs a link of stages {lower} "
                        f"and {lower + 1} at step {a}"
                    )
        for (kind, m, i), t in self.when.items():
            if not 0 <= m < self.microbatches:
                raise ValueError(f"{self.name}: {kind} of {m}: no such microbatch")
            route = self.routes[m]
            if not (0 <= i <= route.top and (kind != BACKWARD or i >= route.bottom)):
                raise ValueError(
                    f"{self.name}: {kind} of {m} on stage {i}, which it does not visit"
                )
            if kind == EXITS:
                end = self.when.get((BACKWARD, m, i), len(self.steps))
                if not self.when[FORWARD, m, i] <= t <= end:
                    raise ValueError(f"{self.name}: exits of {m} on stage {i} at step {t}")
        for step in self.steps:
            for ops in step.ops:
                kinds = [op.kind for op in ops]
                once = kinds.count(FORWARD) <= 1 and kinds.count(BACKWARD) <= 1
                if not once or ops != _ordered(ops):
                    raise ValueError(f"{self.name}: operations of a step out of order: {ops}")

    def in_flight(self, stage: int) -> int:
        """Return the maximum number of microbatches on a stage between forward and backward
        pass."""
        spans = [
            (self.when[FORWARD, m, stage], self.when[BACKWARD, m, stage])
            for m, r in enumerate(self.routes)
            if r.bottom <= stage <= r.top
        ]
        return max(sum(a <= t <= b for a, b in spans) for t in range(len(self.steps)))

    def table(self, kind: str) -> np.ndarray:
        """Return [steps, n, stages] int32, microbatches of the operations of a kind, IDLE for none.

        n is the maximum of them that a stage runs in a step: 1, except for exits under "mixed".
        """
        of_kind = [
            [[o.microbatch for o in ops if o.kind == kind] for ops in s.ops] for s in self.steps
        ]
        n = max(1, *(len(found) for row in of_kind for found in row))
        out = np.full((len(self.steps), n, self.stages), IDLE, np.int32)
        for t, row in enumerate(of_kind):
            for stage, found in enumerate(row):
                out[t, : len(found), stage] = found
        return out

    def __str__(self) -> str:
        """Show a line for each stage and a column for each step: F forward, E exits, B backward.

        After a step marked ' not all neighbours exchange values.
        """
        letter = {FORWARD: "F", EXITS: "E", BACKWARD: "B"}
        head = [str(t) + "'" * (step.links is not None) for t, step in enumerate(self.steps)]
        rows = [["step", *head]]
        for i in range(self.stages):
            cells = (
                "".join(f"{letter[o.kind]}{o.microbatch}" for o in s.ops[i]) for s in self.steps
            )
            rows.append([f"stage {i}", *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
        return "\n".join([self.name, *(line.rstrip() for line in lines)])


class Rings(NamedTuple):
    """Slots of kept values, assigned so that each stage needs as few as possible.

    Attributes:
      inputs: [microbatches, stages], slots of stage inputs. They are among `n_states` slots of the
        shape of a hidden state, as are those of the next three.
      cotangents: [microbatches, stages], of the gradients that exits send into a stage's input.
      outputs: [microbatches, stages], of the gradients that the exits behind the last stage send
        into its output.
      teacher: [microbatches, stages], of outputs of the last stage, if exits are distilled from
        them.
      residuals: [microbatches, stages], slots among `n_residuals` of all other values that a
        backward pass needs.
      arrived: `Arrivals` of hidden states, from the exchange to the forward pass.
      returned: `Arrivals` of gradients, from the exchange to the backward pass.
    """

    inputs: np.ndarray
    cotangents: np.ndarray
    outputs: np.ndarray
    teacher: np.ndarray
    residuals: np.ndarray
    n_states: int
    n_residuals: int
    arrived: Arrivals
    returned: Arrivals


class Arrivals(NamedTuple):
    """Slots in which values from a neighbour wait.

    Attributes:
      read: [microbatches, stages], slot from which an operation reads its value.
      write: [steps, stages], slot of the value that arrives after a step. If none does, it is a
        slot in which nothing waits.
      n: number of slots.
    """

    read: np.ndarray
    write: np.ndarray
    n: int


def rings(schedule: Schedule, input_exits: Sequence[int], distils: bool = False) -> Rings:
    """Return the `Rings` of a schedule for a model with exits on the inputs of the stages
    `input_exits`."""
    shape = (schedule.microbatches, schedule.stages)
    tables = (np.zeros(shape, np.int32) for _ in range(5))
    inputs, cotangents, outputs, teacher, residuals = tables
    n_states = n_residuals = 1
    last = schedule.stages - 1
    for i in range(schedule.stages):
        states, kept = [], []
        for m, route in enumerate(schedule.routes):
            if i > route.top:
                continue
            begin = schedule.when[FORWARD, m, i]
            end = schedule.when.get((BACKWARD, m, i), begin)
            exits = schedule.when.get((EXITS, m, i))
            states.append((begin, max(end, begin if exits is None else exits), inputs, m))
            kept.append((begin, end, residuals, m))
            if exits is not None and i in input_exits:
                states.append((exits, max(end, exits), cotangents, m))
            if exits is not None and i == last:
                states.append((exits, max(end, exits), outputs, m))
                if distils:
                    states.append((exits, max(end, exits), teacher, m))
        n_states = max(n_states, _assign_slots(states, i))
        n_residuals = max(n_residuals, _assign_slots(kept, i))
    return Rings(
        inputs,
        cotangents,
        outputs,
        teacher,
        residuals,
        n_states,
        n_residuals,
        arrived=_arrivals(schedule, FORWARD),
        returned=_arrivals(schedule, BACKWARD),
    )


def _arrivals(schedule: Schedule, kind: str) -> Arrivals:
    """Return the `Arrivals` of the values that operations of a kind read."""
    read = np.zeros((schedule.microbatches, schedule.stages), np.int32)
    write = np.zeros((len(schedule.steps), schedule.stages), np.int32)
    n = 1
    for i in range(schedule.stages):
        sender = i - 1 if kind == FORWARD else i + 1
        spans = []
        for m in range(schedule.microbatches):
            sent = schedule.when.get((kind, m, sender))
            used = schedule.when.get((kind, m, i))
            if sent is not None and used is not None:
                spans.append((sent + 1, used, read, m))
        slots = _assign_slots(spans, i)
        for t in range(len(schedule.steps)):
            waiting = {
                int(read[m, i]): begin for begin, end, _, m in spans if begin <= t + 1 <= end
            }
            new = [slot for slot, begin in waiting.items() if begin == t + 1]
            free = next(slot for slot in range(slots + 1) if slot not in waiting)
            write[t, i] = new[0] if new else free
        n = max(n, slots, int(write[:, i].max()) + 1)
    return Arrivals(read, write, n)


def _assign_slots(spans: list[tuple[int, int, np.ndarray, int]], stage: int) -> int:
    """Assign to every (begin, end, table, microbatch) the lowest slot that is free from begin to
    end."""
    busy_until: list[int] = []
    for begin, end, table, m in sorted(spans, key=lambda s: s[:2]):
        free = next((k for k, t in enumerate(busy_until) if t < begin), None)
        if free is None:
            free = len(busy_until)
            busy_until.append(end)
        busy_until[free] = end
        table[m, stage] = free
    return len(busy_until)


def gpipe(
    stages: int,
    microbatches: int,
    *,
    exit_stages: Sequence[int] = (),
    exits: str = "mixed",
    recompute: bool = False,
) -> Schedule:
    """Return a schedule of all forward passes, then all backward passes, newest microbatch
    first."""
    p, n = stages, microbatches
    turn = n + p - 1
    return _lockstep(
        "gpipe",
        p,
        n,
        exit_stages,
        exits,
        recompute,
        forward=lambda m, i: m + i,
        backward=lambda m, i: turn + (n - 1 - m) + (p - 1 - i),
    )


def one_f_one_b(
    stages: int,
    microbatches: int,
    *,
    exit_stages: Sequence[int] = (),
    exits: str = "mixed",
    recompute: bool = False,
) -> Schedule:
    """Return the lockstep 1F1B table: forward of m on stage i at m + i, backward at m + 2P - 2 - i.

    Args:
      stages: number of stages.
      microbatches: number of microbatches.
      exit_stages: stages with exits on their input.
      exits: when these are computed: "deferred", with the stage's backward pass (optimization 1 of
        EE-LLM's Table 1); "aligned", with the microbatch's final exit; "mixed", deferred except for
        the last P - 1 - i microbatches, which are aligned and so fall into steps without a forward
        pass, two exits in each.
      recompute: see `Schedule`.
    """
    p = stages
    return _lockstep(
        "1f1b",
        p,
        microbatches,
        exit_stages,
        exits,
        recompute,
        forward=lambda m, i: m + i,
        backward=lambda m, i: m + 2 * p - 2 - i,
    )


def _lockstep(
    name: str,
    p: int,
    n: int,
    exit_stages: Sequence[int],
    exits: str,
    recompute: bool,
    *,
    forward: Callable[[int, int], int],
    backward: Callable[[int, int], int],
) -> Schedule:
    require(isinstance(p, int) and p >= 1, "stages", p, "must be at least 1")
    require(isinstance(n, int) and n >= 1, "microbatches", n, "must be at least 1")
    require_one_of("exits", exits, EXIT_POLICIES)
    steps = max(backward(m, 0) for m in range(n))
    table: list[list[list[Operation]]] = [[[] for _ in range(p)] for _ in range(steps + 1)]
    for i in range(p):
        last = i == p - 1
        for m in range(n):
            f, b = forward(m, i), backward(m, i)
            table[f][i].append(Operation(FORWARD, m))
            if last:  # its output exists after the forward pass, or after the recomputed one
                table[b if recompute else f][i].append(Operation(EXITS, m))
            elif i in exit_stages:
                early = exits == "aligned" or (exits == "mixed" and m >= n - (p - 1 - i))
                table[forward(m, p - 1) if early else b][i].append(Operation(EXITS, m))
            table[b][i].append(Operation(BACKWARD, m))
    return Schedule(
        name,
        p,
        tuple(ScheduleStep(tuple(_ordered(ops) for ops in row)) for row in table),
        (Route(p - 1),) * n,
        recompute,
    )


def _ordered(ops: Sequence[Operation]) -> tuple[Operation, ...]:
    return tuple(sorted(ops, key=lambda op: (FORWARD, EXITS, BACKWARD).index(op.kind)))


GENERATORS = {"1f1b": one_f_one_b, "gpipe": gpipe}
