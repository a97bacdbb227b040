"""Tell whether early exit pays for a model on this device, on one page.

    eejax grade smollm2
    eejax grade runs/demo --out=grades/demo
    eejax grade models/tinylm --tokenizer=bytes --text='texts/*.txt'
    eejax grade smollm2 --tune='mine/*.txt' --text=other.txt

MODEL is anything that `eejax.load` takes: a run's workdir, a Hugging Face folder, a GGUF file, or a
name. The text is a run's own held-out text, python-stdlib for other models, or --text. Where the
model has no exit, one of its own final norm and head is added, every --every layers. With --tune
these exits are trained on other text first, and OUT/model is the model with them. The command
measures layers, heads and whole steps, scores every exit on the text, predicts the speed of gates
and of drafts, and decodes with the best of both beside the full model. It prints a table and the
verdict, and writes grade.html, which needs no network, and grade.json into --out. With --json the
last line printed is one JSON object.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile

from absl import flags

from eejax.common.paths import expanded
from eejax.experiments import held_out, launch

_TEXT = flags.DEFINE_multi_string(
    "text", [], "Text files, globs, or python-stdlib; by default a run's own held-out text."
)
_TUNE = flags.DEFINE_multi_string(
    "tune", [], "Text to tune the added exits on first: as --text, and not the same."
)
_TOKENS = flags.DEFINE_integer("tokens", 16_384, "Approximate tokens of text.", lower_bound=2)
_LENGTH = flags.DEFINE_integer(
    "length", 128, "Tokens of a window; those of a run's own text have its length.", lower_bound=2
)
_EVERY = flags.DEFINE_integer(
    "every", None, "Distance in layers of added exits; by default about ten.", lower_bound=1
)
_PAIRS = flags.DEFINE_integer(
    "pairs", None, "Timed pairs of texts; by default as many as take half a minute.", lower_bound=1
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "bytes, a file or a folder, if the model has no tokenizer."
)
_OUT = flags.DEFINE_string("out", "grade", "The folder of the page; made if it does not exist.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

BYTES_PER_TOKEN = 256  # of text that is read, so that a large text is not tokenized whole
MIN_BYTES = 1 << 20


def main(names: list[str]) -> None:
    import eejax
    from eejax.checkpoint.files import write_text
    from eejax.checkpoint.model import is_run
    from eejax.experiments import grade_page, grading

    name = launch.one_model(names)
    workdir, out = is_run(expanded(name)), expanded(_OUT.value)
    tokenizer = _TOKENIZER.value
    with launch.flags_named({}):
        model = eejax.load(name, tokenizer=tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        batches, source = text_of(name, model, folder)
    grading.check_text(batches)
    if _TUNE.value:
        model = with_tuned_exits(model, out)
        name, workdir, tokenizer = str(out / "model"), False, None
    with launch.flags_named({}):
        found = grading.grade(
            name,
            model,
            batches,
            source,
            every=_EVERY.value,
            pairs=_PAIRS.value,
            workdir=workdir,
            tokenizer=tokenizer,
            say=launch.say,
        )
    result = grading.as_json(found)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "grade.json", json.dumps(result, indent=1))
    write_text(out / "grade.html", grade_page.page(found))
    print(show(found))
    print(f"\n{found.verdict.sentence}\n\n{found.recipe.python}")
    if found.recipe.command is not None:
        print(f"\n{found.recipe.command}")
    print(f"\n{out / 'grade.html'}")
    if _JSON.value:
        print(json.dumps(result))


def text_of(name: str, model, folder: str) -> tuple[list, str]:
    """Return batches of text, and its description; text that is packed lies in `folder`."""
    from eejax import data
    from eejax.checkpoint.model import is_run
    from eejax.train.runs import open_run

    if not _TEXT.value and is_run(expanded(name)):
        run = open_run(name)
        source = run.experiment.data.source
        launch.require_text(source, run.workdir, "text")
        listed = source if isinstance(source, str) else ", ".join(source)
        return list(held_out.batches(run, _TOKENS.value)), f"the run's held-out part of {listed}"
    names = _TEXT.value or [data.PYTHON_STDLIB]
    limit = max(MIN_BYTES, BYTES_PER_TOKEN * _TOKENS.value)
    length = min(_LENGTH.value, model.config.context_length)
    with launch.flags_named({"source": "text"}):
        source = data.source(names, max_bytes=limit)
    batches = held_out.of_source(source, model.tokenizer, folder, _TOKENS.value, length)
    return list(batches), ", ".join(names)


def with_tuned_exits(model, out: pathlib.Path):
    """Return the model with exits tuned on --tune wherever the grade would add one.

    It is saved in OUT/model. States of the text lie in OUT/states until the tuning has ended, which
    the same command continues.
    """
    from eejax.checkpoint.hf.save import hf_config_of
    from eejax.checkpoint.hf.sidecar import without_exits
    from eejax.common.errors import require
    from eejax.experiments import grading

    folder, states = out / "model", out / "states"
    same = sorted({*_TUNE.value} & {*_TEXT.value})
    require(not same, "--tune", same, "must be other text than --text", "It would grade itself.")
    require(
        not folder.exists(), "--out", str(out), f"has a model: remove {folder}, or name another"
    )
    with launch.flags_named({}):
        added = grading.added_boundaries(model.config, _EVERY.value)
    require(
        bool(added),
        "--tune",
        list(_TUNE.value),
        "needs a depth without an exit",
        "The model has exits wherever it is graded: leave --tune out, or lower --every.",
    )
    hf_config_of(without_exits(model.config))  # raises for a model that cannot be saved
    with launch.flags_named({"text": "tune", "source": "tune"}):
        tuned = model.tune(_TUNE.value, added, folder=states, watch=launch.say)
    tuned.save(folder)
    shutil.rmtree(states)
    return tuned


def show(found) -> str:
    """Return tables of what was measured and predicted."""
    from eejax import analysis
    from eejax.experiments.grade_page import WAYS, ms, own_exits, share, times

    drafts = {d.boundary: d for d in reversed(found.drafts)}
    rows = [
        [
            f"{d.boundary}",
            share(d.agreement),
            "-" if d.loss is None else f"{d.loss:.3f}",
            *([f"{at.drafts}", times(at.timed)] if (at := drafts.get(d.boundary)) else ["", ""]),
        ]
        for d in found.depths
    ]
    best = [
        [gate, f"{c.target:.0%}", share(c.checked.agreement), times(c.checked.speed)]
        for gate, choices in found.choices.items()
        for c in choices
    ]
    measured = [
        [WAYS[m.way], times(m.predicted), f"{times(m.speed)} ({m.low:.2f}-{m.high:.2f})"]
        for m in found.measured
    ]
    model, seconds = found.model, found.times
    full = seconds.full(model.layers)
    exits = [
        f"exit after layer {boundary}: {ms(own)} for {known:,} tokens ({share(own / full)} of a "
        f"step; the head {share(seconds.heads[-1] / full)})"
        for boundary, known, own in own_exits(found)
    ]
    parts = [
        f"{model.name}: {model.layers} layers of {ms(seconds.layer)}, head {ms(seconds.heads[-1])} "
        f"({seconds.heads[-1] / seconds.layer:.1f} layers), step {ms(full)}, on {model.device}",
        *exits,
        analysis.table(["layers", "agreement", "nats/token", "drafts", "their speed"], rows),
        f"oracle depth {found.oracle.depth:.2f} of {model.layers}: at most "
        f"{times(found.oracle.speed)}",
    ]
    if best:
        parts.append(analysis.table(["gate", "wanted", "agreement", "predicted"], best))
    if measured:
        parts.append(analysis.table(["decoding", "predicted", "measured (95 %)"], measured))
    return "\n\n".join(parts)


if __name__ == "__main__":
    launch.run(main, positional=True)
