"""Run stages in processes of their own, each within its time, and merge their parts' results."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eejax.experiments.jax_settings import GRAPHS_FLAG

SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""For processes that share the GPU with others."""

ALONE = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""For training steps, which need more memory than JAX takes by default."""

TAIL = 2000
"""Characters of a log that are reported for a process without a result."""

START = 120.0
"""Seconds in which JAX must have found the GPU."""

COMPILE_SHARE = 10
"""In a dry run, the time to compile relative to that of one rehearsal."""


@dataclasses.dataclass(frozen=True)
class GpuStage:
    """A module with `run(check)` and `programs(check)`, run once for each of its parts.

    Attributes:
      name: as in `--stages`, "STAGE" or "STAGE:PART".
      module: the module's dotted name.
      parts: environment variables of each part, by the part's name.
      rehearsed: parts that a dry run executes; None for all.
    """

    name: str
    module: str
    parts: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=lambda: {"": {}})
    rehearsed: tuple[str, ...] | None = None

    @property
    def file(self) -> str:
        """Stem of the names of its files."""
        return self.name.replace(":", "_")

    def only(self, part: str) -> GpuStage:
        """Return a stage of one of the parts, which has the whole time."""
        name, parts = f"{self.name}:{part}", {part: self.parts[part]}
        return dataclasses.replace(self, name=name, parts=parts, rehearsed=None)


_HERE = "eejax.experiments.gpu_check"
_LOOPS = {"XLA_FLAGS": f"{GRAPHS_FLAG}=+WHILE"}
STAGES = (
    GpuStage("smoke", f"{_HERE}.smoke"),
    GpuStage(
        "decode",
        f"{_HERE}.decode",
        {
            "engines": {},
            "loops_in_graphs": _LOOPS,
            "calls": _LOOPS,
            "default_graphs": {"XLA_FLAGS": ""},
            "no_graphs": {"XLA_FLAGS": f"{GRAPHS_FLAG}="},
        },
        # XLA's flags for GPUs mean nothing to a CPU.
        rehearsed=("engines", "loops_in_graphs", "calls"),
    ),
    GpuStage("train", f"{_HERE}.train", {"350M": ALONE, "1.3B": ALONE, "torch": SHARED}),
    GpuStage("batch", f"{_HERE}.batch", {"8": {}, "64": {}}),
    GpuStage("serve", f"{_HERE}.serve", {"": SHARED}),
    GpuStage("helios", f"{_HERE}.helios"),
)


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Settings that all stages of a run share.

    Attributes:
      out: the folder of results and logs.
      seconds: the time limit of a stage. Its parts have equal shares of it; in a dry run, the
        programs have `COMPILE_SHARE` times that of each rehearsal.
      small: use tiny models.
      dry_run: compile for `card` without a GPU, and try the stage out on the CPU.
      card: a name in `experiments.aot.CARDS`.
    """

    out: pathlib.Path
    seconds: float = 300.0
    small: bool = False
    dry_run: bool = False
    card: str = "h100"


def run(stages: Sequence[GpuStage], settings: RunSettings) -> Iterator[dict[str, Any]]:
    """Yield the result of each stage as it ends, even if an earlier one failed."""
    settings.out.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        try:
            result = _stage(stage, settings)
        except Exception as error:  # such as a full disk: the other stages go on
            result = dict(stage=stage.name, ok=False, seconds=0.0, error=repr(error))
        yield result


