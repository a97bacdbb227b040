"""Dispatch of requests to models and of models to the device, without a device.

A pool carries out the decisions: `FleetPool` on models, the simulator's pool on recorded ones. Both
take them from here, so that a simulation decides as a server does.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic

import numpy as np

from eejax.helios.choices import Assignment, ModelDepth, ModelProfile
from eejax.helios.disagreement_bound import AnswerAudit, DisagreementBound
from eejax.helios.interfaces import (
    AnswerCosts,
    FleetRequest,
    ModelPolicy,
    ModelPool,
    Pending,
)
from eejax.helios.objectives import NAMED, Telemetry
from eejax.helios.timeline import AnswerTimeline, TimelinePoint, marks
from eejax.helios.verifier import ReferenceJudge

TIMELINE_LENGTH = 2000  # answers that the timeline keeps
MAX_WAITING_AUDITS = 32  # answers that may wait for an audit
AUDIT_SHARE = 0.05  # share of the time that audits may take, beside those of evaluations
REPORT_AUDIT_SHARE = 0.01  # the same if no decision reads them


class Dispatcher(Generic[Pending]):
    """Queue of requests, and the models that serve them.

    `reconcile` loads and frees models as the controller wants, `assign` gives requests to models,
    and `finish` and `audit_next` report their outcome.

    Attributes:
      queue: waiting requests, in order.
      loading: the model that is being loaded.
      aborted: aborted requests whose model was freed before it ended them.
      moved: number of requests that had to continue in another model.
      to_audit: answers that wait for an audit.
      audits: results of audits by model, depth and level of its thresholds.
      performance: timeline of answers.
    """

    def __init__(
        self,
        controller: ModelPolicy,
        pool: ModelPool[Pending],
        profiles: Mapping[str, ModelProfile],
        *,
        share: float,
        clock: Callable[[], float],
        seed: int = 0,
        reference: ReferenceJudge | None = None,
    ):
        """Start with nothing loaded.

        Args:
          profiles: profiles by model.
          share: share of the answers that are audited.
          clock: returns seconds.
          seed: seed of the choice of these answers.
          reference: the model that judges all answers; None if each model judges its own.
        """
        self.controller, self.pool = controller, pool
        self.queue: list[Any] = []
        self.loading: Pending | None = None
        self.aborted: list[Any] = []
        self.moved = 0
        self.to_audit: list[Any] = []
        self.audits: dict[tuple[str, int, int], DisagreementBound] = {}
        self.performance, self._marked = AnswerTimeline(TIMELINE_LENGTH), 0
        self._profiles, self._clock, self._reference = profiles, clock, reference
        self._placed: list[Any] = []  # requests that run in models
        self._next: Assignment | None = None  # where the first request of the queue goes
        self._too_deep: dict[str, int] = {}  # by model, a depth for which there was no room
        self._sampled, self._share = np.random.default_rng(seed), share
        # Seconds of audits outside of evaluations, and the time when counting began.
        self._audited, self._since = 0.0, clock()

    def wait(self, job: FleetRequest) -> None:
        """Queue a request by its order."""
        bisect.insort(self.queue, job, key=lambda job: job.order)

    def reconcile(self) -> None:
        """Load, grow, shrink and free models towards what the controller wants."""
        wanted = self.controller.wanted
        if self.loading is not None and self.loading.choice.model != wanted.model:
            self._await(self.loading)  # its memory is in use; it may be freed again below
        if wanted.model not in self.pool.parts:
            if self.loading is None:
                self._make_room(wanted)
                self.loading = self.pool.load(wanted)
            # Other models go on meanwhile, and new requests go to the current one.
            current = self.controller.current
            nobody = current is None or current.model not in self.pool.parts
            idle = nobody and all(part.idle for part in self.pool.parts.values())
            if self.loading.done() or idle:
                self._await(self.loading)
        part = self.pool.parts.get(wanted.model)
        if part is None:
            return
        if wanted.depth >= self._too_deep.get(wanted.model, math.inf):
            wanted = ModelDepth(wanted.model, part.depth)
            self.controller.depth_limited(wanted)
        if part.depth <= wanted.depth < part.target_segments:
            self.pool.cancel_growth(wanted.model)
        if part.target_segments < wanted.depth:
            self._make_room(wanted)
            if why := self.pool.grow(wanted):
                self.cannot_grow(wanted, why)
        elif part.depth > wanted.depth:
            self.pool.shrink(wanted)
            self.depth_changed(wanted.model)
        if part.depth == wanted.depth and self.controller.current != wanted:
            # The request that waits for a place in the model before may go to this one.
            if self._next is not None and self._next.evaluated:
                self.controller.prompt_dropped(self._next.choice.model)
            self._next = None
            self.controller.model_loaded(wanted)

    def _await(self, loading: Pending) -> None:
        self.loading, model = None, loading.choice.model
        try:
            self.pool.add(loading)
        except (RuntimeError, MemoryError) as error:  # the device may have less room than counted
            if not self.controller.model_given_up(model, f"it cannot be loaded ({error})"):
                raise

    def cannot_grow(self, wanted: ModelDepth, why: str) -> None:
        """Handle that there was less room for a model than was counted.

        If there is no other model, it serves at its depth, and it is not grown until it was freed.
        """
        model, depth = wanted.model, self.pool.parts[wanted.model].depth
        self._too_deep[model] = min(wanted.depth, self._too_deep.get(model, wanted.depth))
        if not self.controller.model_given_up(model, f"it cannot grow ({why})"):
            message = f"{model!r} stays at {depth} exits, as {wanted.depth} cannot be loaded: {why}"
            warnings.warn(message, stacklevel=2)

    def _make_room(self, wanted: ModelDepth) -> None:
        """Free models until the budget holds the wanted choice.

        Idle models go first and the one that serves last; its requests continue in another model
        with their text.
        """
        profiles, budget = self._profiles, self.controller.options.budget
        serving = self.controller.current

        def last(name):
            return (not self.pool.parts[name].idle, serving and name == serving.model)

        for name in sorted([name for name in self.pool.parts if name != wanted.model], key=last):
            depths = {other: part.target_segments for other, part in self.pool.parts.items()}
            depths[wanted.model] = wanted.depth
            held = sum(profiles[model].size(depth) for model, depth in depths.items())
            if held + self.pool.audit_bytes(depths) <= budget:
                return
            self.free(name)

    def free(self, name: str) -> None:
        """Free a model; its requests wait for another one."""
        for job in self.requests_of(name):
            if job.evaluated:
                self.controller.prompt_dropped(name)
            self._placed.remove(job)
            job.model, job.moved, job.evaluated = "", True, False
            if job.aborted:
                self.aborted.append(job)
            else:
                self.moved += 1
                self.wait(job)
        if self._next is not None and self._next.choice.model == name:
            if self._next.evaluated:
                self.controller.prompt_dropped(name)
            self._next = None
        self._too_deep.pop(name, None)
        self.pool.free(name)

    def requests_of(self, model: str) -> list[Any]:
        """Return the requests that run in a model."""
        return [job for job in self._placed if job.model == model]

    def assign(self) -> None:
        """Give requests to models that have free slots, in order.

        They go to the model that serves or is evaluated; those with an objective of their own to
        the best loaded model for it.
        """
        self.controller.device_reported(
            {name: part.depth for name, part in self.pool.parts.items()},
            self.pool.num_cached_tokens,
        )
        current = self.controller.current
        if current is None:
            self._next = None
        if current is None or current.model not in self.pool.parts:
            return
        full, fresh = False, sum(not job.moved for job in self.queue if job.objective is None)
        for job in [*self.queue]:
            if job.objective is not None:
                own = self.controller.best_loaded(NAMED[job.objective]) or current.model
                if self.pool.parts[own].room:
                    self._place(job, Assignment(ModelDepth(own, self.pool.parts[own].depth), False))
                continue
            if full:
                continue
            if self._next is None:
                self._next = self.controller.prompt_arrived()
            if self._next.evaluated and job.moved and fresh:
                continue  # it began in another model, so it is no evaluation of this one
            if self.pool.parts[self._next.choice.model].room:
                given, self._next = self._next, None
                fresh -= not job.moved
                self._place(job, given)
            else:
                full = True  # later requests do not overtake

    def _place(self, job: FleetRequest, given: Assignment) -> None:
        self.queue.remove(job)
        job.model, job.evaluated = given.choice.model, given.evaluated
        job.began, job.first = self._clock(), None
        job.strictness = self._strictness(job.model, job.evaluated)
        self._placed.append(job)
        self.pool.start(job)

    def _strictness(self, model: str, evaluated: bool = False) -> tuple[int, int]:
        """Return the depth and the level of thresholds, which audits of an answer depend on."""
        return self.pool.parts[model].depth, self.controller.level(model, evaluated)

    def depth_changed(self, model: str) -> None:
        """Mark running answers as produced at more than one depth."""
        for job in self.requests_of(model):
            job.strictness = 0, job.strictness[1]

    def record_tokens(self, job: FleetRequest) -> None:
        """Record new tokens of a request."""
        if job.first is None:
            job.first = self._clock()
        if job.heard is None:
            job.heard = self._clock()
            if job.objective is None:
                self.controller.first_token_emitted(job.model, job.heard - job.came)

    def finish(
        self,
        job: FleetRequest,
        whole: bool = True,
        judged: bool = True,
        failed: bool = False,
        perplexity: float | None = None,
    ) -> None:
        """Record that a request finished.

        Args:
          whole: whether it has tokens and did not end in an error; an answer that moved between
            models does not count as whole.
          judged: whether the whole model can judge it.
          failed: whether it ended in an error.
          perplexity: perplexity of its tokens under the model and exits that emitted them; None if
            their probabilities are not known.
        """
        self._placed.remove(job)
        if job.exits and job.heard is not None:
            new = self.controller.decisions[self._marked :]
            self._marked += len(new)
            self.performance.add(
                TimelinePoint(
                    time=self._clock(),
                    model=job.model,
                    depth=self.pool.parts[job.model].depth,
                    tokens=len(job.exits),
                    ttft=job.heard - job.came,
                    perplexity=perplexity,
                    marks=marks(new),
                )
            )
        whole &= not job.moved
        if whole and (job.evaluated or judged):
            job.telemetry = self._telemetry(job, self.pool.costs(job))
            drawn = self._may_audit() and self._sampled.random() < self._share
            if judged and (job.evaluated or drawn):
                self.to_audit.append(job)
            elif job.evaluated:
                self.controller.prompt_answered(job.model, job.telemetry, job.exits, judged=False)
        elif job.evaluated:
            self.controller.prompt_dropped(job.model, failed)
        elif failed:
            self.controller.answer_failed(job.model)

    def _may_audit(self) -> bool:
        """Return whether few answers wait for an audit, and audits took little time so far."""
        objective = self.controller.objective
        share = (
            AUDIT_SHARE if objective is not None and objective.reads_quality else REPORT_AUDIT_SHARE
        )
        spent = self._audited <= share * (self._clock() - self._since)
        return len(self.to_audit) < MAX_WAITING_AUDITS and spent

    def _telemetry(self, job: FleetRequest, costs: AnswerCosts) -> Telemetry:
        """Return the telemetry of an answer that just finished.

        Agreement with the whole model and energy are the profile's if they were not measured.
        """
        part, profile = self.pool.parts[job.model], self._profiles[job.model]
        count, now = len(job.exits), self._clock()
        seconds = max(now - job.began, 1e-9)
        assert job.first is not None  # a whole answer has tokens from its model
        each = (now - job.first) / max(count - 1, 1)
        agreement, energy = costs.agreement, costs.energy
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
            throughput=count / seconds * (costs.beside + 1),
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
        if self._reference is not None:
            return self._reference.quality(verdict), verdict.perplexity
        profile = self._profiles[model]
        agreement = float(np.mean(verdict.same))
        return profile.quality_at(agreement), profile.perplexity_at(agreement)

    def audit(self, choice: ModelDepth) -> DisagreementBound:
        """Return the audits of a model's answers at a depth, with its present thresholds."""
        key = (choice.model, choice.depth, self.controller.level(choice.model))
        return self.audits.get(key, DisagreementBound())

    def audit_next(self) -> None:
        """Audit the next waiting answer, if there is one."""
        if not self.to_audit:
            return
        job = self.to_audit.pop(0)
        model = job.model
        if model not in self.pool.parts:  # it was freed meanwhile
            if job.evaluated:
                self.controller.prompt_dropped(model)
            return
        begin = self._clock()
        try:
            verdict = self.pool.judge(job)
            if not np.isfinite(verdict.logprob).all():
                raise RuntimeError("the judge's log-probabilities are not finite")
        except (RuntimeError, MemoryError) as error:  # the device may have no room for it
            warnings.warn(f"an answer of {model!r} was not audited: {error}", stacklevel=2)
            if job.evaluated:
                self.controller.prompt_answered(model, job.telemetry, job.exits, judged=False)
            return
        if not job.evaluated:
            self._audited += self._clock() - begin
        quality, perplexity = self._on_judged(model, verdict)
        if job.evaluated:
            telemetry = dataclasses.replace(job.telemetry, accuracy=quality, perplexity=perplexity)
            self.controller.prompt_answered(model, telemetry, job.exits)
        if job.strictness != self._strictness(model):
            return
        audit = self.audit(ModelDepth(model, self.pool.parts[model].depth))
        audit = self.audits[model, *job.strictness] = audit.with_answer(verdict, quality)
        known = len(self.controller.decisions)
        self.controller.answers_audited(model, audit)
        if len(self.controller.decisions) > known:
            # If this depth and these thresholds are tried again, only new answers count.
            del self.audits[model, *job.strictness]
