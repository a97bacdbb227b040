"""Request scheduling over the slots of an engine: join, leave, abort and preempt.

The host decides once a step, while the device still works on the step before: a step dispatches the
engine's next call, then reads what the previous call emitted. The scheduler therefore learns one
call late that a request has ended, and its slot is free from the next call on. The engine itself
stops such a request within the call.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from eejax.common.errors import require, require_count
from eejax.inference.payoff import Payoff
from eejax.inference.request import (
    EngineRequest,
    FinishReason,
    RequestOutput,
    Token,
    check_prompts,
    require_new_id,
)
from eejax.inference.sampling import SamplingParams
from eejax.inference.slot_engine import STEPS_PER_CALL, Engine, logits_params_for, policy_for
from eejax.inference.state import MAX_STOP_TOKENS, DecodeRecord, RequestRows


@dataclasses.dataclass
class ScheduledRequest:
    """A request in the scheduler.

    Attributes:
      request: the request as it was added.
      row: the same as arrays of one row, as engines take it.
      order: its place in the queue, by priority and arrival.
      finish: why it ended, None while it runs.
      tokens: its tokens after the prompt.
      slot: its slot, -1 without one.
      calls: calls in flight in which it has a slot.
      fresh: whether no token has come since it got its slot.
    """

    request: EngineRequest
    row: RequestRows
    order: tuple[int, int]
    finish: FinishReason | None = None
    tokens: list[Token] = dataclasses.field(default_factory=list)
    slot: int = -1
    calls: int = 0
    fresh: bool = True

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def length(self) -> int:
        """Number of its tokens, including the prompt's."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def token_ids(self) -> list[int]:
        """Token ids of its prompt and of the tokens after it."""
        return [*self.request.prompt, *(token.id for token in self.tokens)]


E = TypeVar("E", bound=Engine)


def check_stop_tokens(ids: Sequence[int]) -> None:
    """Check that a slot has room for a request's stop tokens.

    Raises:
      ConfigError: for more than `MAX_STOP_TOKENS`.
    """
    allowed = f"must be at most {MAX_STOP_TOKENS} of them"
    require(len(ids) <= MAX_STOP_TOKENS, "stop_token_ids", ids, allowed)


class StepLoop(abc.ABC):
    """Base class of schedulers that serve requests step by step until they are `idle`."""

    @property
    @abc.abstractmethod
    def idle(self) -> bool:
        """True if no request is left, and no output is unread."""

    @abc.abstractmethod
    def step(self) -> list[RequestOutput]:
        """Run a step of all requests."""

    def run(self) -> list[RequestOutput]:
        """Step until all requests are finished."""
        outputs = []
        while not self.idle:
            outputs += self.step()
        return outputs


