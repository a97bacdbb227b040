"""Thresholds with a guarantee on real text (CALM; Schuster et al. 2022, section 4).

    eejax reproduce guarantee --workdir=runs/demo
    eejax reproduce guarantee --workdir=runs/demo \\
        --text=prompts.jsonl --text_field=prompt

The units are texts: windows of the run's held-out text, or the prompts in --text, cut to the
context. They are scored once, at every exit. Then they are divided in two at random, many times: on
one half Learn-then-Test picks the fastest threshold whose risk is at most --delta but for a chance
of --epsilon, on the other half it is judged. The risk is the share of a text's tokens that are not
the full model's. What is claimed, and checked:

- of all divisions at most epsilon, and three standard errors, have a higher risk on the other half.

The promise is about texts to come. The other half stands for them, with an error of its own, so the
share of divisions with a higher risk on all texts together is printed too.

Beside it stands a threshold picked by hand, which promises nothing. How fast both are is measured:
the engine `recompute` at the median of the thresholds picked, and at the one by hand, goes on from
texts in interleaved pairs with `full`. The exit status is 1 where the claim fails. With --json the
last line printed is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from absl import flags

from eejax.common.errors import DataError, require
from eejax.experiments import decode_times, held_out, launch

PROMPTS, NEW = 8, 128  # texts that are timed, and tokens of each

_WORKDIR = flags.DEFINE_string("workdir", None, "The training run.")
_TEXT = flags.DEFINE_multi_string("text", [], "Files of prompts, or globs, to take instead.")
_TEXT_FIELD = flags.DEFINE_string("text_field", "prompt", "Where a record has its prompt.")
_UNITS = flags.DEFINE_integer("units", 800, "At most so many texts.", lower_bound=16)
_SPLITS = flags.DEFINE_integer("splits", 200, "Random divisions in two.", lower_bound=1)
_DELTA = flags.DEFINE_float("delta", 0.05, "Highest share of tokens unlike the full model's.")
_EPSILON = flags.DEFINE_float("epsilon", 0.1, "Chance of a higher risk.")
_GATE = flags.DEFINE_string("gate", "max_probability", "What makes the confidences.")
_HAND = flags.DEFINE_float("hand_picked", 0.8, "The threshold to stand beside.")
_PAIRS = flags.DEFINE_integer("pairs", 12, "Timed pairs; 0: nothing is timed.", lower_bound=0)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")
flags.mark_flags_as_required(["workdir"])


@launch.flags_named({})
def main() -> None:
    from eejax import calibration
    from eejax.inference.policy import ExitPolicy
    from eejax.train.runs import open_run

    for name, flag in (("--delta", _DELTA), ("--epsilon", _EPSILON)):
        require(0 < flag.value < 1, name, flag.value, "must lie strictly between 0 and 1")
    require(0 <= _HAND.value <= 1, "--hand_picked", _HAND.value, "must lie in [0, 1]")
    run = open_run(_WORKDIR.value)
    ExitPolicy.make(run.model.config, 1, gate=_GATE.value)
    texts = list(batches(run))
    launch.say("scoring texts ...")
    scores = calibration.score(run.model.params, run.model.config, texts)
    result = divide(
        scores,
        _DELTA.value,
        _EPSILON.value,
        _SPLITS.value,
        gate=_GATE.value,
        by_hand=_HAND.value,
    )
    if _PAIRS.value:
        launch.say("timing ...")
        add_speeds(result, run.model, texts, _PAIRS.value)
    print(show(result, run.model.config.n_layers))
    if _JSON.value:
        print(json.dumps(result | {"findings": [finding(result).to_dict()]}))
    sys.exit(0 if result["kept"] else 1)


def finding(result: dict):
    """Return the finding on CALM's guarantee."""
    from eejax.experiments.reproduce.claims import Finding, Verdict

    return Finding(
        "CALM",
        "Section 4",
        "Thresholds picked by Learn-then-Test keep a bound on the risk but for a chance of "
        "epsilon.",
        "a bound that is proved",
        f"risk above {result['delta']:g} in {result['exceeded']:.1%} of {result['splits']} "
        f"divisions, at most {result['epsilon']:.0%} promised; mean depth "
        f"{result['depth']['mean']:.2f}, {result['hand_picked']['depth']['mean']:.2f} at a "
        f"threshold of {result['hand_picked']['threshold']:g} picked by hand",
        f"{result['units']} texts, a model of this project's demo, 2 cores",
        Verdict.HOLDS if result["kept"] else Verdict.FAILS,
        "" if result["kept"] else "The risk exceeds its bound more often than by chance.",
    )


def batches(run) -> Iterator[Mapping[str, np.ndarray]]:
    """Return texts, one in each row: of --text, or windows of the run's held-out text."""
    from eejax import data

    if not _TEXT.value:
        return held_out.batches(run, _UNITS.value * run.experiment.data.length)
    documents = data.source(_TEXT.value, text_field=_TEXT_FIELD.value).documents()
    texts = (run.model.tokenizer.encode(document.text) for document in documents)
    rows = list(itertools.islice(((ids, 1) for ids in texts if len(ids) > 1), _UNITS.value))
    if not rows:
        raise DataError(f"--text = {_TEXT.value}: holds no prompt of at least two tokens.")
    return held_out.padded(rows, run.model.config.context_length)


