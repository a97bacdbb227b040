"""Models of a fleet on the device, and measurements of the requests that run in them."""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eejax.common.errors import require
from eejax.common.trees import Tree
from eejax.helios.choices import STRICTEST, ModelDepth, stricter
from eejax.helios.disagreement_bound import AnswerAudit, perplexity_of
from eejax.helios.energy import EnergyMeter
from eejax.helios.interfaces import AnswerCosts, FleetRequest
from eejax.helios.loading import ModelLoad, failure
from eejax.helios.verifier import AnswerVerifier, ReferenceJudge
from eejax.inference import capacity
from eejax.inference.deepening import on_host
from eejax.inference.options import EngineOptions
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy, ExitRules
from eejax.inference.request import EngineRequest, RequestOutput, Token
from eejax.models.config import ModelConfig


class MemberRules(ExitRules, total=False):
    """Arguments of `ExitPolicy.make` by which a member's tokens leave.

    Attributes:
      threshold: one number, or one per exit; 1 by default, with which none leaves early.
    """

    threshold: float | Sequence[float] | np.ndarray


@dataclasses.dataclass(frozen=True)
class FleetMember:
    """A model of a fleet, and the rules by which its tokens leave."""

    params: Tree = dataclasses.field(repr=False)
    config: ModelConfig
    rules: MemberRules = dataclasses.field(default_factory=MemberRules)
    options: EngineOptions = EngineOptions()

    def ready(self) -> FleetMember:
        """Return the member with its parameters prepared by `deepening.on_host`."""
        return dataclasses.replace(self, params=on_host(self.params, self.config))


class ModelChange(NamedTuple):
    """A change of a model.

    Attributes:
      kind: "load", "grow", "shrink" or "free"; "narrow" comes before "grow" if that leaves fewer
        slots, and "stay" replaces "grow" if it was cancelled or there was no room.
      choice: the model, and the number of its exits that are loaded then.
      seconds: time from its start to its use or end; a model that grows serves meanwhile.
      rebuild: part of them in which keys and values were filled in and nothing else ran.
      tokens: tokens of the requests that it was done for, or that start anew.
    """

    time: float
    kind: str
    choice: ModelDepth
    seconds: float
    rebuild: float = 0.0
    tokens: int = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class RunningRequest(FleetRequest):
    """A request of a fleet of models.

    Attributes:
      request: the request as it was added; the serving model adds its own exit rules.
      tokens: tokens so far.
      energy: joules and tokens of its model when that got the request.
      thresholds: [exits] thresholds for its tokens.
    """

    request: EngineRequest
    tokens: list[Token] = dataclasses.field(default_factory=list)
    energy: tuple[float, int] = (0.0, 0)
    thresholds: Any = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def perplexity(self) -> float:
        return perplexity_of(-sum(token.logprob for token in self.tokens), len(self.tokens))


