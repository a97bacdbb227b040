"""Predicted speed of early exits: agreement by depth, the oracle, and gates by measured times.

`frontier` counts the layers below the emitting exit. Here a token also takes along the rows of
earlier tokens that wait below deeper segments, as the engine "recompute" does, and pays for every
head that its gate reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from eejax.calibration.frontier import ExitScores, emitting_exits
from eejax.calibration.guarantee import calibrate
from eejax.calibration.thresholds import BELOW_ONE
from eejax.common.errors import require
from eejax.gates.confidence import LOGITS_GATES
from eejax.models.config import ModelConfig

CAP = 16  # waiting tokens of the engine "recompute", by default
QUANTILES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)


@dataclasses.dataclass(frozen=True)
class DecodingTimes:
    """Measured seconds of the parts of a step that decodes one token of one request.

    Attributes:
      layer: a row through a layer.
      heads: [E + 1] each exit: the layers of its own, its head and the evaluation of its logits.
      step: what a step of the engine "full" takes beside layers and heads.
      rows: (number of rows, their time through a layer over that of one row), ascending from one
        row. An engine pads other numbers to the next of these.
      early_step: what a step with early exits takes beyond `step`: with one exit, and for each
        further exit.
      draft_step: what a step of an engine that may draft takes beyond `step`.
    """

    layer: float
    heads: tuple[float, ...]
    step: float = 0.0
    rows: tuple[tuple[int, float], ...] = ((1, 1.0),)
    early_step: tuple[float, float] = (0.0, 0.0)
    draft_step: float = 0.0

    def full(self, n_layers: int) -> float:
        """Return the seconds of a step through all layers and the final head."""
        return n_layers * self.layer + self.heads[-1] + self.step

    def step_with(self, n_exits: int) -> float:
        """Return what a step with so many early exits takes beside layers and heads."""
        first, further = self.early_step
        return self.step + (first + further * (n_exits - 1) if n_exits else 0.0)

    def factor(self, rows: np.ndarray) -> np.ndarray:
        """Return the time of each number of rows through a layer, over that of one row."""
        widths, factors = zip(*self.rows, strict=True)
        index = np.searchsorted(widths, rows)
        return np.asarray(factors)[np.minimum(index, len(widths) - 1)]

    def without_early_heads(self) -> DecodingTimes:
        """Return the same times with early exits whose heads cost nothing."""
        free = (0.0,) * (len(self.heads) - 1)
        return dataclasses.replace(self, heads=(*free, self.heads[-1]))

    def without_early_work(self) -> DecodingTimes:
        """Return the same times with early exits that add nothing to a step but their heads."""
        return dataclasses.replace(self, early_step=(0.0, 0.0))


@dataclasses.dataclass(frozen=True)
class DepthScore:
    """Quality of an exit on held-out text.

    Attributes:
      boundary: layers below the exit.
      added: whether the exit reads the model's own final norm and head (a logit lens), and is not
        an exit that the model has.
      agreement: share of tokens that are those of the final exit. A greedy draft of the exit is
        accepted as often.
      loss: nats per token; None for an exit that does not know all tokens.
    """

    boundary: int
    added: bool
    agreement: float
    loss: float | None


@dataclasses.dataclass(frozen=True)
class OracleDepth:
    """Effect of leaving by the shallowest exit that says what the final exit says.

    Attributes:
      depth: mean layers below that exit.
      layers_speed: layers of the model over that mean.
      speed: predicted speed over that of the full model if each token reads the head of its exit
        alone and takes waiting rows along, and exits add nothing else to a step.
    """

    depth: float
    layers_speed: float
    speed: float


@dataclasses.dataclass(frozen=True)
class GatePoint:
    """Predicted effect of a threshold of a gate, in a model that has certain exits and no others.

    Attributes:
      gate: name of the gate.
      exits: boundaries of the early exits.
      threshold: threshold of all exits.
      agreement: share of tokens that are the full model's.
      depth: mean layers below the emitting exit.
      speed: predicted speed over that of the full model.
    """

    gate: str
    exits: tuple[int, ...]
    threshold: float
    agreement: float
    depth: float
    speed: float


@dataclasses.dataclass(frozen=True)
class GateGuarantee:
    """A threshold with a guarantee, and what it is predicted to give.

    Attributes:
      point: the threshold on the text that tested it; None where no threshold passed.
      delta: bound of the share of tokens that change, as a mean over windows to come.
      epsilon: probability that the guarantee fails.
      units: windows that tested the thresholds.
    """

    gate: str
    point: GatePoint | None
    delta: float
    epsilon: float
    units: int


def select(
    scores: ExitScores,
    boundaries: Sequence[int] | None = None,
    positions: np.ndarray | None = None,
) -> ExitScores:
    """Return the scores of some early exits, as of a model without the others, and of positions.

    The gate "saturation" compares neighbouring exits, so its confidences are left out.

    Args:
      scores: the scores.
      boundaries: boundaries of early exits that stay, by default all.
      positions: [n] bool or indices, by default all.
    """
    config, at = scores.config, slice(None) if positions is None else positions
    kept = [e for e, x in enumerate(config.exits) if boundaries is None or x.boundary in boundaries]
    rows = [*kept, config.n_exits]
    return ExitScores(
        config.replace(exits=tuple(config.exits[e] for e in kept)),
        scores.labels[at],
        scores.units[at],
        scores.tokens[rows][:, at],
        scores.nlls[rows][:, at],
        {k: a[rows][:, at] for k, a in scores.confidences.items() if k != "saturation"},
    )


def depth_scores(scores: ExitScores, own: Sequence[int] = ()) -> tuple[DepthScore, ...]:
    """Return the quality of every exit, the final one last.

    Args:
      scores: the scores.
      own: boundaries of the early exits that the model has; the others were added.
    """
    agree = (scores.tokens == scores.tokens[-1]).mean(1)
    losses = scores.nlls.mean(1, dtype=np.float64)
    early = [
        DepthScore(
            e.boundary,
            e.boundary not in own,
            float(agree[i]),
            None if e.vocabulary else float(losses[i]),
        )
        for i, e in enumerate(scores.config.exits)
    ]
    return (*early, DepthScore(scores.config.n_layers, False, 1.0, float(losses[-1])))


def oracle_depth(scores: ExitScores, times: DecodingTimes, cap: int = CAP) -> OracleDepth:
    """Measure the depth at which tokens could leave, if it was known when they are right."""
    config = scores.config
    number = (scores.tokens == scores.tokens[-1]).argmax(0)
    depth = float(np.mean(np.asarray(config.exit_boundaries)[number]))
    seconds = _total_seconds(scores, times.without_early_work(), number, every_head=False, cap=cap)
    return OracleDepth(
        depth,
        config.n_layers / depth if depth else float("inf"),
        times.full(config.n_layers) * len(scores) / seconds,
    )


def by_unit(scores: ExitScores, numbers: np.ndarray) -> np.ndarray:
    """Arrange numbers [n] of positions by their texts, [units, positions], -1 behind a text."""
    _, index, counts = np.unique(scores.units, return_inverse=True, return_counts=True)
    found = np.full((len(counts), int(counts.max())), -1)
    order = np.argsort(index, kind="stable")
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    found[index[order], place] = numbers[order]
    return found


def recompute_seconds(
    trace: np.ndarray,
    config: ModelConfig,
    layers: Sequence[float],
    heads: Sequence[float],
    *,
    factor: Callable[[np.ndarray], np.ndarray],
    step: float = 0.0,
    every_head: bool = True,
    cap: int = CAP,
) -> np.ndarray:
    """Return [texts, t] seconds that each token takes with KV recomputation, in any unit.

    As with the engine "recompute" and one request, a token that enters a segment takes along all
    tokens that wait below it, and the `cap`-th waiting token runs all layers.

    Args:
      trace: [texts, t] number of the exit that emits each token, -1 behind a text's end.
      config: the model; its exits have those numbers.
      layers: [L] seconds of a row through each layer.
      heads: [E + 1] seconds of each exit, the final one last.
      factor: returns the time of numbers of rows [texts] through a layer, over that of one row.
      step: seconds of a step beside these.
      every_head: whether a token reads the head of every exit on its way (gates that need logits)
        or that of its own exit alone (routers).
      cap: maximum of waiting tokens.
    """
    below = [sum(layers[begin:end]) for begin, end in config.segments]
    filled = np.zeros((len(trace), len(below)), np.int64)
    seconds = np.zeros(trace.shape)
    for t, number in enumerate(trace.T):
        live = number >= 0
        forced = t + 1 - filled[:, -1] >= cap
        for e, layer in enumerate(below):
            runs = live & ((number >= e) | forced)
            reads = live & ((number >= e) if every_head else (number == e))
            seconds[:, t] += np.where(runs, factor(t + 1 - filled[:, e]) * layer, 0.0)
            seconds[:, t] += np.where(reads, heads[e], 0.0)
            filled[:, e] = np.where(runs, t + 1, filled[:, e])
        seconds[:, t] += np.where(live, step, 0.0)
    return seconds


def _total_seconds(
    scores: ExitScores, times: DecodingTimes, number: np.ndarray, *, every_head: bool, cap: int
) -> float:
    """Return the seconds of all texts whose tokens leave by exits `number` [n]."""
    config = scores.config
    each = recompute_seconds(
        by_unit(scores, number),
        config,
        (times.layer,) * config.n_layers,
        times.heads,
        factor=times.factor,
        step=times.step_with(config.n_exits),
        every_head=every_head,
        cap=cap,
    )
    return float(each.sum())


def gate_point(
    scores: ExitScores,
    times: DecodingTimes,
    gate: str,
    exits: Sequence[int],
    threshold: float,
    cap: int = CAP,
) -> GatePoint:
    """Predict the effect of a threshold in a model whose early exits are at boundaries `exits`.

    `times.heads` are those of all exits of `scores`.
    """
    return _point(*_alone(scores, times, exits), gate, threshold, cap)


def _alone(
    scores: ExitScores, times: DecodingTimes, exits: Sequence[int]
) -> tuple[ExitScores, DecodingTimes]:
    """Return scores and times as of a model without other exits."""
    config = scores.config
    kept = [e for e, x in enumerate(config.exits) if x.boundary in exits]
    heads = tuple(times.heads[e] for e in (*kept, config.n_exits))
    return select(scores, exits), dataclasses.replace(times, heads=heads)


def _point(
    scores: ExitScores, times: DecodingTimes, gate: str, threshold: float, cap: int
) -> GatePoint:
    config = scores.config
    number = emitting_exits(scores, threshold, gate=gate)
    emitted = np.take_along_axis(scores.tokens, number[None], 0)[0]
    early = config.exit_boundaries[:-1]
    seconds = _total_seconds(scores, times, number, every_head=gate != "router", cap=cap)
    return GatePoint(
        gate,
        tuple(early),
        float(threshold),
        float(np.mean(emitted == scores.tokens[-1])),
        float(np.mean(np.asarray(config.exit_boundaries)[number])),
        times.full(config.n_layers) * len(scores) / seconds,
    )


def gates_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the gates that are compared: those that read logits, and routers where there are."""
    routed = any(e.router for e in config.exits)
    return (*LOGITS_GATES, "patience", *(["router"] if routed else []))


