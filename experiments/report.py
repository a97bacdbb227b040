"""Compare the curves and final figures of several training runs.

    eejax report runs/a runs/b --out=report
    eejax report runs/*

It reads each run's config.json and metrics.jsonl, also while a run is going on, and writes
report.md with its pictures into --out: training loss and held-out bits per byte of every exit,
gradient norms, throughput, learning rate and exit weights, and the settings that differ between the
runs.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from eejax.common.paths import expanded
from eejax.experiments import launch

_OUT = flags.DEFINE_string("out", "report", "The folder of the report; made if it does not exist.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

EVALUATIONS = {"eval": "", "eval_ema": ", averaged weights"}  # prefix of the metrics -> meaning
HELD_OUT = {"bits_per_byte": "bits per byte", "loss": "nats per token"}
# Settings without which held-out losses are those of other text.
TEXT = ("data.source", "data.max_bytes", "data.validation_fraction", "data.split_seed")
NONE = "-"


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """Files of a run: config.json and the records of metrics.jsonl."""

    name: str
    folder: pathlib.Path
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and finite values of a metric."""
        found = [(r["step"], r[key]) for r in self.records if _is_number(r.get(key))]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, np.float64), np.array(values, np.float64)

    def typical(self, key: str) -> float | None:
        values = self.series(key)[1]
        return float(statistics.median(values)) if len(values) else None

    def last(self, key: str) -> float | None:
        values = self.series(key)[1]
        return float(values[-1]) if len(values) else None

    @property
    def step(self) -> int:
        return max((r["step"] for r in self.records), default=0)

    @property
    def steps(self) -> int | None:
        """Configured number of steps."""
        train = self.config.get("train")
        return train.get("steps") if isinstance(train, Mapping) else None

    def tokens(self, steps: np.ndarray | Sequence[float]) -> np.ndarray:
        """Return the tokens after each step, interpolated evenly between logged steps."""
        at, seen = self.series("tokens_seen")
        return np.interp(steps, np.append(0.0, at), np.append(0.0, seen))

    def evaluation(self, prefix: str) -> dict[str, float]:
        """Return the last record with 'PREFIX/...': its step, and values such as 'loss/exit_3'."""
        for record in reversed(self.records):
            start = f"{prefix}/"
            found = {k[len(start) :]: v for k, v in record.items() if k.startswith(start)}
            if found := {k: v for k, v in found.items() if _is_number(v)}:
                return {"step": record["step"]} | found
        return {}


def main(folders: list[str]) -> None:
    from eejax import analysis
    from eejax.checkpoint.files import write_text

    runs = read_runs(folders)
    out = expanded(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for file, (title, figure) in figures(runs).items():
        path = out / file
        if figure is None:
            path.unlink(missing_ok=True)  # pictures of an earlier report on other runs
        else:
            pictures[title] = analysis.save(figure, path)
    differ = analysis.differences({r.name: r.config for r in runs})
    write_text(out / "report.md", markdown(runs, differ, pictures))
    print(analysis.table(*overview(runs)))
    for title, header, rows in evaluations(runs):
        print(f"\n{title}\n{analysis.table(header, rows)}")
    print(f"\n{out / 'report.md'}")
    if _JSON.value:
        print(json.dumps(summary(runs, differ, out, pictures)))


def read_runs(folders: Sequence[str]) -> list[RunRecord]:
    """Read each run once, named by its folder, with parent folders where that is ambiguous.

    Raises:
      DataError: if there is no run, or a folder is not a run.
    """
    from eejax.common.errors import DataError
    from eejax.train.loop import CONFIG
    from eejax.train.metrics import read_metrics

    if not folders:
        raise DataError("no run given: name the --workdir of one training run or of several.")
    once = {}
    for folder in folders:
        path = pathlib.Path(os.path.abspath(expanded(folder)))
        once.setdefault(path.resolve(), path)
    runs = []
    for name, path in zip(short_names(list(once.values())), once.values(), strict=True):
        if not (path / CONFIG).is_file():
            raise DataError(
                f"{path} holds no {CONFIG}: give folders that were the --workdir of a training run."
            )
        try:
            config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path / CONFIG} is not JSON ({error}).") from error
        if not isinstance(config, dict):
            raise DataError(f"{path / CONFIG} holds no settings but {type(config).__name__}.")
        runs.append(RunRecord(name, path, config, read_metrics(path)))
    return runs


