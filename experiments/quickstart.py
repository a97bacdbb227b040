"""Take a real model, tell whether early exit pays for it, tune two exits, and time the result.

    eejax quickstart            (or: make quickstart)
    eejax quickstart --model=models/other --workdir=runs/other

The model is SmolLM2-135M-Instruct, which a package of PyPI holds. It writes the text that it is
graded and tuned on itself, so nothing else is downloaded. It takes under ten minutes on 2 cores.
The workdir gets grade.html (whether early exit pays, by depth and gate), model/ (the model with its
exits, which `eejax.load` and transformers open), quickstart.png, chat.txt (answers in the colors of
exits) and summary.json. The same command continues where it was stopped, and repeats only the
measurements of a finished one. With --json the last line printed is one JSON object.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from eejax.experiments import held_out, launch

_MODEL = flags.DEFINE_string("model", "smollm2", "A model that `eejax.load` takes.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Folder of the results.")
_TOKENS = flags.DEFINE_integer(
    "tokens", 8_192, "Tokens of text that the model writes.", lower_bound=64
)
_PASSES = flags.DEFINE_integer("passes", 12, "Passes of tuning over the text.", lower_bound=1)
_NEW = flags.DEFINE_integer("new", 64, "Tokens of a timed answer.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Timed rounds of all questions.", lower_bound=1)
_PEER = flags.DEFINE_bool("peer", True, "Time transformers too, where it is installed.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper and a whale.",
    "Explain in simple words why the sky is blue.",
    "Give me five tips for learning a new language.",
    "Rewrite this sentence three times, each time a little shorter: The committee decided, after "
    "a long discussion, to postpone the meeting until the beginning of next month.",
    "Put a docstring into this program and leave the rest as it is:\n\n"
    "def largest(numbers):\n    found = None\n    for number in numbers:\n"
    "        if found is None or number > found:\n            found = number\n    return found\n",
)
LENGTH = 128  # tokens of a window of the text
HELD_OUT = 0.25  # of the text: what grades the model, and chooses a threshold
GRADED_EXITS = 6
TARGET = 0.95  # agreement of the threshold with which early exits emit
THRESHOLDS = tuple(np.round(np.arange(0.02, 1.0, 0.02), 2).tolist())
FULL, DRAFTS, EXITS, PEER = "full", "drafts", "exits", "transformers"


@dataclasses.dataclass(frozen=True)
class TimedWay:
    """A way to decode, timed beside the full model on the same questions.

    Attributes:
      tokens_per_second: generated tokens over seconds of whole calls, prompts included.
      speed: of the full model's seconds, the total over this way's.
      low, high: its 95 % interval.
      same: share of tokens that are the full model's at the same place.
      by_question: the speed at each of `QUESTIONS`.
    """

    tokens_per_second: float
    speed: float
    low: float
    high: float
    same: float
    by_question: tuple[float, ...]


class StageClock:
    """Clock of the stages: `seconds` of each that has ended, by name."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def ends(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._since = now - self._since, now


