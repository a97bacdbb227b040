"""Several models on one device: a controller says which serves, and how much of it is there.

What the controller wants is made so between two steps: segments are moved while requests run, a
model is loaded beside the one that serves where the budget holds both, and requests of one that has
to go first are taken along, with the text that they have.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eejax.common.errors import require, require_count
from eejax.common.trees import Tree
from eejax.inference.batched_state import BatchOptions
from eejax.inference.engine import CALL
from eejax.inference.generate import check_prompts
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import Sampling
from eejax.inference.scheduler import Output, Stepped, Token
from eejax.inference.shaping import Shaping
from eejax.models.config import ModelConfig
from eejax.serving.controller import Choice, Controller
from eejax.serving.objectives import Telemetry


@dataclasses.dataclass(frozen=True)
class Member:
    """A model of a fleet. rules: of `ExitPolicy.make`, by which its tokens leave."""

    params: Tree = dataclasses.field(repr=False)
    config: ModelConfig
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: BatchOptions = BatchOptions()


@dataclasses.dataclass
class _Job:
    """A request on its way. tokens: that it has; model, own: who serves it, and its number there;
    begin, first: when it was given to a model, and when its first token came."""

    number: int
    prompt: tuple[int, ...]
    limit: int
    asked: dict[str, Any]
    order: tuple[int, int]
    tokens: list[Token] = dataclasses.field(default_factory=list)
    model: str = ""
    own: int = -1
    began: float = 0.0
    first: float = 0.0
    moved: bool = False


class Fleet(Stepped):
    """Requests through whichever model serves; the interface of a `Scheduler`.

    members: by name, of one vocabulary; make_controller(): of the same names. `slots` are those of
    each model. Times are `clock`'s.
    """

    def __init__(
        self, members: Mapping[str, Member], controller: Controller, *, slots: int,
        context: int | None = None, steps: int = CALL,
        clock: Callable[[], float] = time.perf_counter,
    ):  # fmt: skip
        vocabularies = {member.config.vocab_size for member in members.values()}
        require(
            len(vocabularies) == 1, "members", sorted(vocabularies),
            "must have vocabularies of one size", "A text goes from one model to another as ids.",
        )  # fmt: skip
        require(
            {*members} == {*controller.profiles}, "members", sorted(members),
            f"must be those of the controller, {sorted(controller.profiles)}",
        )  # fmt: skip
        self.members, self.controller, self.slots = dict(members), controller, slots
        self.parts: dict[str, PartialModel] = {}
        self.taken_along = 0  # requests that went on in another model
        self._making = dict(slots=slots, context=context, steps=steps)
        self._clock, self._number = clock, 0
        self._queue: list[_Job] = []  # by priority, then as they came
        self._jobs: dict[int, _Job] = {}
        self._ended: list[Output] = []  # to be told with the next step
        self._by_own: dict[tuple[str, int], _Job] = {}

    def submit(
        self, prompt: Sequence[int], limit: int, *, sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (), shaping: Shaping | None = None, priority: int = 0,
    ) -> int:  # fmt: skip
        """A request for up to `limit` tokens: its number. Those of higher priority come first.
        Raises ConfigError for what no model would take."""
        require_count("limit", limit)
        context = self.context
        for member in self.members.values():
            check_prompts([prompt], member.config, context)
        self._number += 1
        asked = dict(sampling=sampling, stop_tokens=tuple(stop_tokens), shaping=shaping)
        order = (-priority, self._number)
        job = _Job(self._number, tuple(prompt), limit, asked, order)
        self._jobs[job.number] = job
        self._wait(job)
        return job.number

    @property
    def context(self) -> int:
        """Most tokens of a request."""
        least = min(member.config.context_length for member in self.members.values())
        return self._making["context"] or least

    @property
    def running(self) -> list[int]:
        """Numbers of the requests that models have."""
        return [job.number for job in self._jobs.values() if job.model]

    @property
    def waiting(self) -> list[int]:
        """Numbers of the others, in the order in which they will be given to one."""
        return [job.number for job in self._queue]

    @property
    def held(self) -> int:
        """Tokens of the requests in slots, prompts and texts."""
        return sum(part.scheduler.held for part in self.parts.values())

    def _wait(self, job: _Job) -> None:
        bisect.insort(self._queue, job, key=lambda job: job.order)

    def cancel(self, number: int) -> bool:
        """Ends a request wherever it is; whether there was one. Its end is told by a step."""
        job = self._jobs.get(number)
        if job is None:
            return False
        if job.model:
            return self.parts[job.model].scheduler.cancel(job.own)
        self._queue.remove(job)
        del self._jobs[number]
        self._ended.append(Output(number, (), "cancelled"))
        return True

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._ended

    @property
    def bytes(self) -> int:
        """Of the weights that are loaded, or on their way."""
        return sum(part.bytes for part in self.parts.values())

    def step(self) -> list[Output]:
        self._arrange()
        self._give()
        outputs, self._ended = self._ended, []
        for name in [*self.parts]:
            part = self.parts[name]
            for own, tokens, finish in part.step():
                job = self._by_own.get((name, own))
                if job is not None:  # else it was taken along to another model
                    outputs += self._told(name, part, job, tokens, finish)
        return outputs

    def _arrange(self) -> None:
        """Towards what the controller wants."""
        wanted, current = self.controller.wanted, self.controller.current
        part = self.parts.get(wanted.model)
        if part is None:
            if not self.controller.beside:
                self._clear(keep=None)
            self._load(wanted)
        elif part.coming < wanted.depth:
            part.grow(wanted.depth)
        elif part.depth > wanted.depth:
            part.shrink(wanted.depth)
        if self.parts[wanted.model].depth == wanted.depth and current != wanted:
            self.controller.loaded(wanted)
        self._clear(keep=self.controller.wanted.model, empty=True)

    def _load(self, choice: Choice) -> None:
        member = self.members[choice.model]
        self.parts[choice.model] = PartialModel(
            member.params, member.config, member.options, depth=choice.depth, **self._making
        )

    def _clear(self, keep: str | None, empty: bool = False) -> None:
        """Frees models but one; `empty`: only those that have nothing left to do."""
        serving = self.controller.current
        for name in [*self.parts]:
            busy = not self.parts[name].scheduler.idle
            serves = empty and serving is not None and serving.model == name
            if name == keep or serves or (empty and busy):
                continue
            for job in [j for j in self._jobs.values() if j.model == name]:
                del self._by_own[name, job.own]
                self.controller.dropped(name)
                job.model, job.moved = "", True
                self._wait(job)
                self.taken_along += 1
            del self.parts[name]

    def _give(self) -> None:
        """Gives requests to the model that serves, as many as it has slots."""
        current = self.controller.current
        if current is None or current.model not in self.parts:
            return
        scheduler = self.parts[current.model].scheduler
        while self._queue and len(scheduler.running) + len(scheduler.waiting) < self.slots:
            job, model = self._queue.pop(0), self.controller.choose().model
            member = self.members[model]
            job.model, job.began, job.first = model, self._clock(), 0.0
            job.own = scheduler.submit(
                job.prompt, job.limit, tokens=job.tokens, **job.asked,
                policy=ExitPolicy.make(member.config, 1, **member.rules),
            )  # fmt: skip
            self._by_own[model, job.own] = job

    def _told(self, model, part, job, tokens, finish) -> list[Output]:
        now = self._clock()
        if tokens:
            job.first = job.first or now
            job.tokens += tokens
            below = [self._below(model, part.depth, t) for t in tokens]
            self.controller.tokens(model, [t.exit for t in tokens], below)
        if not finish:
            return [Output(job.number, tokens, "")]
        del self._by_own[model, job.own], self._jobs[job.number]
        count = len(job.tokens)
        if finish == "cancelled" or job.moved or not count:
            self.controller.dropped(model)
        else:
            self.controller.answered(model, self._telemetry(model, part, job, count, now))
        return [Output(job.number, tokens, finish)]

    def _below(self, model: str, depth: int, token: Token) -> bool:
        """Whether a token left below its threshold, by the last exit that is loaded."""
        config = self.members[model].config
        if token.exit != depth - 1 or token.exit >= config.n_exits:
            return False
        threshold = np.broadcast_to(self.members[model].rules.get("threshold", 1.0), config.n_exits)
        return token.confidence < threshold[token.exit]

    def _telemetry(self, model, part, job, count: int, now: float) -> Telemetry:
        """Of a request; accuracy and energy are those of the profile, as nothing here measures
        them."""
        seconds = max(now - job.began, 1e-9)
        each = (now - job.first) / max(count - 1, 1)
        profile = self.controller.profiles[model]
        energy = float(np.mean([sum(profile.energy[: t.exit + 1]) for t in job.tokens]))
        return Telemetry(
            count / seconds * max(len(part.scheduler.running), 1), job.first - job.began, each,
            profile.sure[part.depth - 1], float(part.bytes), energy,
        )  # fmt: skip
