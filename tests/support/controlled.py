"""A server without models, for the tests of what decides: it does at once what is wanted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

from eejax.helios import prospects
from eejax.helios.choices import ControllerOptions, ModelDepth, ModelProfile
from eejax.helios.controller import Controller
from eejax.helios.objectives import ServiceObjective, Telemetry
from eejax.helios.repository import Repository

THROUGHPUT = ServiceObjective.of("throughput")


def profile(scale: float = 1.0, n: int = 4, **changes) -> ModelProfile:
    own = dict(
        seconds=(scale * 1e-3,) * n,
        prefill=(scale * 1e-2,) * n,
        load=(scale * 0.1,) * n,
        rebuild=(scale * 1e-5,) * n,
        bytes=(scale * 100,) * n,
        energy=(scale,) * n,
        sure=(0.98,) * (n - 1) + (1.0,),
        unsure=tuple(0.5 + 0.5 * (e + 1) / n for e in range(n)),
    )
    return ModelProfile(**(own | changes))


def telemetry(**changes) -> Telemetry:
    own = dict(
        throughput=100.0, ttft=0.1, ttft_p99=0.1, tpot=0.01, accuracy=1.0, memory=100.0, energy=1.0
    )
    return Telemetry(**(own | changes))


def controller_with(**functions: Callable) -> type[Controller]:
    """A controller that compares choices by other functions than those of `prospects`."""

    def replaced():
        return mock.patch.multiple(prospects, **functions)

    class Replaced(Controller):
        def __init__(self, *args: Any, **named: Any):
            with replaced():
                super().__init__(*args, **named)

        def apply(self, event, *details):
            with replaced():
                return super().apply(event, *details)

    return Replaced


def set_state(controller: Controller, **fields: Any) -> None:
    """Goes on in another state; shares: by model, those that are expected of it from now on."""
    expected = controller.state.expected
    for model, shares in fields.pop("shares", {}).items():
        expected = expected.with_shares(model, shares)
    controller.state = dataclasses.replace(controller.state, expected=expected, **fields)


class World:
    """A server that does at once what is wanted, and whose tokens leave as they are told to.

    shares: of tokens by the exit they would leave by, of each model; they come evenly mixed."""

    def __init__(self, profiles, shares, objective=THROUGHPUT, repository=None, **options):
        self.profiles, self.shares, self.time = profiles, shares, 0.0
        self.repository = repository or Repository()
        self.controller = Controller(
            profiles,
            objective,
            self.repository,
            ControllerOptions(**options),
            clock=lambda: self.time,
        )
        self.drawn = {model: itertools.cycle(evenly(s)) for model, s in shares.items()}
        self.served: list[ModelDepth] = []

    def redraw(self, model, shares):
        self.drawn[model] = itertools.cycle(evenly(shares))

    def prompt(self, tokens: int = 20) -> ModelDepth:
        c = self.controller
        c.model_loaded(c.wanted)
        choice, evaluated = c.prompt_arrived()
        self.served.append(choice)
        exits = []
        for _ in range(tokens):
            e = next(self.drawn[choice.model])
            exits.append(min(e, choice.depth - 1))
            c.tokens_emitted(choice.model, [e >= choice.depth])
        self.time += 1.0
        told = self.profiles[choice.model].serving(self.shares[choice.model], choice.depth)
        if evaluated:
            c.prompt_answered(choice.model, told, exits)
        return choice

    @property
    def kinds(self):
        return [d.kind for d in self.controller.decisions]


def evenly(shares) -> list[int]:
    """A hundred exits of these shares, spread."""
    owed, found = [0.0] * len(shares), []
    for _ in range(100):
        owed = [o + s for o, s in zip(owed, shares, strict=True)]
        e = max(range(len(shares)), key=lambda i: owed[i])
        owed[e] -= 1
        found.append(e)
    return found
