"""Train routers for a trained or imported model; they decide for every token where it leaves.

    eejax import-hf --model=models/tinylm --tokenizer=bytes --workdir=runs/tinylm \\
        --source='texts/*.txt'
    eejax calibrate --base=runs/tinylm --every=1 --workdir=runs/routed
    eejax generate --workdir=runs/routed --gate=router --prompt='ROMEO:'

The model itself is not changed. If it has no exits it gets training-free ones, with its own final
norm and head, at every --every-th boundary; --boundaries chooses other boundaries, and tuned exits
(eejax tune) get routers as they are. Text is run through the model once. A tenth of it chooses the
best epoch of every router, and another tenth judges the routers: how well a router predicts which
tokens may leave (AUC), how far its confidence is from the share that is right (error), and how much
thresholds for an agreement with the full model save. One threshold for all exits comes with a
guarantee (Learn-then-Test): with a probability of 90 %, at most 5 % of the tokens of future windows
change, if those are drawn as the judged ones were. --workdir keeps exits and routers and takes the
rest from --base. After a kill the same command resumes. With --json the last line printed is one
JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import shutil
import time

import numpy as np
from absl import flags

from eejax import calibration
from eejax.checkpoint import overlay
from eejax.checkpoint.files import only_user
from eejax.common.errors import ConfigError, DataError
from eejax.common.paths import expanded
from eejax.data import save_tokenizer
from eejax.experiments import field_flags, launch
from eejax.train.runs import open_run

_RUN = field_flags.define(
    open_run,
    {"workdir": "base", "step": "step"},
    helps={"workdir": "the run whose model gets routers"},
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the new run.")
_SOURCE = flags.DEFINE_list("source", None, "Text files or globs; the base's by default.")
_MODEL = field_flags.define(
    calibration.calibrate_model,
    ("every", "boundaries", "tokens"),
    helps={"boundaries": "exits that get routers; by default those of the model, or of --every"},
    lists=["boundaries"],
)
_OPTIONS = field_flags.define(
    calibration.RouterOptions, ("width", "label", "bound", "epochs", "seed"), lists=["bound"]
)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")
flags.mark_flags_as_required(["workdir"])

AGREEMENTS = (0.99, 0.95, 0.9)
DELTA, EPSILON = 0.05, 0.1  # guaranteed share of changed tokens, and the chance of more
BATCH = 16


@launch.flags_named({})
def main() -> None:
    begun = time.monotonic()
    options, settings = _OPTIONS(), _MODEL.values()
    settings["boundaries"] = settings["boundaries"] and sorted(settings["boundaries"])
    workdir, base = expanded(_WORKDIR.value), _RUN["workdir"]
    if reason := overlay.spoilt(workdir, base):
        raise ConfigError(f"--workdir = {_WORKDIR.value!r} with --base = {base!r}: {reason}")
    run = _RUN()
    model = run.model
    workdir.mkdir(parents=True, exist_ok=True)
    with only_user(workdir):
        batches, fingerprint = text(run, workdir)
        try:
            routed = calibration.calibrate_model(
                model,
                batches,
                options,
                **settings,
                folder=workdir / "calibration",
                about={"text": fingerprint, "step": model.step},
                watch=launch.say,
            )
        except DataError:  # with more text or another label a new calibration begins
            shutil.rmtree(workdir / "calibration", ignore_errors=True)
            raise
        save_tokenizer(model.tokenizer, workdir / "tokenizer")
        metadata = model.metadata | {"experiment": experiment(run, routed.config).to_dict()}
        overlay.write_overlay(workdir, base, model.step, routed.config, routed.params, metadata)
        shutil.rmtree(workdir / "calibration")
    seconds = time.monotonic() - begun
    found = routed.calibration
    points = {a: found.point(a) for a in AGREEMENTS}
    promise = calibration.calibrate(found.scores, DELTA, EPSILON, gate="router")
    kept = calibration.at_threshold(found.scores, promise.threshold, gate="router")
    print(show(found, points, model.config.n_layers))
    held = f"At most {DELTA:.0%} of tokens changed, but for a chance of {EPSILON:.0%}"
    if promise.threshold < 1:
        print(f"\n{held}: --threshold={exact(promise.threshold)}, depth {kept.depth:.2f}")
    elif promise.risks[0] > DELTA:  # of the safest candidate
        print(
            f"\n{held}: more of them changed at every threshold at which tokens leave "
            f"({promise.risks[0]:.0%} at {promise.thresholds[0]:g}), so none is promised"
        )
    else:
        print(
            f"\n{held}: {promise.units} windows are too few to promise it of any threshold at "
            "which tokens leave; give more --tokens"
        )
    drawn = draw(found, points, workdir)
    print(f"\ndrawn: {', '.join(map(str, drawn))}")
    thresholds = ",".join(map(exact, found.thresholds(points[0.95])))
    print(
        f"{found.states.n} tokens, {seconds:.0f} s. Now, for about 95 % agreement:\n"
        f"  eejax generate --workdir={_WORKDIR.value} --gate=router "
        f"--threshold={thresholds} --prompt='...'"
    )
    if _JSON.value:
        print(
            json.dumps(
                {
                    "tokens": found.states.n,
                    "seconds": seconds,
                    "exits": [clean(dataclasses.asdict(q)) for q in found.qualities],
                    "points": {str(a): dataclasses.asdict(p) for a, p in points.items()},
                    "promise": {
                        "delta": DELTA,
                        "epsilon": EPSILON,
                        "windows": promise.units,
                        "threshold": promise.threshold,
                        "depth": kept.depth,
                    },
                }
            )
        )


def experiment(run, config):
    """Return the base's experiment for the model with its routers.

    It names no base: the weights come from the overlay's run, and an experiment that would train
    exits with routers is refused.
    """
    from eejax.train.config import ExitWeights, TuneConfig

    weights = ExitWeights((1.0,) * config.n_exits)
    train = dataclasses.replace(run.experiment.train, base=None, base_step=None)
    return dataclasses.replace(
        run.experiment, model=config, exit_weights=weights, train=train, tune=TuneConfig()
    )


def text(run, workdir: pathlib.Path):
    """Return (batches of the text to calibrate on, its fingerprint)."""
    from eejax import data
    from eejax.train import inputs

    config = run.experiment.data
    limit = -(-_MODEL["tokens"] // (BATCH * config.length))
    if _SOURCE.value:
        print(f"text: {', '.join(_SOURCE.value)}")
        source = data.source(_SOURCE.value, text_field=config.text_field)
        folder = workdir / "calibration" / "text"
        try:
            packed = data.pack(source, run.model.tokenizer, folder, validation_fraction=0.0)
        except DataError as error:
            raise DataError(f"--source = {','.join(_SOURCE.value)!r}: {error}") from error
    else:
        launch.require_text(config.source, run.workdir)
        own = (config.source,) if isinstance(config.source, str) else config.source
        print(f"text: {', '.join(own)} (the base's)")
        try:
            packed = run.dataset()
        except DataError as error:
            raise DataError(f"--source = None: {error} Or name the text here.") from error
    batches = data.batches(
        packed.split("train"),
        BATCH,
        config.length,
        document_masks=config.document_masks,
        limit=limit,
    )
    return (inputs.strip(b, config.document_masks) for b in batches), packed.fingerprint


def exact(threshold: float) -> str:
    """Return the shortest text that reads as the same float32.

    Rounded, 0.99997 would be 1, at which no token leaves, and other values would let more tokens
    leave than were judged.
    """
    return np.format_float_positional(np.float32(threshold), unique=True, trim="-")


def clean(values: dict) -> dict:
    """Replace NaN by None, since JSON has no NaN."""

    def nan(v):
        return isinstance(v, float) and math.isnan(v)

    return {k: None if nan(v) else v for k, v in values.items()}


def show(found, points, n_layers: int) -> str:
    from eejax import analysis

    def number(v, form):
        return "-" if math.isnan(v) else format(v, form)

    scores = found.scores
    alone = {e.boundary: i for i, e in enumerate(scores.config.exits)}
    rows = []
    for q in found.qualities:
        leave = "-"
        if q.boundary in alone:
            says = scores.confidences["router"][alone[q.boundary]]
            leave = f"{(says >= 0.95).mean():.1%}"
        rows.append(
            [
                str(q.boundary),
                f"{q.positives:.1%}",
                number(q.auc, ".4f"),
                number(q.error, ".4f"),
                leave,
                f"{n_layers / q.boundary:.2f}" if q.boundary else "",
                q.refused or f"{q.epoch}",
            ]
        )
    header = ["boundary", "may leave", "AUC", "error", "sure (0.95)", "their speed", "epoch"]
    parts = [analysis.table(header, rows), ""]
    rows = [
        [
            f"{a:.0%}",
            f"{p.agreement:.2%}",
            f"{p.depth:.2f}",
            f"{n_layers / p.depth:.2f}",
            ",".join(map(exact, p.threshold)),
        ]
        for a, p in points.items()
    ]
    header = ["wanted", "agreement", f"depth of {n_layers}", "speed at most", "thresholds"]
    return "\n".join([*parts, analysis.table(header, rows)])


def draw(found, points, workdir: pathlib.Path) -> list[pathlib.Path]:
    """Draw the convergence of states over depth (TIDE, section 5.5), and the exits of tokens."""
    from eejax import analysis

    picture = analysis.convergence_by_depth(
        [q.boundary for q in found.qualities],
        found.states.cosine,
        found.states.tokens[:-1] == found.states.tokens[-1],
    )
    shares = {f"{a:.0%} agreement": p.shares for a, p in points.items()}
    histogram = analysis.exit_histogram(shares, found.scores.config.exit_boundaries)
    return [
        analysis.save(picture, workdir / "convergence_by_depth.png"),
        analysis.save(histogram, workdir / "exits.png"),
    ]


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted: the same command resumes")
