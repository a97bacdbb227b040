"""Benchmark scores of a model, as score_tasks or lm-eval wrote them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from eejax.common.errors import ConfigError, DataError
from eejax.helios.quality import PERPLEXITIES, SCORES, BenchmarkScore, check_score


def read_scores(path: str | os.PathLike, model: str) -> list[BenchmarkScore]:
    """Read the results of `eejax score-tasks --json` or of lm-eval (0.4) for a model.

    Of `score_tasks` the rows of single exits are read, not those of thresholds, and the last line
    of a file that holds what the command printed.

    Raises:
      DataError: the file cannot be read or is neither of the two, naming what is missing.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    for part in (text, text.rpartition("\n")[2]):
        try:
            found = json.loads(part)
            break
        except (ValueError, RecursionError):
            continue
    else:
        raise DataError(
            f"{path}: is not JSON. Give the output of score_tasks --json or of lm_eval."
        )
    allowed = 'must have "rows" (score_tasks --json) or "results" (lm_eval --output_path)'
    if not isinstance(found, dict) or not {"rows", "results"} & {*found}:
        raise DataError(f"{path}: {allowed}.")
    try:
        if "results" in found:
            scores = _task_scores(model, 0, found["results"])
        else:
            scores = []
            for row in found["rows"]:
                kind, _, boundary = row["name"].partition(" ")
                if kind == "exit":
                    layers = 0 if int(boundary) == found["layers"] else int(boundary)
                    scores += _task_scores(model, layers, row["tasks"])
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: {allowed} ({error!r}).") from error
    if not any(score.layers == 0 for score in scores):
        wanted = ", ".join((*SCORES, *PERPLEXITIES))
        raise DataError(f"{path}: has no score of the whole model; it must have one of {wanted}.")
    return scores


def _task_scores(
    model: str, layers: int, tasks: Mapping[str, Mapping[str, Any]]
) -> list[BenchmarkScore]:
    found: dict[tuple[str, str], BenchmarkScore] = {}
    for task, values in tasks.items():
        for name, value in values.items():
            metric = name.partition(",")[0]  # lm-eval's filter follows the comma
            known = metric in SCORES or metric in PERPLEXITIES
            if not known or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
            # Some tasks give ROUGE in percent.
            value = value / 100 if metric.startswith("rouge") and value > 1 else value
            score = BenchmarkScore(model, layers, task, metric, value)
            try:
                check_score(score)
            except ConfigError as error:
                raise ConfigError(f"{task} {metric}: {error}") from error
            found.setdefault((task, metric), score)
    return [*found.values()]