def divide(
    scores, delta: float, epsilon: float, splits: int, *, gate: str, by_hand: float, seed: int = 0
) -> dict:
    """Evaluate thresholds of one half of the units on the other, over random divisions."""
    from eejax import calibration

    tested = calibration.CANDIDATES
    candidates = (*tested, calibration.NEVER, by_hand)  # the last two are not tested
    risks = calibration.unit_risks(scores, candidates, gate=gate)
    _, unit = np.unique(scores.units, return_inverse=True)
    tokens = np.bincount(unit)
    boundaries = np.asarray(scores.config.exit_boundaries, np.float64)
    layers = np.stack(
        [
            np.bincount(unit, boundaries[calibration.emitting_exits(scores, t, gate=gate)])
            for t in candidates
        ],
        1,
    )
    if len(risks) < 2:
        raise DataError(f"{len(risks)} texts: must be at least 2, to be divided in two.")
    m, rng, rows = len(tested), np.random.default_rng(seed), []
    for _ in range(splits):
        one, other = np.array_split(rng.permutation(len(risks)), 2)
        found = calibration.learn_then_test(risks[one][:, :m], tested, delta, epsilon)
        j = found.passed - 1 if found.passed else m
        rows.append(
            [
                found.threshold,
                risks[one, j].mean(),
                risks[other, j].mean(),
                layers[other, j].sum() / tokens[other].sum(),
                risks[:, j].mean(),
                risks[other, -1].mean(),
                layers[other, -1].sum() / tokens[other].sum(),
            ]
        )
    threshold, seen, risk, depth, whole, hand_risk, hand_depth = np.array(rows).T
    exceeded = float(np.mean(risk > delta))
    error = math.sqrt(epsilon * (1 - epsilon) / splits)
    return {
        "gate": gate,
        "delta": delta,
        "epsilon": epsilon,
        "splits": splits,
        "units": len(risks),
        "tokens": len(scores),
        "exceeded": exceeded,
        "limit": epsilon + 3 * error,
        "kept": exceeded <= epsilon + 3 * error,
        "exceeded_on_all": float(np.mean(whole > delta)),
        "never_exits": float(np.mean(threshold == calibration.NEVER)),
        "threshold": spread(threshold),
        "calibration_risk": spread(seen),
        "risk": spread(risk),
        "depth": spread(depth),
        "hand_picked": {
            "threshold": by_hand,
            "exceeded": float(np.mean(hand_risk > delta)),
            "risk": spread(hand_risk),
            "depth": spread(hand_depth),
        },
    }


def add_speeds(result: dict, model, texts: Sequence[Mapping[str, np.ndarray]], pairs: int) -> None:
    """Add the measured `speed` over `full`, decoding from the beginnings of texts."""
    context, hand = model.config.context_length, result["hand_picked"]
    rows = [
        tokens[: int((labels >= 0).sum())]
        for batch in texts
        for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True)
    ]
    length = min(max(1, context // 4), max(map(len, rows)))
    rows = [row[:length].tolist() for row in rows if len(row) >= length]  # one program for all
    prompts = rows[:: -(-len(rows) // PROMPTS)]
    thresholds = result["threshold"]["median"], hand["threshold"]
    seconds, _ = decode_times.measure(
        model, thresholds, prompts, min(NEW, context - length - 1), pairs, result["gate"]
    )
    own, picked = decode_times.measured(seconds)
    result["speed"], hand["speed"] = own["speed"], picked["speed"]
    result["speed_over_hand_picked"] = {
        "ratio": 1 / picked["over_above"]["ratio"],
        "low": 1 / picked["over_above"]["high"],
        "high": 1 / picked["over_above"]["low"],
    }


def spread(values: np.ndarray) -> dict[str, float]:
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "low": float(values.min()),
        "high": float(values.max()),
    }


def show(result: dict, n_layers: int) -> str:
    from eejax import analysis

    hand = result["hand_picked"]

    def text(s, f):
        return f"{s['mean']:{f}} ({s['low']:{f}} - {s['high']:{f}})"

    rows = [
        [
            "Learn-then-Test",
            text(result["threshold"], ".2f"),
            text(result["risk"], ".2%"),
            f"{result['exceeded']:.1%}",
            text(result["depth"], ".2f"),
        ],
        [
            "picked by hand",
            f"{hand['threshold']:.2f}",
            text(hand["risk"], ".2%"),
            f"{hand['exceeded']:.1%}",
            text(hand["depth"], ".2f"),
        ],
    ]
    header = [
        "means (lowest - highest)",
        "threshold",
        "risk on the other half",
        f"above {result['delta']:g}",
        f"depth of {n_layers}",
    ]
    if "speed" in result:
        header.append("times as fast as full")
        for row, of in zip(rows, (result, hand), strict=True):
            s = of["speed"]
            row.append(f"{s['ratio']:.2f} ({s['low']:.2f} - {s['high']:.2f})")
    return "\n".join(
        [
            f"{result['units']} texts, {result['tokens']} tokens, {result['splits']} divisions, "
            f"gate {result['gate']}",
            analysis.table(header, rows),
            f"a higher risk on the other half in {result['exceeded']:.1%} of the divisions, on all "
            f"texts in {result['exceeded_on_all']:.1%}; promised: at most {result['epsilon']:.0%} "
            f"(with three standard errors {result['limit']:.1%}): "
            + ("kept" if result["kept"] else "NOT KEPT"),
        ]
    )


if __name__ == "__main__":
    launch.run(main)
