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
    writes; done: that it wrote, of which `told` were read off calls; left [e]: that have yet to go
    through each segment; stage: before which the next token stands, since that step; agree: tokens
    that agree with the whole model."""

    number: int
    part: Part | None = None
    todo: int = 0
    done: int = 0
    told: int = 0
    left: list[int] = dataclasses.field(default_factory=list)
    stage: int = 0
    since: int = 0
    agree: int = 0


class Call(NamedTuple):
    """Steps under way until `end`; brought: (job, exits, below) of what they wrote."""

    end: float
    brought: list[tuple[Prompt, list[int], list[bool]]]


class Part:
    """A model with its slots, as `PartialModel` and `Scheduler` have it. calls: under way, of
    `steps` steps each; flops: of the rows that were run, and of the heads of tokens."""

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
        self._clock = 0  # steps so far

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

    def stay(self) -> None:
        """What is on its way is called off, and leaves its room at once."""
        self.coming = self.depth

    def grown(self) -> float:
        """Seconds of making up keys and values for segments that have come."""
        held = self.held
        new = slice(self.depth, self.coming)
        self.flops += held * sum(self.profile.energy[new])
        for job in self.jobs:
            # Who has yet to come to the end has nothing there to go on from.
            job.left += [job.left[-1]] * (self.coming - self.depth)
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
        job.stage, job.since = 0, self._clock

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
        """Seconds of a step, which brings each a token, but for those that a segment has no room
        for, and those whose texts are still read: of these together a chunk, first who came
        first."""
        reading = [row for row in live if row[0].todo]
        seconds = self.pace.step
        for s in range(self.depth):
            counts = self._go([row for row in live if self._decodes(row[0])], s)
            seconds += self.pace.seconds(s, counts)
            self.flops += sum(counts) * self.profile.energy[s]
        for job, _, _ in live:
            job.stage = max(job.stage, 0)  # the next one
        chunk, room = [], self.pace.tokens
        for job, exits, below in reading:
            chunk.append(min(room, job.todo))
            room, job.todo = room - chunk[-1], job.todo - chunk[-1]
            if not job.todo:
                self._write(job, exits, below)
                job.since = self._clock
        self._clock += 1
        return seconds + (self.pace.reading(chunk, self.depth) if chunk else 0.0)

    def _decodes(self, job: Prompt) -> bool:
        return not job.todo and job.done < self._trace.new

    def _go(self, live: list[tuple[Prompt, list, list]], s: int) -> list[int]:
        """Rows of texts that go through a segment: of tokens that stand before it, with those that
        wait there, and of those that may wait no longer. Who waited longest goes first."""
        counts, room = [], self.pace.most
        for job, exits, below in sorted(live, key=lambda row: row[0].since):
            full = job.left[-1] >= self._cap
            stands = job.stage == s and not (full and s == 0)  # they go deeper before one begins
            # Of those that wait, some may have yet to come here.
            behind = job.left[s - 1] if s else 0
            count = stands + job.left[s] - behind
            if not count or not (stands or full):
                continue
            if counts and count > room:
                room = 0  # nobody overtakes
                continue
            counts.append(count)
            room -= count
            job.left[s] = behind
            if not stands:
                continue
            job.since = self._clock
            if self._by(job) > s:
                job.stage = s + 1
                continue
            self._write(job, exits, below)
            job.stage = -1  # until the next step
            for deeper in range(s + 1, self.depth):
                job.left[deeper] += 1
        return counts

    def _by(self, job: Prompt) -> int:
        """The exit of a text's next token."""
        return self._leaving(self.depth, job.strictness[1])[0][job.number][job.done]

    def _write(self, job: Prompt, exits: list[int], below: list[bool]) -> None:
        by, low = self._leaving(self.depth, job.strictness[1])
        exits.append(by[job.number][job.done])
        self.flops += sum(self.profile.heads[: exits[-1] + 1])
        below.append(low[job.number][job.done])
        job.done += 1