class FleetPool:
    """Pool of the models of a `Fleet`, for its `Dispatcher` (`interfaces.ModelPool`).

    Attributes:
      members: models by name, with one vocabulary.
      parts: loaded models by name.
      slots: by model, the number at each depth.
      context: maximum tokens of a request.
      changes: all changes of models so far.
      audited: number of tokens that each model judged.
    """

    def __init__(
        self,
        members: Mapping[str, FleetMember],
        *,
        slots: int | Mapping[str, Sequence[int]],
        context: int | None,
        steps: int,
        meter: EnergyMeter | None,
        reference: ReferenceJudge | None,
        clock: Callable[[], float],
    ):
        """Prepare the members; none is loaded yet. The arguments are those of `Fleet`."""
        self.members = {name: member.ready() for name, member in members.items()}
        self.slots = {name: _slots_of(name, member, slots) for name, member in members.items()}
        # A text may have to continue in any model.
        least = min(member.config.context_length for member in members.values())
        self.context = least if context is None else context
        self.parts: dict[str, PartialModel] = {}
        self.changes: list[ModelChange] = []
        self.audited = dict.fromkeys(members, 0)
        self._steps, self._reference, self._clock = steps, reference, clock
        self._growing: dict[str, float] = {}  # time of the start, by model
        self._verifiers: dict[str, AnswerVerifier] = {}
        self._meter, self._joules = meter, 0.0 if meter is None else meter.read()
        self._spent = dict.fromkeys(members, 0.0)  # joules
        self._emitted = dict.fromkeys(members, 0)  # tokens

    @property
    def num_cached_tokens(self) -> int:
        return sum(part.scheduler.num_cached_tokens for part in self.parts.values())

    @property
    def idle(self) -> bool:
        return all(part.idle for part in self.parts.values())

    def load(self, choice: ModelDepth) -> ModelLoad:
        return ModelLoad(self._clock(), choice, self.make)

    def make(self, choice: ModelDepth) -> PartialModel:
        """Return a model whose weights have arrived on the device."""
        member = self.members[choice.model]
        part = PartialModel(
            member.params,
            member.config,
            member.options,
            depth=choice.depth,
            slots=self.slots[choice.model],
            context=self.context,
            steps=self._steps,
        )
        jax.block_until_ready((part.engine.weights, part.scheduler.state))
        return part

    def add(self, loading: ModelLoad) -> None:
        self.parts[loading.choice.model] = loading.result()
        self._changed("load", loading.choice.model, loading.begin, 0)

    def grow(self, choice: ModelDepth) -> str:
        part, begin = self.parts[choice.model], self._clock()
        cached = part.scheduler.num_cached_tokens
        if why := failure(lambda: part.grow(choice.depth)):
            self._restart(choice.model)
            return why
        if part.scheduler.num_cached_tokens < cached:
            self._changed("narrow", choice.model, begin, cached - part.scheduler.num_cached_tokens)
        self._growing.setdefault(choice.model, begin)
        return ""

    def adopt_growth(self, model: str) -> str:
        """Use the segments that have arrived; return why that failed, or ""."""
        part, begin = self.parts[model], self._clock()
        if why := failure(part.adopt_growth):
            self._restart(model)
            return why
        cached, since = part.scheduler.num_cached_tokens, self._growing.pop(model)
        self._changed("grow", model, since, cached, self._clock() - begin)
        return ""

    def _restart(self, model: str) -> None:
        """Restart a model that failed to grow."""
        begin, cached = self._clock(), self.parts[model].scheduler.num_cached_tokens
        self.parts[model].restart()
        self._changed("stay", model, self._growing.pop(model, begin), cached)

    def cancel_growth(self, model: str) -> None:
        if failure(self.parts[model].cancel_growth):
            self.parts[model].restart()
        self._changed("stay", model, self._growing.pop(model), 0)

    def shrink(self, choice: ModelDepth) -> None:
        part, begin = self.parts[choice.model], self._clock()
        cached = part.scheduler.num_cached_tokens
        part.shrink(choice.depth)
        self._growing.pop(choice.model, None)
        self._changed("shrink", choice.model, begin, cached)

    def free(self, model: str) -> None:
        del self.parts[model]
        self._growing.pop(model, None)
        self._changed("free", model, self._clock(), 0)

    def _changed(
        self, kind: str, model: str, begin: float, tokens: int, rebuild: float = 0.0
    ) -> None:
        now, depth = self._clock(), self.parts[model].depth if model in self.parts else 0
        choice = ModelDepth(model, depth)
        self.changes.append(ModelChange(now, kind, choice, now - begin, rebuild, tokens))

    def audit_bytes(self, depths: Mapping[str, int]) -> float:
        reference = self._reference
        if reference is not None:
            loaded = 0 if reference.name is None else depths.get(reference.name, 0)
            return capacity.audit_bytes(reference.config, loaded)
        configs = {model: self.members[model].config for model in depths}
        return max(capacity.audit_bytes(configs[m], depth) for m, depth in depths.items())

    def start(self, job: RunningRequest) -> None:
        job.energy = (self._spent[job.model], self._emitted[job.model])
        request = dataclasses.replace(job.request, policy=self._policy(job), objective=None)
        self.parts[job.model].scheduler.add_request(request, job.tokens)

    def _policy(self, job: RunningRequest) -> ExitPolicy:
        member, (_, level) = self.members[job.model], job.strictness
        given = np.broadcast_to(member.rules.get("threshold", 1.0), member.config.n_exits)
        if job.objective == "accuracy":
            level = STRICTEST
        job.thresholds = np.array([stricter(float(t), level) for t in given])
        rules: MemberRules = {**member.rules, "threshold": job.thresholds}
        return ExitPolicy.make(member.config, 1, **rules)

    def step(self, model: str) -> list[RequestOutput]:
        """Run one call of a model's scheduler, and count its energy unless it was idle."""
        part = self.parts[model]
        busy = not part.idle
        outputs = part.scheduler.step()  # segments that arrived are used with the next step
        if busy:
            self.count_energy(model)
        return outputs

    def add_tokens(self, job: RunningRequest, tokens: Sequence[Token]) -> list[bool]:
        """Add new tokens to a request; return whether each left below its threshold."""
        n, least = self.members[job.model].config.n_exits, job.thresholds
        below = [t.exit < n and bool(t.confidence < least[t.exit]) for t in tokens]
        job.tokens += tokens
        job.exits += [t.exit for t in tokens]
        job.below += below
        self._emitted[job.model] += len(tokens)
        return below

    def count_energy(self, model: str | None) -> None:
        """Count the energy since the last call for a model; None counts it for no model.

        If it cannot be read now, it counts with the next call.
        """
        if self._meter is not None:
            before = self._joules
            try:
                self._joules = self._meter.read()
            except OSError as error:
                warnings.warn(f"energy is counted later: {error}", stacklevel=2)
            if model is not None:
                self._spent[model] += max(self._joules - before, 0.0)

    def costs(self, job: RunningRequest) -> AnswerCosts:
        """Return the costs of an answer; its agreement is an expectation until an audit."""
        beside, energy = len(self.parts[job.model].scheduler.running), None
        if self._meter is not None:
            joules, emitted = job.energy
            energy = self._spent[job.model] - joules
            energy /= max(self._emitted[job.model] - emitted, 1)
        return AnswerCosts(beside, energy=energy)

    def judge(self, job: RunningRequest) -> AnswerAudit:
        if self._reference is None:
            part, name = self.parts[job.model], job.model
            if name not in self._verifiers:
                self._verifiers[name] = AnswerVerifier(part.host, part.config)
            verifier = self._verifiers[name]
        else:
            name, verifier = self._reference.name, self._reference.verifier
            part = None if name is None else self.parts.get(name)
        # Weights on their way have their room, but every transfer after them would wait for them.
        loaded = None if part is None else part.weights
        verdict = verifier.judge(loaded, job.request.prompt, [t.id for t in job.tokens])
        if name is not None:
            self.audited[name] += len(job.request.prompt) + len(job.tokens)
        return verdict


def _slots_of(
    name: str, member: FleetMember, slots: int | Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """Return a member's slots by depth."""
    n = member.config.n_exits + 1
    if isinstance(slots, Mapping):
        field, own = f"slots[{name!r}]", slots.get(name, ())
    else:
        field, own = "slots", (slots,) * n
    whole = all(isinstance(k, numbers.Integral) and k > 0 for k in own)
    ok = whole and len(own) == n and [*own] == sorted(own, reverse=True)
    allowed = f"must be {n} whole numbers above 0 that never rise"
    require(ok, field, own, allowed, "Give more memory.")
    return tuple(int(k) for k in own)
