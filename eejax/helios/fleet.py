"""Several models on one device: a controller chooses which serves, and how much of it is loaded.

Its choices are carried out between two steps. Segments are moved while requests run. A model is
loaded beside the one that serves if the budget holds both; otherwise the other is freed first, and
its requests continue in another model with their text.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from eejax.common.errors import require, require_one_of
from eejax.helios.choices import ModelDepth
from eejax.helios.controller import Controller
from eejax.helios.dispatch import Dispatcher
from eejax.helios.energy import EnergyMeter
from eejax.helios.objectives import NAMED
from eejax.helios.pool import FleetMember, FleetPool, ModelChange, RunningRequest
from eejax.helios.report import CHOOSES, FleetReport
from eejax.helios.verifier import ReferenceJudge
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy
from eejax.inference.request import (
    EngineRequest,
    FinishReason,
    RequestOutput,
    check_prompts,
    require_new_id,
)
from eejax.inference.sampling import SamplingParams
from eejax.inference.scheduler import StepLoop, check_stop_tokens
from eejax.inference.slot_engine import STEPS_PER_CALL
from eejax.inference.state import RequestRows

OWN = tuple(name for name in NAMED if name != "goodput")  # objectives that a request may name


class Fleet(StepLoop):
    """Scheduler of requests over several models, of which its controller chooses one.

    A model stays loaded as long as the controller's budget holds it.

    Attributes:
      controller: chooses the model and its depth.
      pool: the models.
      dispatcher: carries out the choices in the pool.
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
        meter: EnergyMeter | None = None,
        reference: ReferenceJudge | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Start without requests; the first step loads a model.

        Args:
          members: models by name, with one vocabulary.
          controller: controller of models with the same names.
          slots: requests that each model serves at a time, or how many at each of its depths
            (`capacity.slots`).
          context: maximum tokens of a request; by default as many as all models take.
          audits: share of the answers that are judged again by `reference` or, without one, by
            their whole model, whose agreement the profiles turn into quality.
          meter: measures energy; without one the profiles' energy is used.
          clock: returns seconds.
        """
        vocabularies = {member.config.vocab_size for member in members.values()}
        require(
            len(vocabularies) == 1,
            "members",
            sorted(vocabularies),
            "must have vocabularies of one size",
            "A text moves from one model to another as token ids.",
        )
        profiles = controller.state.rules.profiles
        require(
            {*members} == {*profiles},
            "members",
            sorted(members),
            f"must be those of the controller, {sorted(profiles)}",
        )
        for name, member in members.items():
            gate = member.rules.get("gate", "max_probability")
            require(
                gate == "max_probability",
                f"{name}.gate",
                gate,
                "must be max_probability",
                "The last loaded exit knows only the probability of a token.",
            )
        require(0 <= audits <= 1, "audits", audits, "must lie in [0, 1]")
        if meter is not None:
            controller.change_rules(counted=meter.name)
        self.controller, self._clock = controller, clock
        self.pool = FleetPool(
            members,
            slots=slots,
            context=context,
            steps=steps,
            meter=meter,
            reference=reference,
            clock=clock,
        )
        self.dispatcher = Dispatcher(
            controller,
            self.pool,
            profiles,
            share=audits,
            clock=clock,
            reference=reference,
        )
        self._arrivals = itertools.count()
        self._jobs: dict[str, RunningRequest] = {}
        self._ended: list[RequestOutput] = []  # to report with the next step

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        A request with an objective of its own goes to the best loaded model for it, and nothing is
        loaded for it. With "accuracy" its tokens leave by the last exit alone.

        Raises:
          ConfigError: for a request that no model accepts.
        """
        id_, prompt = request.request_id, request.prompt
        require_new_id(id_, {*self._jobs, *(output.request_id for output in self._ended)})
        require(request.policy is None, "policy", request.policy, f"must be None: {CHOOSES}")
        if request.objective is not None:
            require_one_of("objective", request.objective, OWN)
        check_stop_tokens(request.stop_token_ids)
        for name, member in self.pool.members.items():
            require(
                request.logits_params is None or member.options.logits_params,
                "logits_params",
                type(request.logits_params).__name__,
                f"must be None: {name} takes none",
                "EngineOptions(logits_params=True) does.",
            )
            check_prompts([prompt], member.config, self.context)
            RequestRows.make(
                member.config,
                [len(prompt)],
                [request.max_tokens],
                ExitPolicy.make(member.config, 1),
                request.sampling or SamplingParams.make(1),
                request.stop_token_ids,
            )
        job = RunningRequest(
            request=request,
            order=(-request.priority, next(self._arrivals)),
            came=self._clock(),
            objective=request.objective,
        )
        self._jobs[id_] = job
        self.dispatcher.wait(job)

    @property
    def slots(self) -> int:
        """Number of slots of the model that serves, or will serve first."""
        model, depth = self.controller.current or self.controller.wanted
        return self.pool.slots[model][depth - 1]

    @property
    def context(self) -> int:
        """Maximum tokens of a request."""
        return self.pool.context

    @property
    def members(self) -> Mapping[str, FleetMember]:
        """Models by name."""
        return self.pool.members

    @property
    def parts(self) -> Mapping[str, PartialModel]:
        """Loaded models by name."""
        return self.pool.parts

    @property
    def changes(self) -> Sequence[ModelChange]:
        """All changes of models so far."""
        return self.pool.changes

    @property
    def running(self) -> list[str]:
        """Ids of the requests that run in models."""
        return [job.request_id for job in self._jobs.values() if job.model]

    @property
    def waiting(self) -> list[str]:
        """Ids of the other requests, in the order in which models will get them."""
        return [job.request_id for job in self.dispatcher.queue]

    @property
    def num_cached_tokens(self) -> int:
        return self.pool.num_cached_tokens

    def abort(self, request_id: str) -> bool:
        """End a request and return whether there was one.

        A later step reports its end, and from then on its id is free.
        """
        job = self._jobs.get(request_id)
        if job is None:
            return False
        if job.model:
            job.aborted = True  # in case the model is freed before it reports the end
            return self.pool.parts[job.model].scheduler.abort(request_id)
        self.dispatcher.queue.remove(job)
        self._aborted(job)
        return True

    def _aborted(self, job: RunningRequest) -> None:
        del self._jobs[job.request_id]
        self._ended.append(RequestOutput(job.request_id, (), FinishReason.ABORTED))

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._ended and not self.dispatcher.to_audit

    def step(self) -> list[RequestOutput]:
        dispatcher, pool = self.dispatcher, self.pool
        if pool.idle:
            pool.count_energy(None)
        dispatcher.reconcile()
        dispatcher.assign()
        while dispatcher.aborted:
            self._aborted(dispatcher.aborted.pop(0))
        outputs, self._ended = self._ended, []
        for name in [*pool.parts]:
            part = pool.parts[name]
            if part.growth_ready:
                wanted = ModelDepth(name, part.target_segments)
                if why := pool.adopt_growth(name):
                    dispatcher.cannot_grow(wanted, why)
                else:
                    dispatcher.depth_changed(name)
            for output in pool.step(name):
                outputs.append(self._output_of(name, self._jobs[output.request_id], output))
        dispatcher.audit_next()
        return outputs

    def _output_of(self, model: str, job: RunningRequest, output: RequestOutput) -> RequestOutput:
        """Record a model's output for a request, and return it with the model's name."""
        id_, tokens, finish = output
        if tokens:
            tokens = tuple(t._replace(model=model) for t in tokens)
            self.dispatcher.record_tokens(job)
            below = self.pool.add_tokens(job, tokens)
            self.controller.tokens_emitted(model, below, own=job.objective is not None)
        if not finish:
            return RequestOutput(id_, tokens)
        del self._jobs[id_]
        sampling, logits_params = job.request.sampling, job.request.logits_params
        greedy = sampling is None or float(sampling.temperature[0]) == 0
        # Sampled tokens, or those of processed logits, are not the whole model's most likely ones.
        shaped = logits_params is not None and bool(logits_params.changes[0])
        judged = job.objective is None and greedy and not shaped
        # A request that ends early, as at a stop string, still has an answer.
        failed = finish == FinishReason.ERROR
        whole = not failed and len(job.tokens) > 0
        self.dispatcher.finish(job, whole, judged, failed, job.perplexity)
        return RequestOutput(id_, tokens, finish)

    def report(self, since: int = 0, points: int = 0) -> FleetReport:
        """Return a report on the choice that serves, or will serve first.

        It has the decisions from number `since` on, and the answers from number `points` on.
        """
        controller = self.controller
        model, depth = controller.current or controller.wanted
        audit = self.dispatcher.audit(ModelDepth(model, depth))
        return FleetReport(
            model,
            depth,
            self.pool.members[model].config.exit_boundaries[depth - 1],
            self.slots,
            controller.below_share,
            audit.share if audit.count else None,
            audit.high if audit.count else None,
            audit.perplexity if audit.count else None,
            controller.state.rules.counted,
            tuple(controller.decisions[since:]),
            self.dispatcher.performance.since(points),
        )
