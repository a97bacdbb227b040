"""Ways to serve that are simulated: the controller's, and what it is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from eejax.common.errors import require, require_count
from eejax.serving.audits import Audit
from eejax.serving.choices import Assignment, Choice, ControllerOptions, Decision, Profile
from eejax.serving.controller import Controller
from eejax.serving.dispatch import Policy
from eejax.serving.objectives import Objective, Telemetry
from eejax.serving.pace import Pace
from eejax.serving.repository import Repository
from eejax.serving.simulator import Setting, simulate
from eejax.serving.traces import Trace

Make = Callable[[Callable[[], float]], Policy]


class Scripted:
    """Choices, each for `every` prompts, the last for all that follow: nothing is looked at."""

    objective = None

    def __init__(
        self, choices: Sequence[Choice], every: int = 1, *, clock: Callable[[], float]
    ):  # fmt: skip
        require(len(choices) > 0, "choices", choices, "must be one at least")
        require_count("every", every)
        self.current: Choice | None = None
        self.decisions: list[Decision] = []
        self.options = ControllerOptions()
        self._choices, self._every, self._clock, self._given = [*choices], every, clock, 0
        self.wanted = choices[0]

    def holds(self, there: Mapping[str, int], held: int) -> None:
        pass

    def choose(self) -> Assignment:
        self._given += 1
        # What the next prompt needs is asked for now; until it is there, they go where they went.
        i = min(self._given // self._every, len(self._choices) - 1)
        if self._choices[i] != self.wanted:
            self.wanted = self._choices[i]
            self.decisions.append(Decision(self._clock(), "switch", self.wanted, "the script"))
        return Assignment(self.current or self.wanted, False)

    def best(self, weights: Mapping[str, float]) -> str | None:
        return None

    def loaded(self, choice: Choice) -> None:
        self.current = choice

    def tokens(self, model: str, below: Sequence[bool], own: bool = False) -> None:
        pass

    def waited(self, model: str, seconds: float) -> None:
        pass

    def answered(self, model: str, telemetry: Telemetry, exits: Sequence[int]) -> None:
        pass

    def dropped(self, model: str, failed: bool = False) -> None:
        pass

    def failed(self, model: str) -> None:
        pass

    def gives_up(self, model: str, why: str) -> bool:
        return False

    def audited(self, model: str, audit: Audit) -> None:
        pass

    def level(self, model: str, evaluated: bool = False) -> int:
        return 0


def fixed(model: str, depth: int) -> Make:
    """One model, up to one depth, throughout."""
    return lambda clock: Scripted([Choice(model, depth)], clock=clock)


def at_random(profiles: Mapping[str, Profile], every: int, n: int, seed: int = 0) -> Make:
    """Any model at any depth, drawn anew for every so many of n prompts."""
    rng, there = np.random.default_rng(seed), choices_of(profiles)
    drawn = [there[int(rng.integers(len(there)))] for _ in range(-(-n // every))]
    return lambda clock: Scripted(drawn, every, clock=clock)


def choices_of(profiles: Mapping[str, Profile]) -> list[Choice]:
    return [Choice(m, d) for m, p in profiles.items() for d in range(1, p.exits + 1)]


def helios(
    profiles: Mapping[str, Profile], objective: Objective, options: ControllerOptions | None = None
) -> Make:
    """The controller, which knows nothing yet but profiles: a benchmark of each whole model, as a
    server has it, is what they say of tokens that all go to the end."""

    def make(clock):
        return Controller(profiles, objective, Repository.of(profiles), options, clock=clock)

    return make


def hindsight(
    trace: Trace, profiles: Mapping[str, Profile], paces: Mapping[str, Pace], every: int,
    setting: Setting | None = None, right: float = 0.0,
) -> tuple[Make, list[Choice]]:  # fmt: skip
    """(policy, its choices): for every stretch of so many prompts a model and depth, so that all of
    it takes the least time of those whose tokens agree with the full model in a share `right`, by
    simulating all choices; the nearest to it where none does.

    To be simulated with `Setting.free`, as it looks at no cost of loading. A choice is made for
    whole stretches, at a price of a wrong token that is the same for all.
    """
    require_count("every", every)
    require(0 <= right <= 1, "right", right, "must lie in [0, 1]")
    setting = dataclasses.replace(setting or Setting(), free=True)
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
    return lambda clock: Scripted(chosen, every, clock=clock), chosen
