"""The page of all findings, in Markdown."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Mapping, Sequence

from eejax.experiments.reproduce.catalogue import Collection, Entry
from eejax.experiments.reproduce.claims import Finding, Verdict

TITLES = {
    "EE-LLM": "EE-LLM (Chen et al., ICML 2024)",
    "HELIOS": "HELIOS (Kumar et al., 2025)",
    "TIDE": "TIDE (Jaber and Jaber, 2026)",
}
HEADER = ("row", "place", "claim", "theirs", "ours", "scale", "verdict")
MISSING = "missing"
RULES = (
    "The tables have a row for each table, figure, equation and claim of three papers, with the "
    "paper's value, our value, the scale of ours, and a verdict. Reasons are listed below the "
    "tables by row number. A verdict is about our value at our scale: if a claim does not hold "
    'for a small model, this says nothing about the paper\'s model. "Not at this scale" means that '
    "our value can neither confirm nor refute the claim, because there is no GPU, the model has "
    "nothing to lose, a value was fitted, or nothing was run. Simulated values come from cost "
    "models, not from a clock. A gain such as 1.48x holds if ours is at least half of it (1.24x), "
    "and a share if it is within 10 points, or better. If a row states another bound, that bound "
    "decides."
)
COMMAND = "EEJAX_DATA=DATA eejax reproduce all --json"


def machine() -> str:
    """Describe this machine: processor, cores, memory, versions."""
    import jax

    text = pathlib.Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    named = re.search(r"model name\s*:\s*(.+)", text)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = jax.devices()[0].device_kind
    return (
        f"{named[1].strip() if named else platform.machine()}, {os.cpu_count()} cores, "
        f"{memory:.0f} GiB, JAX {jax.__version__} on {device}, Python {platform.python_version()}"
    )


def page(collection: Collection, machine: str, failed: Mapping[str, str], day: str = "") -> str:
    """Write the page.

    Args:
      collection: findings by claim.
      machine: where they were made.
      failed: reproductions that ended without findings, with the reason.
      day: date of the page; today by default.
    """
    made = f"Made on {day or datetime.date.today().isoformat()}: {machine}."
    parts = ["# What the papers claim, and what we find", RULES]
    parts += [f"{made} Of the rows, {told(count(collection))}."]
    numbered: list[tuple[int, TableRow]] = []
    for title, rows in tables(collection).items():
        here = list(enumerate(rows, len(numbered) + 1))
        numbered += here
        parts += [f"## {title}", table(here)]
    parts += ["## What does not hold, and why", reasons(numbered, str(Verdict.FAILS))]
    beyond = str(Verdict.NOT_AT_THIS_SCALE)
    parts += ["## What this scale cannot show", reasons(numbered, beyond)]
    broken = [f"- {name}: {why}" for name, why in failed.items()]
    broken += [f"- no finding: {text}" for text in collection.missing]
    broken += [f"- {text}" for text in collection.unknown]
    if broken:
        parts += ["## What is missing from this page", "\n".join(broken)]
    parts += [
        "## Make this page again",
        f"    {COMMAND}",
        "The command continues where it was stopped, and runs a reproduction again only if its "
        "inputs have changed. `--only=NAME` runs one, `--help` lists their names.",
    ]
    return "\n\n".join(parts) + "\n"


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A row of a table.

    Attributes:
      paper: short name; empty if the place names it.
      place: place of the claim, as the paper has it.
      claim: the claim, as the paper has it.
      theirs: the paper's value.
      ours: our value, or where it stands.
      scale: scale of our value; empty if there is none.
      verdict: a `Verdict`, or `MISSING`; empty if another row has it.
      why: the reason for a verdict that is not `Verdict.HOLDS`; empty otherwise.
    """

    paper: str
    place: str
    claim: str
    theirs: str
    ours: str
    scale: str = ""
    verdict: str = ""
    why: str = ""


