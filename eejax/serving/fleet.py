"""Several models on one device: a controller says which serves, and how much of it is there.

What the controller wants is made so between two steps: segments are moved while requests run, a
model is loaded beside the one that serves where the budget holds both, and requests of one that has
to go first are taken along, with the text that they have.
"""

from __future__ import annotations

import bisect
import dataclasses
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eejax.common.errors import require, require_count, require_one_of
from eejax.common.trees import Tree
from eejax.inference.batched_state import BatchOptions
from eejax.inference.engine import CALL
from eejax.inference.generate import check_prompts
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import Sampling
from eejax.inference.scheduler import Output, Stepped, Token, check_asked
from eejax.inference.shaping import Shaping
from eejax.inference.state import Request
from eejax.models.config import ModelConfig
from eejax.serving.audits import Audit, Auditor
from eejax.serving.choices import Choice, Given
from eejax.serving.controller import Controller
from eejax.serving.energy import Meter
from eejax.serving.loading import Loading
from eejax.serving.messages import FleetReport
from eejax.serving.objectives import NAMED, Telemetry

BEHIND = 32  # answers that may wait to be looked at again
OWN = tuple(name for name in NAMED if name != "goodput")  # objectives that a request may name


@dataclasses.dataclass(frozen=True)
class Member:
    """A model of a fleet. rules: of `ExitPolicy.make`, by which its tokens leave."""

    params: Tree = dataclasses.field(repr=False)
    config: ModelConfig
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: BatchOptions = BatchOptions()


class Change(NamedTuple):
    """What was done to models: kind is "load", "grow", "shrink" or "free", of which `depth` exits
    are there then; seconds from when it was begun to when that was used, or done, in which a model
    that grows goes on. rebuild: of them, those in which keys and values were filled in and nothing
    else ran; tokens: of the requests in it, whose keys and values that, or running them anew, is
    of."""

    time: float
    kind: str
    choice: Choice
    seconds: float
    rebuild: float = 0.0
    tokens: int = 0


@dataclasses.dataclass
class _Job:
    """A request on its way. tokens: that it has; model, own: who serves it, and its number there;
    begin, first: when it was given to a model, and when its first token came."""

    number: int
    prompt: tuple[int, ...]
    limit: int
    asked: dict[str, Any]
    order: tuple[int, int]
    objective: str | None = None
    tokens: list[Token] = dataclasses.field(default_factory=list)
    model: str = ""
    own: int = -1
    began: float = 0.0
    first: float = 0.0
    moved: bool = False
    cancelled: bool = False
    evaluated: bool = False
    strictness: tuple[int, int] = (0, 0)
    energy: tuple[float, int] = (0.0, 0)  # joules and tokens of the fleet when it was given
    telemetry: Telemetry | None = None
    thresholds: Any = None  # that its tokens leave by, [exits]


