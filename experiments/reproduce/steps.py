"""The reproductions that `eejax reproduce all` runs, one process each."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

from eejax.experiments.reproduce.claims import MALFORMED, Finding

HERE = pathlib.Path(__file__).parent
MODULES = "eejax.experiments.reproduce."
SLOWER = 8  # times the expected minutes after which a step counts as hanging


@dataclasses.dataclass(frozen=True)
class ReproductionStep:
    """A process that reproduces results, and ends with a JSON object that has `findings`.

    Attributes:
      name: unique name, also of its folder, log and record.
      module: the module to run, as in `python -m`.
      arguments: its flags; {here} stands for the step's own folder, {all} for that of all steps.
      minutes: expected time on 2 idle cores.
      needs: names of earlier steps whose models it reads.
      data: whether it reads $EEJAX_DATA.
      xla_flags: flags of the compiler, such as a number of fake devices.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    minutes: float
    needs: tuple[str, ...] = ()
    data: bool = False
    xla_flags: str = ""

    def command(self, workdir: pathlib.Path) -> list[str]:
        here = workdir / self.name
        arguments = [a.format(here=here, all=workdir) for a in self.arguments]
        return [*arguments, "--json"]

    def source_files(self) -> list[pathlib.Path]:
        """Return the reproduction's own source: its module and those beside it that it imports.

        The catalogue is left out: a claim's words are read from it when the page is written.
        """
        names, queue = set(), [self.module.removeprefix(MODULES)]
        while queue:
            name = queue.pop()
            if name not in names and not name.startswith(("catalogue", "claims")):
                names.add(name)
                queue += imported((HERE / f"{name}.py").read_text())
        return [HERE / f"{name}.py" for name in sorted(names)]


def imported(source: str) -> list[str]:
    """Return the names of the modules of this package that a module imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            if f"{node.module}." == MODULES:
                found += [alias.name for alias in node.names]
            elif (node.module or "").startswith(MODULES):
                found.append(node.module.removeprefix(MODULES))
    return found


def reproduction(name: str, minutes: float, *arguments: str, **fields) -> ReproductionStep:
    return ReproductionStep(name, MODULES + name, arguments, minutes, **fields)


FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
# Programs that run once: most of the time goes into compiling them.
UNOPTIMISED = "--xla_backend_optimization_level=0"
STEPS = (
    reproduction("training_efficiency", 1, "--workdir={here}"),
    reproduction("mechanisms", 8, xla_flags=f"{FOUR_DEVICES} {UNOPTIMISED}"),
    reproduction("convergence", 9, "--workdir={here}", "--seeds=2"),
    reproduction("recipes", 18, "--workdir={here}", "--seeds=1", "--steps=550"),
    reproduction("guarantee", 3, "--workdir={all}/recipes/plain_0", needs=("recipes",)),
    reproduction("tide", 14, "--workdir={here}", data=True),
    reproduction("helios", 38, "--workdir={here}", data=True),
    reproduction(
        "inference",
        12,
        "--workdir={all}/helios/small",
        "--out={here}",
        "--pairs=12",
        needs=("helios",),
        data=True,
        xla_flags=FOUR_DEVICES,
    ),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of a step: its findings and log, and its error, if any."""

    findings: Sequence[Finding]
    log: Sequence[str]
    error: str = ""


def execute(step: ReproductionStep, workdir: pathlib.Path, data: str | None) -> Outcome:
    """Run a step to its end, its output going to WORKDIR/logs/NAME.log.

    Its exit status is 1 where a claim does not hold, which is no error.
    """
    log = workdir / "logs" / f"{step.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", step.module, *step.command(workdir)]
    with log.open("w") as file:
        print(" ".join(command), file=file, flush=True)
        child = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment(step, data)
        )
        status, error = _wait(child, 60 * SLOWER * step.minutes)
    lines = log.read_text(errors="replace").splitlines()
    if error:
        return Outcome((), lines, f"{error}, see {log}")
    findings, error = findings_of(lines)
    return Outcome(findings, lines, error and f"{error} (exit status {status}), see {log}")


def environment(step: ReproductionStep, data: str | None) -> dict[str, str]:
    values = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **os.environ}
    if data:
        values["EEJAX_DATA"] = data
    if step.xla_flags:
        values["XLA_FLAGS"] = f"{values.get('XLA_FLAGS', '')} {step.xla_flags}".strip()
    return values


def _wait(child: subprocess.Popen, seconds: float) -> tuple[int, str]:
    """Return (exit status, error). However this process ends, the child ends too."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return child.wait(seconds), ""
    except subprocess.TimeoutExpired:
        return -1, f"ran for more than {seconds / 60:.0f} minutes"
    finally:
        if child.poll() is None:
            child.terminate()  # a training run writes a checkpoint
            child.wait()
        signal.signal(signal.SIGTERM, previous)


def findings_of(lines: Sequence[str]) -> tuple[tuple[Finding, ...], str]:
    """Return (findings of the JSON object at the end, the problem with it).

    Libraries may print warnings after it as the process ends.
    """
    last = next((line for line in reversed(lines) if line.startswith("{")), "null")
    try:
        summary = json.loads(last)
    except MALFORMED:
        summary = None
    if not isinstance(summary, dict):
        return (), "ended without a JSON object"
    if not summary.get("findings"):
        return (), "ended without findings"
    try:
        return tuple(Finding.from_dict(values) for values in summary["findings"]), ""
    except MALFORMED as error:
        return (), f"has a finding that is malformed: {error}"