def main() -> None:
    import eejax
    from eejax import calibration
    from eejax.checkpoint.files import unwritable, write_text
    from eejax.common.paths import expanded
    from eejax.experiments.conversation import Conversation
    from eejax.interop.api import default_exits

    clock, workdir = StageClock(), expanded(_WORKDIR.value)
    say(f"[1/4] loading {_MODEL.value}, which then writes text of its own")
    with launch.flags_named({"path": "model"}):
        model = eejax.load(_MODEL.value)
    talk = Conversation(_MODEL.value, model)
    begun(workdir)
    train, check = own_text(model, workdir / "text.jsonl").split(HELD_OUT)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(batches(check, model, folder))
    clock.ends("text")

    say("[2/4] grading: does early exit pay as the model is?")
    verdict = graded(model, rows, workdir)
    clock.ends("grade")

    boundaries = default_exits(model.config.n_layers)
    listed = " and ".join(map(str, boundaries))
    say(f"[3/4] tuning exits after {listed} of {model.config.n_layers} layers")
    tuned, agreements = with_tuned_exits(model, train, boundaries, workdir)
    clock.ends("tune")

    say("[4/4] answering questions with the full model, with drafts and with early exits, in turn")
    threshold, expected = threshold_for(tuned, rows)
    ways, answers = measure(tuned, talk, threshold)
    clock.ends("answer")
    summary = {
        "model": _MODEL.value,
        "verdict": verdict,
        "exits": list(boundaries),
        "agreement": agreements,
        "draft_exit": calibration.drafting_exit(tuned.config),
        "threshold": threshold,
        "expected_agreement": expected,
        "ways": {name: dataclasses.asdict(way) for name, way in ways.items()},
        "answers_differ": sum(
            a != b
            for a, b in zip(tokens_of(answers[FULL]), tokens_of(answers[DRAFTS]), strict=True)
        ),
        "seconds": clock.seconds,
    }
    try:
        write_text(workdir / "chat.txt", chat(tuned, answers[EXITS], colors=True))
        write_text(workdir / "summary.json", json.dumps(summary, indent=1))
        draw(workdir / "quickstart.png", summary)
    except OSError as error:
        raise unwritable(error, workdir) from error
    print(show(tuned, summary, answers, workdir))
    if _JSON.value:
        print(json.dumps(summary))


def begun(workdir: pathlib.Path) -> None:
    """Begin the workdir, or check that it is of the same settings."""
    from eejax.checkpoint.settings import require_same_settings

    settings = {"model": _MODEL.value, "tokens": _TOKENS.value, "passes": _PASSES.value}
    require_same_settings(workdir / "settings.json", settings, [], "quickstart")


def own_text(model, path: pathlib.Path):
    """Return the text that the model writes, which the file keeps."""
    import eejax
    from eejax.checkpoint.files import write_text
    from eejax.data.records import TEXT
    from eejax.data.sources import Document, Documents, FieldDocument

    if path.is_file():
        lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return Documents(
            tuple(
                Document(name, text) if form == TEXT else FieldDocument(name, text, form)
                for name, text, form in lines
            )
        )
    found = eejax.own_text(model, _TOKENS.value, watch=say)
    lines = [json.dumps([d.name, d.text, d.form]) for d in found.listed]
    write_text(path, "\n".join(lines) + "\n")
    return found


def batches(source, model, folder: str):
    """Return batches of the held-out text."""
    limit = int(_TOKENS.value * HELD_OUT)
    length = min(LENGTH, model.config.context_length)
    return held_out.of_source(source, model.tokenizer, folder, limit, length)