def short_names(paths: Sequence[pathlib.Path]) -> list[str]:
    """Shorten different paths to as many last parts as distinguish each from the others."""
    parts = [1] * len(paths)
    while True:
        names = ["/".join(p.parts[-n:]) for p, n in zip(paths, parts, strict=True)]
        count = collections.Counter(names)
        if max(count.values()) == 1:
            return names
        parts = [n + (count[name] > 1) for n, name in zip(parts, names, strict=True)]


def exits_of(runs: Sequence[RunRecord], *prefixes: str) -> list[str]:
    """Return the exits with a metric PREFIX/NAME in any run, by depth, the final one last."""
    found = {
        k[len(prefix) + 1 :]
        for prefix in prefixes
        for run in runs
        for record in run.records
        for k, value in record.items()
        if k.startswith(f"{prefix}/") and _is_number(value)
    }

    def number(name):
        return int(n[0]) if (n := re.findall(r"\d+", name)) else -1

    return sorted(found, key=lambda name: (name == "final", number(name), name))


def figures(runs: Sequence[RunRecord]) -> dict[str, tuple[str, Any]]:
    """Return titles and figures by file, None where no run recorded the values."""
    from eejax.analysis import Panel, compare, exit_label

    names = [run.name for run in runs]

    def one(key: str, title: str, ylabel: str = "", over_tokens: bool = False, **how) -> list:
        curves = {run.name: run.series(key) for run in runs}
        if over_tokens:
            curves = {
                run.name: (run.tokens(steps), values)
                for run, (steps, values) in zip(runs, curves.values(), strict=True)
                if total_tokens(run)
            }
        xlabel = "tokens seen" if over_tokens else "training step"
        some = any(len(steps) for steps, _ in curves.values())
        return [Panel(title, xlabel, ylabel, curves, **how)] if some else []

    def each(prefix: str, ylabel: str, **how) -> list[Panel]:
        exits = exits_of(runs, prefix)
        return [p for e in exits for p in one(f"{prefix}/{e}", exit_label(e), ylabel, **how)]

    def held_out(prefix: str) -> list[Panel]:
        unit = next((u for u in HELD_OUT if exits_of(runs, f"{prefix}/{u}")), "loss")
        panels = []
        for e in exits_of(runs, f"{prefix}/{unit}"):
            what = f"{prefix}/{unit}/{e}", exit_label(e), HELD_OUT[unit]
            panels += one(*what, cut=True) + one(*what, over_tokens=True, cut=True)
        return panels

    norms = {"ylabel": "norm", "log": True, "noisy": True}
    skipped = any(run.last("skipped") for run in runs)
    sets = {
        "training_loss.png": (
            "Training loss of every exit",
            each("loss", "nats per token", noisy=True, cut=True),
            3,
        ),
        **{
            f"{prefix}.png": (f"Held-out text, every exit{which}", held_out(prefix), 2)
            for prefix, which in EVALUATIONS.items()
        },
        "gradients.png": (
            "Gradient norms",
            one("grad_norm", "all exits together", **norms) + each("grad_norm", **norms),
            3,
        ),
        "throughput.png": (
            "Throughput",
            one("tokens_per_second", "tokens per second")
            + one("mfu", "MFU: share of the devices' peak")
            + (one("skipped", "skipped steps so far") if skipped else []),
            3,
        ),
        "schedule.png": (
            "Learning rate and exit weights",
            one("learning_rate", "learning rate")
            + each("weight", "weight")
            + one("loss_scale", "loss scale", log=True),
            3,
        ),
    }
    return {
        file: (title, compare(panels, names, title=title, columns=columns) if panels else None)
        for file, (title, panels, columns) in sets.items()
    }