def tables(collection: Collection) -> dict[str, list[TableRow]]:
    """Return the rows of each table of the page, by its title."""
    found = {TITLES[paper]: rows_of(paper, e) for paper, e in collection.entries.items()}
    others = [
        dataclasses.replace(_row(one), paper="", place=f"{one.paper}, {one.place}")
        for one in collection.others
    ]
    return found | ({"Other papers": others} if others else {})


def count(collection: Collection) -> dict[str, int]:
    """Return the number of rows by verdict; "" stands for those that point to another row."""
    counts = dict.fromkeys([*map(str, Verdict), MISSING, ""], 0)
    for row in (row for rows in tables(collection).values() for row in rows):
        counts[row.verdict] += 1
    return counts


def told(counts: Mapping[str, int]) -> str:
    """Return a clause about the counts: "113 hold, 53 do not, 54 are not judged at this scale"."""
    verbs = {
        str(Verdict.HOLDS): ("holds", "hold"),
        str(Verdict.FAILS): ("does not", "do not"),
        str(Verdict.NOT_AT_THIS_SCALE): (
            "is not judged at this scale",
            "are not judged at this scale",
        ),
        MISSING: ("has no finding", "have no finding"),
        "": ("points to another row", "point to another row"),
    }
    always = set(map(str, Verdict))
    return ", ".join(
        f"{counts[kind]} {one if counts[kind] == 1 else plural}"
        for kind, (one, plural) in verbs.items()
        if counts[kind] or kind in always
    )


def rows_of(paper: str, entries: Sequence[Entry]) -> list[TableRow]:
    """Return the rows of a paper's table, in the order of the paper."""
    places = {e.claim.key: e.claim.place for e in entries}
    shown: dict[Finding, str] = {}  # where a finding that speaks of several claims is told
    rows = []
    for entry in entries:
        one = entry.claim
        plain = functools.partial(TableRow, paper, one.place, one.text, one.theirs)
        for finding in entry.findings:
            if finding in shown:
                rows.append(plain(f"see {shown[finding]}"))
            else:
                shown[finding] = finding.place
                rows.append(_row(finding))
        if one.repeats and not entry.findings:
            rows.append(plain(f"see {places[one.repeats]}"))
        elif one.cannot and not entry.findings:
            rows.append(plain("not run", "", str(Verdict.NOT_AT_THIS_SCALE), one.cannot))
        elif not entry.findings:
            rows.append(plain("not run", "", MISSING))
        rows += [_row(finding) for finding in entry.besides]
    return rows


def _row(f: Finding) -> TableRow:
    return TableRow(f.paper, f.place, f.claim, f.theirs, f.ours, f.scale, str(f.verdict), f.why)


def table(rows: Iterable[tuple[int, TableRow]]) -> str:
    """Return a table in Markdown, of rows and their numbers."""
    lines: list[Sequence[str]] = [HEADER, ["---"] * len(HEADER)]
    for number, r in rows:
        bold = r.verdict and r.verdict != str(Verdict.HOLDS)
        verdict = f"**{r.verdict}**" if bold else r.verdict
        lines.append([str(number), r.place, r.claim, r.theirs, r.ours, r.scale, verdict])
    return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


def reasons(numbered: Iterable[tuple[int, TableRow]], verdict: str) -> str:
    """Return a list of the reasons for a verdict, each with its rows, sorted by row."""
    found: dict[str, list[tuple[int, TableRow]]] = {}
    for number, row in numbered:
        if row.verdict == verdict:
            found.setdefault(row.why, []).append((number, row))
    lines = []
    for why, having in found.items():
        numbers = ", ".join(str(number) for number, _ in having)
        named = (", ".join(filter(None, (row.paper, row.place))) for _, row in having)
        places = "; ".join(dict.fromkeys(named))
        rows = "Row" if len(having) == 1 else "Rows"
        lines.append(f"- {rows} {numbers} ({places}): {_escaped(why)}")
    return "\n".join(lines) or "Nothing."
