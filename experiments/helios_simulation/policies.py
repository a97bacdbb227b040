"""Policies to simulate: the controller, and its baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from eejax.common.errors import require, require_count
from eejax.experiments.helios_simulation.pace import StepSeconds
from eejax.experiments.helios_simulation.simulator import SimulationSetting, simulate
from eejax.experiments.helios_simulation.traces import PromptTrace
from eejax.helios.choices import Assignment, ControllerOptions, Decision, ModelDepth, ModelProfile
from eejax.helios.controller import Controller
from eejax.helios.disagreement_bound import DisagreementBound
from eejax.helios.interfaces import ModelPolicy
from eejax.helios.objectives import ServiceObjective, Telemetry
from eejax.helios.repository import Repository

Make = Callable[[Callable[[], float]], ModelPolicy]


class ScriptedPolicy:
    """Policy of a list of choices, each for `every` prompts, the last for all that follow."""

    objective = None

    def __init__(
        self, choices: Sequence[ModelDepth], every: int = 1, *, clock: Callable[[], float]
    ):
        require(len(choices) > 0, "choices", choices, "must be at least one")
        require_count("every", every)
        self.current: ModelDepth | None = None
        self.decisions: list[Decision] = []
        self.options = ControllerOptions()
        self._choices, self._every, self._clock, self._given = [*choices], every, clock, 0
        self.wanted = choices[0]

    def device_reported(self, depths: Mapping[str, int], num_cached_tokens: int) -> None:
        pass

    def prompt_arrived(self) -> Assignment:
        self._given += 1
        # Request the next prompt's model now; until it is loaded, prompts go to the current one.
        i = min(self._given // self._every, len(self._choices) - 1)
        if self._choices[i] != self.wanted:
            self.wanted = self._choices[i]
            self.decisions.append(Decision(self._clock(), "switch", self.wanted, "the script"))
        return Assignment(self.current or self.wanted, False)

    def best_loaded(self, weights: Mapping[str, float]) -> str | None:
        return None

    def model_loaded(self, choice: ModelDepth) -> None:
        self.current = choice

    def depth_limited(self, choice: ModelDepth) -> None:
        self.wanted = choice

    def tokens_emitted(self, model: str, below: Sequence[bool], own: bool = False) -> None:
        pass

    def first_token_emitted(self, model: str, seconds: float) -> None:
        pass

    def prompt_answered(
        self, model: str, telemetry: Telemetry, exits: Sequence[int], judged: bool = True
    ) -> None:
        pass

    def prompt_dropped(self, model: str, failed: bool = False) -> None:
        pass

    def answer_failed(self, model: str) -> None:
        pass

    def model_given_up(self, model: str, why: str) -> bool:
        return False

    def answers_audited(self, model: str, audit: DisagreementBound) -> None:
        pass

    def level(self, model: str, evaluated: bool = False) -> int:
        return 0


def fixed(model: str, depth: int) -> Make:
    """Return a function that makes, for a clock, the policy of one model at one depth."""
    return lambda clock: ScriptedPolicy([ModelDepth(model, depth)], clock=clock)


def at_random(profiles: Mapping[str, ModelProfile], every: int, n: int, seed: int = 0) -> Make:
    """Return a function that makes a policy of random models and depths.

    They are drawn at this call, one for every `every` of n prompts.
    """
    rng, there = np.random.default_rng(seed), choices_of(profiles)
    drawn = [there[int(rng.integers(len(there)))] for _ in range(-(-n // every))]
    return lambda clock: ScriptedPolicy(drawn, every, clock=clock)


def choices_of(profiles: Mapping[str, ModelProfile]) -> list[ModelDepth]:
    return [ModelDepth(m, d) for m, p in profiles.items() for d in range(1, p.exits + 1)]


def helios(
    profiles: Mapping[str, ModelProfile],
    objective: ServiceObjective,
    options: ControllerOptions | None = None,
) -> Make:
    """Return a function that makes the controller, which knows only profiles at first.

    The benchmark of each whole model, as in a server, is its profile's value for tokens that all
    leave by the last exit.
    """

    def make(clock):
        return Controller(profiles, objective, Repository.of(profiles), options, clock=clock)

    return make


def hindsight(
    trace: PromptTrace,
    profiles: Mapping[str, ModelProfile],
    paces: Mapping[str, StepSeconds],
    every: int,
    setting: SimulationSetting | None = None,
    right: float = 0.0,
) -> tuple[Make, list[ModelDepth]]:
    """Return (a function that makes the policy that is best in hindsight, its choices).

    It has a model and a depth for every stretch of `every` prompts. Together they take the least
    time of those whose tokens agree with the full model in a share `right`, found by simulating all
    choices; if none does, they are the nearest to that share.

    Simulate it with `SimulationSetting.free`, because it ignores the cost of loading. A choice is
    made for whole stretches, with one price of a wrong token for all.
    """
    require_count("every", every)
    require(0 <= right <= 1, "right", right, "must lie in [0, 1]")
    setting = dataclasses.replace(setting or SimulationSetting(), free=True)
    choices, seconds, agree = choices_of(profiles), [], []
    for begin in range(0, len(trace), every):
        part = trace.part(begin, min(begin + every, len(trace)))
        runs = [simulate(part, profiles, paces, fixed(*c), setting) for c in choices]
        seconds.append([run.seconds for run in runs])
        agree.append([run.agree.sum() for run in runs])
    took, good = np.array(seconds), np.array(agree, float)
    rows, found = np.arange(len(took)), []
    for price in (0.0, *np.geomspace(1e-3, 1e3, 400) * took.mean() / good.mean()):
        best = np.argmin(took - price * good, axis=1)
        missing = max(0.0, right * len(trace) * trace.new - good[rows, best].sum())
        found.append((missing, took[rows, best].sum(), best.tolist()))
    chosen = [choices[i] for i in min(found)[2]]
    return lambda clock: ScriptedPolicy(chosen, every, clock=clock), chosen
