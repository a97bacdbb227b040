"""EE-LLM's Figure 8: scores of tasks against speed, by threshold.

Of the paper's six tasks four are among the mixed prompts: BoolQ and TruthfulQA (exact match),
NaturalQuestions closed-book (F1) and CNN/DailyMail (ROUGE-L). Answers are greedy and end with the
line. Exact match and F1 are lm-eval's, normalised as for DROP; ROUGE-L is rouge-score's.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from eejax.common.errors import ConfigError, DataError

MIXED = "mixed_prompts/mixed_prompts.jsonl"
BATCH = 16  # requests at a time
PROMPT = 192  # the last tokens of a prompt
MEANINGFUL = 0.05  # of a score, below which a model is taken not to do a task at all


class Task(NamedTuple):
    """A task: its name in the paper, metric and longest answer in tokens."""

    title: str
    metric: str
    new: int


TASKS = {
    "boolq": Task("BoolQ", "EM", 8),
    "truthfulqa": Task("TruthfulQA", "EM", 24),
    "nq_open": Task("NaturalQuestions closed-book", "F1", 16),
    "summarization": Task("CNN/DailyMail", "ROUGE-L", 48),
}


def early_share(traces: Sequence[np.ndarray], n_exits: int) -> float:
    """Compute the share of tokens that leave by an early exit, from the exits of each text's."""
    exits = np.concatenate(traces)
    return float((exits < n_exits).mean()) if len(exits) else 0.0


class TaskPrompt(NamedTuple):
    """A prompt's last tokens, its accepted answers, and their maximum tokens."""

    ids: list[int]
    references: tuple[str, ...]
    new: int


def metrics() -> dict[str, Callable[[str, str], float]]:
    """Return the score of an (answer, reference), by metric.

    Raises:
      ConfigError: without the packages.
    """
    try:
        from lm_eval.tasks.drop.utils import get_metrics
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        fix = "pip install 'eejax[eval]'."
        raise ConfigError(
            f"scores of tasks need lm-eval and rouge-score ({error}): {fix}"
        ) from error
    rouge = RougeScorer(["rougeL"])
    return {
        "EM": lambda answer, one: float(get_metrics(answer, one)[0]),
        "F1": lambda answer, one: float(get_metrics(answer, one)[1]),
        "ROUGE-L": lambda answer, one: rouge.score(one, answer)["rougeL"].fmeasure,
    }


def records(folder: pathlib.Path, model, limit: int) -> dict[str, list[TaskPrompt]]:
    """Return at most `limit` records of each task, cut to the model's context."""
    context = model.config.context_length
    found: dict[str, list[TaskPrompt]] = {name: [] for name in TASKS}
    for line in (folder / MIXED).read_text().splitlines():
        row = json.loads(line)
        mine = found.get(row["task"])
        if mine is None or len(mine) >= limit:
            continue
        references = row["references"] or [row["choices"][row["gold"]]]
        new = min(TASKS[row["task"]].new, context // 2)
        ids = model.tokenizer.encode(row["prompt"]).tolist()
        mine.append(TaskPrompt(ids[-min(PROMPT, context - new) :], tuple(references), new))
    if lacking := [name for name, rows in found.items() if not rows]:
        raise DataError(f"{MIXED}: has no record of {', '.join(lacking)}.")
    return found


def scored(
    model, found: dict[str, list[TaskPrompt]], thresholds: Sequence[float], speed: Callable
) -> dict[str, list[dict]]:
    """Score each task at each threshold.

    Args:
      model: the model of a run.
      found: the result of `records`.
      thresholds: thresholds from 1 down.
      speed: simulated multiple of the full model's speed, by engine, for (traces of exits,
        threshold).

    Returns:
      rows with the threshold, the mean score with its 95 % interval, the mean `change` of a
      record's score from that at the first threshold with its interval, the simulated speeds, and
      the share of tokens that leave `early`.
    """
    from eejax.analysis.intervals import mean_interval
    from eejax.inference import Generator

    measure = metrics()
    generator = Generator.make(model.params, model.config, "recompute")
    rows: dict[str, list[dict]] = {}
    for name, task in TASKS.items():
        rows[name], first = [], None
        for threshold in thresholds:
            values, traces = [], []
            for ids, exits, references in _answers(generator, found[name], threshold):
                answer = model.tokenizer.decode(ids).split("\n")[0].strip()
                values.append(max(measure[task.metric](answer, one) for one in references))
                traces.append(exits)
            each = np.array(values)
            first = each if first is None else first
            rows[name].append(
                {
                    "threshold": threshold,
                    "score": mean_interval(each)._asdict(),
                    "change": mean_interval(each - first)._asdict(),
                    "speed": speed(traces, threshold),
                    "early": early_share(traces, model.config.n_exits),
                }
            )
    return rows


def _answers(generator, mine: Sequence[TaskPrompt], threshold: float):
    """Return (ids, exits after the prompt's pass, references) of each record."""
    for begin in range(0, len(mine), BATCH):
        some = mine[begin : begin + BATCH]
        # As many requests each time, so that nothing is compiled for the last ones.
        prompts = [r.ids for r in (*some, *[some[0]] * (BATCH - len(some)))]
        result = generator.generate(prompts, some[0].new, threshold=threshold)
        for i, record in enumerate(some):
            ids = result.ids(i)
            yield ids, result.exits[i, 1 : len(ids)], record.references