def gate_points(
    scores: ExitScores, times: DecodingTimes, gate: str, cap: int = CAP
) -> tuple[GatePoint, ...]:
    """Predict the effect of a gate's thresholds with all exits, and with each of them alone.

    Thresholds are quantiles of the gate's confidences. A head may cost as much as many layers, so
    that one exit is often better than all. Patience needs two exits or more.
    """
    config = scores.config
    usable = [e.boundary for e in config.exits if gate != "router" or e.router]
    sets = [usable] if len(usable) > 1 or gate == "patience" else []
    sets += [] if gate == "patience" else [[b] for b in usable]
    points = []
    for exits in sets:
        chosen, own = _alone(scores, times, exits)
        points += [_point(chosen, own, gate, t, cap) for t in _thresholds(chosen, gate)]
    return tuple(points)


def _thresholds(scores: ExitScores, gate: str) -> list[float]:
    n = scores.config.n_exits
    if gate == "patience":  # k agree, between k - 1 and k of all exits; 1 would never fire
        return [(k - 0.5) / n for k in range(2, n + 1)]
    found = np.quantile(scores.confidences[gate][:n], QUANTILES)
    return sorted({min(float(t), BELOW_ONE) for t in np.floor(found * 1e5) / 1e5})


def fastest_point(points: Sequence[GatePoint], agreement: float) -> GatePoint | None:
    """Return the point of highest predicted speed with at least this agreement.

    It is None where no point is faster than the full model. The point is chosen on the text that it
    is judged on: judge it on other text.
    """
    require(0 <= agreement <= 1, "agreement", agreement, "must lie in [0, 1]")
    good = [p for p in points if p.agreement >= agreement and p.speed > 1]
    return max(good, key=lambda p: p.speed, default=None)


