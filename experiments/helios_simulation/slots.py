"""A loaded model of a simulated server: its slots, the outputs of its calls, and their seconds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eejax.experiments.helios_simulation.pace import StepSeconds
from eejax.experiments.helios_simulation.traces import ModelTrace
from eejax.helios.choices import ModelProfile
from eejax.helios.interfaces import FleetRequest

Leaving = Callable[[int, int], tuple[list, list]]
"""(exits, below) `[p][n]` of tokens, by a depth and how strict thresholds are."""


@dataclasses.dataclass(kw_only=True, eq=False)
class SimulatedRequest(FleetRequest):
    """A prompt in the simulation.

    Attributes:
      number: number of the prompt.
      part: the model that serves it.
      todo: tokens that the model still has to read before it generates.
      done: generated tokens, of which `num_read` were read from calls.
      num_read: generated tokens that were read from calls.
      remaining: [segments] tokens that still have to go through each segment.
      stage: the segment that the next token waits for.
      since: the step since which it waits.
      agree: tokens that agree with the whole model.
    """

    number: int
    part: SimulatedModel | None = None
    todo: int = 0
    done: int = 0
    num_read: int = 0
    remaining: list[int] = dataclasses.field(default_factory=list)
    stage: int = 0
    since: int = 0
    agree: int = 0


class SimulatedCall(NamedTuple):
    """Steps that run until `end`.

    Attributes:
      end: seconds at which the call ends.
      brought: (request, exits, below) of its outputs.
    """

    end: float
    brought: list[tuple[SimulatedRequest, list[int], list[bool]]]


class SimulatedModel:
    """A model with its slots, as in `PartialModel` and `Scheduler`.

    Attributes:
      calls: running calls, of `steps` steps each.
      flops: operations of the rows that were run, and of the heads of tokens.
    """

    def __init__(
        self,
        trace: ModelTrace,
        profile: ModelProfile,
        pace: StepSeconds,
        leaving: Leaving,
        *,
        depth: int,
        slots: Sequence[int],
        steps: int,
        cap: int,
    ):
        self.profile, self.pace, self.by_depth = profile, pace, slots
        self.depth, self.target_segments, self.ready, self.flops = depth, depth, 0.0, 0.0
        self.jobs: list[
            SimulatedRequest
        ] = []  # in slots, those that ended included until it is known
        self.waiting: collections.deque[SimulatedRequest] = collections.deque()
        self.calls: collections.deque[SimulatedCall] = collections.deque()
        self._trace, self._leaving, self._steps, self._cap = trace, leaving, steps, cap
        self._clock = 0  # steps so far

    @property
    def slots(self) -> int:
        """Number of slots once the segments on their way have arrived."""
        return self.by_depth[self.target_segments - 1]

    @property
    def idle(self) -> bool:
        return not self.jobs and not self.waiting and not self.calls

    @property
    def every(self) -> list[SimulatedRequest]:
        return [*self.jobs, *self.waiting]

    @property
    def room(self) -> bool:
        return len(self.jobs) + len(self.waiting) < self.slots

    @property
    def size(self) -> float:
        """Bytes, with those of segments on their way."""
        return self.profile.size(self.target_segments)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the requests in slots."""
        return sum(int(self._trace.prompts[job.number]) + job.done for job in self.jobs)

    def grow(self, depth: int, now: float) -> float:
        """Start to load segments and return the seconds until they are there.

        Requests that came last are preempted where there will be fewer slots.
        """
        seconds = sum(self.profile.load[self.target_segments : depth])
        self.target_segments, self.ready = depth, now + seconds
        self.jobs, back = self.jobs[: self.slots], self.jobs[self.slots :]
        self.waiting.extendleft(reversed(back))
        return seconds

    def cancel_growth(self) -> None:
        """Cancel segments that are being loaded, whose memory is free at once."""
        self.target_segments = self.depth

    def grown(self) -> float:
        """Return the seconds to catch up keys and values for segments that have arrived."""
        held = self.num_cached_tokens
        new = slice(self.depth, self.target_segments)
        self.flops += held * sum(self.profile.energy[new])
        for job in self.jobs:
            # A request that has not reached the last segment has no state to continue from.
            job.remaining += [job.remaining[-1]] * (self.target_segments - self.depth)
        self.depth = self.target_segments
        return held * sum(self.profile.rebuild[new])

    def shrink(self, depth: int) -> None:
        """Free segments; the remaining model reads all texts anew."""
        self.depth = self.target_segments = depth
        for job in self.jobs:
            self._read_anew(job)

    def _read_anew(self, job: SimulatedRequest) -> None:
        job.todo = int(self._trace.prompts[job.number]) + job.done
        job.remaining = [0] * self.depth
        job.stage, job.since = 0, self._clock

    def join(self) -> None:
        while self.waiting and len(self.jobs) < self.slots:
            job = self.waiting.popleft()
            self._read_anew(job)
            self.jobs.append(job)

    def leave(self, job: SimulatedRequest) -> None:
        self.jobs = [j for j in self.jobs if j is not job]
        self.waiting = collections.deque(j for j in self.waiting if j is not job)

    def call(self, begin: float) -> SimulatedCall:
        """Run steps for the requests in slots, from when the device is free."""
        brought = [(job, [], []) for job in self.jobs]
        end = begin
        for _ in range(self._steps):
            live = [row for row in brought if row[0].done < self._trace.new]
            if not live:
                break
            end += self._step(live)
        return SimulatedCall(end, brought)

    def _step(self, live: list[tuple[SimulatedRequest, list, list]]) -> float:
        """Run a step and return its seconds.

        Each request gets a token, except those for which a segment has no room and those whose
        prompts are still read: of these together a chunk runs, in order of arrival.
        """
        reading = [row for row in live if row[0].todo]
        seconds = self.pace.step
        for s in range(self.depth):
            counts = self._go([row for row in live if self._decodes(row[0])], s)
            seconds += self.pace.seconds(s, counts, self.slots)
            self.flops += sum(counts) * self.profile.energy[s]
        for job, _, _ in live:
            job.stage = max(job.stage, 0)  # the next token
        chunk, room = [], self.pace.tokens
        for job, exits, below in reading:
            chunk.append(min(room, job.todo))
            room, job.todo = room - chunk[-1], job.todo - chunk[-1]
            if not job.todo:
                self._write(job, exits, below)
                job.since = self._clock
        self._clock += 1
        return seconds + (self.pace.reading(chunk, self.depth) if chunk else 0.0)

    def _decodes(self, job: SimulatedRequest) -> bool:
        return not job.todo and job.done < self._trace.new

    def _go(self, live: list[tuple[SimulatedRequest, list, list]], s: int) -> list[int]:
        """Return the rows of each text that run a segment.

        They are tokens that stand before it, with those that wait there, and tokens that may not
        wait longer. Those that waited longest go first.
        """
        counts, room = [], self.pace.max_rows
        for job, exits, below in sorted(live, key=lambda row: row[0].since):
            full = job.remaining[-1] >= self._cap
            stands = job.stage == s and not (full and s == 0)  # first empty the queue
            # Some of the waiting tokens may not have reached this segment.
            behind = job.remaining[s - 1] if s else 0
            count = stands + job.remaining[s] - behind
            if not count or not (stands or full):
                continue
            if counts and count > room:
                room = 0  # keep the order
                continue
            counts.append(count)
            room -= count
            job.remaining[s] = behind
            if not stands:
                continue
            job.since = self._clock
            if self._by(job) > s:
                job.stage = s + 1
                continue
            self._write(job, exits, below)
            job.stage = -1  # until the next step
            for deeper in range(s + 1, self.depth):
                job.remaining[deeper] += 1
        return counts

    def _by(self, job: SimulatedRequest) -> int:
        """Return the exit of a text's next token."""
        return self._leaving(self.depth, job.strictness[1])[0][job.number][job.done]

    def _write(self, job: SimulatedRequest, exits: list[int], below: list[bool]) -> None:
        by, low = self._leaving(self.depth, job.strictness[1])
        exits.append(by[job.number][job.done])
        self.flops += sum(self.profile.heads[: exits[-1] + 1])
        below.append(low[job.number][job.done])
        job.done += 1
