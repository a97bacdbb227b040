"""Costs of changing the model that serves, in seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from eejax.helios.choices import ModelDepth, ModelProfile

LONGEST_INTERVAL = 5000  # prompts between two assessments, where their number is found
HOPE = 0.1  # of a model's tokens that may come to leave early from one assessment to the next


def interval(seconds: float, each: float, gain: float, least: int) -> int:
    """Return the prompts of `each` seconds of which `seconds` of evaluations take a share `gain`.

    The result is between `least` and `LONGEST_INTERVAL`.
    """
    return min(max(math.ceil(seconds / (max(gain, 1e-3) * each)), least), LONGEST_INTERVAL)


def hoped(known: Sequence[float] | None, age: float, exits: int) -> tuple[float, tuple[float, ...]]:
    """Return (assumed share of a model's tokens that leave by the first exit now, shares).

    The shares are those of tokens by exit with it.

    Args:
      known: shares of the last evaluation; None where there was none.
      age: assessments since then.
    """
    hope = 1.0 if known is None else 1 - (1 - HOPE) ** age
    first = (1.0, *(0.0,) * (exits - 1))
    mixed = zip(first, known or first, strict=True)
    return hope, tuple(h * hope + s * (1 - hope) for h, s in mixed)


@dataclasses.dataclass(frozen=True)
class DeviceState:
    """Models and requests on the device.

    Attributes:
      depths: exits that are loaded, by model.
      num_cached_tokens: tokens of the requests under way.
      current: what serves; None before anything does.
      budget: bytes that there may be.
    """

    depths: Mapping[str, int]
    num_cached_tokens: int
    current: ModelDepth | None
    budget: float

    def has(self, choice: ModelDepth) -> bool:
        """Return whether a choice is a part of what serves."""
        now = self.current
        return now is not None and now.model == choice.model and now.depth >= choice.depth


def fits_beside(
    profiles: Mapping[str, ModelProfile], device: DeviceState, choice: ModelDepth
) -> bool:
    """Return whether the budget holds a choice beside the other models that are there."""
    others = {m: d for m, d in device.depths.items() if m != choice.model}
    size = sum(profiles[model].size(depth) for model, depth in others.items())
    return size + profiles[choice.model].size(choice.depth) <= device.budget


def change_cost(
    profiles: Mapping[str, ModelProfile], device: DeviceState, choice: ModelDepth
) -> float:
    """Return the seconds of changing to a choice.

    They are those of loading what is missing, and of the keys and values of the running requests:
    in the new part of a model that grows, and in all of one that shrinks, or for which the model
    that serves has to be freed.
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

    They are those of loading a whole model and loading the one that serves again, where both have
    no room, and of an answer.

    Args:
      shares: of the model's tokens by exit; None: all leave by the last one.
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
