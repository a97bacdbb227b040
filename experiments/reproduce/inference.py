"""EE-LLM's inference (Chen et al., ICML 2024: Figures 8 and 10, Tables 3 and 4) on a trained run.

    EEJAX_DATA=DATA XLA_FLAGS=--xla_force_host_platform_device_count=4 \\
        eejax reproduce inference --workdir=runs/demo

The paper generates with confidence thresholds from 1 down, by KV recomputation on one device and by
a pipeline of stages, and draws tasks' scores over speed. This is the same for any run, and small.

Figure 8, for every threshold: BoolQ and TruthfulQA by exact match, NaturalQuestions closed-book by
F1 and CNN/DailyMail by ROUGE-L, over the speed of `pipelined` for these answers (simulated, as
below); open-book questions and XSUM are not in the data. LAMBADA's last words that the engine
`recompute` completes as they stand there; and, as a small model completes hardly any, three scores
that are teacher-forced, each token by the exit that the threshold decides on: -log p of LAMBADA's
last words, perplexity of the run's held-out text, and agreement there with the full model's most
likely token. Speed is measured: prompts of held-out text, greedy, batch 1, without the prompt's
pass, over the engine `full` in interleaved pairs.

Figure 10: the same scores over the speed of `pipelined` on --stages stages, which is SIMULATED
(`eejax.experiments.latency`): from the exits that these texts' tokens left by, and the times of a
layer, of an exit and of several rows as measured here, on one device; all layers are taken to be
equal, and a hop from stage to stage to be free. Beside it `recompute`, simulated likewise, and as
measured. The paper's third curve, KV recomputation on four devices by tensor parallelism, is
simulated for layers of its 7B model on A100s (`inference_findings.tensor_parallel` says how).
Where there are as many devices as stages, such as the fake ones above, the real `pipelined` writes
some of the texts, to be compared. (Its time would say nothing: fake devices share the cores.)

Table 3: texts at some thresholds, with the exit of every token. Table 4: what every exit predicts
of the full model's text, and how confidently. Claims of the paper, checked here:

- the lower the threshold, the faster;
- at the highest thresholds, scores are the full model's, within their own 95 % intervals;
- `pipelined` is at least as fast as `recompute` for the same tokens (simulated);
- both emit the same tokens from the same exits (near-ties in rounding apart, which are counted).

The exit status is 1 where one does not hold. Reads lambada/lambada_openai.jsonl and
mixed_prompts/mixed_prompts.jsonl in the folder $EEJAX_DATA, and needs lm-eval's metrics. Leaves
results.json, fig8.png, fig8_tasks.png, fig10.png and tables.html in WORKDIR/inference.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from absl import flags

from eejax.common.errors import DataError, require
from eejax.common.paths import expanded
from eejax.experiments import decode_times, held_out, launch, step_costs
from eejax.experiments.reproduce import exit_tables, inference_findings, inference_tasks
from eejax.experiments.reproduce.inference_figures import SCORES, draw, draw_tasks
from eejax.experiments.reproduce.inference_tasks import BATCH, MIXED

_WORKDIR = flags.DEFINE_string("workdir", None, "The training run.")
_THRESHOLDS = flags.DEFINE_list(
    "thresholds", "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2".split(","), "Beside 1."
)
_RECORDS = flags.DEFINE_integer("records", 192, "Last words of LAMBADA.", lower_bound=2)
_ANSWERS = flags.DEFINE_integer("answers", 32, "Records of each task of Figure 8.", lower_bound=2)
_TOKENS = flags.DEFINE_integer("tokens", 100_000, "Held-out tokens to score.", lower_bound=1)
_PAIRS = flags.DEFINE_integer("pairs", 24, "Pairs of runs to time.", lower_bound=2)
_PROMPTS = flags.DEFINE_integer("prompts", 12, "Prompts of the runs timed.", lower_bound=1)
_STAGES = flags.DEFINE_integer("stages", 4, "Stages of `pipelined`.", lower_bound=1)
_TEXTS = flags.DEFINE_integer("texts", 4, "Prompts of Table 3.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "The folder; WORKDIR/inference by default.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")
flags.mark_flags_as_required(["workdir"])

LAMBADA = "lambada/lambada_openai.jsonl"


def main() -> None:
    from eejax import calibration
    from eejax.checkpoint.files import write_text
    from eejax.inference.options import EngineOptions
    from eejax.train.runs import open_run

    thresholds, folder = thresholds_of(_THRESHOLDS.value), data_folder()
    words = list(itertools.islice(lambada(folder), _RECORDS.value))
    mixed = [text for _, text in read(folder / MIXED, "prompt")]
    run = open_run(_WORKDIR.value)
    model, config = run.model, run.model.config
    require(config.n_exits > 0, "--workdir", _WORKDIR.value, "must be a run with early exits")
    stages, limit = _STAGES.value, config.n_layers
    require(stages <= limit, "--stages", stages, f"must be at most the model's {limit} layers")

    say(1, "scoring every exit on held-out text and LAMBADA")
    batches = list(held_out.batches(run, _TOKENS.value))
    rows = np.concatenate([b["tokens"] for b in batches])
    records = encoded(words, model.tokenizer, run.experiment.data.length)
    spoken = calibration.score(model.params, config, word_batches(records))
    text = calibration.score(model.params, config, batches)
    found = [teacher_forced(text, spoken, t) for t in thresholds]
    say(2, f"completing {len(records)} last words of LAMBADA at every threshold")
    full = {"accuracy": completed(model, records, "full", 1.0)}
    for row in found:
        row["accuracy"] = completed(model, records, "recompute", row["threshold"])

    part = min(config.context_length // 4, rows.shape[1])
    starts = np.linspace(0, len(rows) - 1, _PROMPTS.value).astype(int)
    prompts = [rows[i, :part].tolist() for i in starts]
    new = config.context_length - part - 1
    say(3, f"timing {new} tokens, {_PAIRS.value} times at every threshold")
    seconds, results = decode_times.measure(model, thresholds, prompts, new, _PAIRS.value)
    for row, speeds, texts in zip(found, decode_times.measured(seconds), results[1:], strict=True):
        layers = np.concatenate([r.layers[0, 1:] for r in texts])
        early = inference_tasks.early_share([r.exits[0, 1:] for r in texts], config.n_exits)
        row |= speeds | {"layers": float(layers.mean()), "early": early}
    say(4, "timing layers and heads")
    options = EngineOptions()
    widths = (1, *options.resolved(config, 1).buckets)
    times, factors = step_costs.of_layers(model.params, config, widths)

    def speed(traces, threshold):
        return decode_times.simulate(traces, config, stages, times, factors, threshold, options.cap)

    for row, texts in zip(found, results[1:], strict=True):
        row["simulated"] = speed([r.exits[0, 1:] for r in texts], row["threshold"])
    say(5, "answering the tasks of Figure 8 at every threshold")
    asked = inference_tasks.records(folder, model, _ANSWERS.value)
    tasks = inference_tasks.scored(model, asked, thresholds, speed)
    by_threshold = {
        row["threshold"]: [r.exits[0, 1:] for r in texts]
        for row, texts in zip(found, results[1:], strict=True)
    }
    shared = inference_findings.tensor_parallel(by_threshold, config, stages)
    say(6, "writing the tables" + ("" if too_few(stages) else ", and texts on stages"))
    chosen = thresholds[::2]
    asked = exit_tables.text_prompts(rows, mixed, model, _TEXTS.value)
    table3 = exit_tables.texts_of(model, asked, chosen)
    # Not one that repeats itself.
    varied = [len(set(text["texts"][0]["ids"])) for text in table3]
    table4 = exit_tables.exits_of(model, asked[int(np.argmax(varied))])
    check = None
    if not too_few(stages):
        check = decode_times.compared(model, stages, prompts, results[1:], thresholds)

    full |= full_scores(text, spoken)
    claims = judge(found, full, check)
    summary = {
        "step": model.step,
        "stages": stages,
        "pairs": _PAIRS.value,
        "new_tokens": new,
        "held_out_tokens": len(text),
        "records": len(records),
        "full": full,
        "thresholds": found,
        "costs": dataclasses.asdict(times) | {"rows": {str(w): f for w, f in factors.items()}},
        "pipelined_engine": check,
        "tasks": tasks,
        "tensor_parallel": shared,
        "claims": claims,
    }
    scale = f"{model.config.n_layers} layers of width {config.d_model}, step {model.step}, one CPU"
    summary["findings"] = inference_findings.findings(summary, table3, table4, config, scale)
    whole = summary | {"table3": table3, "table4": table4}
    out = expanded(_OUT.value or pathlib.Path(_WORKDIR.value) / "inference")
    drawn = [*draw(out, found, full, stages), draw_tasks(out, tasks)]
    page = exit_tables.page_of(table3, table4)
    for name, content in (("tables.html", page), ("results.json", json.dumps(whole, indent=1))):
        write_text(out / name, content)
        drawn.append(out / name)
    exit_tables.show(table3, table4)
    show(summary, config.n_layers)
    print(f"\nleft: {', '.join(map(str, drawn))}", flush=True)
    if _JSON.value:
        print(json.dumps(summary))
    sys.exit(0 if all(c["holds"] for c in claims) else 1)


def say(number: int, what: str) -> None:
    print(f"[{number}/6] {what}", flush=True)


def thresholds_of(texts: Sequence[str]) -> list[float]:
    """Return thresholds from 1 down."""
    values = launch.numbers("thresholds", texts)
    fine = all(0 <= t <= 1 for t in values) and any(t < 1 for t in values)
    require(fine, "--thresholds", ",".join(texts), "must lie in [0, 1], one of them below 1")
    return sorted({1.0, *values}, reverse=True)


def too_few(stages: int) -> bool:
    import jax

    return jax.device_count() < stages


# Data


def data_folder() -> pathlib.Path:
    value = os.environ.get("EEJAX_DATA")
    if not value:
        raise DataError(f"EEJAX_DATA is not set: set it to the folder that has {LAMBADA}.")
    return expanded(value)


def read(path: pathlib.Path, field: str) -> Iterator[tuple[int, str]]:
    from eejax.data import records

    return records.json_lines(str(path), field)


def lambada(folder: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Return (text, its last word with the space before it)."""
    texts, words = read(folder / LAMBADA, "context"), read(folder / LAMBADA, "continuation")
    for (_, text), (_, word) in zip(texts, words, strict=True):
        yield text, f" {word}"