def overview(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows with each run's progress and speed."""
    header = ["run", "step", "of", "tokens", "skipped steps", "tokens/s", "MFU"]
    rows = []
    for run in runs:
        mfu = run.typical("mfu")
        rows.append(
            [
                run.name,
                f"{run.step:,}",
                _count(run.steps),
                _count(total_tokens(run)),
                _count(run.last("skipped")),
                _count(run.typical("tokens_per_second")),
                NONE if mfu is None else f"{mfu:.1%}",
            ]
        )
    return header, rows


def evaluations(runs: Sequence[RunRecord]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, header and rows of a table for each unit: every run's last evaluation."""
    tables = []
    for unit, label in HELD_OUT.items():
        found = [
            (run, which, run.evaluation(prefix))
            for run in runs
            for prefix, which in EVALUATIONS.items()
        ]
        kept = [f for f in found if any(k.startswith(f"{unit}/") for k in f[2])]
        exits = exits_of(runs, *(f"{prefix}/{unit}" for prefix in EVALUATIONS))
        if not kept:
            continue
        header = ["run", "step", *exits]
        rows = [
            [
                run.name + which,
                _count(last["step"]),
                *(
                    f"{last[key]:.4f}" if (key := f"{unit}/{exit}") in last else NONE
                    for exit in exits
                ),
            ]
            for run, which, last in kept
        ]
        tables.append((f"held-out text, {label}", header, rows))
    return tables


def total_tokens(run: RunRecord) -> float | None:
    return float(run.tokens([run.step])[0]) if len(run.series("tokens_seen")[0]) else None


def markdown(runs, differ: Mapping[str, Mapping], pictures: Mapping[str, pathlib.Path]) -> str:
    """Write the text of report.md."""
    from eejax.analysis import markdown_table

    parts = ["# Training runs", markdown_table(*overview(runs))]
    parts.append(
        "Tokens per second and MFU are medians over the run, evaluation and saving left out. On a "
        "CPU MFU is a share of what a matrix product reached when the run began."
    )
    parts.append("## Last evaluation of every exit")
    tables = evaluations(runs)
    for title, header, rows in tables:
        parts += [f"{title[0].upper()}{title[1:]}:", markdown_table(header, rows)]
    if not tables:
        parts.append("None was recorded.")
    if "data.tokenizer" in differ or "model.vocab_size" in differ:
        parts.append(
            "The runs differ in their tokenizer: losses in nats per token do not compare, bits "
            "per byte do."
        )
    if other := [field for field in TEXT if field in differ]:
        parts.append(
            f"The runs differ in {', '.join(other)}: they are evaluated on different text."
        )
    sizes = [field for field in ("train.eval_batches", "train.batch_size") if field in differ]
    if sizes:
        parts.append(
            f"The runs differ in {', '.join(sizes)}: they are evaluated on samples of different "
            "sizes. `eejax evaluate` takes all of the held-out text."
        )
    parts.append("## Settings that differ")
    if differ:
        rows = [["setting", *(run.name for run in runs)]]
        for field, by in differ.items():
            values = (json.dumps(by[r.name]) if r.name in by else NONE for r in runs)
            rows.append([field, *values])
        if len(runs) > len(differ):  # prefer a long table to a wide one
            rows = [list(column) for column in zip(*rows, strict=True)]
        parts.append(markdown_table(rows[0], rows[1:]))
    else:
        parts.append("None." if len(runs) > 1 else "There is one run.")
    for title, path in pictures.items():
        parts += [f"## {title}", f"![{title}]({path.name})"]
    parts.append("## Where the runs are")
    parts.append(markdown_table(["run", "folder"], [[r.name, str(r.folder)] for r in runs]))
    return "\n\n".join(parts) + "\n"


def summary(runs, differ, out: pathlib.Path, pictures) -> dict[str, Any]:
    return {
        "out": str(out),
        "pictures": [path.name for path in pictures.values()],
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "step": run.step,
                "steps": run.steps,
                "tokens": total_tokens(run),
                "skipped": run.last("skipped"),
                "tokens_per_second": run.typical("tokens_per_second"),
                "mfu": run.typical("mfu"),
            }
            | {prefix: run.evaluation(prefix) for prefix in EVALUATIONS}
            for run in runs
        ],
        "differ": differ,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _count(value: Any) -> str:
    return f"{value:,.0f}" if _is_number(value) else NONE


if __name__ == "__main__":
    launch.run(main, positional=True)
