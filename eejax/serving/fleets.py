"""Several models as one, described so that a process of its own can make the fleet that serves it.

The models are loaded and measured, and whatever a switch between them, or between their depths, may
need is compiled before anybody is answered.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import time
import warnings
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from eejax.common.errors import ConfigError, DataError, require
from eejax.common.trees import nbytes
from eejax.data import chat
from eejax.data.tokenizers import Tokenizer
from eejax.inference import capacity, scoring
from eejax.inference.deepening import on_host
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import Sampling
from eejax.serving.auditor import Auditor
from eejax.serving.choices import ControllerOptions, Profile
from eejax.serving.controller import Controller
from eejax.serving.energy import meter
from eejax.serving.fleet import Fleet, Member
from eejax.serving.messages import LOG, Built, Template
from eejax.serving.models import batch_options
from eejax.serving.objectives import Objective
from eejax.serving.profiles import measure
from eejax.serving.repository import Repository
from eejax.serving.worker import joined
from eejax.train.pretrained import Opened, open_model

log = logging.getLogger(LOG)

THRESHOLD = 0.8  # of exits for which none is given
TEXTS = 64  # most that models are measured on, of those given
SAMPLES, SAMPLED = 16, 96  # texts that the largest model writes where none are, tokens of each
LEAST = 32  # tokens of a context, in which models can be measured
WINDOW, ROWS, BATCHES = 128, 8, 8  # of those texts: tokens of a window, windows of a batch, batches


@dataclasses.dataclass(frozen=True)
class Aims:
    """What a fleet is to do. objective, limits: as `Objective.of`; options: of its `Controller`;
    repository: an SQLite file; audits: share of the answers that are looked at again."""

    objective: str = "throughput"
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    options: ControllerOptions = ControllerOptions()
    repository: str | os.PathLike = ":memory:"
    audits: float = 0.1

    def __post_init__(self):
        require(0 <= self.audits <= 1, "audits", self.audits, "must lie in [0, 1]")
        Objective.of(self.objective, **self.limits)  # raises


@dataclasses.dataclass(frozen=True)
class ServedFleet:
    """sources: of models by their names, each as `Served.source`; thresholds: of those that have
    others than `THRESHOLD`; prompts: texts like what will be asked, on which models are measured,
    by default what the largest one writes; tokenizer, dtype, slots, context, chunk: as `Served`'s.

    Called, it loads and measures the models, which takes a while.
    """

    sources: Mapping[str, str]
    aims: Aims = Aims()
    thresholds: Mapping[str, float | tuple[float, ...]] = dataclasses.field(default_factory=dict)
    prompts: tuple[str, ...] = ()
    tokenizer: str | None = None
    dtype: str | None = None
    slots: int = 16
    context: int | None = None
    chunk: int = 64

    def __post_init__(self):
        require(bool(self.sources), "sources", self.sources, "must name a model at least")
        unknown = sorted({*self.thresholds} - {*self.sources})
        require(not unknown, "thresholds", unknown, f"must be of {sorted(self.sources)}")

    def __call__(self) -> Built:
        opened = {
            name: open_model(source, tokenizer=self.tokenizer, dtype=self.dtype)
            for name, source in self.sources.items()
        }
        check_alike(opened)
        members = {}
        for name, model in opened.items():
            rules = dict(threshold=self.thresholds.get(name, THRESHOLD))
            try:
                ExitPolicy.make(model.config, 1, **rules)
            except ConfigError as error:
                raise ConfigError(f"thresholds of {name!r}: {error}") from error
            options = batch_options(model.config, self.chunk)
            params = jax.device_get(model.params)
            members[name] = Member(params, model.config, rules, options)
        first = next(iter(opened.values()))
        return built(
            members, first.tokenizer, self.aims, slots=self.slots, context=self.context,
            prompts=self.prompts, template=template_of(opened),
        )  # fmt: skip


def check_alike(opened: Mapping[str, Opened]) -> None:
    """Raises ConfigError for models of which one cannot go on with another one's text."""
    (first, own), *others = opened.items()
    for name, model in others:
        for what, of in (
            ("tokenizer", lambda m: m.tokenizer.fingerprint),
            ("vocabulary", lambda m: m.config.vocab_size),
        ):
            # Begins with the setting to be mended, which is not the one of the same name.
            require(
                of(model) == of(own), f"model: the {what} of {name!r}", of(model),
                f"must be that of {first!r}, {of(own)!r}",
                "A text goes from one model to another as ids: train them with one tokenizer.",
            )  # fmt: skip


