"""Grade of a model: what early exit gives on this device, predicted and measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eejax.calibration.drafting import DraftPrediction, predict_drafts
from eejax.calibration.prediction import (
    DecodingTimes,
    DepthScore,
    GateGuarantee,
    GatePoint,
    OracleDepth,
)
from eejax.checkpoint.language_model import LanguageModel
from eejax.experiments import grade_times, grade_verdict
from eejax.experiments.grade_times import MeasuredSpeed
from eejax.experiments.grade_verdict import TARGETS, GradeVerdict, Recipe
from eejax.models.config import ModelConfig

MARGIN = 0.005  # a threshold is chosen to keep so much more than its target
PROMPT, NEW = 64, 64  # tokens of a prompt, and after it
PROMPTS = 4
KEYS = ("tokens", "labels")  # of a batch


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Size of a model, and its weights' shares.

    Attributes:
      name: name that it was loaded by.
      layers: number of layers.
      width: width of the hidden states.
      vocabulary: number of tokens.
      parameters: number of all parameters, exits included.
      dtype: dtype of computation.
      device: device that decodes.
      own_exits: boundaries of the exits that the model has.
      own_vocabularies: tokens that each of them knows.
      layer_share: a layer's share of the weights that a full step reads.
      head_share: the final head's share of them.
    """

    name: str
    layers: int
    width: int
    vocabulary: int
    parameters: int
    dtype: str
    device: str
    own_exits: tuple[int, ...]
    own_vocabularies: tuple[int, ...]
    layer_share: float
    head_share: float


@dataclasses.dataclass(frozen=True)
class TextFacts:
    """Text that a model was graded on.

    Attributes:
      source: description of the text.
      tokens: tokens that were predicted.
      checked: those of them that checked the thresholds; the others chose them.
      windows: windows of text.
    """

    source: str
    tokens: int
    checked: int
    windows: int


@dataclasses.dataclass(frozen=True)
class GateChoice:
    """The fastest threshold at an agreement, chosen on one text and checked on another.

    Attributes:
      target: agreement that was asked for.
      chosen: the point on the text that chose it.
      checked: the same threshold on the text that checks it.
    """

    target: float
    chosen: GatePoint
    checked: GatePoint


@dataclasses.dataclass(frozen=True)
class ModelGrade:
    """Everything that the page says.

    Attributes:
      model: size of the model.
      text: the text.
      times: measured seconds.
      depths: quality of every exit.
      oracle: depth at which tokens could leave.
      frontiers: predictions of each gate's thresholds on the text that chooses.
      choices: each gate's fastest thresholds at `TARGETS`, without those that nothing reaches.
      drafts: predictions for every exit, and for the exits of the model untuned too.
      guarantees: a threshold of each gate that keeps 95 % with a guarantee.
      measured: speeds of whole texts.
      recipe: lines that decode as the verdict says.
      verdict: the verdict.
    """

    model: ModelFacts
    text: TextFacts
    times: DecodingTimes
    depths: tuple[DepthScore, ...]
    oracle: OracleDepth
    frontiers: Mapping[str, tuple[GatePoint, ...]]
    choices: Mapping[str, tuple[GateChoice, ...]]
    drafts: tuple[DraftPrediction, ...]
    guarantees: tuple[GateGuarantee, ...]
    measured: tuple[MeasuredSpeed, ...]
    recipe: Recipe
    verdict: GradeVerdict


