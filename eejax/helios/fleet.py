"""Several models on one device: a controller chooses which serves, and how much of it is loaded.

Its choices are carried out between two steps. Segments are moved while requests run, a model is
loaded beside the one that serves where the budget holds both, and requests of a model that must go
first continue elsewhere with their text.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eejax.common.errors import require, require_one_of
from eejax.common.trees import Tree
from eejax.helios.choices import STRICTEST, ModelDepth, stricter
from eejax.helios.controller import Controller
from eejax.helios.disagreement_bound import AnswerAudit, DisagreementBound, perplexity_of
from eejax.helios.dispatch import Dispatcher, FleetRequest
from eejax.helios.energy import EnergyMeter
from eejax.helios.loading import ModelLoad, failure
from eejax.helios.objectives import NAMED, Telemetry
from eejax.helios.report import CHOOSES, FleetReport
from eejax.helios.verifier import AnswerVerifier, ReferenceJudge
from eejax.inference import capacity
from eejax.inference.deepening import on_host
from eejax.inference.generate import check_prompts
from eejax.inference.options import EngineOptions
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy
from eejax.inference.request import (
    EngineRequest,
    FinishReason,
    RequestOutput,
    Token,
    require_new_id,
)
from eejax.inference.sampling import SamplingParams
from eejax.inference.scheduler import StepLoop
from eejax.inference.slot_engine import STEPS_PER_CALL
from eejax.inference.state import RequestRows
from eejax.models.config import ModelConfig

OWN = tuple(name for name in NAMED if name != "goodput")  # objectives that a request may name


@dataclasses.dataclass(frozen=True)
class FleetMember:
    """A model of a fleet. rules: arguments of `ExitPolicy.make`, by which its tokens leave."""

    params: Tree = dataclasses.field(repr=False)
    config: ModelConfig
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: EngineOptions = EngineOptions()

    def ready(self) -> FleetMember:
        """Return the member with its parameters prepared by `deepening.on_host`."""
        return dataclasses.replace(self, params=on_host(self.params, self.config))


class ModelChange(NamedTuple):
    """A change of a model.

    Attributes:
      kind: "load", "grow", "shrink" or "free"; "narrow" comes before "grow" where that leaves fewer
        slots, and "stay" in place of "grow" where it was cancelled or there was no room.
      choice: the model, and the number of its exits that are loaded then.
      seconds: from its start to its use or end; a model that grows goes on meanwhile.
      rebuild: of them, seconds in which keys and values were filled in and nothing else ran.
      tokens: of the requests that this was done for, or that start anew.
    """

    time: float
    kind: str
    choice: ModelDepth
    seconds: float
    rebuild: float = 0.0
    tokens: int = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class _RunningRequest(FleetRequest):
    """A request of a fleet.

    Attributes:
      request: as it was added; the serving model adds its own exit rules.
      tokens: tokens that it has.
      energy: joules and tokens of that model when it got the request.
      thresholds: [exits], by which its tokens leave.
    """

    request: EngineRequest
    tokens: list[Token] = dataclasses.field(default_factory=list)
    cancelled: bool = False
    energy: tuple[float, int] = (0.0, 0)
    thresholds: Any = None

    @property
    def request_id(self) -> str:
        return self.request.request_id


class Fleet(Dispatcher, StepLoop):
    """Serves requests with the models that its controller chooses, as a `Scheduler` does.

    Args:
      members: models by name, with one vocabulary.
      controller: of the same names.
      slots: requests that each model serves at a time, or how many at each of its depths
        (`capacity.slots`).
      audits: share of the answers that are judged again by `reference` or, without one, by the
        whole of their model, whose agreement the profiles turn into quality.
      clock: returns seconds.
      meter: measures energy; without one it is that of the profiles.

    A model stays loaded as long as the controller's budget holds it.
    """

    def __init__(
        self,
        members: Mapping[str, FleetMember],
        controller: Controller,
        *,
        slots: int | Mapping[str, Sequence[int]],
        context: int | None = None,
        steps: int = STEPS_PER_CALL,
        audits: float = 0.1,
        seed: int = 0,
        meter: EnergyMeter | None = None,
        reference: ReferenceJudge | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        vocabularies = {member.config.vocab_size for member in members.values()}
        require(
            len(vocabularies) == 1,
            "members",
            sorted(vocabularies),
            "must have vocabularies of one size",
            "A text goes from one model to another as ids.",
        )
        require(
            {*members} == {*controller.profiles},
            "members",
            sorted(members),
            f"must be those of the controller, {sorted(controller.profiles)}",
        )
        for name, member in members.items():
            gate = member.rules.get("gate", "max_probability")
            require(
                gate == "max_probability",
                f"{name}.gate",
                gate,
                "must be max_probability",
                "The last exit that is loaded knows of a token only how probable it is.",
            )
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
        self.changes: list[ModelChange] = []
        self._growing: dict[str, float] = {}  # since when
        self._slots = {}
        for name, member in members.items():
            n = member.config.n_exits + 1
            mapped = isinstance(slots, Mapping)
            own = slots.get(name, ()) if mapped else (slots,) * n
            whole = all(isinstance(k, numbers.Integral) and k > 0 for k in own)
            ok = whole and len(own) == n and [*own] == sorted(own, reverse=True)
            allowed = f"must be {n} whole numbers above 0, of which none rises"
            require(
                ok, f"slots[{name!r}]" if mapped else "slots", own, allowed, "Give more memory."
            )
            self._slots[name] = tuple(int(k) for k in own)
        # A text may have to go on in any of them.
        least = min(member.config.context_length for member in members.values())
        self._making = dict(context=least if context is None else context, steps=steps)
        self._arrivals, self._meter = itertools.count(), meter
        self._jobs: dict[str, _RunningRequest] = {}
        self._ended: list[RequestOutput] = []  # to be told with the next step
        self._auditors: dict[str, AnswerVerifier] = {}
        self._joules = 0.0 if meter is None else meter.read()
        self._spent = dict.fromkeys(members, 0.0)  # joules, and
        self._emitted = dict.fromkeys(members, 0)  # tokens

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        A request with an objective of its own goes to the best loaded model for it, and nothing is
        loaded for it. With "accuracy" its tokens leave by the last exit alone.

        Raises:
          ConfigError: for what no model accepts.
        """
        id_, prompt = request.request_id, request.prompt
        require_new_id(id_, {*self._jobs, *(output.request_id for output in self._ended)})
        require(request.policy is None, "policy", request.policy, f"must be None: {CHOOSES}")
        if request.objective is not None:
            require_one_of("objective", request.objective, OWN)
        context = self.context
        for name, member in self.members.items():
            require(
                request.logits_params is None or member.options.logits_params,
                "logits_params",
                type(request.logits_params).__name__,
                f"must be None: {name} takes none",
                "EngineOptions(logits_params=True) does.",
            )
            check_prompts([prompt], member.config, context)
            RequestRows.make(
                member.config,
                [len(prompt)],
                [request.max_tokens],
                ExitPolicy.make(member.config, 1),
                request.sampling or SamplingParams.make(1),
                request.stop_token_ids,
            )
        job = _RunningRequest(
            request=request,
            order=(-request.priority, next(self._arrivals)),
            came=self._clock(),
            objective=request.objective,
        )
        self._jobs[id_] = job
        self._wait(job)

    @property
    def slots(self) -> int:
        """Slots of the model that serves, or will serve first."""
        model, depth = self.controller.current or self.controller.wanted
        return self._slots[model][depth - 1]

    @property
    def context(self) -> int:
        """Most tokens of a request."""
        return self._making["context"]

    @property
    def running(self) -> list[str]:
        """Ids of the requests that models have."""
        return [job.request_id for job in self._jobs.values() if job.model]

    @property
    def waiting(self) -> list[str]:
        """Ids of the other requests, in the order in which models will get them."""
        return [job.request_id for job in self._queue]

    @property
    def num_cached_tokens(self) -> int:
        return sum(part.scheduler.num_cached_tokens for part in self.parts.values())

    def abort(self, request_id: str) -> bool:
        """End a request and return whether there was one.

        A step reports its end. Its id is free from then on.
        """
        job = self._jobs.get(request_id)
        if job is None:
            return False
        if job.model:
            job.cancelled = True  # and if the model has to go before that is told
            return self.parts[job.model].scheduler.abort(request_id)
        self._queue.remove(job)
        self._cancelled(job)
        return True

    def _cancelled(self, job: _RunningRequest) -> None:
        id_ = job.request_id
        del self._jobs[id_]
        self._ended.append(RequestOutput(id_, (), FinishReason.CANCELLED))

    @property
    def settled(self) -> bool:
        """It is idle, and nothing is on its way to the device."""
        coming = any(part.target_segments > part.depth for part in self.parts.values())
        return self.idle and self._loading is None and not coming

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._ended and not self._to_audit

    def step(self) -> list[RequestOutput]:
        if all(part.idle for part in self.parts.values()):
            self._spends(None)
        self._reconcile()
        self._assign()
        outputs, self._ended = self._ended, []
        for name in [*self.parts]:
            part = self.parts[name]
            if part.growth_ready:
                self._goes_deeper(name, part)
            busy = not part.idle
            new = part.scheduler.step()  # what has come by now is used with the next one
            if busy:
                self._spends(name)
            for output in new:
                outputs.append(self._output_of(name, self._jobs[output.request_id], output))
        self._audit_next()
        return outputs

    def _load(self, wanted: ModelDepth) -> ModelLoad:
        return ModelLoad(self._clock(), wanted, self._made)

    def _made(self, choice: ModelDepth) -> PartialModel:
        member = self.members[choice.model]
        part = PartialModel(
            member.params,
            member.config,
            member.options,
            depth=choice.depth,
            slots=self._slots[choice.model],
            **self._making,
        )
        jax.block_until_ready((part.engine.weights, part.scheduler.state))
        return part

    def _adopt_loaded(self, loading: ModelLoad) -> None:
        self._changed("load", loading.choice.model, loading.begin, 0)

    def _grow(self, wanted: ModelDepth) -> None:
        part, begin = self.parts[wanted.model], self._clock()
        held = part.scheduler.num_cached_tokens
        if why := failure(lambda: part.grow(wanted.depth)):
            self._starts_again(wanted, part, why)
            return
        if part.scheduler.num_cached_tokens < held:
            self._changed("narrow", wanted.model, begin, held - part.scheduler.num_cached_tokens)
        self._growing.setdefault(wanted.model, begin)

    def _goes_deeper(self, model: str, part: PartialModel) -> None:
        """Use the segments that have arrived."""
        begin, wanted = self._clock(), ModelDepth(model, part.target_segments)
        if why := failure(part.adopt_growth):
            self._starts_again(wanted, part, why)
            return
        held, since = part.scheduler.num_cached_tokens, self._growing.pop(model)
        self._changed("grow", model, since, held, self._clock() - begin)
        self._changes_depth(model)

    def _starts_again(self, wanted: ModelDepth, part: PartialModel, why: str) -> None:
        """Restart a model that failed to grow."""
        begin, held = self._clock(), part.scheduler.num_cached_tokens
        part.restart()
        self._changed("stay", wanted.model, self._growing.pop(wanted.model, begin), held)
        self._cannot_grow(wanted, why)

    def _cancel_growth(self, model: str) -> None:
        part = self.parts[model]
        if failure(part.cancel_growth):
            part.restart()
        self._changed("stay", model, self._growing.pop(model), 0)

    def _shrink(self, wanted: ModelDepth) -> None:
        part, begin = self.parts[wanted.model], self._clock()
        held = part.scheduler.num_cached_tokens
        part.shrink(wanted.depth)
        self._growing.pop(wanted.model, None)
        self._changed("shrink", wanted.model, begin, held)

    def _on_freed(self, model: str, part: PartialModel) -> None:
        self._growing.pop(model, None)
        self._changed("free", model, self._clock(), 0)

    def _audit_room(self, depths: Mapping[str, int]) -> float:
        reference = self._reference
        if reference is not None:
            return capacity.audit_bytes(reference.config, depths.get(reference.name, 0))
        config = lambda model: self.members[model].config
        return max(capacity.audit_bytes(config(model), depth) for model, depth in depths.items())

    def _requests_of(self, model: str) -> list[_RunningRequest]:
        return [job for job in self._jobs.values() if job.model == model]

    def _withdraw(self, job: _RunningRequest) -> bool:
        if job.cancelled:
            self._cancelled(job)
        else:
            self.taken_along += 1
        return not job.cancelled

    def _changed(
        self, kind: str, model: str, begin: float, tokens: int, rebuild: float = 0.0
    ) -> None:
        now, depth = self._clock(), self.parts[model].depth if model in self.parts else 0
        self.changes.append(
            ModelChange(now, kind, ModelDepth(model, depth), now - begin, rebuild, tokens)
        )

    def _start_request(self, job: _RunningRequest) -> None:
        job.energy = (self._spent[job.model], self._emitted[job.model])
        request = dataclasses.replace(job.request, policy=self._policy(job), objective=None)
        self.parts[job.model].scheduler.add_request(request, job.tokens)

    def _policy(self, job: _RunningRequest) -> ExitPolicy:
        member, (_, level) = self.members[job.model], job.strictness
        given = np.broadcast_to(member.rules.get("threshold", 1.0), member.config.n_exits)
        if job.objective == "accuracy":
            level = STRICTEST
        job.thresholds = np.array([stricter(float(t), level) for t in given])
        return ExitPolicy.make(member.config, 1, **{**member.rules, "threshold": job.thresholds})

    def _output_of(self, model: str, job: _RunningRequest, output: RequestOutput) -> RequestOutput:
        """Record a model's output for a request, and return it with the model's name."""
        id_, tokens, finish = output
        if tokens:
            tokens = tuple(t._replace(model=model) for t in tokens)
            self._on_tokens(job)
            job.tokens += tokens
            job.exits += [t.exit for t in tokens]
            self._emitted[model] += len(tokens)
            n, least = self.members[model].config.n_exits, job.thresholds
            below = [t.exit < n and bool(t.confidence < least[t.exit]) for t in tokens]
            job.below += below
            self.controller.tokens(model, below, own=job.objective is not None)
        if not finish:
            return RequestOutput(id_, tokens)
        del self._jobs[id_]
        sampling, logits_params = job.request.sampling, job.request.logits_params
        greedy = sampling is None or float(sampling.temperature[0]) == 0
        # What is drawn by chance, or shaped, is not what the whole model says is most likely.
        shaped = logits_params is not None and bool(logits_params.changes[0])
        judged = job.objective is None and greedy and not shaped
        # Who leaves in the middle, as at a stop string, has an answer all the same.
        failed = finish == FinishReason.ERROR
        whole = not failed and len(job.tokens) > 0
        self._on_finished(job, whole, judged, failed=failed)
        return RequestOutput(id_, tokens, finish)

    def _own_perplexity(self, job: _RunningRequest) -> float:
        return perplexity_of(-sum(token.logprob for token in job.tokens), len(job.tokens))

    def _spends(self, model: str | None) -> None:
        """Count the energy since the last call for a model; None counts it for no model."""
        if self._meter is not None:
            before, self._joules = self._joules, self._meter.read()
            if model is not None:
                self._spent[model] += max(self._joules - before, 0.0)

    def _telemetry(self, job: _RunningRequest) -> Telemetry:
        """Return an answer's telemetry; its accuracy is expected, until an audit finds it."""
        beside, energy = len(self.parts[job.model].scheduler.running), None
        if self._meter is not None:
            joules, emitted = job.energy
            energy = self._spent[job.model] - joules
            energy /= max(self._emitted[job.model] - emitted, 1)
        return self._measured(job, beside, energy=energy)

    def _judge(self, job: _RunningRequest) -> AnswerAudit:
        if self._reference is None:
            part, name = self.parts[job.model], job.model
            if name not in self._auditors:
                self._auditors[name] = AnswerVerifier(part.host, part.config)
            auditor = self._auditors[name]
        else:
            name, auditor = self._reference.name, self._reference.auditor
            part = self.parts.get(name)
        # What is on its way has its room already, and would be waited for by all that is brought.
        loaded = None if part is None else part.weights
        verdict = auditor.judge(loaded, job.request.prompt, [t.id for t in job.tokens])
        if name is not None:
            self.audited[name] += len(job.request.prompt) + len(job.tokens)
        return verdict

    def _on_judged(self, model: str, verdict: AnswerAudit) -> tuple[float, float]:
        if self._reference is None:
            return super()._on_judged(model, verdict)
        return self._reference.quality(verdict), verdict.perplexity

    def report(self, since: int = 0, points: int = 0) -> FleetReport:
        """Return what serves, or will first.

        It has the decisions from number `since` on, and the answers from number `points` on.
        """
        controller = self.controller
        model, depth = controller.current or controller.wanted
        audit = self.audits.get((model, depth, controller.level(model)), DisagreementBound())
        return FleetReport(
            model,
            depth,
            self.members[model].config.exit_boundaries[depth - 1],
            self.slots,
            controller.below_share,
            audit.share if audit.count else None,
            audit.high if audit.count else None,
            audit.perplexity if audit.count else None,
            controller.counted,
            tuple(controller.decisions[since:]),
            self.performance.since(points),
        )
