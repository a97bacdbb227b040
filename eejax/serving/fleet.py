"""Several models on one device: a controller says which serves, and how much of it is there.

What the controller wants is made so between two steps: segments are moved while requests run, a
model is loaded beside the one that serves where the budget holds both, and requests of one that has
to go first are taken along, with the text that they have.
"""

from __future__ import annotations

import dataclasses
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eejax.common.errors import require, require_count, require_one_of
from eejax.common.trees import Tree
from eejax.inference import capacity
from eejax.inference.batched_state import BatchOptions
from eejax.inference.deepening import on_host
from eejax.inference.engine import CALL
from eejax.inference.generate import check_prompts
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import Sampling
from eejax.inference.scheduler import Output, Stepped, Token, check_asked
from eejax.inference.shaping import Shaping
from eejax.inference.state import Request
from eejax.models.config import ModelConfig
from eejax.serving.auditor import Auditor, Reference
from eejax.serving.audits import Audit, Verdict, perplexity_of
from eejax.serving.choices import STRICTEST, Choice, stricter
from eejax.serving.controller import Controller
from eejax.serving.dispatch import Dispatcher, Job
from eejax.serving.energy import Meter
from eejax.serving.loading import Loading, failure
from eejax.serving.messages import FleetReport
from eejax.serving.objectives import NAMED, Telemetry

OWN = tuple(name for name in NAMED if name != "goodput")  # objectives that a request may name


@dataclasses.dataclass(frozen=True)
class Member:
    """A model of a fleet. rules: of `ExitPolicy.make`, by which its tokens leave."""

    params: Tree = dataclasses.field(repr=False)
    config: ModelConfig
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: BatchOptions = BatchOptions()

    def ready(self) -> Member:
        """With parameters of which engines and audits are made soonest (`deepening.on_host`)."""
        return dataclasses.replace(self, params=on_host(self.params, self.config))


class Change(NamedTuple):
    """What was done to models: kind is "load", "grow", "shrink", "free" or "narrow", which is what
    comes before "grow" where that leaves fewer slots, or "stay", which comes in place of "grow"
    where that is not wanted any more, or there is no room for it; `depth` exits are there then;
    seconds from when it was begun to when that was used, or done, in which a model that grows goes
    on. rebuild: of them, those in which keys and values were filled in and nothing else ran;
    tokens: of the requests that this was done for, or that are to be run anew."""

    time: float
    kind: str
    choice: Choice
    seconds: float
    rebuild: float = 0.0
    tokens: int = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class _Job(Job):
    """A request on its way. tokens: that it has; own: its number in the model that has it; energy:
    joules and tokens of that when it was given to it; thresholds: that its tokens leave by,
    [exits]."""

    number: int
    prompt: tuple[int, ...]
    limit: int
    asked: dict[str, Any]
    tokens: list[Token] = dataclasses.field(default_factory=list)
    own: int = -1
    cancelled: bool = False
    energy: tuple[float, int] = (0.0, 0)
    thresholds: Any = None


