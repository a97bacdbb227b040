"""Thresholds with a guarantee: Learn-then-Test.

Angelopoulos et al. 2021 ("Learn then Test"), as CALM (Schuster et al. 2022, section 4) applies it
to early exit: each candidate threshold is a hypothesis "its risk exceeds delta". The hypotheses are
tested on calibration texts from the safest threshold down, and the last one that is rejected gives
the threshold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import special

from eejax.calibration.frontier import ExitScores, emitting_exits
from eejax.common.errors import ConfigError, DataError, require
from eejax.inference.generate import Decoder

NEVER = 1.0  # the threshold that never fires
CANDIDATES = tuple(i / 100 for i in range(99, -1, -1))


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """The fastest threshold whose risk is at most `delta`, with probability >= 1 - `epsilon`.

    Attributes:
      threshold: the threshold; 1, which never exits and needs no test, where no candidate passed.
      delta: the bound of the risk.
      epsilon: the probability that the guarantee may fail.
      units: number of calibration units.
      passed: number of candidates that passed, from the first on.
      thresholds: the candidates.
      risks: mean risk of each candidate over the units.
      p_values: p-value of "its risk exceeds delta" for each candidate.
    """

    threshold: float
    delta: float
    epsilon: float
    units: int
    passed: int
    thresholds: tuple[float, ...]
    risks: tuple[float, ...]
    p_values: tuple[float, ...]


def learn_then_test(
    risks: np.ndarray,
    thresholds: Sequence[float],
    delta: float,
    epsilon: float,
    *,
    binary: bool = False,
) -> Guarantee:
    """Find the lowest threshold whose expected risk is <= delta, with probability >= 1 - epsilon.

    The probability is over draws of the calibration units. It holds for any number of units and any
    model if the units are independent draws of what is to come (from one document, say, only one
    is), and if thresholds, delta and epsilon were chosen without looking at them. It bounds the
    mean over future units, not each unit. It also holds only for the kind of pass that gave the
    risks: a teacher-forced pass gives risks of single tokens after given text (`calibrate`), whole
    generations give risks of generations.

    Hypotheses are tested in the given order, each at level epsilon, up to the first that is not
    rejected (fixed-sequence testing), so that no level is divided by their number.

    Args:
      risks: [units, thresholds] the loss, in [0, 1], of each unit (a prompt) at each threshold.
      thresholds: the candidates, strictly decreasing.
      delta: the bound of the risk.
      epsilon: the probability that the guarantee may fail.
      binary: whether losses can only be 0 or 1, for which there is an exact test. This is not
        guessed from the values: a test that is chosen by the numbers it tests may be wrong more
        often than it says.

    Raises:
      ConfigError: for delta or epsilon outside (0, 1), and thresholds that do not decrease or lie
        outside [0, 1].
      DataError: for risks of another shape, outside [0, 1] or not finite.
    """
    candidates = np.asarray(thresholds, np.float64)
    falling = candidates.ndim == 1 and candidates.size > 0 and bool(np.all(np.diff(candidates) < 0))
    inside = bool(np.all((candidates >= 0) & (candidates <= 1)))
    require(
        falling and inside,
        "thresholds",
        thresholds,
        "must be strictly decreasing numbers in [0, 1]",
    )
    if not 0 < epsilon < 1:
        raise ConfigError(f"epsilon = {epsilon!r}: must lie strictly between 0 and 1.")
    values = np.asarray(risks, np.float64)
    if values.shape != (len(values), len(candidates)):
        raise DataError(
            f"risks: shape {values.shape}: must be [units, thresholds] for {len(candidates)} "
            "thresholds."
        )
    p = p_values(values, delta, binary=binary)
    failed = np.flatnonzero(~(p <= epsilon))
    passed = int(failed[0]) if len(failed) else len(p)
    return Guarantee(
        threshold=float(candidates[passed - 1]) if passed else NEVER,
        delta=float(delta),
        epsilon=float(epsilon),
        units=len(values),
        passed=passed,
        thresholds=tuple(candidates.tolist()),
        risks=tuple(values.mean(0).tolist()),
        p_values=tuple(p.tolist()),
    )


def p_values(risks: np.ndarray, delta: float, *, binary: bool = False) -> np.ndarray:
    """Compute p-values [thresholds] of "the expected risk exceeds delta".

    They are valid for any number of independent units. For losses in [0, 1] they are those of
    Hoeffding-Bentkus (Bates et al. 2021, proposition 8): the lesser of exp(-n h(min(r, delta),
    delta)) and e P(Bin(n, delta) <= ceil(n r)), with r the mean of n units and h(a, b) the relative
    entropy of two coins. For `binary` losses they are the binomial tail P(Bin(n, delta) <= n r).

    Args:
      risks: [units, thresholds].
      delta: the bound of the risk.
      binary: whether losses can only be 0 or 1.
    """
    require(0 < delta < 1, "delta", delta, "must lie strictly between 0 and 1")
    risks = np.asarray(risks, np.float64)
    if risks.ndim != 2 or not risks.size:
        raise DataError(f"risks: shape {risks.shape}: must be [units, thresholds], neither 0.")
    if not np.all((risks >= 0) & (risks <= 1)):
        wrong = risks[~((risks >= 0) & (risks <= 1))][0]
        raise DataError(f"risks: {wrong} is among them: must be finite and in [0, 1].")
    if binary and not np.all((risks == 0) | (risks == 1)):
        wrong = risks[(risks != 0) & (risks != 1)][0]
        raise DataError(f"risks: {wrong} is among them: with binary, must be 0 or 1.")
    n = len(risks)
    # Exact sums: a rounded one could fall on the wrong side of a whole number.
    sums = np.array([math.fsum(column) for column in risks.T])
    tail = special.bdtr(np.ceil(sums), n, delta)
    if binary:
        return tail
    a = np.minimum(sums / n, delta)
    hoeffding = np.exp(-n * (special.rel_entr(a, delta) + special.rel_entr(1 - a, 1 - delta)))
    return np.minimum(hoeffding, np.minimum(math.e * tail, 1.0))


def unit_risks(
    scores: ExitScores, thresholds: Sequence[float], exits: Sequence[int] | None = None, **rules
) -> np.ndarray:
    """Return the share [units, thresholds] of tokens that differ from the full model's.

    `exits` and `rules` are those of `frontier.emitting_exits`; units come in the order of their
    numbers.
    """
    _, index = np.unique(scores.units, return_inverse=True)
    counts = np.bincount(index)
    columns = []
    for threshold in thresholds:
        number = emitting_exits(scores, threshold, exits, **rules)
        token = np.take_along_axis(scores.tokens, number[None], 0)[0]
        columns.append(np.bincount(index, token != scores.tokens[-1]) / counts)
    return np.stack(columns, 1)


def unlike(text: Sequence[int], other: Sequence[int]) -> float:
    """Compute 1 - ROUGE-L of two token sequences (Lin 2004).

    ROUGE-L is the harmonic mean of the shares that the longest common subsequence has of each
    sequence. It gives CALM's loss of a text against the full model's (section 4.2): 0 for equal
    sequences, 1 for those that share nothing.
    """
    row = [0] * (len(other) + 1)
    for a in text:
        before, row = row, [0]
        for j, b in enumerate(other):
            row.append(before[j] + 1 if a == b else max(row[j], before[j + 1]))
    return 1 - 2 * row[-1] / (len(text) + len(other)) if row[-1] else float(text != other)


def text_risks(
    engine: Decoder,
    full: Decoder,
    prompts: Sequence[Sequence[int]],
    thresholds: Sequence[float],
    max_new_tokens: int,
    loss: Callable[[Sequence[int], Sequence[int]], float] = unlike,
    **rules,
) -> np.ndarray:
    """Return [prompts, thresholds], the loss of an engine's texts against the full model's.

    These are the risks of the deployed pass itself, for `learn_then_test`: of whole texts, and of
    engines whose tokens are not those of `posthoc` ("propagate"), to which `calibrate` does not
    carry over. Each prompt is generated alone, greedily, at each threshold.

    Args:
      engine: the engine that is judged.
      full: the engine of the full model.
      prompts: token ids of each prompt.
      thresholds: the candidates.
      max_new_tokens: tokens that are generated for each prompt.
      loss: loss(text, the full model's text), in [0, 1].
      **rules: `exits`, `gate`, `min_exit_layer` and `decay`, as in `Generator.stream`.
    """
    wanted = [full.generate([p], max_new_tokens).ids(0) for p in prompts]

    def risk(prompt, want, threshold):
        got = engine.generate([prompt], max_new_tokens, threshold=threshold, **rules)
        return loss(got.ids(0), want)

    pairs = list(zip(prompts, wanted, strict=True))
    return np.array([[risk(*pair, t) for t in thresholds] for pair in pairs])


def calibrate(
    scores: ExitScores,
    delta: float,
    epsilon: float,
    thresholds: Sequence[float] = CANDIDATES,
    exits: Sequence[int] | None = None,
    **rules,
) -> Guarantee:
    """Run `learn_then_test` on the share of a text's tokens that differ from the full model's.

    The units are those of the scores: each should be a text as it will come, such as a prompt.
    `exits` and `rules` (`gate`, `min_exit_layer`, `decay`) are those of `frontier.emitting_exits`;
    the guarantee holds for these alone.

    The guarantee is about the pass that was scored, in which every token sees what all layers
    computed for the text. It carries over to engines that decide as "posthoc" does, because their
    keys and values are exact ("recompute", "pipelined"). It does not carry over to an engine that
    uses the state of an early exit in place of missing ones ("propagate"), nor to whole
    generations: after its first different token a generation goes on with another text. For either,
    use `text_risks`.
    """
    return learn_then_test(
        unit_risks(scores, thresholds, exits, **rules), thresholds, delta, epsilon
    )