def graded(model, rows: Sequence, workdir: pathlib.Path) -> str:
    """Grade the model, write the page, and return the verdict."""
    from eejax.checkpoint.files import write_text
    from eejax.experiments import grade_page, grading

    path = workdir / "grade.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))["verdict"]["sentence"]
    every = max(1, model.config.n_layers // GRADED_EXITS)
    found = grading.grade(
        _MODEL.value, model, rows, "text of its own", every=every, pairs=4, new=32, say=launch.say
    )
    write_text(workdir / "grade.html", grade_page.page(found))
    write_text(path, json.dumps(grading.as_json(found), indent=1))
    say(found.verdict.sentence)
    return found.verdict.sentence


def with_tuned_exits(model, text, boundaries: Sequence[int], workdir: pathlib.Path):
    """Return (the model with tuned exits, their agreement before and after)."""
    import eejax
    from eejax.checkpoint.files import write_text

    folder, path = workdir / "model", workdir / "tuning.json"
    if not path.is_file():
        made = model.tune(
            text,
            boundaries,
            tokens=_TOKENS.value,
            length=LENGTH,
            passes=_PASSES.value,
            folder=workdir / "states",
            watch=say,
        )
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped while it saved
        made.save(folder)
        shutil.rmtree(workdir / "states")
        found = {
            when: [q.agreement for q in getattr(made.tuning, when)] for when in ("before", "after")
        }
        write_text(path, json.dumps(found))
    return eejax.load(folder), json.loads(path.read_text(encoding="utf-8"))


def threshold_for(model, rows: Sequence) -> tuple[float, float]:
    """Return the threshold of least depth that keeps `TARGET` on held-out text, and what it keeps.

    It is 1, which never fires, where no other keeps as much.
    """
    from eejax import calibration

    scores = calibration.score(model.params, model.config, rows)
    points = calibration.sweep(scores, (*THRESHOLDS, 1.0))
    point = calibration.fastest(points, TARGET)
    return point.threshold, point.agreement


def measure(tuned, talk, threshold: float) -> tuple[dict[str, TimedWay], dict[str, list]]:
    """Time whole greedy answers to `QUESTIONS` in turn: (ways, the results of each)."""
    from eejax.analysis.pairs import total_ratio
    from eejax.experiments.decode_times import program, with_layers_of
    from eejax.interop.api import drafting_generator, generator_of

    asked = [talk.ask(question, _NEW.value) for question in QUESTIONS]
    settings: dict[str, Any] = {"stop_token_ids": tuned.tokenizer.end_ids}
    full = generator_of(tuned, "full")
    generators = {
        FULL: full,
        DRAFTS: with_layers_of(full, drafting_generator(tuned)),
        EXITS: with_layers_of(full, generator_of(tuned, "recompute")),
    }
    runs = {
        name: lambda ids, g=g, more=more: g.generate([ids], _NEW.value, **settings, **more)
        for name, g in generators.items()
        for more in [{"threshold": threshold} if name == EXITS else {}]
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    answers: dict[str, list] = {name: [] for name in runs}
    for ids in {program(tuned.config, ids, _NEW.value): ids for ids in asked}.values():
        for run in runs.values():  # compiled, and not timed
            run(ids)
    if (theirs := peer()) is not None:  # it writes as many tokens as the full model
        lengths = {tuple(ids): len(runs[FULL](ids).ids(0)) for ids in asked}
        runs[PEER] = lambda ids: theirs(ids, lengths[tuple(ids)])
        seconds[PEER], answers[PEER] = [], []
    for number in range(_ROUNDS.value):
        for i, ids in enumerate(asked):
            for name in list(runs) if (number + i) % 2 else list(reversed(runs)):
                begin = time.perf_counter()
                result = runs[name](ids)
                seconds[name].append(time.perf_counter() - begin)
                if number == 0:
                    answers[name].append(result)
    found = {}
    want, questions = tokens_of(answers[FULL]), len(asked)
    for name in runs:
        ratio = total_ratio(seconds[FULL], seconds[name])
        got = answers[name] if name == PEER else tokens_of(answers[name])
        rate = sum(map(len, got)) * _ROUNDS.value / sum(seconds[name])
        same = [a == b for x, y in zip(want, got, strict=True) for a, b in zip(x, y, strict=False)]
        each = np.reshape(seconds[name], (-1, questions)).sum(0)
        speeds = np.reshape(seconds[FULL], (-1, questions)).sum(0) / each
        found[name] = TimedWay(rate, *ratio, float(np.mean(same)), tuple(speeds.tolist()))
    return found, answers


def tokens_of(results: Sequence) -> list[list[int]]:
    return [result.ids(0) for result in results]


def peer():
    """Return transformers' generation of the same file, None where it is not installed."""
    from eejax.checkpoint.hf.packages import find
    from eejax.experiments import peer_device

    installed = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    path = find(_MODEL.value)
    if not (_PEER.value and installed and path):
        return None
    cores = len(os.sched_getaffinity(0))
    return peer_device.generator_of_gguf(path, cores)


def draw(path: pathlib.Path, summary: dict[str, Any]) -> None:
    from eejax import analysis
    from eejax.analysis.grades import tuned_exits

    ways = {
        WAYS[name]: (way["speed"], way["low"], way["high"])
        for name, way in summary["ways"].items()
        if name != FULL
    }
    agreement = summary["agreement"]
    figure = tuned_exits(summary["exits"], agreement["before"], agreement["after"], ways)
    analysis.save(figure, path)


EXPLANATION = """\
speed: the full model's time for the questions, over the time of a way.
same tokens: those of the full model's answers; after one that differs, the rest is another text."""
WAYS = {
    FULL: "the full model",
    DRAFTS: "drafts, verified",
    EXITS: "early exits",
    PEER: "transformers",
}


def chat(model, results: Sequence, *, colors: bool) -> str:
    """Return the first questions with their answers, those in the colors of exits."""
    lines = []
    for question, result in zip(QUESTIONS, results, strict=False):
        text = (result.colored if colors else result.text)(0, model.tokenizer.decode)
        lines.append(f"> {question}\n{text}\n[{result.legend(colors)}]\n")
    return "\n".join(lines)


def show(model, summary: dict[str, Any], answers: dict[str, list], workdir: pathlib.Path) -> str:
    from eejax import analysis

    colors = sys.stdout.isatty()
    shown = chat(model, answers[EXITS][:2], colors=colors)
    before, after = summary["agreement"]["before"], summary["agreement"]["after"]
    exits = [
        [f"after layer {n}", f"{a:.1%}", f"{b:.1%}"]
        for n, a, b in zip(summary["exits"], before, after, strict=True)
    ]
    rows = []
    for name, way in summary["ways"].items():
        label = WAYS[name] + (f", threshold {summary['threshold']:g}" if name == EXITS else "")
        speed = "1" if name == FULL else f"{way['speed']:.2f} ({way['low']:.2f}-{way['high']:.2f})"
        rows.append([label, f"{way['tokens_per_second']:.1f}", speed, f"{way['same']:.1%}"])
    header = ["answers by", "tokens/s", "speed (95 % interval)", "same tokens"]
    files = ("grade.html", "quickstart.png", "chat.txt")
    command = f"  {launch.shell_command()} chat {workdir / 'model'}"
    return "\n".join(
        (
            f"\nAnswers with early exits (threshold {summary['threshold']:g}):\n\n{shown}",
            analysis.table(["exit", "agreement before tuning", "after"], exits),
            "",
            analysis.table(header, rows),
            EXPLANATION,
            "",
            verdict(summary),
            f"\nThis took {sum(summary['seconds'].values()):.0f} s. Look at:",
            *(f"  {workdir / name}" for name in files),
            "Chat with the full model, drafted where that is faster, or with early exits:",
            command,
            f"{command} --threshold={summary['threshold']:g}",
        )
    )


def verdict(summary: dict[str, Any]) -> str:
    """Return what the measurements say, as a sentence for each way."""

    def said(name: str) -> str:
        way = summary["ways"][name]
        if way["low"] > 1:
            return f"pay here: {way['speed']:.2f} times as fast"
        if way["high"] < 1:
            return f"do not pay here: {way['speed']:.2f} times as fast"
        return "make no difference here that can be told from noise"

    same = "all" if not summary["answers_differ"] else "NOT all"
    speeds, exit = summary["ways"][DRAFTS]["by_question"], summary["draft_exit"]
    drafts = "Drafts from the text itself (no exit is right often enough to draft here)"
    if exit is not None:
        drafts = f"Drafts of the exit after layer {exit}, and from the text itself,"
    return (
        f"{drafts} {said(DRAFTS)} ({min(speeds):.2f} to {max(speeds):.2f} by question; most where "
        f"the answer repeats text), and {same} tokens are the full model's.\n"
        f"Early exits that agree with the full model in {summary['expected_agreement']:.0%} of the "
        f"tokens of held-out text {said(EXITS)}."
    )


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted: the same command continues where it was stopped")