class Fleet(Dispatcher, Stepped):
    """Requests through whichever model serves; the interface of a `Scheduler`.

    members: by name, of one vocabulary; controller: of the same names. slots: requests that each
    model serves at a time, or how many it serves at each of its depths (`capacity.slots`). A model
    stays loaded for as long as the controller's budget holds it. audits: share of the answers that
    are judged again by `reference`, or, without one, by the whole of their model, whose agreement
    the profiles turn into quality. Times are `clock`'s; meter: what energy is measured by, without
    which it is what the profiles say.
    """

    def __init__(
        self, members: Mapping[str, Member], controller: Controller, *,
        slots: int | Mapping[str, Sequence[int]], context: int | None = None, steps: int = CALL,
        audits: float = 0.1, seed: int = 0, meter: Meter | None = None,
        reference: Reference | None = None,
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
        super().__init__(controller, controller.profiles, share=audits, seed=seed, clock=clock)
        self.controller: Controller
        self.parts: dict[str, PartialModel]
        if meter is not None:
            controller.counted = meter.name
        self.members = {name: member.ready() for name, member in members.items()}
        self.audited = dict.fromkeys(members, 0)  # tokens that a model judged
        self._reference = reference
        self.taken_along = 0  # requests that went on in another model
        self.changes: list[Change] = []
        self._growing: dict[str, float] = {}  # since when
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
        self._number, self._meter = 0, meter
        self._jobs: dict[int, _Job] = {}
        self._ended: list[Output] = []  # to be told with the next step
        self._by_own: dict[tuple[str, int], _Job] = {}
        self._auditors: dict[str, Auditor] = {}
        self._joules = 0.0 if meter is None else meter.read()
        self._spent = dict.fromkeys(members, 0.0)  # joules, and
        self._emitted = dict.fromkeys(members, 0)  # tokens

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
        for name, member in self.members.items():
            require(
                shaping is None or member.options.shaping, "shaping", type(shaping).__name__,
                f"must be None: {name} takes none", "BatchOptions(shaping=True) does.",
            )  # fmt: skip
            check_prompts([prompt], member.config, context)
            Request.make(
                member.config, [len(prompt)], [limit], ExitPolicy.make(member.config, 1),
                Sampling.make(1) if sampling is None else sampling, stop_tokens,
            )  # fmt: skip
        self._number += 1
        asked = dict(sampling=sampling, stop_tokens=tuple(stop_tokens), shaping=shaping)
        order = (-priority, self._number)
        job = _Job(
            number=self._number, prompt=tuple(prompt), limit=limit, asked=asked, order=order,
            came=self._clock(), objective=objective,
        )  # fmt: skip
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
        return sum(part.scheduler.held for part in self.parts.values())

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
    def settled(self) -> bool:
        """Whether it is idle, and nothing is on its way to the device."""
        coming = any(part.coming > part.depth for part in self.parts.values())
        return self.idle and self._loading is None and not coming

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._ended and not self._to_audit

    def step(self) -> list[Output]:
        if all(part.idle for part in self.parts.values()):
            self._spends(None)
        self._arrange()
        self._give()
        outputs, self._ended = self._ended, []
        for name in [*self.parts]:
            part = self.parts[name]
            if part.came:
                self._goes_deeper(name, part)
            busy = not part.idle
            told = part.scheduler.step()  # what has come by now is used with the next one
            if busy:
                self._spends(name)
            for own, tokens, finish in told:
                job = self._by_own.get((name, own))
                if job is not None:  # else it was taken along to another model
                    outputs += self._told(name, job, tokens, finish)
        self._audit_next()
        return outputs

    def _load(self, wanted: Choice) -> Loading:
        return Loading(self._clock(), wanted, self._made)

    def _made(self, choice: Choice) -> PartialModel:
        member = self.members[choice.model]
        part = PartialModel(
            member.params, member.config, member.options, depth=choice.depth,
            slots=self._slots[choice.model], **self._making,
        )  # fmt: skip
        jax.block_until_ready((part.engine.weights, part.scheduler.state))
        return part

    def _arrived(self, loading: Loading) -> None:
        self._changed("load", loading.choice.model, loading.begin, 0)

    def _grow(self, wanted: Choice) -> None:
        part, begin = self.parts[wanted.model], self._clock()
        held = part.scheduler.held
        if why := failure(lambda: part.grow(wanted.depth)):
            self._starts_again(wanted, part, why)
            return
        if part.scheduler.held < held:
            self._changed("narrow", wanted.model, begin, held - part.scheduler.held)
        self._growing.setdefault(wanted.model, begin)

    def _goes_deeper(self, model: str, part: PartialModel) -> None:
        """With what has come."""
        begin, wanted = self._clock(), Choice(model, part.coming)
        if why := failure(part.exchange):
            self._starts_again(wanted, part, why)
            return
        held, since = part.scheduler.held, self._growing.pop(model)
        self._changed("grow", model, since, held, self._clock() - begin)
        self._changes_depth(model)

    def _starts_again(self, wanted: Choice, part: PartialModel, why: str) -> None:
        """A model that was to grow, and failed to."""
        begin, held = self._clock(), part.scheduler.held
        part.restart()
        self._changed("stay", wanted.model, self._growing.pop(wanted.model, begin), held)
        self._cannot_grow(wanted, why)

    def _stay(self, model: str) -> None:
        part = self.parts[model]
        if failure(part.stay):
            part.restart()
        self._changed("stay", model, self._growing.pop(model), 0)

    def _shrink(self, wanted: Choice) -> None:
        part, begin = self.parts[wanted.model], self._clock()
        held = part.scheduler.held
        part.shrink(wanted.depth)
        self._growing.pop(wanted.model, None)
        self._changed("shrink", wanted.model, begin, held)

    def _freed(self, model: str, part: PartialModel) -> None:
        self._growing.pop(model, None)
        self._changed("free", model, self._clock(), 0)

    def _audit_room(self, depths: Mapping[str, int]) -> float:
        reference = self._reference
        if reference is not None:
            return capacity.audit_bytes(reference.config, depths.get(reference.name, 0))
        config = lambda model: self.members[model].config
        return max(capacity.audit_bytes(config(model), depth) for model, depth in depths.items())

    def _in(self, model: str) -> list[_Job]:
        return [job for job in self._jobs.values() if job.model == model]

    def _take(self, job: _Job) -> bool:
        del self._by_own[job.model, job.own]
        if job.cancelled:
            self._cancelled(job)
        else:
            self.taken_along += 1
        return not job.cancelled

    def _changed(
        self, kind: str, model: str, begin: float, tokens: int, rebuild: float = 0.0
    ) -> None:
        now, depth = self._clock(), self.parts[model].depth if model in self.parts else 0
        self.changes.append(Change(now, kind, Choice(model, depth), now - begin, rebuild, tokens))

    def _begin(self, job: _Job) -> None:
        job.energy = (self._spent[job.model], self._emitted[job.model])
        job.own = self.parts[job.model].scheduler.submit(
            job.prompt, job.limit, tokens=job.tokens, **job.asked,
            policy=self._policy(job), priority=-job.order[0],
        )  # fmt: skip
        self._by_own[job.model, job.own] = job

    def _policy(self, job: _Job) -> ExitPolicy:
        member, (_, level) = self.members[job.model], job.strictness
        given = np.broadcast_to(member.rules.get("threshold", 1.0), member.config.n_exits)
        if job.objective == "accuracy":
            level = STRICTEST
        job.thresholds = np.array([stricter(float(t), level) for t in given])
        return ExitPolicy.make(member.config, 1, **{**member.rules, "threshold": job.thresholds})

    def _told(self, model, job, tokens, finish) -> list[Output]:
        if tokens:
            tokens = tuple(t._replace(model=model) for t in tokens)
            self._hears(job)
            job.tokens += tokens
            job.exits += [t.exit for t in tokens]
            self._emitted[model] += len(tokens)
            n, least = self.members[model].config.n_exits, job.thresholds
            below = [t.exit < n and bool(t.confidence < least[t.exit]) for t in tokens]
            job.below += below
            self.controller.tokens(model, below, own=job.objective is not None)
        if not finish:
            return [Output(job.number, tokens, "")]
        del self._by_own[model, job.own], self._jobs[job.number]
        sampling, shaping = job.asked["sampling"], job.asked["shaping"]
        greedy = sampling is None or float(sampling.temperature[0]) == 0
        # What is drawn by chance, or shaped, is not what the whole model says is most likely.
        shaped = shaping is not None and bool(shaping.changes[0])
        judged = job.objective is None and greedy and not shaped
        # Who leaves in the middle, as at a stop string, has an answer all the same.
        whole = finish != "error" and len(job.tokens) > 0
        self._finished(job, whole, judged, failed=finish == "error")
        return [Output(job.number, tokens, finish)]

    def _own_perplexity(self, job: _Job) -> float:
        return perplexity_of(-sum(token.logprob for token in job.tokens), len(job.tokens))

    def _spends(self, model: str | None) -> None:
        """What was counted since this was asked last; None: of nobody who serves."""
        if self._meter is not None:
            before, self._joules = self._joules, self._meter.read()
            if model is not None:
                self._spent[model] += max(self._joules - before, 0.0)

    def _telemetry(self, job: _Job) -> Telemetry:
        """Its accuracy is what is expected, until an audit finds it out."""
        beside, energy = len(self.parts[job.model].scheduler.running), None
        if self._meter is not None:
            joules, emitted = job.energy
            energy = self._spent[job.model] - joules
            energy /= max(self._emitted[job.model] - emitted, 1)
        return self._measured(job, beside, energy=energy)

    def _judge(self, job: _Job) -> Verdict:
        if self._reference is None:
            part, name = self.parts[job.model], job.model
            if name not in self._auditors:
                self._auditors[name] = Auditor(part.host, part.config)
            auditor = self._auditors[name]
        else:
            name, auditor = self._reference.name, self._reference.auditor
            part = self.parts.get(name)
        # What is on its way has its room already, and would be waited for by all that is brought.
        loaded = None if part is None else part.weights
        verdict = auditor.judge(loaded, job.prompt, [t.id for t in job.tokens])
        if name is not None:
            self.audited[name] += len(job.prompt) + len(job.tokens)
        return verdict

    def _judged(self, model: str, verdict: Verdict) -> tuple[float, float]:
        if self._reference is None:
            return super()._judged(model, verdict)
        return self._reference.quality(verdict), verdict.perplexity

    def report(self, since: int = 0, points: int = 0) -> FleetReport:
        """What serves, or will first; with the decisions from number `since` on, and the answers
        from number `points` on."""
        controller = self.controller
        model, depth = controller.current or controller.wanted
        audit = self.audits.get((model, depth, controller.level(model)), Audit())
        return FleetReport(
            model, depth, self.members[model].config.stops[depth - 1],
            self.slots, controller.below_share, audit.share if audit.count else None,
            audit.high if audit.count else None, audit.perplexity if audit.count else None,
            controller.counted, tuple(controller.decisions[since:]), self.performance.since(points),
        )  # fmt: skip
