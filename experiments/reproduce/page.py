"""The page of all findings, in Markdown."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Mapping, Sequence

from experiments.reproduce.catalogue import Collection, Entry
from experiments.reproduce.claims import Claim, Finding, Verdict

TITLES = {
    "EE-LLM": "EE-LLM (Chen et al., ICML 2024)",
    "HELIOS": "HELIOS (Kumar et al., 2025)",
    "TIDE": "TIDE (Jaber and Jaber, 2026)",
}
HEADER = ("place", "claim", "theirs", "ours", "scale", "verdict")
MISSING = "missing"
COMMAND = "EEJAX_DATA=DATA python -m experiments.reproduce.all --json"


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
    counts = count(collection)
    told = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    parts = [
        "# What the papers claim, and what we find",
        "A row for each table, figure, equation and claim of three papers: their value, ours, the "
        "scale of ours, and whether the claim holds of it. A claim about large models or GPUs is "
        "not judged on small ones: then the row says what is missing. Values that are simulated "
        "come from models of cost, not from a clock. A gain such as 1.48x holds if ours is at "
        "least half of it (1.24x), and a share if it is within 10 points, or better.",
        f"Made on {day or datetime.date.today().isoformat()}: {machine}. Of all rows: {told}.",
    ]
    for paper, entries in collection.entries.items():
        parts += [f"## {TITLES[paper]}", table(rows_of(entries))]
    if collection.others:
        parts += ["## Other papers", table([_cells(f, f.paper) for f in collection.others])]
    findings = [
        *(
            f
            for rows in collection.entries.values()
            for e in rows
            for f in (*e.findings, *e.besides)
        ),
        *collection.others,
    ]
    parts += ["## What does not hold, and why", listed(reasons(findings, Verdict.FAILS))]
    beyond = reasons(findings, Verdict.NOT_AT_THIS_SCALE) | not_run(collection)
    parts += ["## What this scale cannot show", listed(beyond)]
    broken = [f"- {name}: {why}" for name, why in failed.items()]
    broken += [f"- no finding: {text}" for text in collection.missing]
    broken += [f"- {text}" for text in collection.unknown]
    if broken:
        parts += ["## What is missing from this page", "\n".join(broken)]
    parts += [
        "## Make this page again",
        f"    {COMMAND}",
        "It continues where it was stopped, and runs a reproduction again only if what it depends "
        "on has changed. `--only=NAME` runs one, `--help` lists their names.",
    ]
    return "\n\n".join(parts) + "\n"


def count(collection: Collection) -> dict[str, int]:
    """Number of rows by verdict, without those that repeat another row."""
    counts = dict.fromkeys([*map(str, Verdict), MISSING], 0)
    for entries in collection.entries.values():
        told = dict.fromkeys(f for e in entries for f in (*e.findings, *e.besides))
        for finding in told:
            counts[str(finding.verdict)] += 1
        for claim in (e.claim for e in entries if not e.findings and not e.claim.repeats):
            counts[str(Verdict.NOT_AT_THIS_SCALE) if claim.cannot else MISSING] += 1
    return counts


def rows_of(entries: Sequence[Entry]) -> list[list[str]]:
    """Cells of each row of a paper's table, in the order of the paper."""
    places = {e.claim.key: e.claim.place for e in entries}
    shown: dict[Finding, str] = {}  # where a finding that speaks of several claims is told
    rows = []
    for entry in entries:
        one = entry.claim
        for finding in entry.findings:
            if finding in shown:
                rows.append([*_start(one), f"see {shown[finding]}", "", ""])
            else:
                shown[finding] = finding.place
                rows.append(_cells(finding))
        if one.repeats and not entry.findings:
            rows.append([*_start(one), f"see {places[one.repeats]}", "", ""])
        elif not entry.findings:
            verdict = str(Verdict.NOT_AT_THIS_SCALE) if one.cannot else MISSING
            rows.append([*_start(one), "not run", "", f"**{verdict}**"])
        rows += [_cells(finding) for finding in entry.besides]
    return rows


def _start(claim: Claim) -> list[str]:
    return [claim.place, claim.text, claim.theirs]


def _cells(f: Finding, paper: str = "") -> list[str]:
    place = f"{paper}, {f.place}" if paper else f.place
    verdict = str(f.verdict) if f.verdict is Verdict.HOLDS else f"**{f.verdict}**"
    return [place, f.claim, f.theirs, f.ours, f.scale, verdict]


def table(rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


def reasons(findings: Sequence[Finding], verdict: Verdict) -> dict[str, list[str]]:
    """Places of the claims of a verdict, by reason."""
    found: dict[str, list[str]] = {}
    for f in findings:
        if f.verdict is verdict:
            found.setdefault(f.why, []).append(f"{f.paper}, {f.place}")
    return found


def not_run(collection: Collection) -> dict[str, list[str]]:
    """Places of the claims that no reproduction speaks of, by reason."""
    found: dict[str, list[str]] = {}
    for paper, entries in collection.entries.items():
        for claim in (e.claim for e in entries if e.claim.cannot and not e.findings):
            found.setdefault(claim.cannot, []).append(f"{paper}, {claim.place}")
    return found


def listed(by_reason: Mapping[str, Sequence[str]]) -> str:
    lines = [
        f"- {'; '.join(dict.fromkeys(places))}: {_escaped(why)}"
        for why, places in by_reason.items()
    ]
    return "\n".join(lines) or "Nothing."
