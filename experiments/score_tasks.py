"""Standard tasks of EleutherAI's lm-eval, by every exit of a model and at every threshold.

    eejax score-tasks --model=runs/mine --tasks=arc_easy,lambada_openai
    eejax score-tasks --model=runs/mine --tasks=mine --include_path=tasks \
        --exits=6,12 --thresholds=0.5,0.9

Needs `pip install 'eejax[eval]'`. One table: a row for each exit and threshold, a column for each
metric of a task, and the mean layers below the exits that answered. Texts that are scored go
through the model once, for all rows; those that are generated once for each row. --include_path
names a folder with tasks of your own (YAML), beside lm-eval's, whose data come from the Hub. With
--json the last line printed is one JSON object, with lm-eval's standard errors.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import sys

from absl import flags

from eejax.checkpoint.language_model import load
from eejax.common.errors import ConfigError
from eejax.experiments import field_flags, launch
from eejax.gates.confidence import GATES

_MODEL = flags.DEFINE_string(
    "model", None, "A run's workdir, a Hugging Face folder, a GGUF file, or a name."
)
_TASKS = flags.DEFINE_list("tasks", None, "Names of tasks, groups of them, or patterns.")
_INCLUDE = flags.DEFINE_string("include_path", None, "A folder of more tasks.")
_EXITS = flags.DEFINE_list("exits", ["all"], "Boundaries of exits; empty for none.")
_THRESHOLDS = flags.DEFINE_list(
    "thresholds", [], "Thresholds: each for all exits, or one for each exit as 0.5/0.9."
)
_GATE = flags.DEFINE_enum("gate", "max_probability", GATES, "Gate of the thresholds.")
_LIMIT = flags.DEFINE_integer("limit", None, "Maximum records of a task.", lower_bound=1)
_FEWSHOT = flags.DEFINE_integer(
    "num_fewshot", None, "Examples before each question; by default each task's own.", lower_bound=0
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Texts at a time.", lower_bound=1)
_LOADING = field_flags.define(load, ("tokenizer", "dtype"))
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")
flags.mark_flags_as_required(["model", "tasks"])

DRAWS = 1000  # bootstrap draws for standard errors without a formula


@launch.flags_named({"exit": "exits", "path": "model"})
def main() -> None:
    try:
        from eejax.interop.lm_eval import EarlyExitLM
    except ModuleNotFoundError as error:
        raise ConfigError(f"--tasks: need lm-eval ({error}): pip install 'eejax[eval]'.") from error

    # lm-eval's decorator hides the signature.
    flags_of_model = dict(batch_size=_BATCH_SIZE.value, **_LOADING.values())
    lm = EarlyExitLM(_MODEL.value, **flags_of_model)  # pyright: ignore[reportCallIssue]
    rows = []
    for name, chosen in choices(lm.config.exit_boundaries).items():
        rows.append((name, lm.at(**chosen)))  # errors come before any work
    if not rows:
        raise ConfigError("--exits = '': leaves nothing to score without --thresholds.")
    tasks, found = manager(), []
    for i, (name, one) in enumerate(rows):
        launch.say(f"{name} ({i + 1} of {len(rows)}) ...")
        results = scored(one, tasks)
        found.append({"name": name, "depth": one.depth, "tasks": results})
    print(show(found, lm.config.n_layers))
    if _JSON.value:
        told = {"model": _MODEL.value, "layers": lm.config.n_layers, "gate": _GATE.value}
        print(json.dumps(told | {"rows": found}))


def manager():
    """Return lm-eval's index of tasks. Raises `ConfigError` for a missing folder or task."""
    from lm_eval.tasks import TaskManager

    folder = _INCLUDE.value
    if folder is not None and not pathlib.Path(folder).is_dir():
        raise ConfigError(f"--include_path = {folder!r}: must be a folder.")
    found = TaskManager(include_path=folder)
    for name in _TASKS.value:
        if not found.match_tasks([name]):
            where = f" nor in {folder}" if folder else ""
            raise ConfigError(f"--tasks = {name!r}: there is none in lm-eval{where}.")
    return found


def choices(boundaries: tuple[int, ...]) -> dict[str, dict]:
    """Return settings by the name of a row: exits from the first on, then thresholds."""
    exits = _EXITS.value
    if exits == ["all"]:
        exits = sorted(set(boundaries))
    found = {f"exit {e}": {"exit": e} for e in launch.numbers("exits", exits, int)}
    for threshold in _THRESHOLDS.value:
        found[f"threshold {threshold}"] = {"thresholds": threshold, "gate": _GATE.value}
    return found


def scored(lm, tasks) -> dict[str, dict[str, float]]:
    """Return {task: {metric: value}}, of groups too."""
    import lm_eval

    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval would fork a process that runs JAX's threads
    logging.getLogger("lm_eval").setLevel(
        logging.ERROR
    )  # it would log its assumptions for each row
    with contextlib.redirect_stdout(sys.stderr):
        # lm-eval's decorator hides the signature.
        results = lm_eval.simple_evaluate(  # pyright: ignore[reportCallIssue]
            model=lm,  # pyright: ignore[reportCallIssue]
            tasks=_TASKS.value,  # pyright: ignore[reportCallIssue]
            task_manager=tasks,  # pyright: ignore[reportCallIssue]
            limit=_LIMIT.value,
            num_fewshot=_FEWSHOT.value,  # pyright: ignore[reportCallIssue]
            bootstrap_iters=DRAWS,
            log_samples=False,
        )["results"]
    return {
        task: {
            metric.removesuffix(",none"): value
            for metric, value in values.items()
            if isinstance(value, float | int)
        }
        for task, values in results.items()
    }


def show(rows: list[dict], n_layers: int) -> str:
    from eejax import analysis

    columns = [
        (task, metric)
        for task, values in rows[0]["tasks"].items()
        for metric in values
        if "_stderr" not in metric and metric != "sample_len"
    ]
    header = ["", f"depth of {n_layers}", *(f"{task} {metric}" for task, metric in columns)]
    lines = [
        [row["name"], f"{row['depth']:.2f}", *(f"{row['tasks'][t][m]:.4g}" for t, m in columns)]
        for row in rows
    ]
    return analysis.table(header, lines)


if __name__ == "__main__":
    launch.run(main)