def grade(
    name: str,
    model: LanguageModel,
    batches: Sequence[Mapping[str, np.ndarray]],
    source: str,
    *,
    every: int | None = None,
    pairs: int | None = None,
    new: int = NEW,
    workdir: bool = False,
    tokenizer: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> ModelGrade:
    """Grade a model on batches of held-out text.

    The first half of the windows chooses thresholds, and the second half checks them and begins the
    texts that are generated.

    Args:
      name: name of the model, for the recipe.
      model: the model.
      batches: batches of text.
      source: description of the text.
      every: distance in layers of the exits that are added; by default there are about ten.
      pairs: timed pairs of generations; by default as many as take some seconds.
      new: tokens of a generation.
      workdir: whether `name` is the workdir of a run.
      tokenizer: as the model was loaded with, for the recipe.
      say: called with lines of progress.

    Raises:
      ConfigError: for a distance that leaves no exit.
      DataError: for text with fewer than two windows.
    """
    from eejax import calibration
    from eejax.calibration import prediction

    own = tuple(e.boundary for e in model.config.exits if e.boundary < model.config.n_layers)
    graded = with_every(model, every)
    config = graded.config
    tokens = check_text(batches)
    say(f"scoring {config.n_exits + 1} exits on {tokens} tokens ...")
    scores = calibration.score(graded.params, config, batches)
    first, second = halves(scores)
    choosing, checking = (prediction.select(scores, positions=p) for p in (first, second))
    prompts = prompts_of(batches, config.context_length)
    new = min(new, config.context_length - len(prompts[0]) - 1)
    say("timing layers, heads and whole steps ...")
    times = grade_times.measure_times(graded, prompts, new)
    say("predicting speeds of gates and drafts ...")
    frontiers = prediction.frontiers_of(choosing, times)
    depths = prediction.depth_scores(scores, own)
    drafts = [
        predict_drafts(config, times, e, d.agreement, tuned=not d.added)
        for e, d in enumerate(depths[:-1])
    ]
    choices = {gate: choose(points, checking, times) for gate, points in frontiers.items()}
    gate = max(
        (c.checked for cs in choices.values() for c in cs if c.target == TARGETS[0]),
        key=lambda p: p.speed,
        default=None,
    )
    draft = max(drafts, key=lambda d: (d.timed if d.drafts else 0.0, d.single))
    say("decoding beside the full model ...")
    step = times.full(config.n_layers)
    measured = grade_times.measure_speeds(
        graded, prompts, new, gate, draft, step_seconds=step, pairs=pairs
    )
    verdict = grade_verdict.judge(choosing, times, depths, gate, draft, measured)
    drafts += untuned_drafts(model, own, batches, times)
    return ModelGrade(
        facts(name, model, own),
        TextFacts(source, len(scores), len(checking), len(np.unique(scores.units))),
        times,
        depths,
        prediction.oracle_depth(checking, times),
        {gate: prediction.envelope(points) for gate, points in frontiers.items()},
        choices,
        tuple(sorted(drafts, key=lambda d: (d.boundary, not d.tuned))),
        tuple(
            prediction.gate_guarantee(choosing, checking, times, safest(points))
            for points in frontiers.values()
            if points
        ),
        measured,
        grade_verdict.recipe(name, own, workdir, verdict, gate, draft, tokenizer),
        verdict,
    )


def choose(points: Sequence[GatePoint], checking, times: DecodingTimes) -> tuple[GateChoice, ...]:
    """Return the fastest points at `TARGETS`, checked on other text."""
    from eejax.calibration import prediction

    found = []
    for target in TARGETS:
        p = prediction.fastest_point(points, min(target + MARGIN, 1.0))
        if p is not None:
            again = prediction.gate_point(checking, times, p.gate, p.exits, p.threshold)
            found.append(GateChoice(target, p, again))
    return tuple(found)


def safest(points: Sequence[GatePoint]) -> GatePoint:
    """Return the point for whose gate and exits a guarantee is sought.

    It is the fastest at the lowest target or, where none is faster than the full model, the
    fastest of all that reach the target.
    """
    good = [p for p in points if p.agreement >= TARGETS[0]] or points
    return max(good, key=lambda p: p.speed)


def added_boundaries(config: ModelConfig, every: int | None) -> tuple[int, ...]:
    """Return boundaries without an exit, `every` layers apart; None for about ten of them."""
    from eejax.calibration.calibration import boundaries_for

    every = max(1, round(config.n_layers / 10)) if every is None else every
    own = {e.boundary for e in config.exits}
    return tuple(n for n in boundaries_for(config, every) if n not in own)


def with_every(model: LanguageModel, every: int | None) -> LanguageModel:
    """Return the model with exits of its final norm and head at boundaries without an exit.

    Those are `added_boundaries`.
    """
    from eejax.calibration import with_exits

    config = model.config
    kept = config.replace(exits=tuple(e for e in config.exits if e.boundary < config.n_layers))
    params, config = with_exits(model.params, kept, added_boundaries(config, every))
    return dataclasses.replace(model, params=params, config=config)


def check_text(batches: Sequence[Mapping[str, np.ndarray]]) -> int:
    """Return the number of tokens that are predicted.

    Raises `DataError` unless there are two windows with some, to choose and to check.
    """
    from eejax.common.errors import DataError

    labelled = [np.asarray(b["labels"]) >= 0 for b in batches]
    windows = sum(int(a.any(1).sum()) for a in labelled)
    if windows < 2:
        raise DataError(
            f"--text: has {windows} windows with a token to predict: must have at least 2, because "
            "one half chooses thresholds and the other checks them. Give more text, or raise "
            "--tokens."
        )
    return sum(int(a.sum()) for a in labelled)


def halves(scores) -> tuple[np.ndarray, np.ndarray]:
    """Return masks [n] of the positions of the first and of the second half of the windows."""
    units = np.unique(scores.units)
    first = np.isin(scores.units, units[: len(units) // 2])
    return first, ~first


def prompts_of(batches: Sequence[Mapping[str, np.ndarray]], context: int) -> list[list[int]]:
    """Return beginnings of windows of the second half, all of one length."""
    tokens, labels = (np.concatenate([np.asarray(b[k]) for b in batches]) for k in KEYS)
    rows = np.flatnonzero((labels >= 0).any(1))
    rows = rows[len(rows) // 2 :]
    length = max(1, min(PROMPT, tokens.shape[1], context // 2))
    whole = [r for r in rows if (labels[r, : length - 1] >= 0).all()] or list(rows)
    spread = np.unique(np.linspace(0, len(whole) - 1, PROMPTS).round().astype(int))
    return [tokens[whole[i], :length].tolist() for i in spread]


def untuned_drafts(
    model: LanguageModel, own: Sequence[int], batches, times: DecodingTimes
) -> list[DraftPrediction]:
    """Predict drafts of the final norm and head at the boundaries of the exits of the model."""
    from eejax import calibration
    from eejax.calibration import prediction, with_exits

    if not own:
        return []
    bare = model.config.replace(exits=())
    params, config = with_exits(model.params | {"exits": {}}, bare, own)
    scores = calibration.score(params, config, batches)
    same = dataclasses.replace(times, heads=(times.heads[-1],) * (len(own) + 1))
    return [
        predict_drafts(config, same, e, d.agreement, tuned=False)
        for e, d in enumerate(prediction.depth_scores(scores)[:-1])
    ]


def facts(name: str, model: LanguageModel, own: tuple[int, ...]) -> ModelFacts:
    """Return the size of the model, and the shares of a layer and of the head in a full step."""
    import jax

    from eejax.common.trees import size
    from eejax.models import params

    config = model.config
    layer = size(params.layer(config))
    head = config.padded_vocab * config.d_model
    known = {e.boundary: e.vocabulary or config.vocab_size for e in config.exits}
    read = config.n_layers * layer + head
    device = jax.devices()[0]
    return ModelFacts(
        name,
        config.n_layers,
        config.d_model,
        config.vocab_size,
        size(params.abstract(config)),
        str(config.dtype),
        f"{device.device_kind} ({device.platform})",
        own,
        tuple(known[boundary] for boundary in own),
        layer / read,
        head / read,
    )


def as_json(found: ModelGrade) -> dict[str, Any]:
    """Return a grade as JSON takes it, with None for numbers that are not finite."""
    return _plain(dataclasses.asdict(found))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
