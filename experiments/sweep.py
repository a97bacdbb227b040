"""Measure quality and speed of a trained model for every gate at every threshold.

    eejax sweep --workdir=runs/demo
    eejax sweep --workdir=runs/demo --gates=margin,patience --exits=3 --time

One teacher-forced pass over the run's held-out text (or --text) answers for all gates, thresholds
and exits at once: agreement with the full model, perplexity and bits per byte against mean depth.
It prints a table and draws WORKDIR/sweep.png. With --time segments and heads are timed here, and
depth becomes predicted time: that of the layers and heads a token needs before it leaves. Tokens
that wait for deeper layers add to the steps that run them, which is not counted. Without
--thresholds each gate has its own, spread over its confidences on this text; the gate "fixed" uses
each exit in turn, for all tokens. With --json the last line printed is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile

import numpy as np
from absl import flags

from eejax.common.errors import ConfigError, DataError, require, require_one_of
from eejax.common.paths import expanded
from eejax.experiments import field_flags, held_out, launch, step_costs
from eejax.inference.policy import ExitRules
from eejax.train.runs import open_run

_RUN = field_flags.define(open_run, ("workdir", "step", "ema"))
_TEXT = flags.DEFINE_multi_string("text", [], "Text files or globs to score instead.")
_TOKENS = flags.DEFINE_integer(
    "tokens", 100_000, "Approximate tokens, evenly spread.", lower_bound=1
)
_GATES = flags.DEFINE_list("gates", None, "Names of gates; all by default.")
_THRESHOLDS = flags.DEFINE_list("thresholds", None, "For every gate; by default each has its own.")
_EXITS = field_flags.define(ExitRules, ["exits"])
_RULES = field_flags.define(ExitRules, ("min_exit_layer", "decay"))
_TIME = flags.DEFINE_bool("time", False, "Time segments and heads, and predict a token's time.")
_OUT = flags.DEFINE_string("out", None, "The picture; WORKDIR/sweep.png by default.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

POINTS = 12  # thresholds of a gate without --thresholds
SUFFIXES = (".png", ".pdf", ".svg")


@launch.flags_named({"threshold": "thresholds", "gate": "gates"})
def main() -> None:
    from eejax import analysis, calibration
    from eejax.gates.confidence import GATES
    from eejax.inference.policy import ExitPolicy, available_gates

    for gate in _GATES.value or ():
        require_one_of("--gates", gate, GATES)

    chosen, rules = _EXITS["exits"], _RULES.values()
    thresholds = _THRESHOLDS.value and launch.numbers("thresholds", _THRESHOLDS.value, float)
    require(thresholds != [], "--thresholds", "", "must be numbers in [0, 1]")
    run = _RUN()
    model, config = run.model, run.model.config
    gates = _GATES.value or available_gates(config)
    for threshold in thresholds or [1.0]:  # errors come before any work
        for gate in gates:
            ExitPolicy.make(config, 1, threshold, exits=chosen, gate=gate, **rules)
    least = rules.get("min_exit_layer", 0)
    active = [
        e.boundary
        for e in config.exits
        if (chosen is None or e.boundary in chosen) and e.boundary >= least
    ]
    if not active:
        raise ConfigError(
            f"--exits = {chosen}, --min_exit_layer = {least}: leave no early exit "
            f"active of this model's, at {[e.boundary for e in config.exits]}."
        )
    out = expanded(_OUT.value) if _OUT.value else expanded(_RUN["workdir"]) / "sweep.png"
    if out.suffix not in SUFFIXES or out.is_dir():
        raise ConfigError(
            f"--out = {_OUT.value!r}: must be a file ending in {', '.join(SUFFIXES)}."
        )
    costs = None
    if _TIME.value:
        launch.say("timing segments ...")
        rows, heads = step_costs.of_segments(model.params, config)
        costs = calibration.SegmentCosts(rows[0].tolist(), heads.tolist())
    with tempfile.TemporaryDirectory() as folder:
        batches = texts(run, folder)
        launch.say(f"scoring about {_TOKENS.value} tokens ...")
        scores = calibration.score(model.params, config, batches)
    curves = {}
    for gate in gates:
        if gate == "fixed":
            # Each exit alone: the others' threshold of 1 never fires.
            each = [[float(e.boundary != b) for e in config.exits] for b in active]
            points = calibration.sweep(scores, each, gate=gate, costs=costs)
        else:
            taken = thresholds or gate_thresholds(scores, gate, active)
            points = calibration.sweep(scores, taken, active, gate=gate, costs=costs, **rules)
        points.append(calibration.at_threshold(scores, 1.0, costs=costs))
        unique = {point.shares: point for point in points}
        curves[gate] = sorted(unique.values(), key=lambda p: (p.depth, p.seconds or 0.0))
    per_token = scores.bytes_per_token(model.tokenizer)
    if not per_token:
        raise DataError(
            f"--text = {_TEXT.value}: must hold at least two bytes, to score the second."
        )
    result = {
        "step": model.step,
        "tokens": len(scores),
        "exits": active,
        "costs": costs and dataclasses.asdict(costs),
        "curves": {
            gate: [describe(p, per_token, costs) for p in points] for gate, points in curves.items()
        },
    }
    print(f"step {model.step} of {_RUN['workdir']}, {len(scores)} tokens")
    print(show(result["curves"], config.n_layers))
    label = (
        "predicted time of a token, all layers = 1"
        if costs
        else f"mean depth of emitted tokens (of {config.n_layers} layers)"
    )
    figure = analysis.frontiers(result["curves"], x="time" if costs else "depth", xlabel=label)
    print(f"\ndrawn: {analysis.save(figure, out)}")
    if _JSON.value:
        print(json.dumps(result))


def texts(run, folder: str):
    """Return batches of --text, packed in `folder`, or of the run's held-out text."""
    from eejax import data

    if not _TEXT.value:
        return held_out.batches(run, _TOKENS.value)
    config = run.experiment.data
    source = data.source(_TEXT.value, text_field=config.text_field)
    masks = config.document_masks
    return held_out.of_source(
        source, run.model.tokenizer, folder, _TOKENS.value, config.length, document_masks=masks
    )