Records = Sequence[tuple[list[int], list[int]]]


def encoded(words: Sequence[tuple[str, str]], tokenizer, length: int) -> Records:
    """Return (prompt, last word) as ids, together at most `length` tokens.

    That is the length of the run's training. They are the text's last tokens. Texts without room
    for their word and a token before it are left out.
    """
    records = []
    for text, word in words:
        ids = tokenizer.encode(text).tolist()
        target = tokenizer.encode(word, begins=False).tolist()
        if ids and target and len(target) < length:
            records.append((ids[-(length - len(target)) :], target))
    if len(records) < 2:
        raise DataError(f"{LAMBADA}: fewer than 2 last words fit into {length} tokens.")
    return records


def word_batches(records: Records) -> Iterator[dict[str, np.ndarray]]:
    """Return batches of one text in each row, in which the last word's tokens count."""
    length = max(len(prompt) + len(target) for prompt, target in records) - 1
    texts = [(prompt + target, len(prompt)) for prompt, target in records]
    return held_out.padded(texts, length)


# Scores


def by_unit(scores, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Return, of every text, (sum of -log p of its labels under their exits, its labels)."""
    from eejax import calibration

    number = calibration.emitting_exits(scores, threshold)
    nll = np.take_along_axis(scores.nlls, number[None], 0)[0]
    _, unit = np.unique(scores.units, return_inverse=True)
    return np.bincount(unit, nll.astype(np.float64)), np.bincount(unit)


def teacher_forced(text, spoken, threshold: float) -> dict:
    """Score texts at a threshold.

    more_than_full is the -log p by which a last word exceeds the full model's, and the share by
    which perplexity is higher. They are paired by text, and so more exact.
    """
    from eejax import calibration
    from eejax.analysis.intervals import Interval, mean_interval

    point = calibration.at_threshold(text, threshold)
    words, (sums, counts) = by_unit(spoken, threshold)[0], by_unit(text, threshold)
    more = mean_interval(sums - by_unit(text, 1.0)[0], counts)
    return {
        "threshold": threshold,
        "word_loss": float(words.mean()),
        "perplexity": point.perplexity,
        "agreement": point.agreement,
        "depth": point.depth,
        "shares": point.shares,
        "more_than_full": {
            "word_loss": mean_interval(words - by_unit(spoken, 1.0)[0])._asdict(),
            "perplexity": Interval(*(math.exp(x) - 1 for x in more))._asdict(),
        },
    }


def full_scores(text, spoken) -> dict[str, dict]:
    """Return scores of the full model, with their 95 % intervals."""
    from eejax.analysis.intervals import Interval, mean_interval

    perplexity = Interval(*map(math.exp, mean_interval(*by_unit(text, 1.0))))
    return {
        "word_loss": mean_interval(by_unit(spoken, 1.0)[0])._asdict(),
        "perplexity": perplexity._asdict(),
    }


def completed(model, records: Records, engine: str, threshold: float) -> dict[str, float]:
    """Return the share of last words that greedy decoding writes exactly.

    The threshold applies to the first token too, which the prompt's pass makes.
    """
    from eejax.analysis.intervals import share_interval
    from eejax.inference import Generator

    generator = Generator.make(model.params, model.config, engine)
    longest, right = max(len(target) for _, target in records), 0
    for begin in range(0, len(records), BATCH):
        prompts, targets = zip(*records[begin : begin + BATCH], strict=True)
        # As many requests each time, so that nothing is compiled for the last ones.
        filled = [*prompts, *[prompts[0]] * (BATCH - len(prompts))]
        result = generator.generate(filled, longest, threshold=threshold, prefill_exit=True)
        right += sum(result.ids(i)[: len(t)] == t for i, t in enumerate(targets))
    return share_interval(right, len(records))._asdict()


def judge(found: Sequence[dict], full: dict, check: dict | None) -> list[dict]:
    """Judge the claims, each with a line that says what was found and whether it `holds`.

    `found` is by threshold from 1 down; `full` has scores of the full model with intervals; `check`
    is the result of `compared`, None if it was not run.
    """
    first, last = found[0], found[-1]
    slower = [
        f"{row['threshold']:g} ({text_of(row['over_above'])} times the threshold above)"
        for row in found
        if row["over_above"]["high"] < 1
    ]
    claims = [
        {
            "claim": "`recompute` is the faster the lower the threshold: "
            f"{first['speed']['ratio']:.2f} times full's at 1, {last['speed']['ratio']:.2f} at "
            f"{last['threshold']:g}, {text_of(last['over_first'])} times the speed at 1; "
            f"slower than the threshold above, beyond the interval: {', '.join(slower) or 'none'}",
            "holds": not slower and last["over_first"]["low"] > 1,
        }
    ]
    for key, whole in full.items():

        def value(row, key=key):
            return row[key]["score"] if key == "accuracy" else row[key]

        def within(row, w=whole, v=value):
            return w["low"] <= v(row) <= w["high"]

        high = found[:2]
        lowest = list(itertools.takewhile(within, found))
        there = ", ".join(f"{value(row):.4g} at {row['threshold']:g}" for row in high)
        if more := high[-1]["more_than_full"].get(key):
            shown = ".2%" if key == "perplexity" else ".3f"
            more = {k: f"{x:+{shown}}" for k, x in more.items()}
            there += f" (paired: {more['score']}, {more['low']} to {more['high']})"
        claims.append(
            {
                "claim": f"{SCORES[key]}: {there}, where the full model's is {whole['score']:.4g} "
                f"({whole['low']:.4g}-{whole['high']:.4g}); within that down to "
                + (f"{lowest[-1]['threshold']:g}" if lowest else "none"),
                "holds": all(map(within, high)),
            }
        )
    ratios = [row["simulated"]["pipelined"] / row["simulated"]["recompute"] for row in found]
    least = int(np.argmin(ratios))
    claims.append(
        {
            "claim": "`pipelined` is at least as fast as `recompute` for the same tokens "
            f"(simulated): {min(ratios):.3f} (at {found[least]['threshold']:g}) "
            f"to {max(ratios):.3f} times",
            "holds": min(ratios) >= 1 - 1e-9,
        }
    )
    if check:
        claims.append(
            {
                "claim": "`pipelined` and `recompute` emit the same tokens from the same exits: "
                f"{check['differ']} of {check['tokens']} differ, after near-ties in "
                f"{check['near_ties']} texts, without in {check['others']}",
                "holds": check["others"] == 0,
            }
        )
    return claims


def text_of(ratio: dict[str, float]) -> str:
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def show(summary: dict, n_layers: int) -> None:
    from eejax import analysis

    stages, full, found = summary["stages"], summary["full"], summary["thresholds"]
    print(
        f"\nFigure 8: {summary['records']} last words of LAMBADA, {summary['held_out_tokens']} "
        f"held-out tokens, {summary['pairs']} pairs of {summary['new_tokens']} new tokens"
    )
    header = [
        "threshold",
        "last words",
        "-log p",
        "perplexity",
        "agreement",
        f"depth of {n_layers}",
        "layers run",
        "times full (95 %)",
    ]
    whole = [
        f"{full['accuracy']['score']:.1%}",
        f"{full['word_loss']['score']:.2f}",
        f"{full['perplexity']['score']:.3f}",
        "100.0%",
        f"{n_layers:.2f}",
        f"{n_layers:.2f}",
        "1",
    ]
    cells = [
        [
            f"{r['threshold']:g}",
            f"{r['accuracy']['score']:.1%}",
            f"{r['word_loss']:.2f}",
            f"{r['perplexity']:.3f}",
            f"{r['agreement']:.1%}",
            f"{r['depth']:.2f}",
            f"{r['layers']:.2f}",
            text_of(r["speed"]),
        ]
        for r in found
    ]
    print(analysis.table(header, [["full", *whole], *cells]))
    print("\nFigure 8: scores of tasks, and times full on stages (simulated)")
    tasks = inference_tasks.TASKS
    header = ["threshold", *(f"{tasks[n].title}, {tasks[n].metric}" for n in summary["tasks"])]
    rows = zip(*summary["tasks"].values(), strict=True)
    cells = [
        [f"{some[0]['threshold']:g}"]
        + [f"{r['score']['score']:.3f} at {r['speed']['pipelined']:.2f}" for r in some]
        for some in rows
    ]
    print(analysis.table(header, cells))
    print(
        f"\nFigure 10: times full; simulated with measured times of equal layers, {stages} stages"
    )
    header = ["threshold", "recompute, measured", "recompute, simulated", "pipelined, simulated"]
    cells = [
        [
            f"{r['threshold']:g}",
            text_of(r["speed"]),
            *(f"{r['simulated'][k]:.2f}" for k in ("recompute", "pipelined")),
        ]
        for r in found
    ]
    print(analysis.table(header, cells) + "\n")
    for one in summary["findings"]:
        print(f"{one['place']}: theirs: {one['theirs']}; ours: {one['ours']}: {one['verdict']}")
    print()
    for claim in summary["claims"]:
        print(f"{'holds' if claim['holds'] else 'FAILS'}  {claim['claim']}")
    if summary["pipelined_engine"] is None:
        print(
            f"not checked: the tokens of the real `pipelined`, which needs {stages} devices; "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={stages} makes fake ones"
        )


if __name__ == "__main__":
    launch.run(main)