class Fleet(Stepped):
    """Requests through whichever model serves; the interface of a `Scheduler`.

    members: by name, of one vocabulary; controller: of the same names. slots: requests that each
    model serves at a time, or how many it serves at each of its depths (`capacity.slots`). A model
    stays loaded for as long as the controller's budget holds it. audits: share of the answers that
    are looked at again by the whole of their model. Times are `clock`'s; meter: what energy is
    measured by, without which it is what the profiles say.
    """

    def __init__(
        self, members: Mapping[str, Member], controller: Controller, *,
        slots: int | Mapping[str, Sequence[int]], context: int | None = None, steps: int = CALL,
        audits: float = 0.1, seed: int = 0, meter: Meter | None = None,
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
        for name, member in members.items():
            gate = member.rules.get("gate", "max_probability")
            require(
                gate == "max_probability", f"{name}.gate", gate, "must be max_probability",
                "The last exit that is loaded knows of a token only how probable it is.",
            )  # fmt: skip
        require(0 <= audits <= 1, "audits", audits, "must lie in [0, 1]")
        self.members, self.controller = dict(members), controller
        self.parts: dict[str, PartialModel] = {}
        self.audits: dict[tuple[str, int, int], Audit] = {}  # by model, depth and strictness
        self.audited = dict.fromkeys(members, 0)  # tokens that were looked at again
        self.taken_along = 0  # requests that went on in another model
        self.changes: list[Change] = []
        self._growing: dict[str, float] = {}  # since when
        self._loading: Loading | None = None
        self._slots = {}
        for name, member in members.items():
            n = member.config.n_exits + 1
            mapped = isinstance(slots, Mapping)
            own = slots.get(name, ()) if mapped else (slots,) * n
            whole = all(isinstance(k, numbers.Integral) and k > 0 for k in own)
            ok = whole and len(own) == n and [*own] == sorted(own, reverse=True)
            told = f"must be {n} whole numbers above 0, of which none rises"
            require(ok, f"slots[{name!r}]" if mapped else "slots", own, told, "Give more memory.")
            self._slots[name] = tuple(int(k) for k in own)
        # A text may have to go on in any of them.
        least = min(member.config.context_length for member in members.values())
        self._making = dict(context=least if context is None else context, steps=steps)
        self._clock, self._number, self._meter = clock, 0, meter
        self._queue: list[_Job] = []  # by priority, then as they came
        self._next: Given | None = None  # where the first of them goes
        self._jobs: dict[int, _Job] = {}
        self._ended: list[Output] = []  # to be told with the next step
        self._by_own: dict[tuple[str, int], _Job] = {}
        self._auditors: dict[str, Auditor] = {}
        self._sampled, self._share = np.random.default_rng(seed), audits
        self._to_audit: list[_Job] = []
        self._emitted = 0

    def submit(
        self, prompt: Sequence[int], limit: int, *, sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (), shaping: Shaping | None = None, priority: int = 0,
        objective: str | None = None,
    ) -> int:  # fmt: skip
        """A request for up to `limit` tokens: its number. Those of higher priority come first.

        objective: the name of one that is the request's own: of the models that are loaded the best
        for it is taken, and nothing is loaded for it; with "accuracy" no exit is taken but the
        last. Raises ConfigError for what no model would take.
        """
        require_count("limit", limit)
        check_asked(priority, sampling=sampling, shaping=shaping)
        if objective is not None:
            require_one_of("objective", objective, OWN)
        context = self.context
        for member in self.members.values():
            check_prompts([prompt], member.config, context)
            Request.make(
                member.config, [len(prompt)], [limit], ExitPolicy.make(member.config, 1),
                Sampling.make(1) if sampling is None else sampling, stop_tokens,
            )  # fmt: skip
        self._number += 1
        asked = dict(sampling=sampling, stop_tokens=tuple(stop_tokens), shaping=shaping)
        order = (-priority, self._number)
        job = _Job(self._number, tuple(prompt), limit, asked, order, objective)
        self._jobs[job.number] = job
        self._wait(job)
        return job.number

    @property
    def slots(self) -> int:
        """Requests that the model which serves, or will first, has room for."""
        model, depth = self.controller.current or self.controller.wanted
        return self._slots[model][depth - 1]

    @property
    def context(self) -> int:
        """Most tokens of a request."""
        return self._making["context"]

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
            job.cancelled = True  # and if the model has to go before that is told
            return self.parts[job.model].scheduler.cancel(job.own)
        self._queue.remove(job)
        self._cancelled(job)
        return True

    def _cancelled(self, job: _Job) -> None:
        del self._jobs[job.number]
        self._ended.append(Output(job.number, (), "cancelled"))

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._ended and not self._to_audit

    @property
    def _depths(self) -> dict[str, int]:
        return {name: part.depth for name, part in self.parts.items()}

    def audit(self, choice: Choice) -> Audit:
        """What is known of a model's answers at a depth, by the thresholds that it has now."""
        key = (*choice, self.controller.level(choice.model))
        return self.audits.setdefault(key, Audit())

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
            if part.came:
                begin = self._clock()
                part.exchange()
                jax.block_until_ready(part.scheduler.state.cache)
                self._changed("grow", name, self._growing.pop(name), self._clock() - begin)
            for own, tokens, finish in part.step():
                job = self._by_own.get((name, own))
                if job is not None:  # else it was taken along to another model
                    outputs += self._told(name, part, job, tokens, finish)
        if self._to_audit:
            self._audited(self._to_audit.pop(0))
        return outputs

    def _arrange(self) -> None:
        """Towards what the controller wants."""
        wanted, current = self.controller.wanted, self.controller.current
        if self._loading is not None and self._loading.choice.model != wanted.model:
            self._arrived()  # it has its place, and is freed again if that is needed
        if wanted.model not in self.parts:
            self._load(wanted)
        part = self.parts.get(wanted.model)
        if part is None:
            return
        if part.coming < wanted.depth:
            self._make_room(wanted)
            part.grow(wanted.depth)
            self._growing.setdefault(wanted.model, self._clock())
        elif part.depth > wanted.depth:
            begin = self._clock()
            part.shrink(wanted.depth)
            self._growing.pop(wanted.model, None)
            self._changed("shrink", wanted.model, begin)
        if part.depth == wanted.depth and current != wanted:
            self.controller.loaded(wanted)

    def _load(self, wanted: Choice) -> None:
        """A model that is not there: in a thread, while others go on."""
        if self._loading is None:
            self._make_room(wanted)
            self._loading = Loading(self._clock(), wanted, self._made)
        if self._loading.done() or all(part.idle for part in self.parts.values()):
            self._arrived()

    def _arrived(self) -> None:
        """Waits for a model that is on its way."""
        loading, self._loading = self._loading, None
        self.parts[loading.choice.model] = loading.result()
        self._changed("load", loading.choice.model, loading.begin)

    def _made(self, choice: Choice) -> PartialModel:
        member = self.members[choice.model]
        part = PartialModel(
            member.params, member.config, member.options, depth=choice.depth,
            slots=self._slots[choice.model], **self._making,
        )  # fmt: skip
        jax.block_until_ready((part.engine.weights, part.scheduler.state))
        return part

    def _changed(self, kind: str, model: str, begin: float, rebuild: float = 0.0) -> None:
        now, depth = self._clock(), self.parts[model].depth if model in self.parts else 0
        held = self.parts[model].scheduler.held if depth else 0
        self.changes.append(Change(now, kind, Choice(model, depth), now - begin, rebuild, held))

    def _make_room(self, wanted: Choice) -> None:
        """Frees models until the budget holds what is wanted: first those with nothing to do, last
        the one that serves, whose requests go on elsewhere with the text that they have."""
        profiles, budget = self.controller.profiles, self.controller.options.budget
        serving = self.controller.current
        last = lambda name: (not self.parts[name].idle, serving and name == serving.model)
        for name in sorted(self.parts.keys() - {wanted.model}, key=last):
            others = self.parts.keys() - {wanted.model}
            held = sum(profiles[other].size(self.parts[other].coming) for other in others)
            if held + profiles[wanted.model].size(wanted.depth) <= budget:
                return
            self._free(name)

    def _free(self, name: str) -> None:
        for job in [j for j in self._jobs.values() if j.model == name]:
            del self._by_own[name, job.own]
            if job.evaluated:
                self.controller.dropped(name)
            job.model, job.moved, job.evaluated = "", True, False
            if job.cancelled:
                self._cancelled(job)
                continue
            self._wait(job)
            self.taken_along += 1
        if self._next is not None and self._next.choice.model == name:
            if self._next.evaluated:
                self.controller.dropped(name)
            self._next = None
        del self.parts[name]
        self._growing.pop(name, None)
        self._changed("free", name, self._clock())

    def _give(self) -> None:
        """Gives requests to models that have slots for them, in their order: to the one that
        serves, or is evaluated, and those with an objective of their own to the best that is
        there."""
        self.controller.holds(self._depths, self.held)
        current = self.controller.current
        if current is None or current.model not in self.parts:
            return
        full, fresh = False, sum(not job.moved for job in self._queue if job.objective is None)
        for job in [*self._queue]:
            own = None
            if job.objective is not None:
                own = self.controller.best(NAMED[job.objective])
            if own is not None:
                if self._room(own):
                    self._place(job, Given(Choice(own, self.parts[own].depth), False))
                continue
            if full:
                continue
            if self._next is None:
                self._next = self.controller.choose()
            if self._next.evaluated and job.moved and fresh:
                continue  # it says nothing of the model: it began in another one
            if self._room(self._next.choice.model):
                given, self._next = self._next, None
                fresh -= not job.moved
                self._place(job, given)
            else:
                full = True  # who came later does not overtake

    def _room(self, model: str) -> bool:
        part = self.parts[model]
        return len(part.scheduler.running) + len(part.scheduler.waiting) < part.engine.slots

    def _place(self, job: _Job, given: Given) -> None:
        model = given.choice.model
        self._queue.remove(job)
        job.model, job.evaluated = model, given.evaluated
        job.began, job.first, job.strictness = self._clock(), 0.0, self._strictness(model)
        job.energy = (self._joules(), self._emitted)
        job.own = self.parts[model].scheduler.submit(
            job.prompt, job.limit, tokens=job.tokens, **job.asked,
            policy=self._policy(model, job), priority=-job.order[0],
        )  # fmt: skip
        self._by_own[model, job.own] = job

    def _strictness(self, model: str) -> tuple[int, int]:
        """What audits of an answer are of: another depth or thresholds are another matter."""
        return self.parts[model].depth, self.controller.level(model)

    def _thresholds(self, model: str) -> np.ndarray:
        member = self.members[model]
        given = np.broadcast_to(member.rules.get("threshold", 1.0), member.config.n_exits)
        return np.array([self.controller.threshold(model, float(t)) for t in given])

    def _policy(self, model: str, job: _Job) -> ExitPolicy:
        member = self.members[model]
        none = np.ones(member.config.n_exits)
        job.thresholds = none if job.objective == "accuracy" else self._thresholds(model)
        return ExitPolicy.make(member.config, 1, **{**member.rules, "threshold": job.thresholds})

    def _told(self, model, part, job, tokens, finish) -> list[Output]:
        now = self._clock()
        if tokens:
            job.first = job.first or now
            job.tokens += tokens
            self._emitted += len(tokens)
            n, least = self.members[model].config.n_exits, job.thresholds
            below = [t.exit < n and t.confidence < least[t.exit] for t in tokens]
            self.controller.tokens(model, below, own=job.objective is not None)
        if not finish:
            return [Output(job.number, tokens, "")]
        del self._by_own[model, job.own], self._jobs[job.number]
        whole = finish != "cancelled" and not job.moved and len(job.tokens) > 0
        sampling, shaping = job.asked["sampling"], job.asked["shaping"]
        greedy = sampling is None or float(sampling.temperature[0]) == 0
        # What is drawn by chance, or shaped, is not what the whole model says is most likely.
        judged = job.objective is None and greedy and shaping is None
        if whole and (job.evaluated or judged):
            job.telemetry = self._telemetry(model, part, job, now)
            drawn = len(self._to_audit) < BEHIND and self._sampled.random() < self._share
            if judged and (job.evaluated or drawn):
                self._to_audit.append(job)
            elif job.evaluated:
                self._answered(job, job.telemetry)
        elif job.evaluated:
            self.controller.dropped(model)
        return [Output(job.number, tokens, finish)]

    def _answered(self, job: _Job, telemetry: Telemetry) -> None:
        self.controller.answered(job.model, telemetry, [t.exit for t in job.tokens])

    def _joules(self) -> float:
        return 0.0 if self._meter is None else self._meter.read()

    def _telemetry(self, model, part, job, now: float) -> Telemetry:
        """Of a request; its accuracy is what is expected, until an audit finds it out."""
        count, seconds = len(job.tokens), max(now - job.began, 1e-9)
        each = (now - job.first) / max(count - 1, 1)
        profile = self.controller.profiles[model]
        joules, emitted = job.energy
        if self._meter is None:
            energy = float(np.mean([sum(profile.energy[: t.exit + 1]) for t in job.tokens]))
        else:
            energy = max(self._joules() - joules, 0.0) / max(self._emitted - emitted, 1)
        return Telemetry(
            count / seconds * max(len(part.scheduler.running), 1), job.first - job.began, each,
            float(np.mean([profile.sure[t.exit] for t in job.tokens])), profile.size(part.depth),
            energy,
        )  # fmt: skip

    def _audited(self, job: _Job) -> None:
        """Looks at an answer again, by the whole of the model that gave it."""
        model, part = job.model, self.parts.get(job.model)
        if part is None:  # it had to go
            if job.evaluated:
                self.controller.dropped(model)
            return
        if model not in self._auditors:
            self._auditors[model] = Auditor(part.host, part.config)
        self.audited[model] += len(job.prompt) + len(job.tokens)
        verdict = self._auditors[model].judge(
            part.engine.weights, job.prompt, [t.id for t in job.tokens]
        )
        if job.evaluated:
            same = float(np.mean(verdict.same))
            self._answered(job, dataclasses.replace(job.telemetry, accuracy=same))
        if job.strictness == self._strictness(model):
            audit = self.audit(Choice(model, part.depth))
            audit.add(verdict)
            known = len(self.controller.decisions)
            self.controller.audited(model, audit.low, audit.high, audit.best)
            if len(self.controller.decisions) > known:
                # Should this depth and these thresholds be tried again, it is for what comes then.
                del self.audits[model, *job.strictness]

    def report(self, since: int = 0) -> FleetReport:
        """What serves, or will first; with the decisions from number `since` on."""
        controller = self.controller
        model, depth = controller.current or controller.wanted
        audit = self.audit(Choice(model, depth))
        return FleetReport(
            model, depth, self.members[model].config.stops[depth - 1],
            self.slots, controller.below_share, audit.share if audit.count else None,
            audit.high if audit.count else None, audit.perplexity if audit.count else None,
            tuple(controller.decisions[since:]),
        )  # fmt: skip