def gate_thresholds(scores, gate: str, active: list[int]) -> list[float]:
    """Return thresholds among which the gate decides differently about this text."""
    boundaries = [e.boundary for e in scores.config.exits]
    if gate == "patience":  # k agree, between k - 1 and k of all exits; 1 would never fire
        counts = np.arange(2, len(active) + 1)
        return [0.0, *((counts - 0.5) / len(boundaries)).tolist()]
    said = scores.confidences[gate][[boundaries.index(b) for b in active]]
    spread = np.quantile(said, np.arange(POINTS) / POINTS)
    return sorted({float(t) for t in np.floor(spread * 1e4) / 1e4})


def describe(point, bytes_per_token: float, costs) -> dict:
    """Return a point in numbers; its time is a share of that of all layers."""
    return dataclasses.asdict(point) | {
        "perplexity": point.perplexity,
        "bits_per_byte": point.bits_per_byte(bytes_per_token),
        "time": costs and point.seconds / costs.full,
    }


def show(curves: dict[str, list[dict]], n_layers: int) -> str:
    from eejax import analysis

    timed = any(p["time"] is not None for points in curves.values() for p in points)
    header = ["gate", "threshold", "agreement", f"depth of {n_layers}"]
    header += [*(["time"] if timed else []), "perplexity", "bits/byte"]
    rows = []
    for gate, points in curves.items():
        for i, p in enumerate(points):
            rows.append(
                [
                    gate if i == 0 else "",
                    ",".join(f"{t:.4g}" for t in np.ravel(p["threshold"])),
                    f"{p['agreement']:.2%}",
                    f"{p['depth']:.2f}",
                    *([f"{p['time']:.3f}"] if timed else []),
                    f"{p['perplexity']:.3f}",
                    f"{p['bits_per_byte']:.3f}",
                ]
            )
    return analysis.table(header, rows)


if __name__ == "__main__":
    launch.run(main)
