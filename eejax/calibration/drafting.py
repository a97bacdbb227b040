"""Predicted speed of lossless drafting by exits (the engine "speculative")."""

from __future__ import annotations

import dataclasses

import numpy as np

from eejax.calibration.prediction import DecodingTimes
from eejax.inference.options import EngineOptions, draft_cost, verify_cost
from eejax.inference.schedule import best_drafts
from eejax.models.config import ExitConfig, ModelConfig


@dataclasses.dataclass(frozen=True)
class DraftPrediction:
    """Predicted speed of drafts of one exit, over that of the full model.

    Attributes:
      boundary: layers below the exit.
      tuned: whether it is an exit that the model has, and not its own final norm and head.
      acceptance: share of greedy drafts that are the final exit's tokens.
      drafts: number of drafts that the engine chooses at that acceptance, by its own costs; 0 where
        they do not pay.
      speed: predicted speed by these costs, which follow from the weights that a pass reads.
      timed: predicted speed of as many drafts by the times that were measured on this device.
      single: predicted speed by measured times if every step made one draft.
    """

    boundary: int
    tuned: bool
    acceptance: float
    drafts: int
    speed: float
    timed: float
    single: float


def number_of_drafts(
    acceptance: float, cost: float, verify: tuple[float, float], max_drafts: int
) -> int:
    """Return the number of drafts that the engine chooses (`schedule.best_drafts`)."""
    allowed = np.array([max_drafts], np.int32)
    share, costs = np.array([acceptance], np.float32), np.asarray(verify, np.float32)
    return int(best_drafts(np, share, np.float32(cost), costs, allowed, max_drafts)[0])


def draft_speed(
    acceptance: float,
    drafts: int,
    cost: float,
    verify: tuple[float, float],
    step: float = 0.0,
) -> float:
    """Return the speed of a number of drafts, over that of the full model.

    With k drafts, a share a of which is accepted, a step gives 1 + a + .. + a^k tokens in the time
    of 1 + s + c k + v + w (k - 1) full steps.

    Args:
      acceptance: a.
      drafts: k.
      cost: c, time of a draft.
      verify: (v, w), what the pass that verifies drafts takes beyond a full step, for the first
        draft and for each further one.
      step: s, the engine's own work beyond that of a full step.
    """
    tokens = sum(acceptance**i for i in range(drafts + 1))
    extra = verify[0] + verify[1] * (drafts - 1) if drafts else 0.0
    return tokens / (1 + step + cost * drafts + extra)


def drafting_exit(config: ModelConfig) -> int | None:
    """Return the boundary of the exit that should draft for a lone request, None if none should.

    Where acceptances are known (`ExitConfig.acceptance`), it is the exit whose drafts are fastest
    by the engine's costs on this device. If none of them is faster than the full model, it is the
    lowest exit whose acceptance is not known: the engine finds out while it decodes.
    """
    early = [e for e in config.exits if e.boundary < config.n_layers]
    speeds = {
        e.boundary: engine_drafts(config, e, e.acceptance)[1]
        for e in early
        if e.acceptance is not None
    }
    best = max(speeds, key=speeds.__getitem__, default=None)
    if best is not None and speeds[best] > 1:
        return best
    return min((e.boundary for e in early if e.acceptance is None), default=None)


def engine_drafts(config: ModelConfig, own: ExitConfig, acceptance: float) -> tuple[int, float]:
    """Return (the drafts of an exit that the engine makes, their speed), by the engine's costs."""
    options = EngineOptions("speculative", draft_exit=own.boundary)
    alone = config.replace(exits=(own,))
    costs = draft_cost(alone, options), verify_cost(alone, options, 1)
    drafts = number_of_drafts(acceptance, *costs, options.max_drafts)
    return drafts, draft_speed(acceptance, drafts, *costs)


def predict_drafts(
    config: ModelConfig, times: DecodingTimes, e: int, acceptance: float, *, tuned: bool
) -> DraftPrediction:
    """Predict the speed of drafts of exit e, by the engine's costs and by measured times.

    Args:
      config: the model.
      times: measured times; `times.heads` are those of its exits.
      e: number of the exit.
      acceptance: share of greedy drafts that are the final exit's tokens.
      tuned: see `DraftPrediction`.
    """
    own = config.exits[e]
    drafts, speed = engine_drafts(config, own, acceptance)
    timed, one = (timed_costs(config, times, e, k) for k in (drafts, 1))
    step = times.draft_step / times.full(config.n_layers)
    return DraftPrediction(
        own.boundary,
        tuned,
        acceptance,
        drafts,
        speed,
        draft_speed(acceptance, drafts, *timed, step),
        draft_speed(acceptance, 1, *one, step),
    )


def timed_costs(
    config: ModelConfig, times: DecodingTimes, e: int, drafts: int
) -> tuple[float, tuple[float, float]]:
    """Return (cost, verify) of `draft_speed` for a number of drafts of exit e, by measured times.

    The rows of drafts run through the layers above the exit, and the final head, together.
    """
    full, boundary = times.full(config.n_layers), config.exits[e].boundary
    cost = (boundary * times.layer + times.heads[e]) / full
    above = ((config.n_layers - boundary) * times.layer + times.heads[-1]) / full
    beyond = above * (float(times.factor(np.array(drafts + 1))) - 1)
    return cost, (beyond / max(drafts, 1), beyond / max(drafts, 1))
