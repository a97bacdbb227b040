"""Early exits of a real model: speed and scores of tasks at thresholds with a guarantee.

    EEJAX_DATA=DATA eejax bench tasks --model=runs/quickstart/model --json

Texts of $EEJAX_DATA that are of other kinds than the exits were tuned on (Wikipedia, a novel,
worked mathematics and programs) are scored once. For each agreement, such as 95 %, one half finds
the lowest threshold that keeps it with a probability of 90 % (Learn-then-Test; windows are the
units), with all exits or with one of them, and the other half shows what it gives: agreement by
kind of text, mean depth, and predicted speed. Where no threshold passes, tokens never leave.

Then the model answers each task's records alone and greedily, with the engine "full" and with
"recompute" at each of these thresholds, in turns. Reported: scores with their 95 % intervals,
seconds of an answer, and `speed`, seconds of a token of "full" over those of the threshold, whole
calls, prompt included. Programs that the model writes for HumanEval are run, in a process of their
own with limits of time and memory. Needs lm-eval's metrics (`pip install 'eejax[eval]'`).
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from eejax.common.errors import ConfigError, DataError
from eejax.experiments import answered_tasks, data_sets, held_out, launch
from eejax.experiments.answered_tasks import TASKS
from eejax.experiments.conversation import encoder_of
from eejax.experiments.decode_times import program

_MODEL = flags.DEFINE_string("model", None, "A model with exits, as `eejax.load` takes it.")
_TASKS = flags.DEFINE_list("tasks", list(TASKS), "Tasks.")
_RECORDS = flags.DEFINE_integer("records", 16, "Records of a task.", lower_bound=2)
_AGREEMENTS = flags.DEFINE_list("agreements", ["0.95", "0.97", "0.99"], "Shares to keep.")
_TOKENS = flags.DEFINE_integer("tokens", 49_152, "Tokens of text to score.", lower_bound=128)
_LENGTH = flags.DEFINE_integer("length", 64, "Tokens of a window.", lower_bound=8)
_LONGEST = flags.DEFINE_integer("longest", 700, "Most tokens of a prompt.", lower_bound=16)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
flags.mark_flag_as_required("model")

KINDS = {
    "Wikipedia": "wikitext2/test_a.txt",
    "a novel": "books/great_expectations.txt",
    "mathematics": "gsm8k/train_500.jsonl",
    "programs": "mbpp/mbpp.jsonl",
}
FIELDS = {"gsm8k/train_500.jsonl": ("question", "answer"), "mbpp/mbpp.jsonl": ("text", "code")}
CHARACTERS_PER_TOKEN = 16  # of text that is read, so that a book is not tokenized whole
RISK = 0.1  # probability that a guarantee may fail
FULL = "full"
GATE = "max_probability"


@dataclasses.dataclass(frozen=True)
class SafeThreshold:
    """A threshold that keeps an agreement, and what it gives on text that did not choose it.

    Attributes:
      target: agreement to keep.
      exits: boundaries of the exits that tokens may leave by.
      threshold: threshold of all of them; 1, which never fires, where none passed.
      agreement: share of tokens that are the full model's.
      by_kind: the same by kind of text.
      depth: mean layers below the emitting exit.
      predicted: predicted speed over that of the full model, for one request.
      windows: windows that tested the thresholds.
    """

    target: float
    exits: tuple[int, ...]
    threshold: float
    agreement: float
    by_kind: Mapping[str, float]
    depth: float
    predicted: float
    windows: int


def main() -> None:
    import eejax

    targets = launch.numbers("agreements", _AGREEMENTS.value)
    if not all(0.5 <= t < 1 for t in targets):
        raise ConfigError(f"--agreements = {_AGREEMENTS.value}: must lie in [0.5, 1).")
    if unknown := [name for name in _TASKS.value if name not in TASKS]:
        raise ConfigError(f"--tasks = {unknown}: must be of {', '.join(TASKS)}.")
    answered_tasks.metrics()  # what is missing is named before any work
    with launch.flags_named({"path": "model"}):
        model = eejax.load(_MODEL.value)
    if not model.config.n_exits:
        raise ConfigError(
            f"--model = {_MODEL.value!r}: has no early exits: model.tune() adds some."
        )
    launch.say("scoring every exit on text of several kinds ...")
    safe, seconds = thresholds_of(model, targets)
    result: dict[str, Any] = {
        "model": _MODEL.value,
        "layers": model.config.n_layers,
        "exits": list(model.config.exit_boundaries[:-1]),
        "thresholds": [dataclasses.asdict(found) for found in safe],
        "full_step_seconds": seconds,
        "tasks": {},
    }
    generators = generators_of(model, safe)
    for name in _TASKS.value:
        launch.say(f"answering {TASKS[name].title} ...")
        result["tasks"][name] = answered(model, generators, name)
    print(show(result))
    if _JSON.value:
        print(json.dumps(result))


def text_of(kind: str) -> str:
    """Return the text of a kind. Raises `DataError` for a file that is missing."""
    name = KINDS[kind]
    if name not in FIELDS:
        return data_sets.path(name).read_text(encoding="utf-8")
    rows = data_sets.records(name)
    return "\n\n".join("\n".join(row[field] for field in FIELDS[name]) for row in rows)


def scored_kinds(model) -> tuple[Any, np.ndarray]:
    """Return (scores of all kinds, [n] the kind's number of each position)."""
    from eejax import calibration, data

    each = _TOKENS.value // len(KINDS)
    length = min(_LENGTH.value, model.config.context_length)
    found, kinds, before = [], [], 0
    for number, kind in enumerate(KINDS):
        part = text_of(kind)[: CHARACTERS_PER_TOKEN * each]
        with tempfile.TemporaryDirectory() as folder:
            source = data.Documents((data.Document(kind, part),))
            for batch in held_out.of_source(source, model.tokenizer, folder, each, length):
                size = len(batch["labels"])
                found.append({**batch, "units": before + np.arange(size)})
                kinds += [number] * size
                before += size
    scores = calibration.score(model.params, model.config, found)
    return scores, np.asarray(kinds)[scores.units]


def thresholds_of(model, targets: Sequence[float]) -> tuple[list[SafeThreshold], float]:
    """Return the fastest safe threshold for each agreement, and the seconds of a full step."""
    from eejax.calibration import calibrate, prediction
    from eejax.experiments import grade_times

    scores, kinds = scored_kinds(model)
    half = scores.units % 2 == 0  # windows of every kind on either side
    testing, checking = (prediction.select(scores, positions=p) for p in (half, ~half))
    prompt = scores.labels[:32].tolist()
    times = grade_times.measure_times(model, [prompt], 48)
    own = model.config.exit_boundaries[:-1]
    found = []
    for target in targets:
        options = []
        for exits in {own, *((b,) for b in own)}:
            safe = calibrate(prediction.select(testing, exits), 1 - target, RISK, gate=GATE)
            point = prediction.gate_point(checking, times, GATE, exits, safe.threshold)
            options.append((point.speed if safe.passed else 0.0, point, safe))
        _, point, safe = max(options, key=lambda option: (option[0], -len(option[1].exits)))
        found.append(
            SafeThreshold(
                target,
                point.exits,
                point.threshold,
                point.agreement,
                by_kind(prediction.select(scores, positions=~half), kinds[~half], point),
                point.depth,
                point.speed,
                safe.units,
            )
        )
    return found, times.full(model.config.n_layers)


def by_kind(scores, kinds: np.ndarray, point) -> dict[str, float]:
    """Return the agreement at a point by kind of text."""
    from eejax.calibration import emitting_exits
    from eejax.calibration.prediction import select

    chosen = select(scores, point.exits)
    number = emitting_exits(chosen, point.threshold, gate=point.gate)
    emitted = np.take_along_axis(chosen.tokens, number[None], 0)[0]
    same = emitted == chosen.tokens[-1]
    return {kind: float(same[kinds == i].mean()) for i, kind in enumerate(KINDS)}


def generators_of(model, safe: Sequence[SafeThreshold]) -> dict[str, tuple[Any, dict]]:
    """Return (generator, its rules) by name of a way; all read the same arrays of layers."""
    from eejax.experiments.decode_times import with_layers_of
    from eejax.inference import Generator

    full = Generator.make(model.params, model.config, FULL)
    made: dict[tuple[int, ...], Any] = {}
    ways: dict[str, tuple[Any, dict]] = {FULL: (full, {})}
    for found in safe:
        if found.exits not in made:
            kept = tuple(e for e in model.config.exits if e.boundary in found.exits)
            config = model.config.replace(exits=kept)
            made[found.exits] = with_layers_of(
                full, Generator.make(model.params, config, "recompute")
            )
        rules = {"threshold": found.threshold, "gate": GATE}
        ways[f"{found.target:g}"] = made[found.exits], rules
    return ways


def answered(model, generators: dict[str, tuple[Any, dict]], name: str) -> dict[str, Any]:
    """Answer a task's records in every way: scores, seconds and speeds by way."""
    from eejax.analysis.intervals import mean_interval, share_interval
    from eejax.analysis.pairs import total_ratio

    task, tokenizer, encode = TASKS[name], model.tokenizer, encoder_of(model)
    room = min(_LONGEST.value, model.config.context_length - task.new - 1)
    # Prompts of one compiled program alone, the one that most of them have.
    by_program: dict[tuple[int, int], list] = {}
    for record in answered_tasks.read(task, 8 * _RECORDS.value):
        text = record.text
        ids = tokenizer.encode(text).tolist() if task.continues else encode(text)
        if len(ids) <= room:
            one = program(model.config, ids, task.new)
            by_program.setdefault(one, []).append((ids, record))
    asked = max(by_program.values(), key=len, default=[])[: _RECORDS.value]
    if len(asked) < 2:
        raise DataError(f"{task.title}: fewer than 2 prompts have at most {room} tokens.")
    settings: dict[str, Any] = {"stop_token_ids": tokenizer.end_ids}
    if task.ends:
        settings |= {"stop_strings": task.ends, "decode_text": tokenizer.decode}
    seconds: dict[str, list[float]] = {way: [] for way in generators}
    scores: dict[str, list[float]] = {way: [] for way in generators}
    counts: dict[str, list[int]] = {way: [] for way in generators}
    early: dict[str, list[float]] = {way: [] for way in generators}
    for generator, rules in generators.values():
        generator.generate([asked[0][0]], task.new, **settings, **rules)
    for number, (ids, record) in enumerate(asked):
        ways = list(generators) if number % 2 else list(reversed(generators))
        results = {}
        for way in ways:
            generator, rules = generators[way]
            begin = time.perf_counter()
            result = generator.generate([ids], task.new, **settings, **rules)
            seconds[way].append(time.perf_counter() - begin)
            results[way] = result
        for way, result in results.items():
            text = result.text(0, tokenizer.decode)
            cut = min((at for end in task.ends if (at := text.find(end)) >= 0), default=len(text))
            scores[way].append(record.score(text[:cut]))
            counts[way].append(len(result.ids(0)))
            early[way].append(float((result.exits[0] < result.n_exits).mean()))
    rows = {}
    for way in generators:
        each = np.divide(seconds[way], counts[way])
        ratio = total_ratio(np.divide(seconds[FULL], counts[FULL]), each)
        change, own = np.subtract(scores[way], scores[FULL]), np.array(scores[way])
        score = share_interval(round(own.sum()), len(own)) if task.binary else mean_interval(own)
        rows[way] = {
            "score": score._asdict(),
            "change": mean_interval(change)._asdict(),
            "seconds": float(np.mean(seconds[way])),
            "tokens": float(np.mean(counts[way])),
            "speed": dict(zip(("ratio", "low", "high"), ratio, strict=True)),
            "early": float(np.mean(early[way])),
        }
    return {"metric": task.metric, "records": len(asked), "ways": rows}


def show(result: Mapping[str, Any]) -> str:
    """Return tables of thresholds and of tasks."""
    from eejax import analysis

    rows = [
        [
            f"{t['target']:.0%}",
            ", ".join(map(str, t["exits"])) if t["threshold"] < 1 else "none",
            f"{t['threshold']:.2f}",
            f"{t['agreement']:.1%}",
            *(f"{share:.1%}" for share in t["by_kind"].values()),
            f"{t['depth']:.1f}",
            f"{t['predicted']:.2f}",
        ]
        for t in result["thresholds"]
    ]
    header = ["to keep", "exits", "threshold", "kept", *KINDS, "depth", "predicted speed"]
    parts = [analysis.table(header, rows)]
    rows = []
    for name, task in result["tasks"].items():
        for way, row in task["ways"].items():
            score, speed = row["score"], row["speed"]
            rows.append(
                [
                    f"{TASKS[name].title}, {task['metric']}" if way == FULL else "",
                    way if way == FULL else f"{float(way):.0%}",
                    f"{score['score']:.3f} ({score['low']:.3f}-{score['high']:.3f})",
                    f"{row['seconds']:.2f}",
                    f"{row['tokens']:.0f}",
                    f"{speed['ratio']:.2f} ({speed['low']:.2f}-{speed['high']:.2f})",
                    f"{row['early']:.0%}",
                ]
            )
    header = ["task", "agreement", "score (95 %)", "seconds", "tokens", "speed (95 %)", "early"]
    parts.append(analysis.table(header, rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    launch.run(main)
