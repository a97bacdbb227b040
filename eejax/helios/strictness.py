"""Strictness of a model as required by audits: its minimum depth, and its thresholds."""

from __future__ import annotations

import dataclasses

from eejax.helios.choices import STRICTEST
from eejax.helios.disagreement_bound import DisagreementBound

MAX_REST = 6  # maximum doublings of the assessments before a model may be less strict


@dataclasses.dataclass(frozen=True)
class Strictness:
    """The minimum depth and the thresholds that audits require.

    Attributes:
      least: minimum number of loaded exits.
      level: level of the thresholds (`choices.stricter`).
      failed: audits so far whose answers had too large a shortfall.
      rest: assessments before the model may be less strict.
    """

    least: int = 1
    level: int = 0
    failed: int = 0
    rest: int = 0


def too_many(audit: DisagreementBound, allowed: float, expected: float) -> bool:
    """Return whether audited answers have a larger mean shortfall than is allowed.

    Either that is certain, or these answers do not show that the limit is kept although as many
    answers with the expected shortfall would have. The shortfall of an answer is 1 minus its
    quality.
    """
    if audit.share <= allowed:
        return False
    return audit.low > allowed or audit.had_been(expected) <= allowed


def tightened(state: Strictness, level: int, depth: int, exits: int) -> Strictness | None:
    """Return the next stricter step for a model, or None if there is none.

    It is another exit or, with all of them loaded, thresholds one level stricter. None does not
    count as a failure, because every further audit would then lengthen the rest.

    Args:
      state: the present strictness.
      level: level of the thresholds in use, which a limit may have made the strictest.
      depth: number of loaded exits.
      exits: number of exits of the model.
    """
    if depth == exits and level >= STRICTEST:
        return None
    failed = state.failed + 1
    state = dataclasses.replace(state, failed=failed, rest=2 ** min(failed, MAX_REST))
    if depth < exits:
        return dataclasses.replace(state, least=depth + 1)
    return dataclasses.replace(state, level=state.level + 1)


def assessed(state: Strictness, bound: float, allowed: float) -> Strictness:
    """Return the state after an assessment.

    Args:
      state: the present strictness.
      bound: upper bound on the mean shortfall of answers from audits since the last assessment.
      allowed: maximum of that mean. With at most half of it the model was stricter than needed,
        and once it has rested, the last step is taken back.
    """
    state = dataclasses.replace(state, rest=max(0, state.rest - 1))
    if bound > allowed / 2 or state.rest:
        return state
    if state.level:
        return dataclasses.replace(state, level=state.level - 1)
    return dataclasses.replace(state, least=max(1, state.least - 1))
