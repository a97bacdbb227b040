"""Building of a fleet: its models are measured, and everything that it may need is compiled.

A switch between models, or between their depths, then compiles nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from eejax.common.errors import ConfigError, require, require_given, require_one_of
from eejax.common.fields import UnitFloat, check_fields
from eejax.common.lengths import padded_lengths
from eejax.common.progress import LOG
from eejax.data.tokenizers import Tokenizer
from eejax.helios.choices import ControllerOptions, ModelProfile
from eejax.helios.controller import Controller
from eejax.helios.energy import EnergyMeter, meter
from eejax.helios.fleet import Fleet
from eejax.helios.measurements import (
    MeasurementSetup,
    earlier_evaluations,
    largest,
    measure_members,
    open_repository,
    with_profiles,
)
from eejax.helios.objectives import ServiceObjective
from eejax.helios.pool import FleetMember
from eejax.helios.quality import QualitySource, with_benchmarks, with_ratios
from eejax.helios.verifier import AnswerVerifier, ReferenceJudge
from eejax.inference import capacity
from eejax.inference.deepening import on_host
from eejax.inference.partial import PartialModel
from eejax.inference.request import EngineRequest
from eejax.inference.scheduler import compile_joins

log = logging.getLogger(LOG)

MIN_CONTEXT = 32  # minimum tokens of a context in which models can be measured


@dataclasses.dataclass(frozen=True)
class FleetConfig:
    """Objective and options of a fleet.

    Attributes:
      objective: the objective, as `ServiceObjective.of` takes it.
      limits: limits by metric, as `ServiceObjective.of` takes them.
      options: options of the fleet's `Controller`.
      repository: an SQLite file with measurements, from which a fleet continues; by default they
        are kept in memory.
      audits: share of the answers that are judged again, as `quality` says.
      quality: the measure of accuracy. best, or best:NAME: the share of tokens that the largest
        model, or the named one, would have chosen; judge:PATH: the perplexity of the answers under
        a model that is not served; benchmark, or benchmark:TASK,...: scores that were imported with
        eejax repository.
    """

    objective: str = "throughput"
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    options: ControllerOptions = ControllerOptions()
    repository: str | os.PathLike = ":memory:"
    audits: UnitFloat = 0.1
    quality: str = "best"

    def __post_init__(self):
        check_fields(self)
        QualitySource.parse(self.quality)  # raises
        ServiceObjective.of(self.objective, **self.limits)  # raises


def build_fleet(
    members: Mapping[str, FleetMember],
    tokenizer: Tokenizer,
    config: FleetConfig,
    *,
    slots: int,
    context: int | None = None,
    prompts: Sequence[str] = (),
    judge: FleetMember | None = None,
) -> Callable[[int], Fleet]:
    """Measure models that are in host memory, and return a function that makes their fleet.

    Models for which the repository has measurements under the same conditions are not measured
    again. The function takes the steps of a call, compiles all programs, and loads a model.

    Args:
      members: the models by name.
      tokenizer: their tokenizer.
      config: objective and options.
      slots: maximum requests at a time.
      context: maximum tokens of a request; by default that of the model with the smallest.
      prompts: texts like those to come; by default what the largest model writes.
      judge: the model that judges answers, where the quality is a judge's.

    Raises:
      ConfigError: a context, budget, limit or quality that these models cannot have.
      DataError: a model whose logits are not finite.
    """
    members = {name: member.ready() for name, member in members.items()}
    source = QualitySource.parse(config.quality)
    readers = [*members.values(), *([] if judge is None else [judge])]  # the judge reads answers
    context = _context(readers, context)
    counter = _energy_meter(config)
    reference = reference_of(members, source, judge)
    by_depth = _slots_by_depth(members, reference, config.options.budget, slots, context)
    setup = MeasurementSetup(members, by_depth, context, tokenizer, tuple(prompts), reference)
    repository = open_repository(config.repository)
    counted = "operations" if counter is None else counter.name
    profiles = measure_members(setup, repository, source, counted)
    scores = []
    if source.kind == "benchmark":
        scores = repository.scores()
        boundaries = {name: member.config.exit_boundaries for name, member in members.items()}
        profiles = with_benchmarks(profiles, boundaries, scores, source.names)
        _require_perplexity(config, profiles)
    elif source.kind == "judge":
        assert reference is not None  # `reference_of` requires it
        profiles, reference.least = with_ratios(profiles)
    known = earlier_evaluations(repository, profiles, source, scores, reference)
    repository = with_profiles(repository, profiles)
    for name, profile in profiles.items():
        whole = profile.benchmark()[profile.exits]
        more = "" if whole.perplexity == 1 else f", perplexity {whole.perplexity:.2f}"
        log.info("%s: quality %.3f (%s)%s", name, whole.accuracy, config.quality, more)

    def fleet(steps: int) -> Fleet:
        for i, (name, member) in enumerate(members.items(), 1):
            at = f"{name}, model {i} of {len(members)}"
            warm_up(member, slots=by_depth[name], context=context, steps=steps, name=at)
        if judge is not None and reference is not None:
            for length in audited_lengths(context):
                reference.verifier.judge(None, [0], [0] * (length - 1))
        controller = Controller(
            profiles,
            ServiceObjective.of(config.objective, **config.limits),
            repository,
            config.options,
            known=known,
            clock=time.time,
        )
        made = Fleet(
            members,
            controller,
            slots=by_depth,
            context=context,
            steps=steps,
            meter=counter,
            audits=config.audits,
            reference=reference,
        )
        made.step()  # load a model before the first request
        return made

    return fleet


def _context(readers: Sequence[FleetMember], context: int | None) -> int:
    """Return the tokens of a request, at most those of every model that reads it."""
    most = min(reader.config.context_length for reader in readers)
    context = most if context is None else context
    require(
        MIN_CONTEXT <= context <= most,
        "context",
        context,
        f"must be in {MIN_CONTEXT}..{most}, for all models",
    )
    return context


def _energy_meter(config: FleetConfig) -> EnergyMeter | None:
    """Return the meter of joules, if there is one. Raises `ConfigError` for a limit without."""
    found = meter()
    if found is None and ("energy" in config.limits or config.objective == "energy"):
        log.info(
            "nothing counts joules here, neither NVML nor RAPL: operations of the layers and heads "
            "are counted instead"
        )
        require(
            "energy" not in config.limits,
            "limits.energy",
            config.limits.get("energy"),
            "must be left out where nothing counts joules, as operations are another unit",
            "Limit something else, or let this process read NVML or RAPL.",
        )
    return found


def _slots_by_depth(
    members: Mapping[str, FleetMember],
    reference: ReferenceJudge | None,
    budget: float,
    slots: int,
    context: int,
) -> dict[str, tuple[int, ...]]:
    """Return the slots of each model at each of its depths, beside room for audits."""

    def beside(name: str) -> Callable[[int], int]:
        """Return the bytes that judging an answer takes beside that many segments of a member."""
        of = members[name].config if reference is None else reference.config

        def there(depth):
            return depth if reference is None or reference.name == name else 0

        return lambda depth: capacity.audit_bytes(of, there(depth))

    # If the budget is too small for several models, report the one that needs most.
    needs = {name: min_bytes(members[name], context, beside(name)) for name in members}
    largest_first = sorted(members, key=lambda name: -needs[name])
    return {
        name: room(members[name], slots, context, budget, name, beside(name))
        for name in largest_first
    }


def _require_perplexity(config: FleetConfig, profiles: Mapping[str, ModelProfile]) -> None:
    """Raise `ConfigError` for a perplexity that is limited or weighed without any score of it."""
    asked = config.limits.get("perplexity") or config.objective == "perplexity"
    known = any(profile.perplexity != ((1.0, 1.0),) for profile in profiles.values())
    allowed = "must have a score of perplexity, of a task that all models were scored on"
    require(known or not asked, "quality", config.quality, allowed, "Or take best or judge.")


def room(
    member: FleetMember,
    slots: int,
    context: int,
    budget: float,
    name: str = "model",
    beside: Callable[[int], int] | None = None,
) -> tuple[int, ...]:
    """Return the slots of a model at each of its depths, none more than at the depth before.

    There are at most `slots`. Memory is reserved for audits: `beside` bytes by depth, by default
    those of the model itself.

    Raises:
      ConfigError: where the budget does not hold the model with one slot, at some depth.
    """
    options = dataclasses.replace(member.options, can_deepen=True)
    beside = beside or partial(capacity.audit_bytes, member.config)

    def fit(depth, options):
        return capacity.slots(member.config, options, depth, context, budget - beside(depth), slots)

    # All depths use the buckets of the first depth's slots; they are part of what is kept.
    options = options.resolved(member.config, max(fit(1, options), 1))
    found = [fit(depth, options) for depth in range(1, member.config.n_exits + 2)]
    if not found[-1]:  # fewer requests also need smaller buckets
        options = dataclasses.replace(member.options, can_deepen=True)
        options = options.resolved(member.config, 1)
        found = [min(fit(depth, options), 1) for depth in range(1, member.config.n_exits + 2)]
    found = tuple(np.minimum.accumulate(found).tolist())
    if not found[-1]:
        raise ConfigError(
            f"budget = {budget:.0f}: must be {min_bytes(member, context, beside)} bytes at least, "
            f"which the whole of {name} takes with one request, or a part of it with its audits."
        )
    return found


def min_bytes(member: FleetMember, context: int, beside: Callable[[int], int] | None = None) -> int:
    """Return the bytes of the model with one request, at the depth that takes most.

    That is the whole model, unless audits take more than what is left out at a smaller depth.
    `beside` is that of `room`.
    """
    beside = beside or partial(capacity.audit_bytes, member.config)
    config = member.config
    options = dataclasses.replace(member.options, can_deepen=True).resolved(config, 1)
    return max(
        math.ceil(capacity.engine_bytes(config, options, depth, context, 1)) + beside(depth)
        for depth in range(1, config.n_exits + 2)
    )


def warm_up(
    member: FleetMember, *, slots: Sequence[int], context: int, steps: int, name: str = "model"
) -> None:
    """Compile the programs that a model may need at every depth.

    They cover requests that join, requests that come and go while the model is to grow, requests
    that are running when it grows from any depth to any other, and audits of answers of all
    lengths.
    """
    config, n = member.config, member.config.n_exits + 1
    host = on_host(member.params, config)
    verifier = AnswerVerifier(host, config)
    lengths = audited_lengths(context)

    def make(depth):
        return PartialModel(
            host, config, member.options, slots=slots, depth=depth, context=context, steps=steps
        )

    def at(depth: int) -> None:
        part = make(depth)
        compile_joins(part.scheduler, slots[depth - 1])
        for length in lengths:
            verifier.judge(part.engine.weights, [0], [0] * (length - 1))
        # A growing model already has the slots of the deeper depth. It may then be asked to grow
        # further, or not at all.
        counts = sorted({*slots[depth - 1 :]}, reverse=True)
        for many, few in itertools.combinations(counts, 2):
            part.resize(many)
            part.resize(few)
            if many == counts[0]:
                compile_joins(part.scheduler, few)
            part.resize(counts[0])

    def can_deepen(depth: int, deeper: int) -> None:
        part = make(depth)
        part.scheduler.add_request(EngineRequest("warm-up", (0,), 2 * steps))
        part.step()
        part.grow(deeper)
        part.scheduler.step()  # at the old depth, with the new slots
        part.adopt_growth()
        part.run()

    parts = [(depth, deeper) for depth in range(1, n + 1) for deeper in range(depth, n + 1)]
    for i, (depth, deeper) in enumerate(parts, 1):
        to = f", and on to {deeper}" if deeper > depth else ""
        log.info("%s: compiling part %d of %d, depth %d%s", name, i, len(parts), depth, to)
        if deeper == depth:
            at(depth)  # releases this depth's memory before the next one
        else:
            can_deepen(depth, deeper)


def audited_lengths(context: int) -> list[int]:
    """Return the lengths of text for which programs of audits are compiled."""
    return [length for length in padded_lengths(context) if length > 1]


def reference_of(
    members: Mapping[str, FleetMember], source: QualitySource, judge: FleetMember | None
) -> ReferenceJudge | None:
    """Return the model that judges all members' answers; None where each judges its own."""
    if source.kind == "benchmark":
        return None
    if source.kind == "judge":
        allowed = "must be given to a fleet whose quality is a judge's"
        judge = require_given("judge", judge, allowed)
        return ReferenceJudge(on_host(judge.params, judge.config), judge.config)
    name = largest(members)
    if source.names:
        (name,) = source.names
        require_one_of("quality: best", name, tuple(members))
    return ReferenceJudge(members[name].params, members[name].config, name)
