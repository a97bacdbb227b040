"""Two random models under a controller, beside each of them alone: tokens a second and joules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from experiments import card_programs
from experiments.gpu_check.check import Check, not_there
from experiments.gpu_check.decode import prompts, weights

EARLY = 0.75
"""Share of a model's tokens that may leave by its first exit."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is served.

    Attributes:
      small, large: the models.
      context, new: tokens of a request, and of an answer.
      requests: prompts.
      slots: requests of the larger model that the budget holds.
      most: most slots of a model.
    """

    small: card_programs.Size
    large: card_programs.Size
    context: int = 512
    new: int = 100
    requests: int = 256
    slots: int = 8
    most: int = 32


VOCABULARY = 512
FULL = Sizes(
    dataclasses.replace(card_programs.MEDIUM, vocabulary=VOCABULARY, exits=(6, 12)),
    dataclasses.replace(card_programs.BILLION, vocabulary=VOCABULARY, exits=(6, 12)),
)
_TINY = dataclasses.replace(card_programs.SMALL, width=64, inner=192, vocabulary=VOCABULARY)
SMALL = Sizes(
    dataclasses.replace(_TINY, layers=2, exits=(1,)),
    dataclasses.replace(_TINY, layers=4, exits=(2,)),
    context=64,
    new=8,
    requests=6,
    slots=2,
    most=2,
)


def sizes(check: Check) -> Sizes:
    return SMALL if check.small else FULL


def run(check: Check) -> None:
    made: list[Models] = []

    def measured() -> dict[str, Any]:
        made.append(Models(sizes(check)))
        return made[0].told()

    if check.measure("models", measured) is None:
        return
    for name in ("small", "large"):
        check.measure(f"{name} alone", partial(made[0].alone, name))
    for objective in ("throughput", "energy"):
        check.measure(f"controller: {objective}", partial(made[0].controlled, objective))


def programs(check: Check) -> Iterator[tuple[str, Callable]]:
    """Yield both models' loops at all of their depths."""
    own = sizes(check)
    for name, size in (("small", own.small), ("large", own.large)):
        config = size.config(own.context)
        one = dict(config=config, slots=own.slots, cache=own.context, shaping=True, grows=True)
        for depth in range(1, config.n_exits + 2):
            build = partial(card_programs.slots, **one, drafts=0, max_depth=depth)
            yield f"{name} to depth {depth}", build


class Models:
    """Models, what they cost, and prompts."""

    def __init__(self, own: Sizes):
        from eejax.inference import capacity
        from eejax.inference.engine import CALL
        from eejax.serving.fleet import Member
        from eejax.serving.fleets import room, warm_up
        from eejax.serving.measurements import windows
        from eejax.serving.models import batch_options
        from eejax.serving.profiles import measure

        self.own, self.members, self.slots, self.profiles = own, {}, {}, {}
        configs = {name: getattr(own, name).config(own.context) for name in ("small", "large")}
        texts = prompts(configs["small"], own.requests, own.context // 4)
        self.texts = dict(enumerate(texts))
        for name, config in configs.items():
            params = weights(config, 4.0)
            options = batch_options(config, None)
            self.members[name] = Member(params, config, options=options).ready()
        config, options = configs["large"], self.members["large"].options
        depth = config.n_exits + 1
        self.budget = 1.05 * capacity.engine_bytes(config, options, depth, own.context, own.slots)
        few = texts[: max(2, len(texts) // 8)]
        for name, member in self.members.items():
            self.slots[name] = room(member, own.most, own.context, self.budget)
            rules = {"threshold": self.threshold(name, few)}
            self.members[name] = member = dataclasses.replace(member, rules=rules)
            given = dict(slots=self.slots[name], context=own.context)
            self.profiles[name] = measure(
                member, few, windows(few, own.context), new=min(32, own.new), **given
            )
            warm_up(member, steps=CALL, **given)

    def told(self) -> dict[str, Any]:
        """Return what was measured of the models."""
        return dict(
            slots={name: list(slots) for name, slots in self.slots.items()},
            thresholds={name: m.rules["threshold"] for name, m in self.members.items()},
            profiles={name: vars(p) for name, p in self.profiles.items()},
            budget_bytes=self.budget,
        )

    def threshold(self, name: str, texts: list) -> float:
        """Return one by which a share `EARLY` of tokens leaves by a model's first exit."""
        from experiments.helios_runs import Static, drive

        given = dict(slots=self.slots[name], context=self.own.context)
        first = Static(name, self.members[name], 1, 1.0, **given)
        _, answers = drive(first, dict(enumerate(texts)), self.own.new)
        sure = [token.confidence for answer in answers for token in answer.tokens]
        return float(np.quantile(sure, 1 - EARLY))

    def alone(self, name: str) -> dict[str, Any]:
        """Serve all prompts by one whole model."""
        from experiments.helios_runs import Static

        member = self.members[name]
        given = dict(slots=self.slots[name], context=self.own.context)
        depth, threshold = member.config.n_exits + 1, member.rules["threshold"]
        return self._driven(Static(name, member, depth, threshold, **given))

    def controlled(self, objective: str) -> dict[str, Any]:
        """Serve all prompts by what the controller chooses for an objective."""
        from eejax.serving.choices import ControllerOptions
        from eejax.serving.controller import Controller
        from eejax.serving.objectives import Objective
        from eejax.serving.repository import Repository
        from experiments.helios_runs import Chosen, Stopwatch

        watch = Stopwatch()
        controller = Controller(
            self.profiles,
            Objective.of(objective),
            Repository.of(self.profiles),
            ControllerOptions(budget=self.budget, tokens=self.own.new),
            clock=watch.now,
        )
        given = dict(slots=self.slots, context=self.own.context)
        server = Chosen(self.members, controller, watch, **given)
        found = self._driven(server)
        decided = [[d.kind, d.choice.model, d.choice.depth, d.why] for d in controller.decisions]
        changes = [
            [c.kind, c.choice.model, c.choice.depth, c.seconds] for c in server.fleet.changes
        ]
        return found | dict(decisions=decided[:40], changes=changes[:40])

    def _driven(self, server) -> dict[str, Any]:
        from eejax.serving.energy import meter
        from experiments.helios_runs import drive

        counter = meter()
        before = counter.read() if counter else 0.0
        seconds, answers = drive(server, self.texts, self.own.new)
        tokens = sum(len(a.tokens) for a in answers)
        ttft = [a.ttft for a in answers]
        found = dict(
            tokens_per_second=tokens / seconds,
            seconds=seconds,
            ttft_p50=float(np.median(ttft)),
            ttft_p99=float(np.percentile(ttft, 99)),
        )
        if counter is None:
            return found | dict(joules=not_there("pynvml") or "no meter")
        joules = counter.read() - before
        return found | dict(joules=joules, joules_per_token=joules / tokens, meter=counter.name)
