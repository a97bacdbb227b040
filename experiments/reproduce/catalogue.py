"""Catalogue of the three papers' claims, and the findings about each.

A finding with a key belongs to the claim of that key, and takes its place and words from there. A
finding without a key belongs to the claims of its place that have its text. A place with a single
claim has every finding of that place, so a figure may have a finding for each of its curves. A
finding with another text at a place of several claims is shown there, and answers none of them. A
finding may name several places ("Section 3.2, Table 1"), or a part of one ("Figure 3(b)").
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from eejax.common.errors import require
from eejax.experiments.reproduce import claims_ee_llm, claims_helios, claims_tide
from eejax.experiments.reproduce.claims import OTHER_PAPERS, PAPERS, Claim, Finding, Verdict

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
      paper: one of `PAPERS`.
      key: the claim's, in the catalogue of the paper.
      ours: as in `Finding`.
      scale: as in `Finding`.
      holds: whether the claim holds of our value; None if it cannot be judged at this scale.
      why: the reason if it does not hold or is not judged; left out if it holds.
    """
    one = claim(paper, key)
    if holds is None:
        verdict = Verdict.NOT_AT_THIS_SCALE
    else:
        verdict = Verdict.HOLDS if holds else Verdict.FAILS
    why = "" if verdict is Verdict.HOLDS else why
    return Finding(paper, one.place, one.text, one.theirs, ours, scale, verdict, why, key)


def key_of(paper: str, place: str, text: str) -> str:
    """Return the key of the claim with this place and text; empty if there is none."""
    found = (c.key for c in CATALOGUE.get(paper, ()) if (c.place, c.text) == (place, text))
    return next(found, "")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A claim of the catalogue with the findings about it.

    Attributes:
      claim: the claim.
      findings: findings about it.
      besides: further findings of its place, on the place's last claim.
    """

    claim: Claim
    findings: tuple[Finding, ...]
    besides: tuple[Finding, ...] = ()


@dataclasses.dataclass(frozen=True)
class Collection:
    """All findings by claim.

    Attributes:
      entries: for each of `PAPERS`, its claims in the order of the paper.
      others: findings about `OTHER_PAPERS`.
      missing: "PAPER, PLACE: claim" for each claim without a finding.
      unknown: the problem with each finding that belongs to no claim.
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
    """Assign findings to their claims."""
    claims = {paper: catalogue[paper] for paper in PAPERS if paper in catalogue}
    found: dict[tuple[str, str], list[Finding]] = {}
    besides: dict[tuple[str, str], list[Finding]] = {}
    others, unknown = [], []
    for one in findings:
        if one.paper in OTHER_PAPERS:
            others.append(one)
            continue
        if one.key:
            own = next((c for c in claims.get(one.paper, ()) if c.key == one.key), None)
            if own is None:
                unknown.append(f"{one.paper}, {one.place}: no claim has the key {one.key!r}")
            else:
                one = dataclasses.replace(one, place=own.place, claim=own.text, theirs=own.theirs)
                found.setdefault((one.paper, own.key), []).append(one)
            continue
        here = claims_at(one.place, claims.get(one.paper, ()))
        if not any(here):
            unknown.append(f"{one.paper}, {one.place}: no claim of the catalogue is there")
            continue
        exact = [c for some in here for c in some if c.text == one.claim]
        single = [some[0] for some in here if len(some) == 1]
        for c in dict.fromkeys([*exact, *single]):
            found.setdefault((one.paper, c.key), []).append(one)
        if not (exact or single):
            last = next(some for some in here if some)[-1]
            besides.setdefault((one.paper, last.key), []).append(one)

    def of(where, paper, c):
        return tuple(where.get((paper, c.key), ()))

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


def claims_at(place: str, claims: Sequence[Claim]) -> list[list[Claim]]:
    """Return the claims at each place that a finding names, or those of the whole place.

    The claims of the whole count if a part has none.
    """
    places = [(c, labels(c.place)) for c in claims]
    found = []
    for label in labels(place):
        while label:
            some = [c for c, own in places if label in own]
            if some:
                found.append(some)
                break
            label = _whole(label)
    return found


def labels(place: str) -> list[str]:
    """Return the single places of a text such as "Figures 3 and 4" or "C.2.1, Figure 3(b)"."""
    found, kind, before = [], "", ""
    for word in re.split(r"[\s,;]+", place.replace("(", " (")):
        number = word.strip("().-")
        if before.islower() and before not in ("and", "to"):
            pass  # "footnote 2"
        elif re.fullmatch(r"[a-c]", number) and found:
            found[-1] += number
        elif re.fullmatch(r"\d+(\.\d+)*[a-c]?", number):
            found.append(f"{kind} {number}")
        elif re.fullmatch(r"[A-F](\.\d+)+", number) or before == "Appendix":
            found.append(f"{kind if kind and before.startswith(kind) else 'Appendix'} {number}")
        elif word == "Abstract":
            found.append(word)
        elif word[:1].isupper():
            kind = word.rstrip("s.")
        before = word
    return found


def _whole(label: str) -> str:
    """Return the place that a part belongs to: "Figure 3" for "Figure 3b", "" for a whole one."""
    kind, _, number = label.partition(" ")
    if number[-1:] in ("a", "b", "c"):
        return f"{kind} {number[:-1]}"
    return f"{kind} {number.rpartition('.')[0]}" if "." in number else ""
