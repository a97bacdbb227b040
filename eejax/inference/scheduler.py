"""Who is in which slot: requests that join, leave, are cancelled or put back, over any engine.

The host decides once a step, while the device still works on the step before: a step dispatches the
engine's next call first and then reads what the call before it emitted. So a request's end is known
one call late, and its slot is free from the call after; within a call the engine itself ends it.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import numbers
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eejax.common.errors import require, require_count
from eejax.inference import generate
from eejax.inference.engine import CALL, Engine, shaping_for
from eejax.inference.payoff import Payoff
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import Sampling
from eejax.inference.shaping import Shaping
from eejax.inference.state import Record, Request
from eejax.models.config import ModelConfig


class Token(NamedTuple):
    """One emitted token; exit is the number of the emitting exit, layers those it went through;
    likely: (token, log-probability) of the most likely ones, as many as the request asked for;
    model: the name of the one that it came from, where there are several."""

    id: int
    exit: int
    logprob: float
    confidence: float
    layers: int
    likely: tuple[tuple[int, float], ...] = ()
    model: str = ""


class Output(NamedTuple):
    """What a step brought a request: new tokens, and how it ended: "stop", "length", "context",
    "cancelled", "error" (logits that are not finite; their token is left out), or "" while it goes
    on."""

    number: int
    tokens: tuple[Token, ...]
    finish: str


def check_asked(priority: int, **given: ExitPolicy | Sampling | Shaping | None) -> None:
    """Raises ConfigError for a priority, policy, sampling or shaping that is not of one request."""
    whole = isinstance(priority, numbers.Integral) and not isinstance(priority, bool)
    require(whole, "priority", priority, "must be an integer")
    for name, part in given.items():
        kind = dict(policy=ExitPolicy, sampling=Sampling, shaping=Shaping)[name]
        ok = part is None or isinstance(part, kind)
        require(ok, name, part, f"must be made by {kind.__name__}.make, or None")
        rows = {len(a) for a in jax.tree.leaves(part)} or {1}
        require(rows == {1}, name, f"{sorted(rows)} rows", "must be of one request")


@dataclasses.dataclass
class Job:
    """A request on its way. order: its place in the queue, by priority and arrival."""

    number: int
    prompt: tuple[int, ...]
    request: Request
    limit: int
    order: tuple[int, int]
    finish: str = ""
    tokens: list[Token] = dataclasses.field(default_factory=list)
    slot: int = -1
    calls: int = 0  # under way in which it has a slot
    fresh: bool = True  # no token has come since it got its slot


class Stepped:
    """What answers requests step by step, until it is `idle`."""

    def run(self) -> list[Output]:
        """Steps until all requests are done."""
        outputs = []
        while not self.idle:
            outputs += self.step()
        return outputs


class Scheduler(Stepped):
    """Requests through an engine's slots, by priority and then in the order they came.

    `submit` and `cancel` at any time; `step` again and again. Nothing is lost: every request gets
    each of its tokens in one `Output`, and one that says how it ended. A request that is put back
    (`preempt`) keeps what it has, and goes on from there when its turn comes again, before those
    that came after it; only engines that resume can do so.

    `payoff` turns exits off for as long as they do not pay (`Payoff`). Calls that it times have the
    device alone, and nobody joins between those of a pair, so that they are of the same requests.
    `clock` gives seconds.
    """

    def __init__(
        self,
        engine: Engine,
        config: ModelConfig,
        *,
        steps: int = CALL,
        payoff: Payoff | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """config: the engine's model, with the exits that the engine has."""
        require_count("steps", steps)
        self.engine, self.config, self.steps = engine, config, steps
        self.payoff, self._clock = payoff, clock
        self.state = engine.start()
        require(
            payoff is None or hasattr(self.state, "request"), "payoff", payoff,
            f"must be None with {type(engine).__name__}", "Its requests cannot be paused.",
        )  # fmt: skip
        self._jobs: dict[int, Job] = {}
        self._free = list(range(engine.slots))[::-1]
        self._slots: list[Job | None] = [None] * engine.slots
        self._calls: collections.deque[Call] = collections.deque()
        self._freed: list[int] = []  # slots to be emptied before the next call
        self._number, self._warm = 0, False
        self._queue: list[tuple[tuple[int, int], Job]] = []  # a heap; some may have ended
        self._ended: list[Job] = []  # to be told with this step

    def submit(
        self,
        prompt: Sequence[int],
        limit: int,
        *,
        policy: ExitPolicy | None = None,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (),
        shaping: Shaping | None = None,
        priority: int = 0,
        tokens: Sequence[Token] = (),
    ) -> int:
        """A request for up to `limit` tokens: its number. Those of higher priority come first.

        policy, sampling and shaping are of one row. tokens: that it has already, fewer than
        `limit`: it goes on behind them, as after `preempt`. Raises ConfigError for what the engine
        would not take.
        """
        require_count("limit", limit)
        check_asked(priority, policy=policy, sampling=sampling, shaping=shaping)
        resumes = not tokens or self.engine.resumes
        require(resumes, "tokens", f"{len(tokens)}", "must be none: the engine resumes nothing")
        text = [*prompt, *(t.id for t in tokens)]
        generate.check_prompts([text], self.config, self.engine.context)
        require(len(tokens) < limit, "tokens", f"{len(tokens)}", f"must be fewer than {limit}")
        room = self.engine.context - len(prompt)
        request = Request.make(
            self.config, [len(prompt)], [min(limit, room)],
            ExitPolicy.make(self.config, 1) if policy is None else policy,
            Sampling.make(1) if sampling is None else sampling, stop_tokens,
            shaping=shaping_for(shaping, self.engine, 1),
        )  # fmt: skip
        exits = request.policy.thresholds.shape[1]
        require(
            exits == self.config.n_exits, "policy", f"thresholds of {exits} exits",
            f"must be made of the engine's config, which has {self.config.n_exits}",
        )  # fmt: skip
        number = self._number
        self._number += 1
        prompt = tuple(int(t) for t in prompt)
        job = Job(number, prompt, request, limit, (-priority, number), tokens=list(tokens))
        self._jobs[number] = job
        self._wait(self._jobs[number])
        return number

    def cancel(self, number: int) -> bool:
        """Ends a request wherever it is; whether there was one. Its end is told by a step."""
        job = self._jobs.get(number)
        if job is None or job.finish:
            return False
        self._end(job, "cancelled")
        return True

    def preempt(self, number: int) -> bool:
        """Puts a running request back into the queue; whether it was running."""
        require(
            self.engine.resumes, "engine", type(self.engine).__name__,
            "must be one that resumes requests", "BatchedEngine does.",
        )  # fmt: skip
        job = self._jobs.get(number)
        if job is None or job.slot < 0 or job.finish:
            return False
        self._leave(job)
        if not job.calls:
            self._wait(job)
        return True

    def keep(self, slots: int) -> list[int]:
        """Slots that are to stay where there will be only so many, ascending: of requests that run,
        and then free ones. Puts back the last requests, by their order, where more run."""
        jobs = sorted((job for job in self._slots if job is not None), key=lambda job: job.order)
        for job in jobs[slots:]:
            self.preempt(job.number)
        rows = [job.slot for job in jobs[:slots]]
        free = [i for i, job in enumerate(self._slots) if job is None]
        return sorted([*rows, *free][:slots])

    def exchange(
        self, engine: Engine, state: Any = None, rows: Sequence[int] | None = None
    ) -> None:
        """Goes on with another engine and its state; without one it starts anew, once the state
        that there was is let go.

        rows: for each of its slots the one whose request is in it now, or -1 where nobody's ever
        was; default: the same slots. Raises ConfigError where a request that runs is in none.
        """
        n = engine.slots
        rows = range(self.engine.slots) if rows is None else rows
        require(len(rows) == n, "rows", rows, f"must be {n}, as many as the engine has slots")
        lost = [j.number for i, j in enumerate(self._slots) if j is not None and i not in rows]
        require(not lost, "rows", rows, f"must have the slots of requests {lost}, which run")
        ok = state is not None or not self.running
        require(ok, "state", state, f"must be given while requests {self.running} run")
        self._slots = [None if r < 0 else self._slots[r] for r in rows]
        for slot, job in enumerate(self._slots):
            if job is not None:
                job.slot = slot
        self._freed = [i for i, r in enumerate(rows) if r in self._freed]
        none = [i for i, job in enumerate(self._slots) if job is None and i not in self._freed]
        self._free = none[::-1]
        self.engine, self.state = engine, state
        if state is None:
            self.state = engine.start()

    @property
    def waiting(self) -> list[int]:
        """Numbers of the requests without a slot, in the order in which they will get one."""
        ready = (job for _, job in sorted(self._queue, key=lambda entry: entry[0]))
        return [job.number for job in ready if not job.finish]

    @property
    def running(self) -> list[int]:
        """Numbers of the requests in slots."""
        return [job.number for job in self._slots if job is not None]

    @property
    def unfinished(self) -> int:
        """Requests that have not ended: those in slots and without one, and those that were put
        back while a call that they are in was under way, which are in neither until it is read."""
        return sum(not job.finish for job in self._jobs.values())

    @property
    def held(self) -> int:
        """Tokens of the requests in slots, prompts and texts."""
        return sum(len(job.prompt) + len(job.tokens) for job in self._slots if job is not None)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do and nothing to tell."""
        return not self._jobs and not self._calls

    def step(self) -> list[Output]:
        """Fills free slots, sends the engine on, and tells what the call before brought."""
        times = self.payoff is not None and self.payoff.measuring
        # Prompts, and requests that no exit could leave, say nothing of whether exits pay.
        running = [job for job in self._slots if job is not None]
        times = times and any(_may_leave(job.request.policy) for job in running)
        if not (times and (self.payoff.midway or any(job.fresh for job in running))):
            self._join()
        running = [job for job in self._slots if job is not None]
        if not running:
            return self._collect(0) + self._told()
        if times and not any(job.fresh for job in running):
            outputs = self._collect(0)
            return outputs + self._timed() + self._told()
        self._call(self.payoff is None or self.payoff.exits)
        if self.payoff is not None and not self.payoff.measuring:
            self.payoff.add(0.0, 1)
        # What the call just made brings is read with the next step.
        return self._collect(1) + self._told()

    def _timed(self) -> list[Output]:
        """A call that is told to `payoff`, but for the first one, which compiles."""
        if not self.running:
            return []
        begin = self._clock()
        self._call(self.payoff.next())
        outputs = self._collect(0)
        seconds, emitted = self._clock() - begin, sum(len(o.tokens) for o in outputs)
        self.payoff.add(seconds if self._warm else None, emitted)
        self._warm = True
        return outputs

    def _wait(self, job: Job) -> None:
        heapq.heappush(self._queue, (job.order, job))

    def _leave(self, job: Job) -> None:
        """Takes a request out of its slot, which the next call finds empty."""
        if job.slot >= 0:
            self._slots[job.slot] = None
            self._freed.append(job.slot)
            job.slot = -1

    def _end(self, job: Job, finish: str) -> None:
        self._leave(job)
        job.finish = finish
        self._ended.append(job)

    def _join(self) -> None:
        if self._freed:
            self.state = self.engine.free(self.state, self._freed)
            self._free += self._freed[::-1]
            self._freed = []
        jobs: list[Job] = []
        while self._queue and len(jobs) < len(self._free):
            _, job = heapq.heappop(self._queue)
            jobs += [] if job.finish else [job]
        if not jobs:
            return
        prompts = [[*j.prompt, *(t.id for t in j.tokens)] for j in jobs]
        rows = jax.tree.map(lambda *a: np.concatenate(a), *(j.request for j in jobs))
        made, first = self.engine.prefill(prompts, rows)
        slots = [self._free.pop() for _ in jobs]
        self.state = self.engine.insert(self.state, made, slots)
        for job, slot in zip(jobs, slots, strict=True):
            job.slot, self._slots[slot], job.fresh = slot, job, True
        # The first tokens of engines whose prefill makes them, by row and not by slot.
        self._under_way(first, jobs, False)

    def _call(self, exits: bool) -> None:
        if self.payoff is not None:
            policy = self.state.request.policy
            paused = np.full((self.engine.slots,), not exits)
            self.state = self.state.replace(
                request=self.state.request.replace(policy=policy.replace(paused=paused))
            )
        self.state, record = self.engine.generate(self.state, self.steps)
        self._under_way(record, list(self._slots), True)

    def _under_way(self, record: Record, jobs: list, steps: bool) -> None:
        self._calls.append(Call(record, jobs, steps))
        for job in jobs:
            if job is not None:
                job.calls += 1

    def _collect(self, keep: int) -> list[Output]:
        """Reads what is under way but for the newest `keep` calls."""
        outputs = []
        while self._calls and (not keep or sum(call.steps for call in self._calls) > keep):
            call = self._calls.popleft()
            record = jax.tree.map(np.asarray, call.record)
            for i, job in enumerate(call.jobs):
                if job is None:
                    continue
                job.calls -= 1
                own = lambda a, i=i, steps=call.steps: a[:, i] if steps else a[i : i + 1]
                tokens = self._taken(job, jax.tree.map(own, record))
                if tokens:
                    outputs.append(Output(job.number, tokens, ""))
                # Who was put back cannot go on without what was under way.
                if job.slot < 0 and not job.calls and not job.finish:
                    self._wait(job)
        return outputs

    def _taken(self, job: Job, record: Record) -> tuple[Token, ...]:
        """New tokens of a request, of its columns of a record; ends it with the last."""
        if job.finish:
            return ()
        new, finish = [], ""
        stops = np.asarray(job.request.stops[0])
        most = int(job.request.limit[0])
        for i in np.flatnonzero(record.exit >= 0):
            if not np.isfinite(record.logprob[i]):
                finish = "error"
                break
            new.append(Token(
                int(record.token[i]), int(record.exit[i]), float(record.logprob[i]),
                float(record.confidence[i]), int(record.layers[i]), _likely(job, record, i),
            ))  # fmt: skip
            if new[-1].id in stops[stops >= 0]:
                finish = "stop"
            elif len(job.tokens) + len(new) >= most:
                finish = "length" if most == job.limit else "context"
            if finish:
                break
        job.tokens += new
        job.fresh = job.fresh and not new
        if finish:
            self._end(job, finish)
        return tuple(new)

    def _told(self) -> list[Output]:
        """The ends of requests since the last step."""
        ended, self._ended = self._ended, []
        for job in ended:
            del self._jobs[job.number]
        return [Output(job.number, (), job.finish) for job in ended]


def _likely(job: Job, record: Record, i: int) -> tuple[tuple[int, float], ...]:
    """The most likely tokens of a request's i-th, as many as it asked for and there are."""
    most = 0 if job.request.shaping is None else int(job.request.shaping.likely[0])
    if not most or record.likely is None:
        return ()
    tokens, logprobs = (a[i, :most].tolist() for a in record.likely)
    return tuple((t, p) for t, p in zip(tokens, logprobs, strict=True) if t >= 0)


def _may_leave(policy: ExitPolicy) -> bool:
    """Whether exits could make a difference to a request."""
    fires = np.asarray(policy.active) & (np.asarray(policy.thresholds) < 1)
    return bool(fires.any() or (np.asarray(policy.drafts) > 0).any())


class Call(NamedTuple):
    """A record under way, the requests its columns are of, and whether it is of steps, or of
    prompts."""

    record: Record
    jobs: list[Job | None]
    steps: bool