def _stage(stage: GpuStage, settings: RunSettings) -> dict[str, Any]:
    begin = time.monotonic()
    log = settings.out / f"{stage.file}.txt"
    log.unlink(missing_ok=True)
    tasks = [*_tasks(stage, settings)]
    results = {}
    shares = [COMPILE_SHARE if mode == "compile" else 1 for _, mode, _ in tasks]
    for n, (name, mode, environment) in enumerate(tasks):
        left = settings.seconds - (time.monotonic() - begin)
        part = dict(stage=stage, mode=mode, part=name, environment=environment)
        results[name] = _part(settings, left * shares[n] / sum(shares[n:]), log, **part)
    seconds = round(time.monotonic() - begin, 1)
    errors = {k: r["error"] for k, r in results.items() if r.get("error")}
    result: dict[str, Any] = dict(stage=stage.name, ok=not errors, seconds=seconds)
    if errors:
        result["error"] = "; ".join(f"{k}: {e}" if k else e for k, e in errors.items())
    if len(results) == 1 and "" in results:
        result |= {k: v for k, v in results[""].items() if k != "error"}
    else:
        result["parts"] = results
    (settings.out / f"{stage.file}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _tasks(stage: GpuStage, settings: RunSettings) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield (name, task, environment) of each process of a stage."""
    if not settings.dry_run:
        for name, environment in stage.parts.items():
            yield name, "run", dict(environment)
        return
    only = next(iter(stage.parts)) if len(stage.parts) == 1 else ""
    yield f"compile {only}".strip(), "compile", _compiling()
    for name in stage.parts if stage.rehearsed is None else stage.rehearsed:
        yield f"rehearse {name}".strip(), "run", _rehearsing()


def _compiling() -> dict[str, str]:
    """Return an environment in which JAX's CUDA plugin is found, and no device is started."""
    own = os.path.join(sys.prefix, "lowering")
    paths = [os.environ.get("PYTHONPATH"), own if os.path.isdir(own) else None]
    known = os.pathsep.join(p for p in paths if p)
    return {"JAX_PLATFORMS": "cpu", "PYTHONPATH": known, "XLA_FLAGS": ""}


def _rehearsing() -> dict[str, str]:
    """Return an environment in which programs run on the CPU, and are compiled quickly."""
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def _part(settings: RunSettings, seconds: float, log: pathlib.Path, **task: Any) -> dict[str, Any]:
    """Run one process of a stage, and end it at its time limit."""
    stage, part, mode = task["stage"], task["part"], task["mode"]
    name = "_".join([stage.file, *part.split()])
    found = settings.out / f"{name}.partial.json"
    found.unlink(missing_ok=True)
    own = dict(
        module=stage.module,
        part=part.removeprefix("compile").removeprefix("rehearse").strip(),
        mode=mode,
        out=str(settings.out),
        name=name,
        small=settings.small or (settings.dry_run and mode == "run"),
        card=settings.card,
        # The running measurement may then finish, and the rest is left out.
        seconds=seconds - min(30.0, 0.2 * seconds),
    )
    command = [sys.executable, "-P", "-m", "eejax.experiments.gpu_check.child", json.dumps(own)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | task["environment"]
    with log.open("a") as file:
        print(f"== {stage.name} {part} {task['environment']}", file=file, flush=True)
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(max(1.0, seconds))
            error = "" if status == 0 else f"the process ended with status {status}"
        except subprocess.TimeoutExpired:
            error = f"ended at its time limit of {seconds:.0f} s"
        finally:
            _end(process)
    result = json.loads(found.read_text()) if found.exists() else {}
    found.unlink(missing_ok=True)
    said = [f"{error} (see {log.name})"] if error else []
    if error:
        result.setdefault("log", log.read_text(errors="replace")[-TAIL:])
        if process.returncode > 0:  # it failed by itself
            said.append(_last_line(result["log"]))
    said += [f"{k}: {_last_line(e)}" for k, e in result.get("errors", {}).items()]
    if not said and (late := result.get("not_measured")):
        said = [f"no time was left for {', '.join(late)}"]
    if said:
        result["error"] = "; ".join(said)
    return result


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


def missing_gpu() -> str | None:
    """Return why JAX does not compute on a GPU, or None if it does.

    A separate process asks, as one that has found a GPU keeps memory there.
    """
    code = "import jax; print(jax.default_backend())"
    command = [sys.executable, "-P", "-c", code]
    environment = os.environ | SHARED
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=START
        )
    except subprocess.TimeoutExpired:
        return f"JAX has not started within {START:.0f} s"
    if done.returncode:
        return f"JAX does not start: {_last_line(done.stderr)}"
    backend = _last_line(done.stdout)
    return None if backend == "gpu" else f"JAX has the {backend.upper()} only"


def _end(process: subprocess.Popen) -> None:
    """End a process and those that it started, which form a session of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