class Scheduler(StepLoop, Generic[E]):
    """Scheduler of requests in an engine's slots, by priority and then in order of arrival.

    `add_request` and `abort` may be called at any time; `step` is called again and again. Every
    request gets each of its tokens in exactly one `RequestOutput`, and one output that says how it
    finished. A preempted request keeps its tokens and continues when its turn comes again, before
    requests that arrived after it; only engines that can resume support this.

    `payoff` turns exits off while they do not pay (`Payoff`). A timed call has the device to
    itself, and no request joins between the two calls of a pair, so that both run the same
    requests. `clock` returns seconds.
    """

    state: Any

    def __init__(
        self,
        engine: E,
        *,
        steps: int = STEPS_PER_CALL,
        payoff: Payoff | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Start the engine."""
        require_count("steps", steps)
        self.engine, self.steps = engine, steps
        self.payoff, self._clock = payoff, clock
        self.state = engine.start()
        require(
            payoff is None or hasattr(self.state, "request"),
            "payoff",
            payoff,
            f"must be None with {type(engine).__name__}",
            "Its exits cannot be turned off while it runs.",
        )
        self._jobs: dict[str, ScheduledRequest] = {}
        self._free = list(range(engine.slots))[::-1]
        self._slots: list[ScheduledRequest | None] = [None] * engine.slots
        self._calls: collections.deque[EngineCall] = collections.deque()
        self._freed: list[int] = []  # slots to free before the next call
        self._arrivals, self._warm = itertools.count(), False
        self._joined = False  # requests joined, and no pair of timed calls has ended since
        self._queue: list[
            tuple[tuple[int, int], ScheduledRequest]
        ] = []  # a heap; some may have ended
        self._ended: list[ScheduledRequest] = []  # to report with this step

    def add_request(self, request: EngineRequest, tokens: Sequence[Token] = ()) -> None:
        """Queue a request.

        Args:
          tokens: tokens that it already has, fewer than its `max_tokens`; it continues after them,
            as after `preempt`.

        Raises:
          ConfigError: for a request that the engine does not accept.
        """
        config = self.engine.config
        id_, most, prompt = request.request_id, request.max_tokens, request.prompt
        require_new_id(id_, self._jobs)
        allowed = "must be None: there is one model, and nothing to choose"
        require(request.objective is None, "objective", request.objective, allowed)
        resumes = not tokens or self.engine.resumes
        require(resumes, "tokens", f"{len(tokens)}", "must be none: the engine cannot resume")
        text = [*prompt, *(t.id for t in tokens)]
        check_prompts([text], config, self.engine.context)
        require(len(tokens) < most, "tokens", f"{len(tokens)}", f"must be fewer than {most}")
        check_stop_tokens(request.stop_token_ids)
        row = RequestRows.make(
            config,
            [len(prompt)],
            [min(most, self.engine.context - len(prompt))],
            policy_for(request.policy, self.engine),
            request.sampling or SamplingParams.make(1),
            request.stop_token_ids,
            logits_params=logits_params_for(request.logits_params, self.engine, 1),
        )
        order = (-request.priority, next(self._arrivals))
        self._jobs[id_] = ScheduledRequest(request, row, order, tokens=list(tokens))
        self._enqueue(self._jobs[id_])

    def abort(self, request_id: str) -> bool:
        """End a request and return whether there was one.

        A later step reports its end, and from then on its id is free.
        """
        job = self._jobs.get(request_id)
        if job is None or job.finish:
            return False
        self._end(job, FinishReason.ABORTED)
        return True

    def preempt(self, request_id: str) -> bool:
        """Move a running request back to the queue, and return whether it was running."""
        require(
            self.engine.resumes,
            "engine",
            type(self.engine).__name__,
            "must be one that resumes requests",
            "EarlyExitEngine does.",
        )
        job = self._jobs.get(request_id)
        if job is None or job.slot < 0 or job.finish:
            return False
        self._vacate(job)
        if not job.calls:
            self._enqueue(job)
        return True

    def preempt_all(self) -> list[RequestOutput]:
        """Preempt all running requests, and return what calls in flight emitted.

        All of them are in the queue afterwards, before requests that arrived later.
        """
        self.retain_slots(0)
        return self._collect(0) + self._take_ended()

    def retain_slots(self, slots: int) -> list[int]:
        """Choose which `slots` slots to keep, in ascending order.

        Slots of running requests are kept first, then free ones. If more requests run, the last
        ones in order are preempted.
        """
        jobs = sorted((job for job in self._slots if job is not None), key=lambda job: job.order)
        for job in jobs[slots:]:
            self.preempt(job.request_id)
        rows = [job.slot for job in jobs[:slots]]
        free = [i for i, job in enumerate(self._slots) if job is None]
        return sorted([*rows, *free][:slots])

    def replace_engine(
        self, engine: E, state: Any = None, rows: Sequence[int] | None = None
    ) -> None:
        """Continue with another engine and its state.

        Without a state, the engine starts anew after the old state is freed.

        rows: for each slot of the new engine, the old slot whose request it holds, or -1 for none;
        by default the same slots. Raises ConfigError if a running request would have no slot, and
        for a smaller context, for which limits of requests were not made.
        """
        n, context = engine.slots, self.engine.context
        allowed = f"must be at least {context}, that of the engine before"
        require(engine.context >= context, "engine.context", engine.context, allowed)
        rows = range(self.engine.slots) if rows is None else rows
        require(len(rows) == n, "rows", rows, f"must be {n}, as many as the engine has slots")
        lost = [j.request_id for i, j in enumerate(self._slots) if j is not None and i not in rows]
        require(not lost, "rows", rows, f"must have the slots of the running requests {lost}")
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
    def waiting(self) -> list[str]:
        """Ids of the requests without a slot, in the order in which they will get one."""
        ready = (job for _, job in sorted(self._queue, key=lambda entry: entry[0]))
        return [job.request_id for job in ready if not job.finish]

    @property
    def running(self) -> list[str]:
        """Ids of the requests in slots."""
        return [job.request_id for job in self._slots if job is not None]

    @property
    def unfinished(self) -> int:
        """Number of requests that have not finished.

        It counts requests with and without a slot, and preempted ones whose last call is still
        running, which are neither in a slot nor queued until it is read.
        """
        return sum(not job.finish for job in self._jobs.values())

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens of the requests in slots, prompts included."""
        return sum(job.length for job in self._slots if job is not None)

    @property
    def idle(self) -> bool:
        """True if no request is left, and no output is unread."""
        return not self._jobs and not self._calls

    def step(self) -> list[RequestOutput]:
        """Fill free slots, dispatch the next call, and return the previous one's outputs."""
        payoff = self.payoff
        times = self._may_time()
        # Where requests join all the time, no call would be without a prompt.
        waits = payoff is not None and (payoff.midway or self._joined)
        fresh = any(job is not None and job.fresh for job in self._slots)
        if not (times and (waits or fresh)):
            self._fill_slots()
        running = [job for job in self._slots if job is not None]
        if not running:
            return self._collect(0) + self._take_ended()
        if times and not any(job.fresh for job in running):
            outputs = self._collect(0)
            assert payoff is not None
            return outputs + self._step_timed(payoff) + self._take_ended()
        self._dispatch(payoff is None or payoff.exits)
        if payoff is not None and not payoff.measuring:
            payoff.add(0.0 if self._may_leave() else None, 1)
        # The outputs of this call are read in the next step, or at once if that one may be timed.
        return self._collect(0 if self._may_time() else 1) + self._take_ended()

    def _may_time(self) -> bool:
        """Return whether the next call may show if exits pay: one of its requests can leave."""
        return self.payoff is not None and self.payoff.measuring and self._may_leave()

    def _may_leave(self) -> bool:
        """Return whether a running request can leave early."""
        return any(job is not None and job.row.policy.can_leave.any() for job in self._slots)

    def _step_timed(self, payoff: Payoff) -> list[RequestOutput]:
        """Run a call and report its time to `payoff`, unless it compiled."""
        if not self.running:
            return []
        begin = self._clock()
        self._dispatch(payoff.next())
        outputs = self._collect(0)
        seconds, emitted = self._clock() - begin, sum(len(o.tokens) for o in outputs)
        payoff.add(seconds if self._warm else None, emitted)
        self._warm, self._joined = True, self._joined and payoff.midway
        return outputs

    def _enqueue(self, job: ScheduledRequest) -> None:
        heapq.heappush(self._queue, (job.order, job))

    def _vacate(self, job: ScheduledRequest) -> None:
        """Take a request out of its slot, which the next call finds empty."""
        if job.slot >= 0:
            self._slots[job.slot] = None
            self._freed.append(job.slot)
            job.slot = -1

    def _end(self, job: ScheduledRequest, finish: FinishReason) -> None:
        self._vacate(job)
        job.finish = finish
        self._ended.append(job)

    def _fill_slots(self) -> None:
        if self._freed:
            self.state = self.engine.free(self.state, self._freed)
            self._free += self._freed[::-1]
            self._freed = []
        jobs: list[ScheduledRequest] = []
        while self._queue and len(jobs) < len(self._free):
            _, job = heapq.heappop(self._queue)
            jobs += [] if job.finish else [job]
        if not jobs:
            return
        prompts = [j.token_ids for j in jobs]
        rows = jax.tree.map(lambda *a: np.concatenate(a), *(j.row for j in jobs))
        made, first = self.engine.prefill(prompts, rows)
        slots = [self._free.pop() for _ in jobs]
        self.state = self.engine.insert(self.state, made, slots)
        for job, slot in zip(jobs, slots, strict=True):
            job.slot, self._slots[slot], job.fresh = slot, job, True
        self._joined = True
        # Some engines emit first tokens in `prefill`, by row and not by slot.
        self._track(first, jobs, False)

    def _dispatch(self, exits: bool) -> None:
        if self.payoff is not None:
            policy = self.state.request.policy
            paused = np.full((self.engine.slots,), not exits)
            self.state = self.state.replace(
                request=self.state.request.replace(policy=policy.replace(paused=paused))
            )
        self.state, record = self.engine.generate(self.state, self.steps)
        self._track(record, list(self._slots), True)

    def _track(self, record: DecodeRecord, jobs: list, steps: bool) -> None:
        self._calls.append(EngineCall(record, jobs, steps))
        for job in jobs:
            if job is not None:
                job.calls += 1

    def _collect(self, keep: int) -> list[RequestOutput]:
        """Read all running calls but the newest `keep`."""
        outputs = []
        while self._calls and (not keep or sum(call.steps for call in self._calls) > keep):
            call = self._calls.popleft()
            record = jax.tree.map(np.asarray, call.record)
            for i, job in enumerate(call.jobs):
                if job is None:
                    continue
                job.calls -= 1

                def own(a, i=i, steps=call.steps):
                    return a[:, i] if steps else a[i : i + 1]

                tokens = self._take_tokens(job, jax.tree.map(own, record))
                if tokens:
                    outputs.append(RequestOutput(job.request_id, tokens))
                # A preempted request can continue once its calls in flight are read.
                if job.slot < 0 and not job.calls and not job.finish:
                    self._enqueue(job)
        return outputs

    def _take_tokens(self, job: ScheduledRequest, record: DecodeRecord) -> tuple[Token, ...]:
        """Return a request's new tokens of a record, and end it with its last one."""
        if job.finish:
            return ()
        new, finish = [], None
        stop_token_ids = np.asarray(job.row.stop_token_ids[0])
        most = int(job.row.limit[0])
        for i in np.flatnonzero(record.exit >= 0).tolist():
            if not np.isfinite(record.logprob[i]):
                finish = FinishReason.ERROR
                break
            new.append(
                Token(
                    int(record.token[i]),
                    int(record.exit[i]),
                    float(record.logprob[i]),
                    float(record.confidence[i]),
                    self.engine.config.exit_boundaries[int(record.exit[i])],
                    _top_logprobs(job, record, i),
                )
            )
            if new[-1].id in stop_token_ids[stop_token_ids >= 0]:
                finish = FinishReason.STOP
            elif len(job.tokens) + len(new) >= most:
                whole = most == job.request.max_tokens
                finish = FinishReason.LENGTH if whole else FinishReason.CONTEXT
            if finish:
                break
        job.tokens += new
        job.fresh = job.fresh and not new
        if finish:
            self._end(job, finish)
        return tuple(new)

    def _take_ended(self) -> list[RequestOutput]:
        """Return the ends of requests since the last step."""
        ended, self._ended = self._ended, []
        for job in ended:
            del self._jobs[job.request_id]
        return [RequestOutput(job.request_id, (), job.finish) for job in ended]


def _top_logprobs(
    job: ScheduledRequest, record: DecodeRecord, i: int
) -> tuple[tuple[int, float], ...]:
    """Return the most likely tokens at a request's i-th, as many as it asked for and exist."""
    most = 0 if job.row.logits_params is None else int(job.row.logits_params.top_logprobs[0])
    if not most or record.top_logprobs is None:
        return ()
    tokens, logprobs = (a[i, :most].tolist() for a in record.top_logprobs)
    return tuple((t, p) for t, p in zip(tokens, logprobs, strict=True) if t >= 0)


class EngineCall(NamedTuple):
    """A dispatched call: its record, each column's request, and whether it ran steps."""

    record: DecodeRecord
    jobs: list[ScheduledRequest | None]
    steps: bool


def compile_joins(scheduler: Scheduler, slots: int) -> None:
    """Compile the programs that fill one, two, four and so on up to all slots at once."""
    for n in sorted({slots, *(2**i for i in range(slots.bit_length()))}):
        for i in range(n):
            scheduler.add_request(EngineRequest(f"warm-up-{i}", (0,), 2))
        scheduler.run()
