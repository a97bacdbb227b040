"""Dispatch of requests to models and of models to the device, without a device.

`Fleet` carries it out with models, `simulator` with recorded ones. Both get their orders here, so
that what is simulated is what serves.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from eejax.helios.choices import Assignment, ControllerOptions, Decision, ModelDepth, ModelProfile
from eejax.helios.disagreement_bound import AnswerAudit, DisagreementBound
from eejax.helios.objectives import NAMED, ServiceObjective, Telemetry
from eejax.helios.timeline import AnswerTimeline, TimelinePoint, marks

KEPT = 2000  # prompts of the timeline
BEHIND = 32  # answers that may wait to be looked at again
AUDITS = 0.05  # share of the time that audits may take beside those of evaluations
REPORTED = 0.01  # the same where no decision reads them


class ModelPolicy(Protocol):
    """The deciding part: a `Controller`, or an object with its interface."""

    current: ModelDepth | None
    wanted: ModelDepth | None
    decisions: list[Decision]
    options: ControllerOptions
    objective: ServiceObjective | None

    def holds(self, there: Mapping[str, int], held: int) -> None: ...
    def choose(self) -> Assignment: ...
    def best(self, weights: Mapping[str, float]) -> str | None: ...
    def loaded(self, choice: ModelDepth) -> None: ...
    def tokens(self, model: str, below: Sequence[bool], own: bool = False) -> None: ...
    def waited(self, model: str, seconds: float) -> None: ...
    def answered(self, model: str, telemetry: Telemetry, exits: Sequence[int]) -> None: ...
    def dropped(self, model: str, failed: bool = False) -> None: ...
    def failed(self, model: str) -> None: ...
    def gives_up(self, model: str, why: str) -> bool: ...
    def audited(self, model: str, audit: DisagreementBound) -> None: ...
    def level(self, model: str, evaluated: bool = False) -> int: ...


class LoadedModel(Protocol):
    """A model with `depth` loaded segments, of which there will be `target_segments`.

    room: a slot is free for another request.
    """

    depth: int
    target_segments: int
    idle: bool
    room: bool


class PendingModel(Protocol):
    """A model that is being loaded; `result` waits for it."""

    choice: ModelDepth
    begin: float

    def done(self) -> bool: ...
    def result(self) -> Any: ...


@dataclasses.dataclass(kw_only=True, eq=False)
class FleetRequest:
    """A request of a fleet.

    Attributes:
      order: order in which requests are assigned to models.
      came: time of arrival.
      objective: its own objective, if any.
      model: the model that has it.
      began, first: times at which that model got it and emitted its first token of it.
      heard: time of the first token of all.
      evaluated: it is part of an evaluation.
      moved: another model had it before.
      strictness: number of exits that it may take, 0 where that changed, and the level of its
        thresholds.
      exits: exits by which its tokens left.
      below: for each token, whether it left below its threshold.
    """

    order: tuple[int, int]
    came: float
    objective: str | None = None
    model: str = ""
    began: float = 0.0
    first: float | None = None
    heard: float | None = None
    evaluated: bool = False
    moved: bool = False
    strictness: tuple[int, int] = (0, 0)
    telemetry: Telemetry | None = None
    exits: list[int] = dataclasses.field(default_factory=list)
    below: list[bool] = dataclasses.field(default_factory=list)


class Dispatcher(abc.ABC):
    """Base of `Fleet` and the simulator.

    Requests wait in a queue. `_reconcile` makes what is loaded what the controller wants, `_assign`
    gives requests to models, `_on_finished` and `_audit_next` report what became of them.
    Subclasses implement the methods without a body.

    profiles: of the models. share: of the answers that are audited.
    """

    def __init__(
        self,
        controller: ModelPolicy,
        profiles: Mapping[str, ModelProfile],
        *,
        share: float,
        seed: int,
        clock: Callable[[], float],
    ):
        self.controller = controller
        self.parts: dict[str, Any] = {}
        self.audits: dict[
            tuple[str, int, int], DisagreementBound
        ] = {}  # by model, depth and strictness
        self._profiles, self._clock = profiles, clock
        self._queue: list[Any] = []  # in order
        self._next: Assignment | None = None  # where the first of them goes
        self._loading: PendingModel | None = None
        self._too_deep: dict[str, int] = {}  # depths at which there was no room for a model
        self._sampled, self._share = np.random.default_rng(seed), share
        self._to_audit: list[Any] = []
        self._audited, self._since = 0.0, clock()  # seconds of audits, and from when on
        self.performance, self._marked = AnswerTimeline(KEPT), 0

    @abc.abstractmethod
    def _load(self, wanted: ModelDepth) -> PendingModel:
        """Start to load a model."""

    @abc.abstractmethod
    def _adopt_loaded(self, loading: Any) -> None:
        """Handle that a model that was loaded is in `parts` now."""

    @abc.abstractmethod
    def _grow(self, wanted: ModelDepth) -> None:
        """Start to load more segments of a model."""

    @abc.abstractmethod
    def _cancel_growth(self, model: str) -> None:
        """Cancel the growth of a model."""

    @abc.abstractmethod
    def _shrink(self, wanted: ModelDepth) -> None: ...

    @abc.abstractmethod
    def _on_freed(self, model: str, part: Any) -> None:
        """Handle that a model was removed from `parts`; it has no requests."""

    @abc.abstractmethod
    def _requests_of(self, model: str) -> Iterable[Any]:
        """Return the requests that a model has."""

    @abc.abstractmethod
    def _withdraw(self, job: Any) -> bool:
        """Take a request from its model; return whether it continues in another one."""

    @abc.abstractmethod
    def _start_request(self, job: Any) -> None:
        """Start a request in the model that has it now."""

    @abc.abstractmethod
    def _telemetry(self, job: Any) -> Telemetry:
        """Return the telemetry of an answer, by `_measured`."""

    @abc.abstractmethod
    def _judge(self, job: Any) -> AnswerAudit:
        """Judge an answer again, by default with the whole of the model that gave it."""

    @property
    @abc.abstractmethod
    def num_cached_tokens(self) -> int:
        """Tokens of the requests in slots, prompts included."""

    def _audit_room(self, depths: Mapping[str, int]) -> float:
        """Return the most bytes that an audit of any of these models takes beside them."""
        return 0.0

    def _wait(self, job: FleetRequest) -> None:
        bisect.insort(self._queue, job, key=lambda job: job.order)

    def _reconcile(self) -> None:
        """Load, grow, shrink and free models towards what the controller wants."""
        wanted = self.controller.wanted
        if self._loading is not None and self._loading.choice.model != wanted.model:
            self._await()  # it has its place, and is freed again if that is needed
        if wanted.model not in self.parts:
            if self._loading is None:
                self._make_room(wanted)
                self._loading = self._load(wanted)
            # Others go on meanwhile, and whoever comes is served by what was there.
            current = self.controller.current
            nobody = current is None or current.model not in self.parts
            idle = nobody and all(part.idle for part in self.parts.values())
            if self._loading.done() or idle:
                self._await()
        part = self.parts.get(wanted.model)
        if part is None:
            return
        if wanted.depth >= self._too_deep.get(wanted.model, math.inf):
            self.controller.wanted = wanted = ModelDepth(wanted.model, part.depth)
        if part.depth <= wanted.depth < part.target_segments:
            self._cancel_growth(wanted.model)
        if part.target_segments < wanted.depth:
            self._make_room(wanted)
            self._grow(wanted)
        elif part.depth > wanted.depth:
            self._shrink(wanted)
            self._changes_depth(wanted.model)
        if part.depth == wanted.depth and self.controller.current != wanted:
            self.controller.loaded(wanted)

    def _await(self) -> None:
        loading, self._loading = self._loading, None
        model = loading.choice.model
        try:
            self.parts[model] = loading.result()
        except (RuntimeError, MemoryError) as error:  # there may be no room, whatever was counted
            if not self.controller.gives_up(model, f"it cannot be loaded ({error})"):
                raise
            return
        self._adopt_loaded(loading)

    def _cannot_grow(self, wanted: ModelDepth, why: str) -> None:
        """Handle that there was no room for as much of a model, whatever was counted.

        If there is no other model it serves as it is, and no more is asked for until it was freed.
        """
        model, depth = wanted.model, self.parts[wanted.model].depth
        self._too_deep[model] = min(wanted.depth, self._too_deep.get(model, wanted.depth))
        if not self.controller.gives_up(model, f"it cannot grow ({why})"):
            message = f"{model!r} stays at {depth} exits, as {wanted.depth} cannot be loaded: {why}"
            warnings.warn(message, stacklevel=2)

    def _make_room(self, wanted: ModelDepth) -> None:
        """Free models until the budget holds what is wanted.

        Idle models go first and the one that serves last; its requests continue elsewhere with
        their text.
        """
        profiles, budget = self._profiles, self.controller.options.budget
        serving = self.controller.current
        last = lambda name: (not self.parts[name].idle, serving and name == serving.model)
        for name in sorted([name for name in self.parts if name != wanted.model], key=last):
            depths = {other: part.target_segments for other, part in self.parts.items()}
            depths[wanted.model] = wanted.depth
            held = sum(profiles[model].size(depth) for model, depth in depths.items())
            if held + self._audit_room(depths) <= budget:
                return
            self._free(name)

    def _free(self, name: str) -> None:
        for job in [*self._requests_of(name)]:
            if job.evaluated:
                self.controller.dropped(name)
            goes_on = self._withdraw(job)
            job.model, job.moved, job.evaluated = "", True, False
            if goes_on:
                self._wait(job)
        if self._next is not None and self._next.choice.model == name:
            if self._next.evaluated:
                self.controller.dropped(name)
            self._next = None
        self._too_deep.pop(name, None)
        self._on_freed(name, self.parts.pop(name))

    def _assign(self) -> None:
        """Give requests to models that have free slots, in order.

        They go to the model that serves or is evaluated; those with an objective of their own to
        the best loaded model for it.
        """
        self.controller.holds(
            {name: part.depth for name, part in self.parts.items()}, self.num_cached_tokens
        )
        current = self.controller.current
        if current is None:
            self._next = None
        if current is None or current.model not in self.parts:
            return
        full, fresh = False, sum(not job.moved for job in self._queue if job.objective is None)
        for job in [*self._queue]:
            if job.objective is not None:
                own = self.controller.best(NAMED[job.objective]) or current.model
                if self.parts[own].room:
                    self._place(job, Assignment(ModelDepth(own, self.parts[own].depth), False))
                continue
            if full:
                continue
            if self._next is None:
                self._next = self.controller.choose()
            if self._next.evaluated and job.moved and fresh:
                continue  # it says nothing of the model: it began in another one
            if self.parts[self._next.choice.model].room:
                given, self._next = self._next, None
                fresh -= not job.moved
                self._place(job, given)
            else:
                full = True  # who came later does not overtake

    def _place(self, job: FleetRequest, given: Assignment) -> None:
        self._queue.remove(job)
        job.model, job.evaluated = given.choice.model, given.evaluated
        job.began, job.first = self._clock(), None
        job.strictness = self._strictness(job.model, job.evaluated)
        self._start_request(job)

    def _strictness(self, model: str, evaluated: bool = False) -> tuple[int, int]:
        """Return what audits of an answer depend on: the depth and the level of thresholds."""
        return self.parts[model].depth, self.controller.level(model, evaluated)

    def _changes_depth(self, model: str) -> None:
        """Mark running answers as those of no one depth."""
        for job in self._requests_of(model):
            job.strictness = 0, job.strictness[1]

    def _on_tokens(self, job: FleetRequest) -> None:
        """Record new tokens of a request."""
        if job.first is None:
            job.first = self._clock()
        if job.heard is None:
            job.heard = self._clock()
            if job.objective is None:
                self.controller.waited(job.model, job.heard - job.came)

    def _on_finished(
        self, job: FleetRequest, whole: bool = True, judged: bool = True, failed: bool = False
    ) -> None:
        """Record that a request finished.

        Args:
          whole: it has tokens and did not end in an error; an answer that moved between models does
            not count as whole.
          judged: the whole model can judge it.
          failed: it ended in an error.
        """
        if job.exits and job.heard is not None:
            new = self.controller.decisions[self._marked :]
            self._marked += len(new)
            self.performance.add(
                TimelinePoint(
                    time=self._clock(),
                    model=job.model,
                    depth=self.parts[job.model].depth,
                    tokens=len(job.exits),
                    ttft=job.heard - job.came,
                    seconds=self._clock() - job.came,
                    perplexity=self._own_perplexity(job),
                    marks=marks(new),
                )
            )
        whole &= not job.moved
        if whole and (job.evaluated or judged):
            job.telemetry = self._telemetry(job)
            drawn = self._may_audit() and self._sampled.random() < self._share
            if judged and (job.evaluated or drawn):
                self._to_audit.append(job)
            elif job.evaluated:
                self.controller.answered(job.model, job.telemetry, job.exits)
        elif job.evaluated:
            self.controller.dropped(job.model, failed)
        elif failed:
            self.controller.failed(job.model)

    def _own_perplexity(self, job: Any) -> float | None:
        """Return an answer's perplexity under the model that gave it, as its tokens left.

        None where their probabilities are not known.
        """
        return None

    def _may_audit(self) -> bool:
        """Return whether few answers wait for an audit, and audits took little time so far."""
        objective = self.controller.objective
        share = AUDITS if objective is not None and objective.reads_quality else REPORTED
        spent = self._audited <= share * (self._clock() - self._since)
        return len(self._to_audit) < BEHIND and spent

    def _measured(
        self,
        job: FleetRequest,
        beside: int,
        agreement: float | None = None,
        energy: float | None = None,
    ) -> Telemetry:
        """Return the telemetry of an answer that just finished, beside so many other requests.

        Agreement with the whole model and energy are the profile's where they were not measured.
        """
        part, profile = self.parts[job.model], self._profiles[job.model]
        count, now = len(job.exits), self._clock()
        seconds = max(now - job.began, 1e-9)
        each = (now - job.first) / max(count - 1, 1)
        if agreement is None:
            left = zip(job.exits, job.below, strict=True)
            agreement = float(
                np.mean([(profile.unsure if b else profile.sure)[e] for e, b in left])
            )
        if energy is None:
            shares = [job.exits.count(e) / count for e in range(profile.exits)]
            energy = profile.worked(shares, part.depth)
        first = job.first - job.began
        return Telemetry(
            throughput=count / seconds * (beside + 1),
            ttft=first,
            ttft_p99=first,
            tpot=each,
            accuracy=profile.quality_at(agreement),
            memory=profile.size(part.depth),
            energy=energy,
            perplexity=profile.perplexity_at(agreement),
        )

    def _on_judged(self, model: str, verdict: AnswerAudit) -> tuple[float, float]:
        """Return (quality, perplexity) of a model's judged answer."""
        profile = self._profiles[model]
        agreement = float(np.mean(verdict.same))
        return profile.quality_at(agreement), profile.perplexity_at(agreement)

    def audit(self, choice: ModelDepth) -> DisagreementBound:
        """Return what audits found of a model's answers at a depth, with its present thresholds."""
        key = (*choice, self.controller.level(choice.model))
        return self.audits.setdefault(key, DisagreementBound())

    def _audit_next(self) -> None:
        """Audit an answer, if one waits for it."""
        if not self._to_audit:
            return
        job = self._to_audit.pop(0)
        model = job.model
        if model not in self.parts:  # it had to go
            if job.evaluated:
                self.controller.dropped(model)
            return
        begin = self._clock()
        try:
            verdict = self._judge(job)
        except (RuntimeError, MemoryError) as error:  # there may be no room for it
            warnings.warn(f"an answer of {model!r} is not looked at again: {error}", stacklevel=2)
            if job.evaluated:
                self.controller.answered(model, job.telemetry, job.exits)
            return
        self._audited += self._clock() - begin
        quality, perplexity = self._on_judged(model, verdict)
        if job.evaluated:
            telemetry = dataclasses.replace(job.telemetry, accuracy=quality, perplexity=perplexity)
            self.controller.answered(model, telemetry, job.exits)
        if job.strictness != self._strictness(model):
            return
        audit = self.audit(ModelDepth(model, self.parts[model].depth))
        audit.add(verdict, quality)
        known = len(self.controller.decisions)
        self.controller.audited(model, audit)
        if len(self.controller.decisions) > known:
            # Should this depth and these thresholds be tried again, it is for what comes then.
            del self.audits[model, *job.strictness]
