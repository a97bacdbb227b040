"""A loaded model of a simulated server: its slots, what its calls write, and how long they take."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eejax.serving.choices import Profile
from eejax.serving.dispatch import Job
from eejax.serving.pace import Pace
from eejax.serving.traces import ModelTrace

Leaving = Callable[[int, int], tuple[list, list]]
"""(exits, below) [p][n] of tokens, by a depth and how strict thresholds are."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Prompt(Job):
    """A prompt on its way. part: that has it; todo: tokens that its model has yet to read before it
    writes; done: that it wrote, of which `told` were read off calls; left [e]: that wait before
    each segment; agree: tokens that agree with the whole model."""

    number: int
    part: Part | None = None
    todo: int = 0
    done: int = 0
    told: int = 0
    left: list[int] = dataclasses.field(default_factory=list)
    agree: int = 0


class Call(NamedTuple):
    """Steps under way until `end`; brought: (job, exits, below) of what they wrote."""

    end: float
    brought: list[tuple[Prompt, list[int], list[bool]]]


class Part:
    """A model with its slots, as `PartialModel` and `Scheduler` have it. calls: under way, of
    `steps` steps each; flops: of the rows that were run."""

    def __init__(
        self, trace: ModelTrace, profile: Profile, pace: Pace, leaving: Leaving, *, depth: int,
        slots: Sequence[int], steps: int, cap: int,
    ):  # fmt: skip
        self.profile, self.pace, self.by_depth = profile, pace, slots
        self.depth, self.coming, self.ready, self.flops = depth, depth, 0.0, 0.0
        self.jobs: list[Prompt] = []  # in slots, those that ended included until it is known
        self.waiting: collections.deque[Prompt] = collections.deque()
        self.calls: collections.deque[Call] = collections.deque()
        self._trace, self._leaving, self._steps, self._cap = trace, leaving, steps, cap

    @property
    def slots(self) -> int:
        """As many as there will be with what is on its way."""
        return self.by_depth[self.coming - 1]

    @property
    def idle(self) -> bool:
        return not self.jobs and not self.waiting and not self.calls

    @property
    def every(self) -> list[Prompt]:
        return [*self.jobs, *self.waiting]

    @property
    def room(self) -> bool:
        return len(self.jobs) + len(self.waiting) < self.slots

    @property
    def size(self) -> float:
        """Bytes, with what is on its way."""
        return self.profile.size(self.coming)

    @property
    def held(self) -> int:
        """Tokens of the requests in slots."""
        return sum(int(self._trace.prompts[job.number]) + job.done for job in self.jobs)

    def grow(self, depth: int, now: float) -> float:
        """Seconds until it is there. Those who came last go back where there are to be fewer
        slots."""
        seconds = sum(self.profile.load[self.coming : depth])
        self.coming, self.ready = depth, now + seconds
        self.jobs, back = self.jobs[: self.slots], self.jobs[self.slots :]
        self.waiting.extendleft(reversed(back))
        return seconds

    def grown(self) -> float:
        """Seconds of making up keys and values for segments that have come."""
        held = self.held
        new = slice(self.depth, self.coming)
        self.flops += held * sum(self.profile.energy[new])
        for job in self.jobs:
            job.left += [0] * (self.coming - self.depth)
        self.depth = self.coming
        return held * sum(self.profile.rebuild[new])

    def shrink(self, depth: int) -> None:
        """Texts are read anew by what is left of the model."""
        self.depth = self.coming = depth
        for job in self.jobs:
            self._read_anew(job)

    def _read_anew(self, job: Prompt) -> None:
        job.todo = int(self._trace.prompts[job.number]) + job.done
        job.left = [0] * self.depth

    def join(self) -> None:
        while self.waiting and len(self.jobs) < self.slots:
            job = self.waiting.popleft()
            self._read_anew(job)
            self.jobs.append(job)

    def leave(self, job: Prompt) -> None:
        self.jobs = [j for j in self.jobs if j is not job]
        self.waiting = collections.deque(j for j in self.waiting if j is not job)

    def call(self, begin: float) -> Call:
        """Steps for who is in a slot, from when the device is free."""
        brought = [(job, [], []) for job in self.jobs]
        end = begin
        for _ in range(self._steps):
            live = [row for row in brought if row[0].done < self._trace.new]
            if not live:
                break
            end += self._step(live)
        return Call(end, brought)

    def _step(self, live: list[tuple[Prompt, list, list]]) -> float:
        """Seconds of a step, which brings each a token, but for those whose texts are still read:
        of those together a chunk, first who came first."""
        rows, room = [0] * self.depth, self.pace.tokens
        reading = [row for row in live if row[0].todo]
        for job, exits, below in live:
            if not job.todo:
                e = self._write(job, exits, below)
                last = e if job.left[-1] < self._cap else self.depth - 1
                for s in range(self.depth):
                    if s <= last:
                        rows[s] += 1 + job.left[s]
                        job.left[s] = 0
                    else:
                        job.left[s] += 1
        for job, exits, below in reading:
            taken = min(room, job.todo)
            room, job.todo = room - taken, job.todo - taken
            if not job.todo:
                self._write(job, exits, below)
        seconds = self.pace.step + sum(self.pace.seconds(s, k) for s, k in enumerate(rows))
        if reading:
            seconds += sum(self.pace.chunk[: self.depth])
        self.flops += sum(k * f for k, f in zip(rows, self.profile.energy, strict=False))
        return seconds

    def _write(self, job: Prompt, exits: list[int], below: list[bool]) -> int:
        """A token: by which exit."""
        by, low = self._leaving(self.depth, job.strictness[1])
        e = by[job.number][job.done]
        exits.append(e)
        below.append(low[job.number][job.done])
        job.done += 1
        return e
