"""List of findings of one paper, judged as they are added."""

from __future__ import annotations

import math

from eejax.experiments.reproduce import catalogue
from eejax.experiments.reproduce.claims import Finding, Verdict

VERDICTS = {
    True: Verdict.HOLDS,
    False: Verdict.FAILS,
    None: Verdict.NOT_AT_THIS_SCALE,
}


class Findings:
    """Findings of a paper at one scale, in the order in which they are added.

    Args:
      paper: one of `claims.PAPERS`.
      scale: model, data and device of all values that name no other.
    """

    def __init__(self, paper: str, scale: str):
        self.found: list[Finding] = []
        self._paper, self._scale = paper, scale

    def add(
        self,
        place: str,
        claim: str,
        theirs: str,
        ours: str,
        holds: bool | None,
        why: str,
        scale: str | None = None,
    ) -> None:
        """Add what was found of a claim.

        Args:
          place: as `Finding` has it.
          claim: as `Finding` has it.
          theirs: as `Finding` has it.
          ours: as `Finding` has it.
          holds: whether the claim holds, or None where that is not judged.
          why: the reason, should it not hold.
          scale: as `Finding` has it; by default that of all findings here.
        """
        verdict = VERDICTS[None if holds is None else bool(holds)]
        why = "" if verdict is Verdict.HOLDS else why
        scale = scale or self._scale
        key = catalogue.key_of(self._paper, place, claim)
        self.found.append(
            Finding(self._paper, place, claim, theirs, ours, scale, verdict, why, key)
        )

    def to_dicts(self) -> list[dict[str, str]]:
        return [finding.to_dict() for finding in self.found]


def gain(theirs: float, ours: float) -> bool:
    """Return whether a ratio of ours has at least half of a gain: 1.24x of 1.48x."""
    return math.isfinite(ours) and ours - 1 >= (theirs - 1) / 2


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")
