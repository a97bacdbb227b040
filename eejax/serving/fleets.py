"""Several models as one, described so that another process can build the fleet that serves them.

The models are loaded and measured, and everything that a switch between them, or between their
depths, may need is compiled before the first request.
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

import jax
import numpy as np

from eejax.checkpoint.language_model import LanguageModel, load
from eejax.common.errors import ConfigError, require, require_given, require_one_of
from eejax.common.fields import UnitFloat, check_fields
from eejax.common.lengths import padded_lengths
from eejax.common.progress import LOG
from eejax.data import chat
from eejax.data.tokenizer_files import TemplateSource
from eejax.data.tokenizers import Tokenizer
from eejax.helios.choices import ControllerOptions
from eejax.helios.controller import Controller
from eejax.helios.energy import meter
from eejax.helios.fleet import Fleet
from eejax.helios.measurements import (
    MeasurementSetup,
    evaluated,
    kept,
    largest,
    measured,
    with_profiles,
)
from eejax.helios.objectives import ServiceObjective
from eejax.helios.pool import FleetMember
from eejax.helios.quality import QualitySource, with_benchmarks, with_ratios
from eejax.helios.verifier import AnswerVerifier, ReferenceJudge
from eejax.inference import capacity
from eejax.inference.deepening import on_host
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy
from eejax.inference.request import EngineRequest
from eejax.serving.messages import BuiltEngine
from eejax.serving.models import batch_options, require_room
from eejax.serving.worker import joined

log = logging.getLogger(LOG)

THRESHOLD = 0.8  # default threshold of exits
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


@dataclasses.dataclass(frozen=True)
class ServedFleet:
    """A fleet to serve; calling it loads and measures the models, which takes a while.

    Attributes:
      sources: sources of models by their names, each as `ServedModel.source`.
      config: objective and options of the fleet.
      thresholds: thresholds of models with others than `THRESHOLD`.
      prompts: texts like those to come, on which models are measured; by default what the largest
        model writes.
      tokenizer: as in `ServedModel`.
      dtype: as in `ServedModel`.
      slots: as in `ServedModel`.
      context: as in `ServedModel`.
      chunk: as in `ServedModel`.
    """

    sources: Mapping[str, str]
    config: FleetConfig = FleetConfig()
    thresholds: Mapping[str, float | tuple[float, ...]] = dataclasses.field(default_factory=dict)
    prompts: tuple[str, ...] = ()
    tokenizer: str | None = None
    dtype: str | None = None
    slots: int = 16
    context: int | None = None
    chunk: int | None = None

    def __post_init__(self):
        require(bool(self.sources), "sources", self.sources, "must name at least one model")
        require_room(self.slots, self.context)
        unknown = sorted({*self.thresholds} - {*self.sources})
        require(not unknown, "thresholds", unknown, f"must be among {sorted(self.sources)}")

    def __call__(self) -> BuiltEngine:
        opened = {
            name: load(source, tokenizer=self.tokenizer, dtype=self.dtype)
            for name, source in self.sources.items()
        }
        source, judge = QualitySource.parse(self.config.quality), None
        if source.kind == "judge":
            (path,) = source.names
            found = load(path, tokenizer=self.tokenizer, dtype=self.dtype)
            check_alike(opened | {path: found})
            judge = FleetMember(jax.device_get(found.params), found.config)
        check_alike(opened)
        members = {}
        for name, model in opened.items():
            threshold = self.thresholds.get(name, THRESHOLD)
            try:
                ExitPolicy.make(model.config, 1, threshold)
            except ConfigError as error:
                raise ConfigError(f"thresholds of {name!r}: {error}") from error
            options = batch_options(model.config, self.chunk)
            params = jax.device_get(model.params)
            members[name] = FleetMember(params, model.config, {"threshold": threshold}, options)
        first = next(iter(opened.values()))
        return built(
            members,
            first.tokenizer,
            self.config,
            slots=self.slots,
            context=self.context,
            prompts=self.prompts,
            template=template_of(opened),
            judge=judge,
        )


def check_alike(opened: Mapping[str, LanguageModel]) -> None:
    """Raise `ConfigError` for models that cannot continue each other's texts."""
    (first, own), *others = opened.items()
    for name, model in others:
        for what, of in (
            ("tokenizer", lambda m: m.tokenizer.fingerprint),
            ("vocabulary", lambda m: m.config.vocab_size),
        ):
            # The message begins with the setting to fix, which is not the differing one.
            require(
                of(model) == of(own),
                f"model: the {what} of {name!r}",
                of(model),
                f"must be that of {first!r}, {of(own)!r}",
                "A text goes from one model to another as ids: train them with one tokenizer.",
            )


