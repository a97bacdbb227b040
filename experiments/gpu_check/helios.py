"""Two random models under a controller, against each of them alone: tokens a second and joules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from eejax.experiments import card_programs
from eejax.experiments.gpu_check import helios_programs
from eejax.experiments.gpu_check.check import StageCheck, missing_module
from eejax.experiments.gpu_check.decode import prompts, weights

EARLY = 0.75
"""Share of a model's tokens that may leave by its first exit."""


@dataclasses.dataclass(frozen=True)
class HeliosSizes:
    """Models and requests of the stage.

    Attributes:
      small: the smaller model.
      large: the larger model.
      context: tokens of a request.
      new: tokens of an answer.
      requests: number of prompts.
      slots: requests of the larger model that the budget holds.
      max_slots: maximum slots of a model.
    """

    small: card_programs.ModelSize
    large: card_programs.ModelSize
    context: int = 512
    new: int = 100
    requests: int = 256
    slots: int = 8
    max_slots: int = 32


VOCABULARY = 512
FULL = HeliosSizes(
    dataclasses.replace(card_programs.MEDIUM, vocabulary=VOCABULARY, exits=(6, 12)),
    dataclasses.replace(card_programs.BILLION, vocabulary=VOCABULARY, exits=(6, 12)),
)
_TINY = dataclasses.replace(card_programs.SMALL, width=64, inner=192, vocabulary=VOCABULARY)
SMALL = HeliosSizes(
    dataclasses.replace(_TINY, layers=2, exits=(1,)),
    dataclasses.replace(_TINY, layers=4, exits=(2,)),
    context=64,
    new=8,
    requests=6,
    slots=2,
    max_slots=2,
)


def sizes(check: StageCheck) -> HeliosSizes:
    return SMALL if check.small else FULL


def run(check: StageCheck) -> None:
    made: list[Models] = []

    def measured() -> dict[str, Any]:
        made.append(Models(sizes(check)))
        return made[0].figures()

    if check.measure("models", measured) is None:
        return
    for name in ("small", "large"):
        check.measure(f"{name} alone", partial(made[0].alone, name))
    for objective in ("throughput", "energy"):
        check.measure(f"controller: {objective}", partial(made[0].controlled, objective))


def programs(check: StageCheck) -> Iterator[tuple[str, Callable]]:
    """Yield both models' loops at all depths and slots, growth, audits, and the pass of scores."""
    from eejax.experiments import aot
    from eejax.kernels import call

    setup, described = sizes(check), members(sizes(check))
    _, few = request_texts(setup)
    capability = aot.CARDS[check.card].capability
    with call.compute_capability(capability):
        _, counts = slot_counts(setup, described)
    for name, member in described.items():
        own = (member, counts[name], setup.context, capability)
        for what, build in helios_programs.member_programs(*own):
            yield f"{name} {what}", build
        scored = dict(config=member.config, texts=few, context=setup.context)
        yield f"{name} scores", partial(helios_programs.scores, **scored)


def members(setup: HeliosSizes) -> dict[str, Any]:
    """Return the models by their names, without parameters."""
    from eejax.helios.pool import FleetMember
    from eejax.serving.models import batch_options

    configs = {name: getattr(setup, name).config(setup.context) for name in ("small", "large")}
    return {n: FleetMember(None, c, options=batch_options(c, None)) for n, c in configs.items()}


