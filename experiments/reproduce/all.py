"""Every reproduction of the three papers, and one page of what was found.

    EEJAX_DATA=DATA eejax reproduce all --json
    EEJAX_DATA=DATA eejax reproduce all --only=mechanisms,inference

Runs each reproduction as a process of its own, in order, at a size for 2 cores: about 105 minutes
in all where nothing else runs. Models are trained once and shared. Each leaves its files, its log
and a record of its findings in --workdir. What has a record is not run again unless its arguments,
the data, its own source or a model that it needs has changed; a change of the library does not
count, and --again=NAME runs one anew. A reproduction that fails is reported and does not stop the
others; one that is stopped continues where it was, if it can.

The page has a row for each claim of the catalogue (`reproduce.catalogue`). The exit
status is 1 where a claim has no finding, a finding belongs to no claim, or a reproduction fails;
that a claim does not hold is a finding, and no failure. With --only the page is written to the
folder --workdir and may lack rows. Steps that read prompts fail without the folder $EEJAX_DATA;
docs/BENCHMARKS.md, "Data", says what lies in it and where to get it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import flags

from eejax.common.paths import expanded
from eejax.experiments import launch
from eejax.experiments.reproduce import catalogue, page
from eejax.experiments.reproduce.claims import MALFORMED, Finding
from eejax.experiments.reproduce.steps import STEPS, ReproductionStep, execute

_WORKDIR = flags.DEFINE_string("workdir", "runs/reproduce", "Where everything is left.")
_OUTPUT = flags.DEFINE_string("output", None, "The page; docs/REPRODUCTION.md by default.")
_ONLY = flags.DEFINE_list("only", None, f"Only these, of {', '.join(s.name for s in STEPS)}.")
_AGAIN = flags.DEFINE_list("again", None, "Run these anew, whatever their records say.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

SHOWN = 15  # last lines of the log of a failed step


def main() -> None:
    from eejax.checkpoint.files import write_text
    from eejax.common.errors import require

    names = [step.name for step in STEPS]
    for flag, values in (("only", _ONLY.value), ("again", _AGAIN.value)):
        check_names(flag, values, names)
    for flag, value in (("workdir", _WORKDIR.value), ("output", _OUTPUT.value)):
        require(value != "", f"--{flag}", value, "must be a path")
    workdir = expanded(_WORKDIR.value).absolute()
    page_in = pathlib.Path("docs") if _ONLY.value is None else workdir
    output = writable(_OUTPUT.value or page_in / "REPRODUCTION.md")
    chosen = chosen_steps(STEPS, _ONLY.value)
    data = os.environ.get("EEJAX_DATA")
    begin = time.perf_counter()
    failed = run_all(chosen, workdir, data, again=_AGAIN.value or ())
    found = [one for s in STEPS if s.name not in failed for one in recorded(s, workdir)]
    collection = catalogue.collect(found)
    write_text(output, page.page(collection, page.machine(), failed))
    show(collection, failed)
    print(f"\nthe page: {output}", flush=True)
    if _JSON.value:
        summary = {
            "findings": [one.to_dict() for one in found],
            "count": page.count(collection),
            "missing": collection.missing,
            "unknown": collection.unknown,
            "failed": failed,
            "seconds": time.perf_counter() - begin,
            "page": str(output),
        }
        print(json.dumps(summary))
    whole = collection.complete or (_ONLY.value is not None and not collection.unknown)
    sys.exit(0 if whole and not failed else 1)


def check_names(flag: str, values: Sequence[str] | None, names: Sequence[str]) -> None:
    """Raise ConfigError for a flag that is given and names no step, or something else."""
    from eejax.common.errors import require, require_one_of

    told, fix = f"must be of {', '.join(names)}, one at least", "Or leave the flag out."
    require(values != [], f"--{flag}", "", told, fix)
    for value in values or ():
        require_one_of(f"--{flag}", value, tuple(names))


def writable(path: str | os.PathLike) -> pathlib.Path:
    """Make the folder of a file that is to be written later.

    Raises ConfigError for a folder, and OSError where the file could not be written.
    """
    from eejax.common.errors import require

    path = expanded(path)
    require(not path.is_dir(), "--output", str(path), "must be a file, and is a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    probe = path.with_name(f"{path.name}.part")
    probe.touch()
    probe.unlink()
    return path


def chosen_steps(
    steps: Sequence[ReproductionStep], only: Sequence[str] | None
) -> list[ReproductionStep]:
    """Return the named steps, with those that they need, in order; all steps for None."""
    by_name = {step.name: step for step in steps}
    wanted: set[str] = set()
    queue = list(by_name if only is None else only)
    while queue:
        name = queue.pop()
        if name not in wanted:
            wanted.add(name)
            queue += by_name[name].needs
    return [step for step in steps if step.name in wanted]


def run_all(
    steps: Sequence[ReproductionStep],
    workdir: pathlib.Path,
    data: str | None,
    *,
    again: Sequence[str] = (),
) -> dict[str, str]:
    """Run what has no valid record. Returns the reason for each step that failed, by name."""
    digests = digests_of(STEPS, workdir, data)
    to_do = [s for s in steps if s.name in again or record_of(s, workdir).digest != digests[s.name]]
    failed: dict[str, str] = {}
    spent = expected = 0.0
    for number, step in enumerate(steps, 1):
        start = f"[{number}/{len(steps)}] {step.name}"
        if step not in to_do:
            launch.say(f"{start}: done before")
            continue
        if reason := impossible(step, data, failed):
            failed[step.name] = reason
            launch.say(f"{start}: {reason}")
            continue
        left = sum(s.minutes for s in to_do[to_do.index(step) :])
        pace = max(1.0, spent / expected) if expected else 1.0
        launch.say(f"{start}: about {step.minutes * pace:.0f} min; all: {left * pace:.0f} min")
        begin = time.perf_counter()
        outcome = execute(step, workdir, data)
        minutes = (time.perf_counter() - begin) / 60
        spent, expected = spent + minutes, expected + step.minutes
        if outcome.error:
            failed[step.name] = outcome.error
            launch.say(f"{start}: FAILED after {minutes:.1f} min: {outcome.error}")
            launch.say("".join(f"    {line}\n" for line in outcome.log[-SHOWN:]))
            continue
        write_record(step, workdir, digests[step.name], outcome.findings, 60 * minutes)
        launch.say(f"{start}: {minutes:.1f} min, {len(outcome.findings)} findings")
    return failed


def impossible(step: ReproductionStep, data: str | None, failed: Mapping[str, str]) -> str:
    """Return the reason why a step cannot run; empty if it can."""
    if step.data and not data:
        return "EEJAX_DATA is not set: set it to the folder of prompts and texts"
    lacking = [name for name in step.needs if name in failed]
    return f"needs {', '.join(lacking)}, which failed" if lacking else ""


def digests_of(
    steps: Sequence[ReproductionStep], workdir: pathlib.Path, data: str | None
) -> dict[str, str]:
    """Digest, for each step, everything that its result depends on except the library."""
    files = data_files(data)
    found: dict[str, str] = {}
    for step in steps:
        parts = [step.module, *step.command(workdir), *(found[name] for name in step.needs)]
        parts += [source.read_text() for source in step.source_files()]
        parts += [files] if step.data else []
        found[step.name] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return found


def data_files(data: str | None) -> str:
    """Return names and sizes of the files in the data folder."""
    if not data:
        return ""
    root = expanded(data)
    rows = [(str(p.relative_to(root)), p.stat().st_size) for p in root.rglob("*") if p.is_file()]
    return json.dumps(sorted(rows))


class StepRecord(NamedTuple):
    """A finished step: a digest of its inputs, and its findings."""

    digest: str = ""
    findings: tuple[Finding, ...] = ()


def record_of(step: ReproductionStep, workdir: pathlib.Path) -> StepRecord:
    """Return the record of a finished step; empty if there is none.

    A damaged record counts as none, and is reported.
    """
    path = workdir / "records" / f"{step.name}.json"
    if not path.is_file():
        return StepRecord()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return StepRecord(values["digest"], tuple(map(Finding.from_dict, values["findings"])))
    except (OSError, *MALFORMED) as error:
        launch.say(f"{path}: is damaged ({error!r}) and counts as none: the step has to run again")
        return StepRecord()


def write_record(
    step: ReproductionStep,
    workdir: pathlib.Path,
    digest: str,
    findings: Sequence[Finding],
    seconds: float,
) -> None:
    from eejax.checkpoint.files import write_text

    values = {"digest": digest, "seconds": seconds, "findings": [f.to_dict() for f in findings]}
    folder = workdir / "records"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{step.name}.json", json.dumps(values, indent=1))


def recorded(step: ReproductionStep, workdir: pathlib.Path) -> list[Finding]:
    return [*record_of(step, workdir).findings]


def show(collection: catalogue.Collection, failed: Mapping[str, str]) -> None:
    print(f"Of the rows, {page.told(page.count(collection))}.")
    for name, reason in failed.items():
        print(f"FAILED   {name}: {reason}")
    for text in collection.missing:
        print(f"missing  {text}")
    for text in collection.unknown:
        print(f"unknown  {text}")


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted: the same command continues")