def template_of(opened: Mapping[str, LanguageModel]) -> TemplateSource | None:
    """Return the chat template of the models that have one, None if none has.

    Raises:
      ConfigError: if their templates differ or are invalid.
    """
    found = {name: chat.find(model.source, model.tokenizer) for name, model in opened.items()}
    found = {name: template for name, template in found.items() if template is not None}
    if not found:
        return None
    (first, own), *others = found.items()
    for name, template in others:
        allowed = f"must be that of {first!r}"
        fix = "Put the same chat_template.jinja into their folders."
        require(template == own, f"chat template of {name!r}", template.source[:40], allowed, fix)
    chat.ChatTemplate(*own)  # reject an invalid template before the first request
    return own


def built(
    members: Mapping[str, FleetMember],
    tokenizer: Tokenizer,
    config: FleetConfig,
    *,
    slots: int,
    context: int | None = None,
    prompts: Sequence[str] = (),
    template: TemplateSource | None = None,
    judge: FleetMember | None = None,
) -> BuiltEngine:
    """Build the fleet of models that are in host memory.

    The models are measured here, except those for which the repository has measurements under the
    same conditions. `judge` is the model that judges their answers, where the quality is a judge's.
    """
    members = {name: member.ready() for name, member in members.items()}
    source = QualitySource.parse(config.quality)
    configs = [member.config for member in members.values()]
    readers = configs if judge is None else [*configs, judge.config]  # the judge reads answers
    most = min(reader.context_length for reader in readers)
    context = most if context is None else context
    require(
        MIN_CONTEXT <= context <= most,
        "context",
        context,
        f"must be in {MIN_CONTEXT}..{most}, for all models",
    )
    counts = meter()
    if counts is None and ("energy" in config.limits or config.objective == "energy"):
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
    budget = config.options.budget
    reference = reference_of(members, source, judge)

    def beside(name: str) -> Callable[[int], int]:
        """Return the bytes that judging an answer takes beside that many segments of a member."""
        of = members[name].config if reference is None else reference.config

        def there(depth):
            return depth if reference is None or reference.name == name else 0

        return lambda depth: capacity.audit_bytes(of, there(depth))

    # If the budget is too small for several models, report the one that needs most.
    needs = {name: min_bytes(members[name], context, beside(name)) for name in members}
    largest_first = sorted(members, key=lambda name: -needs[name])
    by_depth = {
        name: room(members[name], slots, context, budget, name, beside(name))
        for name in largest_first
    }
    setup = MeasurementSetup(members, by_depth, context, tokenizer, tuple(prompts), reference)
    repository = kept(config.repository)
    profiles = measured(setup, repository, source, "operations" if counts is None else counts.name)
    scores = []
    if source.kind == "benchmark":
        scores = repository.scores()
        boundaries = {name: member.config.exit_boundaries for name, member in members.items()}
        profiles = with_benchmarks(profiles, boundaries, scores, source.names)
        perplexity = config.limits.get("perplexity") or config.objective == "perplexity"
        known = any(p.perplexity != ((1.0, 1.0),) for p in profiles.values())
        allowed = "must have a score of perplexity, of a task that all models were scored on"
        require(
            known or not perplexity, "quality", config.quality, allowed, "Or take best or judge."
        )
    elif source.kind == "judge":
        assert reference is not None  # `built` loads a judge's reference
        profiles, reference.least = with_ratios(profiles)
    known = evaluated(repository, profiles, source, scores, reference)
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
            meter=counts,
            audits=config.audits,
            reference=reference,
        )
        made.step()  # load a model before the first request
        return made

    deepest = max(configs, key=lambda one: one.n_layers)
    return BuiltEngine(None, deepest, tokenizer, template, fleet)


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
        joined(part.scheduler, slots[depth - 1])
        for length in lengths:
            verifier.judge(part.engine.weights, [0], [0] * (length - 1))
        # A growing model already has the slots of the deeper depth. It may then be asked to grow
        # further, or not at all.
        counts = sorted({*slots[depth - 1 :]}, reverse=True)
        for many, few in itertools.combinations(counts, 2):
            part.resize(many)
            part.resize(few)
            if many == counts[0]:
                joined(part.scheduler, few)
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