def slot_counts(setup: HeliosSizes, described: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the budget, and the number of requests that each model holds at each depth.

    They follow from shapes alone, whatever memory the card has.
    """
    from eejax.helios.build import room
    from eejax.inference import capacity

    large = described["large"]
    depth = large.config.n_exits + 1
    size = capacity.engine_bytes(large.config, large.options, depth, setup.context, setup.slots)
    budget = 1.05 * size
    return budget, {
        n: room(m, setup.max_slots, setup.context, budget) for n, m in described.items()
    }


def request_texts(setup: HeliosSizes) -> tuple[list[list[int]], list[list[int]]]:
    """Return all prompts, and those on which models are measured."""
    texts = prompts(setup.small.config(setup.context), setup.requests, setup.context // 4)
    return texts, texts[: max(2, len(texts) // 8)]


class Models:
    """Models, their costs, and prompts."""

    def __init__(self, setup: HeliosSizes):
        from eejax.helios.build import warm_up
        from eejax.helios.measurements import windows
        from eejax.helios.profiles import measure
        from eejax.inference.slot_engine import STEPS_PER_CALL

        self.setup, self.profiles = setup, {}
        described = members(setup)
        self.budget, self.slots = slot_counts(setup, described)
        texts, few = request_texts(setup)
        self.texts = dict(enumerate(texts))
        self.members = {
            name: dataclasses.replace(member, params=weights(member.config, 4.0)).ready()
            for name, member in described.items()
        }
        for name, member in [*self.members.items()]:
            rules = {"threshold": self.threshold(name, few)}
            self.members[name] = member = dataclasses.replace(member, rules=rules)
            given = dict(slots=self.slots[name], context=setup.context)
            self.profiles[name] = measure(
                member, few, windows(few, setup.context), new=min(32, setup.new), **given
            )
            warm_up(member, steps=STEPS_PER_CALL, **given)

    def figures(self) -> dict[str, Any]:
        """Return the models' slots, thresholds and profiles, and the budget."""
        return dict(
            slots={name: list(slots) for name, slots in self.slots.items()},
            thresholds={name: m.rules["threshold"] for name, m in self.members.items()},
            profiles={name: vars(p) for name, p in self.profiles.items()},
            budget_bytes=self.budget,
        )

    def threshold(self, name: str, texts: list) -> float:
        """Return a threshold by which a share `EARLY` of tokens leaves by a model's first exit."""
        from eejax.experiments.helios_runs import StaticModel, drive

        given = dict(slots=self.slots[name], context=self.setup.context)
        first = StaticModel(name, self.members[name], 1, 1.0, **given)
        _, answers = drive(first, dict(enumerate(texts)), self.setup.new)
        sure = [token.confidence for answer in answers for token in answer.tokens]
        return float(np.quantile(sure, 1 - EARLY))

    def alone(self, name: str) -> dict[str, Any]:
        """Serve all prompts by one whole model."""
        from eejax.experiments.helios_runs import StaticModel

        member = self.members[name]
        given = dict(slots=self.slots[name], context=self.setup.context)
        depth, threshold = member.config.n_exits + 1, member.rules["threshold"]
        return self._driven(StaticModel(name, member, depth, threshold, **given))

    def controlled(self, objective: str) -> dict[str, Any]:
        """Serve all prompts by the controller's choices for an objective."""
        from eejax.experiments.helios_runs import ControlledFleet, Stopwatch
        from eejax.helios.choices import ControllerOptions
        from eejax.helios.controller import Controller
        from eejax.helios.objectives import ServiceObjective
        from eejax.helios.repository import Repository

        watch = Stopwatch()
        controller = Controller(
            self.profiles,
            ServiceObjective.of(objective),
            Repository.of(self.profiles),
            ControllerOptions(budget=self.budget, tokens=self.setup.new),
            clock=watch.now,
        )
        given = dict(slots=self.slots, context=self.setup.context)
        server = ControlledFleet(self.members, controller, watch, **given)
        found = self._driven(server)
        decided = [[d.kind, d.choice.model, d.choice.depth, d.why] for d in controller.decisions]
        changes = [
            [c.kind, c.choice.model, c.choice.depth, c.seconds] for c in server.fleet.changes
        ]
        return found | dict(decisions=decided[:40], changes=changes[:40])

    def _driven(self, server) -> dict[str, Any]:
        from eejax.experiments.helios_runs import drive
        from eejax.helios.energy import meter

        counter = meter()
        before = counter.read() if counter else 0.0
        seconds, answers = drive(server, self.texts, self.setup.new)
        tokens = sum(len(a.tokens) for a in answers)
        ttft = [a.ttft for a in answers]
        found = dict(
            tokens_per_second=tokens / seconds,
            seconds=seconds,
            ttft_p50=float(np.median(ttft)),
            ttft_p99=float(np.percentile(ttft, 99)),
        )
        if counter is None:
            return found | dict(joules=missing_module("pynvml") or "no meter")
        joules = counter.read() - before
        return found | dict(joules=joules, joules_per_token=joules / tokens, meter=counter.name)
