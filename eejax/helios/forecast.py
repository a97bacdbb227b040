"""Costs of changing the model that serves, in seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from eejax.helios.choices import ModelDepth, ModelProfile

MAX_INTERVAL = 5000  # largest computed number of prompts between two assessments
HOPE = 0.1  # share of the remaining tokens that may start to leave early between two assessments


def interval(seconds: float, each: float, gain: float, least: int) -> int:
    """Return the number of prompts in whose time `seconds` of evaluations are a share `gain`.

    A prompt takes `each` seconds. The result is between `least` and `MAX_INTERVAL`.
    """
    return min(max(math.ceil(seconds / (max(gain, 1e-3) * each)), least), MAX_INTERVAL)


def hoped(known: Sequence[float] | None, age: float, exits: int) -> tuple[float, tuple[float, ...]]:
    """Return the share of tokens assumed to leave by the first exit now, and all shares by exit.

    Args:
      known: shares of the last evaluation, or None without one.
      age: assessments since then.
      exits: number of exits.
    """
    hope = 1.0 if known is None else 1 - (1 - HOPE) ** age
    first = (1.0, *(0.0,) * (exits - 1))
    mixed = zip(first, known or first, strict=True)
    return hope, tuple(h * hope + s * (1 - hope) for h, s in mixed)


@dataclasses.dataclass(frozen=True)
class DeviceState:
    """Models and requests on the device.

    Attributes:
      depths: loaded exits by model.
      num_cached_tokens: tokens of the running requests.
      current: the choice that serves; None at first.
      budget: maximum bytes.
    """

    depths: Mapping[str, int]
    num_cached_tokens: int
    current: ModelDepth | None
    budget: float

    def has(self, choice: ModelDepth) -> bool:
        """Return whether a choice is a part of the current one."""
        now = self.current
        return now is not None and now.model == choice.model and now.depth >= choice.depth


def fits_beside(
    profiles: Mapping[str, ModelProfile], device: DeviceState, choice: ModelDepth
) -> bool:
    """Return whether the budget holds a choice beside the other loaded models."""
    others = {m: d for m, d in device.depths.items() if m != choice.model}
    size = sum(profiles[model].size(depth) for model, depth in others.items())
    return size + profiles[choice.model].size(choice.depth) <= device.budget


def change_cost(
    profiles: Mapping[str, ModelProfile], device: DeviceState, choice: ModelDepth
) -> float:
    """Return the seconds of changing to a choice.

    They count loading the missing segments, and computing the keys and values of the running
    requests: in the new part of a model that grows, and in the whole of a model that shrinks, or
    for which the serving model has to be freed.
    """
    profile, current = profiles[choice.model], device.current
    if current is not None and current.model == choice.model:
        same, there = True, current.depth
    else:
        same, there = False, device.depths.get(choice.model, 0)
    seconds = sum(profile.load[there : choice.depth])
    if same and there <= choice.depth:
        return seconds + device.num_cached_tokens * sum(profile.rebuild[there : choice.depth])
    beside = not same and fits_beside(profiles, device, choice)
    return seconds + (
        0.0 if beside else device.num_cached_tokens * sum(profile.rebuild[: choice.depth])
    )


def evaluation_cost(
    profiles: Mapping[str, ModelProfile],
    device: DeviceState,
    model: str,
    shares: Sequence[float] | None,
    length: float,
) -> float:
    """Return the seconds for which an evaluation keeps others from being served.

    They count an answer and, if there is no room for both models, loading the whole model and then
    the serving one again.

    Args:
      shares: shares of the model's tokens by exit; None if all leave by the last one.
      length: tokens of an answer.
    """
    profile = profiles[model]
    whole, current = ModelDepth(model, profile.exits), device.current
    seconds = change_cost(profiles, device, whole)
    if current is not None and not fits_beside(profiles, device, whole):
        serving = profiles[current.model]
        seconds += sum(serving.load[: current.depth])
        seconds += device.num_cached_tokens * sum(serving.rebuild[: current.depth])
    last = [float(e == profile.exits - 1) for e in range(profile.exits)]
    tpot = profile.serving(last if shares is None else shares, profile.exits).tpot
    return seconds + length * tpot
