"""Several models served as one, described so that another process can build their fleet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax

from eejax.checkpoint.language_model import LanguageModel, load
from eejax.common.errors import ConfigError, require
from eejax.data import chat
from eejax.data.tokenizer_files import TemplateSource
from eejax.data.tokenizers import Tokenizer
from eejax.helios.build import FleetConfig, build_fleet
from eejax.helios.fleet import Fleet
from eejax.helios.pool import FleetMember
from eejax.helios.quality import QualitySource
from eejax.inference.policy import ExitPolicy
from eejax.serving.messages import BuiltEngine
from eejax.serving.models import batch_options, require_room

THRESHOLD = 0.8  # default threshold of exits


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
        template = template_of(opened)  # raises, before models are measured
        fleet = build_fleet(
            members,
            first.tokenizer,
            self.config,
            slots=self.slots,
            context=self.context,
            prompts=self.prompts,
            judge=judge,
        )
        return served_fleet(members, first.tokenizer, template, fleet)


def served_fleet(
    members: Mapping[str, FleetMember],
    tokenizer: Tokenizer,
    template: TemplateSource | None,
    fleet: Callable[[int], Fleet],
) -> BuiltEngine:
    """Return a fleet, which `fleet` makes for a number of steps, as the worker takes it."""
    deepest = max((member.config for member in members.values()), key=lambda c: c.n_layers)
    return BuiltEngine(None, deepest, tokenizer, template, fleet)


def check_alike(opened: Mapping[str, LanguageModel]) -> None:
    """Raise `ConfigError` for models that cannot continue each other's texts."""
    (first, own), *others = opened.items()
    for name, model in others:
        for what, of in (
            ("tokenizer", lambda m: m.tokenizer.fingerprint),
            ("vocabulary", lambda m: m.config.vocab_size),
            ("set of end tokens", lambda m: sorted(m.tokenizer.end_ids)),
        ):
            # The message begins with the setting to fix, which is not the differing one.
            require(
                of(model) == of(own),
                f"model: the {what} of {name!r}",
                of(model),
                f"must be that of {first!r}, {of(own)!r}",
                "A text goes from one model to another as ids, and ends alike in all: use models "
                "of one tokenizer and one set of end tokens.",
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