def template_of(opened: Mapping[str, Opened]) -> Template | None:
    """The chat template of those models that have one. Raises ConfigError where they differ."""
    found = {name: chat.find(model.path, model.tokenizer) for name, model in opened.items()}
    found = {name: template for name, template in found.items() if template is not None}
    if not found:
        return None
    (first, own), *others = found.items()
    for name, template in others:
        told = f"must be that of {first!r}"
        fix = "Put the same chat_template.jinja into their folders."
        require(template == own, f"chat template of {name!r}", template[0][:40], told, fix)
    chat.Template(*own)  # one that is none is told before anybody asks
    return own


def built(
    members: Mapping[str, Member], tokenizer: Tokenizer, aims: Aims, *, slots: int,
    context: int | None = None, prompts: Sequence[str] = (), template: Template | None = None,
) -> Built:  # fmt: skip
    """A fleet's, of models that lie on the host; they are measured here."""
    members = {name: member.ready() for name, member in members.items()}
    configs = [member.config for member in members.values()]
    most = min(config.context_length for config in configs)
    context = most if context is None else context
    require(
        LEAST <= context <= most, "context", context, f"must be in {LEAST}..{most}, for all models"
    )
    counts = meter()
    if counts is None and ("energy" in aims.limits or aims.objective == "energy"):
        log.info(
            "nothing counts joules here, neither NVML nor RAPL: operations of the layers and heads "
            "stand for them"
        )
        require(
            "energy" not in aims.limits, "limits.energy", aims.limits.get("energy"),
            "must be left out where nothing counts joules, as operations are another unit",
            "Limit something else, or let this process read NVML or RAPL.",
        )  # fmt: skip
    budget = aims.options.budget
    # Of those that the budget is too small for the one that needs most is told of.
    largest_first = sorted(members, key=lambda name: -least(members[name], context))
    by_depth = {name: room(members[name], slots, context, budget, name) for name in largest_first}
    if prompts:
        texts = encoded(prompts, tokenizer)
    else:
        largest = max(members, key=lambda name: nbytes(members[name].params))
        log.info("%s: writing texts to measure models on", largest)
        own = dict(slots=by_depth[largest], context=context)
        texts = sampled(members[largest], tokenizer, **own)
    new = max(min(32, context // 8), 1)
    texts = [text[: context // 2] for text in texts]  # there is room to go on
    batches = windows(texts, context)
    profiles = {}
    for name, m in members.items():
        own = dict(slots=by_depth[name], context=context, new=new)
        log.info("%s: measuring it at %d depths", name, len(by_depth[name]))
        try:
            profiles[name] = measure(m, texts, batches, **own)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error

    def fleet(steps: int) -> Fleet:
        for name, member in members.items():
            warm_up(member, slots=by_depth[name], context=context, steps=steps, name=name)
        repository = kept(aims.repository, profiles)
        controller = Controller(
            profiles, Objective.of(aims.objective, **aims.limits), repository, aims.options,
            clock=time.time,
        )  # fmt: skip
        made = Fleet(
            members,
            controller,
            slots=by_depth,
            context=context,
            steps=steps,
            meter=counts,
            audits=aims.audits,
        )
        made.step()  # so that a model is there for who asks first
        return made

    deepest = max(configs, key=lambda config: config.n_layers)
    return Built(None, deepest, tokenizer, template, fleet)


def room(
    member: Member, slots: int, context: int, budget: float, name: str = "model"
) -> tuple[int, ...]:
    """Up to so many slots of a model at each of its depths, none more than at the one before; room
    is left for what audits bring. Raises ConfigError where the budget does not hold the model with
    one, at any depth."""
    options = dataclasses.replace(member.options, grows=True)
    beside = lambda depth: capacity.audit_bytes(member.config, depth)
    fit = lambda depth, options: capacity.slots(
        member.config, options, depth, context, budget - beside(depth), slots
    )
    # All depths have the buckets of the first one's slots, which are a part of what is kept.
    options = options.of_slots(max(fit(1, options), 1))
    found = [fit(depth, options) for depth in range(1, member.config.n_exits + 2)]
    if not found[-1]:  # with fewer requests there is less to keep, too
        options = dataclasses.replace(member.options, grows=True).of_slots(1)
        found = [min(fit(depth, options), 1) for depth in range(1, member.config.n_exits + 2)]
    found = tuple(np.minimum.accumulate(found).tolist())
    if not found[-1]:
        raise ConfigError(
            f"budget = {budget:.0f}: must be {least(member, context)} bytes at least, which the "
            f"whole of {name} takes with one request, or less of it with what audits bring."
        )
    return found


def least(member: Member, context: int) -> int:
    """Bytes of the model with one request, at the depth that takes most: the whole of it, but where
    audits bring more than what is left out of less."""
    options = dataclasses.replace(member.options, grows=True).of_slots(1)
    config = member.config
    return max(
        math.ceil(capacity.engine_bytes(config, options, depth, context, 1))
        + capacity.audit_bytes(config, depth)
        for depth in range(1, config.n_exits + 2)
    )


def warm_up(
    member: Member, *, slots: Sequence[int], context: int, steps: int, name: str = "model"
) -> None:
    """Compiles what a model may need at every depth: requests that join, that come and go while it
    is to grow, that are there when it grows from any depth to any other, and audits of answers of
    all lengths."""
    config, n = member.config, member.config.n_exits + 1
    host = on_host(member.params, config)
    auditor = Auditor(host, config)
    lengths = [length for length in scoring.lengths(context) if length > 1]
    make = lambda depth: PartialModel(
        host, config, member.options, slots=slots, depth=depth, context=context, steps=steps
    )

    def at(depth: int) -> None:
        part = make(depth)
        joined(part.scheduler, slots[depth - 1])
        for length in lengths:
            auditor.judge(part.engine.weights, [0], [0] * (length - 1))
        # Before more is there the slots are as few already; then still more may be asked for, or
        # none of it.
        counts = sorted({*slots[depth - 1 :]}, reverse=True)
        for many, few in itertools.combinations(counts, 2):
            part.resize(many)
            part.resize(few)
            if many == counts[0]:
                joined(part.scheduler, few)
            part.resize(counts[0])

    def grows(depth: int, deeper: int) -> None:
        part = make(depth)
        part.scheduler.submit([0], 2 * steps)
        part.step()
        part.grow(deeper)
        part.scheduler.step()  # at the old depth, with the new slots
        part.exchange()
        part.run()

    for depth in range(1, n + 1):
        log.info("%s: compiling what else depth %d of %d may need", name, depth, n)
        at(depth)  # and there is room for the next one
        for deeper in range(depth + 1, n + 1):
            grows(depth, deeper)


def kept(path: str | os.PathLike, profiles: Mapping[str, Profile]) -> Repository:
    """The repository in a file, with what was measured; in memory where that cannot be had now, as
    who is served does not depend on it."""
    try:
        return Repository.of(profiles, path)
    except DataError as error:
        warnings.warn(f"measurements are not kept: {error}", stacklevel=2)
        return Repository.of(profiles)


def encoded(prompts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of the first texts. Raises DataError where nothing is in them."""
    texts = [tokenizer.encode(text).tolist() for text in prompts[:TEXTS]]
    texts = [ids for ids in texts if ids]
    if not texts:
        raise DataError("prompts: have no text to measure models on.")
    return texts


def sampled(
    member: Member, tokenizer: Tokenizer, *, slots: Sequence[int], context: int
) -> list[list[int]]:
    """Texts as a model writes them, from the beginning of one, at temperature 1."""
    starts = (tokenizer.bos_id, tokenizer.eos_id, 0)
    start = next(token for token in starts if token is not None)
    part = PartialModel(
        member.params, member.config, member.options, slots=slots, context=context,
        depth=member.config.n_exits + 1,
    )  # fmt: skip
    texts = {
        part.scheduler.submit(
            [start], min(SAMPLED, context - 1), sampling=Sampling.make(1, 1.0, seed=seed)
        ): [start]
        for seed in range(SAMPLES)
    }
    for number, tokens, _ in part.run():
        texts[number] += [token.id for token in tokens]
    return [*texts.values()]


def windows(texts: Sequence[Sequence[int]], context: int) -> list[dict[str, np.ndarray]]:
    """Texts, one after the other, as batches of `calibration.score`. Raises DataError for less than
    two tokens."""
    ids = np.fromiter(itertools.chain.from_iterable(texts), np.int32)
    if len(ids) < 2:
        raise DataError(f"prompts: have {len(ids)} tokens to measure models on, which is too few.")
    width = min(WINDOW, context, len(ids) - 1)
    rows = ids[: len(ids) // (width + 1) * (width + 1)].reshape(-1, width + 1)[: ROWS * BATCHES]
    # All batches of one shape, for which one program is compiled.
    count = len(rows) // ROWS * ROWS or len(rows)
    batches = np.split(rows[:count], max(count // ROWS, 1))
    return [dict(tokens=b[:, :-1], labels=b[:, 1:]) for b in batches]
