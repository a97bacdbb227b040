"""Strictness of a model as audits ask for it: its least depth, and its thresholds."""

from __future__ import annotations

import dataclasses

from eejax.helios.choices import STRICTEST
from eejax.helios.disagreement_bound import DisagreementBound

LONGEST_REST = 6  # doublings of the assessments before a model may be less strict


@dataclasses.dataclass(frozen=True)
class Strictness:
    """The least depth and the thresholds that audits ask for.

    Attributes:
      least: exits that are loaded at least.
      level: of its thresholds (`choices.stricter`).
      failed: audits so far that found too many wrong tokens.
      rest: assessments before the model may be less strict.
    """

    least: int = 1
    level: int = 0
    failed: int = 0
    rest: int = 0


def too_many(audit: DisagreementBound, allowed: float, expected: float) -> bool:
    """Return whether audited answers have a larger share of wrong tokens than is allowed.

    Either that is certain, or as many answers with the expected share would have shown that the
    limit is kept, and these do not.
    """
    if audit.share <= allowed:
        return False
    return audit.low > allowed or audit.had_been(expected) <= allowed


def tightened(state: Strictness, level: int, depth: int, exits: int) -> Strictness | None:
    """Return the next step for a model.

    It is another exit or, with all of them loaded, thresholds one level stricter. None where
    neither is left, which is no failure: rest is for the next step, and every audit that comes
    meanwhile would make it longer.

    Args:
      level: of the thresholds that it serves with, which a limit may have made the strictest.
      depth: exits that are loaded, of so many.
    """
    if depth == exits and level >= STRICTEST:
        return None
    failed = state.failed + 1
    state = dataclasses.replace(state, failed=failed, rest=2 ** min(failed, LONGEST_REST))
    if depth < exits:
        return dataclasses.replace(state, least=depth + 1)
    return dataclasses.replace(state, level=state.level + 1)


def assessed(state: Strictness, bound: float, allowed: float) -> Strictness:
    """Return the state after an assessment.

    Args:
      bound: on the share of wrong tokens, by audits since the last assessment.
      allowed: that share; with at most half of it the model was stricter than it had to be, and
        once it has rested one step is taken back, the last one first.
    """
    state = dataclasses.replace(state, rest=max(0, state.rest - 1))
    if bound > allowed / 2 or state.rest:
        return state
    if state.level:
        return dataclasses.replace(state, level=state.level - 1)
    return dataclasses.replace(state, least=max(1, state.least - 1))
