"""Report on the state of a serving fleet."""

from __future__ import annotations

from typing import NamedTuple

from eejax.helios.choices import Decision
from eejax.helios.timeline import TimelinePoint

CHOOSES = "the server chooses the model, and where its tokens leave"


class FleetReport(NamedTuple):
    """State of a serving fleet.

    Attributes:
      model, depth, layers: the model, and how many of its exits and layers are loaded.
      slots: slots of the model.
      below: share of all tokens that left below their threshold.
      shortfall: 1 minus the mean quality of the model's audited answers; None, like the next two,
        if none was audited.
      bound: upper confidence bound on the shortfall.
      perplexity: perplexity of those answers under their judge.
      counted: source of energy: "nvml" or "rapl" for joules, or "operations".
      decisions, points: decisions and answers since the last report.
    """

    model: str
    depth: int
    layers: int
    slots: int
    below: float
    shortfall: float | None
    bound: float | None
    perplexity: float | None
    counted: str
    decisions: tuple[Decision, ...]
    points: tuple[TimelinePoint, ...] = ()
