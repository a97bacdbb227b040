"""Quality of a model's answers, on a scale that compares models.

HELIOS (Kumar et al., 2025), §3.3.1 and §3.4: models are shortlisted by benchmarks, and evaluated by
metrics that need no reference answer, such as perplexity.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eejax.common.errors import ConfigError, require, require_count, require_one_of
from eejax.helios.choices import ModelProfile
from eejax.helios.disagreement_bound import AnswerAudit, perplexity_of

KINDS = ("best", "judge", "benchmark")
# Metrics in [0, 1] that measure the quality of a task's answers; the first that a task has counts.
SCORES = ("exact_match", "acc_norm", "acc", "f1", "rougeL", "rougeL_max", "rouge_l", "pass@1")
PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity")


@dataclasses.dataclass(frozen=True)
class QualitySource:
    """Source of the quality of a model's answers.

    Attributes:
      kind: "best": agreement of the answers' tokens with what the best model of the fleet would
        have chosen; "judge": perplexity of the answers under a model that is not served, as the
        ratio of the lowest one of the fleet to the model's own; "benchmark": the mean of imported
        benchmark scores over the tasks that all models have.
      names: for "best" the model, by default the one with the most parameters; for "judge" the
        model's run, folder or name; for "benchmark" the tasks, by default all.
    """

    kind: str = "best"
    names: tuple[str, ...] = ()

    def __post_init__(self):
        require_one_of("quality", self.kind, KINDS)
        if self.kind == "judge":
            fix = "As in judge:runs/judge."
            require(len(self.names) == 1, "quality", "judge", "must name one model", fix)
        if self.kind == "best":
            require(len(self.names) <= 1, "quality", self.names, "must name at most one model")

    @classmethod
    def parse(cls, text: str) -> QualitySource:
        """Read KIND or KIND:NAME; the tasks of "benchmark" are separated by commas."""
        kind, colon, rest = text.partition(":")
        names = tuple(rest.split(",")) if kind == "benchmark" else (rest,)
        if colon and not all(names):
            raise ConfigError(f"quality = {text!r}: must have a name after the colon.")
        return cls(kind, names if colon else ())

    def __str__(self) -> str:
        return ":".join([self.kind, *([",".join(self.names)] if self.names else [])])


class BenchmarkScore(NamedTuple):
    """A benchmark result of a model.

    Attributes:
      layers: layers below the exit that answered, 0 for the whole model.
      metric: the task's name of it, without a filter's name.
    """

    model: str
    layers: int
    task: str
    metric: str
    value: float


def check_score(score: BenchmarkScore) -> None:
    """Raise ConfigError for a score that cannot be kept or used."""
    for name, text in (("model", score.model), ("task", score.task)):
        good = isinstance(text, str) and text != ""
        good = good and text.encode(errors="ignore").decode() == text  # no lone surrogate
        require(good, name, text, "must be a nonempty string of Unicode text")
    require_count("layers", score.layers, minimum=0)
    require(score.layers < 2**31, "layers", score.layers, "must be less than 2**31")
    metric, value = score.metric, score.value
    known = metric in SCORES or metric in PERPLEXITIES
    require(known, "metric", metric, f"must be of {', '.join((*SCORES, *PERPLEXITIES))}")
    low, high, range_ = (0, 1, "[0, 1]") if metric in SCORES else (1, math.inf, "[1, inf)")
    good = isinstance(value, float) and math.isfinite(value) and low <= value <= high
    require(good, "value", value, f"must be a number in {range_}")


def with_benchmarks(
    profiles: Mapping[str, ModelProfile],
    exit_boundaries: Mapping[str, Sequence[int]],
    scores: Sequence[BenchmarkScore],
    tasks: Sequence[str] = (),
) -> dict[str, ModelProfile]:
    """Return profiles with the quality, and the perplexity if it was scored, of benchmarks.

    A whole model's quality is its mean score over the tasks. A score at another depth, where all
    tokens leave by the exit there, is a second point. Between the points the quality is
    interpolated over agreement with the whole model (`ModelProfile.quality_at`).

    Args:
      exit_boundaries: by model, layers below each of its exits, the final one last.
      tasks: tasks of the mean; by default all that every model was scored on.

    Raises:
      ConfigError: for a model that was not scored, or not on such a task, or not by a metric that
        the others have.
    """
    known = {name: _metrics_by_task(scores, name, SCORES) for name in profiles}
    missing = [name for name, found in known.items() if not found]
    fix = "Import some: eejax repository --repository=FILE --scores=NAME=RESULTS.json."
    require(not missing, "quality", "benchmark", f"has no score of {', '.join(missing)}", fix)
    common = set.intersection(*({*found} for found in known.values()))
    lacking = sorted({*tasks} - common)
    allowed = f"must be tasks that all models were scored on, of {', '.join(sorted(common))}"
    require(not lacking, "quality", lacking, allowed, fix)
    chosen = tuple(tasks) or tuple(sorted(common))
    require(bool(chosen), "quality", "benchmark", "has no task that all were scored on", fix)
    common_metrics = {task: _common_metric(known, task, SCORES) for task in chosen}
    for task, metric in common_metrics.items():
        own = "; ".join(f"{name} has {', '.join(sorted(known[name][task]))}" for name in known)
        allowed = f"must have a metric that all models were scored by: {own}"
        require(metric is not None, "quality: task", task, allowed, "Score them by one metric.")
    metrics = {task: metric for task, metric in common_metrics.items() if metric is not None}
    top_logprobs = {name: _metrics_by_task(scores, name, PERPLEXITIES) for name in profiles}
    texts = set.intersection(*({*found} for found in top_logprobs.values()))
    texts &= {*tasks} if tasks else texts
    by_text = {task: _common_metric(top_logprobs, task, PERPLEXITIES) for task in texts}
    by_text = {task: metric for task, metric in by_text.items() if metric is not None}
    made = {}
    for name, profile in profiles.items():
        quality, perplexity = {}, {}
        for depth, layers in enumerate(exit_boundaries[name], 1):
            whole = depth == profile.exits
            agreement, at = (1.0, 0) if whole else (profile.agrees[depth - 1], layers)
            found = {(s.task, s.metric): s.value for s in scores if s[:2] == (name, at)}
            if metrics.items() <= {*found}:
                quality[agreement] = float(np.mean([found[key] for key in metrics.items()]))
            if by_text and by_text.items() <= {*found}:
                logs = [np.log(found[key]) for key in by_text.items()]
                perplexity[agreement] = float(np.exp(np.mean(logs)))
        made[name] = dataclasses.replace(
            profile,
            quality=curve(quality),
            perplexity=curve(perplexity or {1.0: 1.0}),
            ceiling=quality[1.0],
        )
    return made


def _metrics_by_task(
    scores: Sequence[BenchmarkScore], model: str, metrics: Sequence[str]
) -> dict[str, set[str]]:
    """Return which of `metrics` a whole model was scored by, by task."""
    found: dict[str, set[str]] = {}
    for score in scores:
        if (score.model, score.layers) == (model, 0) and score.metric in metrics:
            found.setdefault(score.task, set()).add(score.metric)
    return found


def _common_metric(
    known: Mapping[str, Mapping[str, set[str]]], task: str, metrics: Sequence[str]
) -> str | None:
    """Return the first of `metrics` by which all models were scored on a task."""
    common = set.intersection(*(found[task] for found in known.values()))
    return next((metric for metric in metrics if metric in common), None)


def curve(points: Mapping[float, float]) -> tuple[tuple[float, float], ...]:
    """Return points as pairs in ascending order."""
    return tuple(sorted(points.items()))


class JudgedAnswer(NamedTuple):
    """A judged answer.

    Attributes:
      agreement: expected agreement of answers at its depth with the whole model, 1 for the whole
        model's own.
      verdict: the judge's verdict.
    """

    agreement: float
    verdict: AnswerAudit


def perplexities(answers: Sequence[JudgedAnswer]) -> dict[float, float]:
    """Return the perplexity of answers by their agreement, over all their tokens."""
    pooled: dict[float, list[np.ndarray]] = {}
    for answer in answers:
        pooled.setdefault(answer.agreement, []).append(answer.verdict.logprob)
    logprobs = {a: np.concatenate(logprobs) for a, logprobs in pooled.items()}
    return {a: max(perplexity_of(-x.sum(), len(x)), 1.0) for a, x in logprobs.items()}


def with_verdicts(profile: ModelProfile, answers: Sequence[JudgedAnswer]) -> ModelProfile:
    """Return a profile whose quality and perplexity come from judged answers.

    The quality is their agreement with the judging model, the perplexity that under this model.
    """
    found: dict[float, list[float]] = {}
    for answer in answers:
        found.setdefault(answer.agreement, []).append(agreement_of(answer.verdict))
    points = {agreement: float(np.mean(values)) for agreement, values in found.items()}
    return dataclasses.replace(
        profile, quality=curve(points), perplexity=curve(perplexities(answers))
    )


def with_ratios(profiles: Mapping[str, ModelProfile]) -> tuple[dict[str, ModelProfile], float]:
    """Return (profiles with ratios of perplexity as their quality, the lowest perplexity).

    The quality is the lowest perplexity of whole models over their own.
    """
    least = min(profile.perplexity[-1][1] for profile in profiles.values())

    def ratios(p):
        return tuple((share, min(1.0, least / value)) for share, value in p.perplexity)

    made = {n: dataclasses.replace(p, quality=ratios(p)) for n, p in profiles.items()}
    return made, least


def agreement_of(verdict: AnswerAudit) -> float:
    """Return the share of an answer's tokens that the judge would have chosen."""
    return float(np.mean(verdict.same))


def relative_to(least: float, verdict: AnswerAudit) -> float:
    """Return the lowest perplexity of a fleet's models over that of an answer, at most 1."""
    return min(1.0, least / verdict.perplexity)
