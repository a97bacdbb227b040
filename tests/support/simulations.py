"""Traces, profiles and paces of made-up models, for the tests of simulated serving."""

from __future__ import annotations

import numpy as np

from eejax.experiments.helios_simulation.pace import StepSeconds
from eejax.experiments.helios_simulation.simulator import SimulationSetting, simulate
from eejax.experiments.helios_simulation.traces import ModelTrace, PromptTrace
from eejax.helios.choices import ControllerOptions, ModelProfile
from eejax.helios.objectives import ServiceObjective

THROUGHPUT = ServiceObjective.of("throughput")


def model(exits, prompts=2, thresholds=None, n=3, prefill_exit=True, wrong=()) -> ModelTrace:
    """Tokens that leave by `exits` [p, new] at 0.5; those of `wrong` (p, t) are not the final
    exit's before that."""
    exits = np.asarray(exits)
    sure = np.arange(n) >= exits[..., None]
    tokens = np.zeros((*exits.shape, n), np.int32)
    for p, t in wrong:
        tokens[p, t, :-1] = 1
    lengths = np.broadcast_to(prompts, len(exits)).astype(np.int32)
    limits = (0.5,) * (n - 1) if thresholds is None else thresholds
    return ModelTrace(
        tuple(range(1, n + 1)),
        limits,
        prefill_exit,
        lengths,
        tokens,
        np.where(sure, 0.9, 0.1).astype(np.float32),
    )


def trace(*models, kinds=None) -> PromptTrace:
    named = dict(zip(("small", "large"), models, strict=False))
    return PromptTrace(named, kinds or ("task",) * len(models[0]))


def profile(scale=1.0, n=3, **changes) -> ModelProfile:
    own = dict(
        seconds=(scale,) * n,
        prefill=(scale,) * n,
        load=(scale * 10,) * n,
        rebuild=(scale * 0.5,) * n,
        bytes=(scale * 100,) * n,
        energy=(scale,) * n,
        sure=(1.0,) * n,
        unsure=(0.9,) * n,
    )
    return ModelProfile(**(own | changes))


def pace(scale=1.0, n=3, slots=1) -> StepSeconds:
    """A second a row and segment, a quarter of one a chunk."""
    rows = tuple(scale * (k + 1) for k in range(slots))
    return StepSeconds(0.0, (rows,) * n, (scale * 0.25,) * n)


def run(t, make, *, scale=1.0, setting=None, profiles=None):
    names = [*t.models]
    scales = {name: scale * (i + 1) for i, name in enumerate(names)}
    n = t.models[names[0]].exits
    profiles = profiles or {name: profile(s, n) for name, s in scales.items()}
    paces = {name: pace(s, n) for name, s in scales.items()}
    return simulate(t, profiles, paces, make, setting or SimulationSetting(slots=1, steps=1))


def drawn(seed=0, p=60, new=12):
    """Tokens of small leave late and those of large early in the second half, and the other way
    round in the first."""
    rng = np.random.default_rng(seed)
    early, late = (0.8, 0.1, 0.1), (0.1, 0.1, 0.8)

    def draw(shares, k):
        return rng.choice(3, (k, new), p=shares)

    half = p // 2
    one = np.concatenate([draw(early, half), draw(late, p - half)])
    two = np.concatenate([draw(late, half), draw(early, p - half)])
    return trace(model(one), model(two))


def options(**changes):
    own = dict(prompts=2, interval=10, window=20, breaches=10, tokens=12)
    return ControllerOptions(**(own | changes))


def cheap(scale):
    return profile(scale, load=(scale * 1e-2,) * 3, rebuild=(scale * 1e-4,) * 3)


PROFILES = {"small": cheap(1.0), "large": cheap(1.3)}
