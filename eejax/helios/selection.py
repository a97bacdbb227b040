"""Depths of a model that are considered, and the order of preference of choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from eejax.common.errors import ConfigError, require
from eejax.helios.choices import ControllerOptions, ModelDepth, ModelProfile, breaches

# Each time that a choice had too many breaches, its allowed share is multiplied by CALMER, at most
# CALMEST times.
CALMER, CALMEST = 0.8, 4


def check_models(profiles: Mapping[str, ModelProfile], budget: float) -> None:
    """Raise ConfigError for no model, or for a budget that does not hold each of them whole."""
    require(bool(profiles), "profiles", profiles, "must have at least one model")
    for name, profile in profiles.items():
        size = profile.size(profile.exits)
        if size > budget:
            raise ConfigError(
                f"budget = {budget:g}: holds no whole {name!r}, which has {size:g} bytes and "
                "has to be evaluated whole. Give more, or leave it out."
            )


def greedy_depth(
    shares: Sequence[float],
    least: int,
    calm: Callable[[int], bool],
    rank: Callable[[int], tuple[float, float]],
) -> int:
    """Return the best depth at or above the exit by which most tokens leave.

    Args:
      shares: shares of tokens by exit.
      least: minimum depth, whatever the shares are.
      calm: whether no breaches are expected at a depth; at the last one there are none.
      rank: rank of a depth by the objective.
    """
    exits = len(shares)
    mode = max(range(exits), key=lambda e: (shares[e], -e)) + 1
    depths = range(max(mode, least), exits + 1)
    return max((d for d in depths if d == exits or calm(d)), key=lambda d: (rank(d), -d))


def calm(
    choice: ModelDepth, shares: Sequence[float], options: ControllerOptions, broken: int
) -> bool:
    """Return whether no breaches are expected of a choice.

    The more often it was breached before (`broken`), the fewer are allowed.
    """
    room = options.breaches / options.window * CALMER ** min(broken, CALMEST)
    return breaches(shares, choice.depth) <= room


def favoured(rank: tuple[float, float], gain: float) -> tuple[float, float]:
    """Return a rank (`ServiceObjective.rank`) raised by a gain, for the choice that serves."""
    excess, score = rank  # 0, or less where limits are missed
    return min(excess + gain, 0.0), score + gain
