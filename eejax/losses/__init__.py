"""Losses: chunked cross entropy, the multi-exit loss, and the schedules of its weights."""

from eejax.losses.cross_entropy import (
    IGNORE,
    exits_cross_entropy,
    linear_cross_entropy,
)
from eejax.losses.multi_exit import ExitSums, multi_exit_loss
from eejax.losses.objective import LossObjective

__all__ = [
    "IGNORE",
    "ExitSums",
    "LossObjective",
    "exits_cross_entropy",
    "linear_cross_entropy",
    "multi_exit_loss",
]
