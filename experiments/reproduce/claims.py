"""Claims of papers, and the findings of reproductions about them.

A reproduction's summary has a list `findings`, one `Finding` for each claim that it answers;
`eejax reproduce all` collects them on one page.
"""

from __future__ import annotations

import dataclasses
import enum

from eejax.common.errors import require

PAPERS = ("EE-LLM", "HELIOS", "TIDE")
OTHER_PAPERS = ("CALM", "LayerSkip")
"""Papers of which single results are reproduced: their claims are not listed in full."""


class Verdict(enum.StrEnum):
    """Outcome of a reproduction for our value at our scale.

    The last one is for values that can show neither of the others.
    """

    HOLDS = "holds"
    FAILS = "does not hold"
    NOT_AT_THIS_SCALE = "not at this scale"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a paper, a row of its catalogue.

    Attributes:
      key: name of the claim, unique in its paper.
      place: table, figure, equation, proposition or section, as the paper numbers it ("Table 1").
      text: the claim in our words, one sentence.
      theirs: the paper's value, with units.
      repeats: key of the claim of this paper that this one announces or repeats, if any.
      cannot: the reason why no reproduction can speak of it; empty for all others.
    """

    key: str
    place: str
    text: str
    theirs: str
    repeats: str = ""
    cannot: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Our finding on one claim.

    Attributes:
      paper: one of `PAPERS` or `OTHER_PAPERS`.
      place: table, figure, section or proposition, as the paper numbers it ("Table 1").
      claim: the paper's claim in our words, one sentence.
      theirs: the paper's value, with units.
      ours: our value, with units.
      scale: model, data and device of our value ("simulated", "9.5M parameters, 2 cores").
      verdict: whether the claim holds of our value.
      why: the reason where it does not hold or is not judged; empty otherwise.
      key: of the claim in the catalogue, whose words the page then shows; empty for what has none.
    """

    paper: str
    place: str
    claim: str
    theirs: str
    ours: str
    scale: str
    verdict: Verdict
    why: str = ""
    key: str = ""

    def __post_init__(self):
        known = (*PAPERS, *OTHER_PAPERS)
        require(self.paper in known, "paper", self.paper, f"must be one of {', '.join(known)}")
        needs_reason = self.verdict is not Verdict.HOLDS
        require(bool(self.why) or not needs_reason, "why", self.why, "must give the reason")

    def to_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, str]) -> Finding:
        """Read a finding that was written as JSON. Raises one of `MALFORMED` for what is none."""
        made = cls(**{**values, "verdict": Verdict(values["verdict"])})
        for name, value in values.items():
            require(isinstance(value, str), name, value, "must be a string")
        return made


MALFORMED = (TypeError, ValueError, KeyError, RecursionError)
"""Errors that reading JSON of findings raises where it is damaged."""
