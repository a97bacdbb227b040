"""The catalogue of the three papers' claims, and which findings speak of each.

A finding belongs to the claim of its paper, place and text. Where a place has a single claim, every
finding of that place belongs to it, so that a figure may have a finding for each of its curves. A
finding that says something else of a place with several claims is shown there, and stands for none
of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from eejax.common.errors import require
from experiments.reproduce import claims_ee_llm, claims_helios, claims_tide
from experiments.reproduce.claims import OTHER_PAPERS, PAPERS, Claim, Finding, Verdict

CATALOGUE: Mapping[str, tuple[Claim, ...]] = {
    module.PAPER: module.CLAIMS for module in (claims_ee_llm, claims_helios, claims_tide)
}


def claim(paper: str, key: str) -> Claim:
    """Look up a claim. Raises `ConfigError` where the catalogue has none of this key."""
    known = {one.key: one for one in CATALOGUE[paper]}
    require(key in known, "key", key, f"must be a claim of {paper}: {', '.join(known)}")
    return known[key]


def finding(
    paper: str, key: str, ours: str, scale: str, holds: bool | None, why: str = ""
) -> Finding:
    """Make the finding of a claim in the catalogue.

    Args:
      paper, key: the claim.
      ours, scale: as in `Finding`.
      holds: whether the claim holds of our value; None if it cannot be judged at this scale.
      why: the reason if it does not hold or is not judged; left out if it holds.
    """
    one = claim(paper, key)
    if holds is None:
        verdict = Verdict.NOT_AT_THIS_SCALE
    else:
        verdict = Verdict.HOLDS if holds else Verdict.FAILS
    why = "" if verdict is Verdict.HOLDS else why
    return Finding(paper, one.place, one.text, one.theirs, ours, scale, verdict, why)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A claim of the catalogue with the findings that speak of it.

    Attributes:
      claim: the claim.
      findings: those that speak of it.
      besides: further findings of its place, on the place's last claim.
    """

    claim: Claim
    findings: tuple[Finding, ...]
    besides: tuple[Finding, ...] = ()


@dataclasses.dataclass(frozen=True)
class Collection:
    """All findings by claim.

    Attributes:
      entries: of each of `PAPERS`, its claims in the order of the paper.
      others: findings about `OTHER_PAPERS`.
      missing: "PAPER, PLACE: claim" for each claim without a finding.
      unknown: what is wrong with each finding that belongs to no claim.
    """

    entries: Mapping[str, tuple[Entry, ...]]
    others: tuple[Finding, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return not self.missing and not self.unknown


def collect(
    findings: Iterable[Finding], catalogue: Mapping[str, Sequence[Claim]] = CATALOGUE
) -> Collection:
    """Assign findings to the claims that they speak of."""
    claims = {paper: catalogue[paper] for paper in PAPERS if paper in catalogue}
    found: dict[tuple[str, str], list[Finding]] = {}
    besides: dict[tuple[str, str], list[Finding]] = {}
    others, unknown = [], []
    for one in findings:
        here = [c for c in claims.get(one.paper, ()) if c.place == one.place]
        exact = [c for c in here if c.text == one.claim]
        if one.paper in OTHER_PAPERS:
            others.append(one)
        elif not here:
            unknown.append(f"{one.paper}, {one.place}: no claim of the catalogue is there")
        elif exact or len(here) == 1:
            found.setdefault((one.paper, (exact or here)[0].key), []).append(one)
        else:
            besides.setdefault((one.paper, here[-1].key), []).append(one)
    of = lambda where, paper, c: tuple(where.get((paper, c.key), ()))
    entries = {
        paper: tuple(Entry(c, of(found, paper, c), of(besides, paper, c)) for c in listed)
        for paper, listed in claims.items()
    }
    missing = [
        f"{paper}, {entry.claim.place}: {entry.claim.text}"
        for paper, rows in entries.items()
        for entry in rows
        if not (entry.findings or entry.claim.repeats or entry.claim.cannot)
    ]
    return Collection(entries, tuple(others), tuple(missing), tuple(unknown))