def envelope(points: Sequence[GatePoint]) -> tuple[GatePoint, ...]:
    """Return the points that no other beats in both agreement and speed, slowest first."""
    kept: list[GatePoint] = []
    for point in sorted(points, key=lambda p: (-p.speed, -p.agreement)):
        if not kept or point.agreement > kept[-1].agreement:
            kept.append(point)
    return tuple(reversed(kept))


def gate_guarantee(
    choosing: ExitScores,
    testing: ExitScores,
    times: DecodingTimes,
    point: GatePoint,
    *,
    delta: float = 0.05,
    epsilon: float = 0.1,
    cap: int = CAP,
) -> GateGuarantee:
    """Find the lowest threshold of a point's gate and exits that keeps its risk below `delta`.

    Candidates come from one text and are tested on another (`guarantee.calibrate`).
    """
    candidates = _thresholds(select(choosing, point.exits), point.gate)[::-1]
    chosen = select(testing, point.exits)
    found = calibrate(chosen, delta, epsilon, candidates, gate=point.gate)
    passed = None
    if found.passed:
        passed = gate_point(testing, times, point.gate, point.exits, found.threshold, cap)
    return GateGuarantee(point.gate, passed, delta, epsilon, found.units)


def frontiers_of(
    scores: ExitScores, times: DecodingTimes, cap: int = CAP
) -> Mapping[str, tuple[GatePoint, ...]]:
    """Return `gate_points` of every gate that the model can use."""
    return {gate: gate_points(scores, times, gate, cap) for gate in gates_of(scores.config)}
