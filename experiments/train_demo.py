"""Train a small early-exit model on the standard library, and show what early exit saves.

    eejax train-demo            (or: make train-demo)
    eejax train-demo --tiny     (shows only that everything works)

It takes under ten minutes on 2 cores without a GPU. It writes the checkpoint, metrics.jsonl,
summary.json, sample.txt, and loss.png, quality_speed.png and exits.png into --workdir. The same
command resumes a run that was stopped, and repeats only the measurements of a finished one.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time

import numpy as np
from absl import flags
from ml_collections import config_flags

from eejax.common.paths import expanded
from eejax.experiments import config_files, launch

_DEFAULT = config_files.FOLDER / "demo.py"
_CONFIG = config_flags.DEFINE_config_file("config", str(_DEFAULT), "The experiment.")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the results: runs/demo, or runs/tiny with --tiny."
)
_TINY = flags.DEFINE_bool("tiny", False, "A model and budget for testing: under a minute.")
_PAIRS = flags.DEFINE_integer("pairs", 24, "Timed pairs for each threshold.", lower_bound=2)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

THRESHOLDS = tuple(np.round(np.arange(0.30, 1.0, 0.02), 2).tolist())
TARGETS = (0.99, 0.97, 0.95)  # agreement of the thresholds whose speed is measured
EXPLANATION = """\
trigram and zlib: simple compressors of the same text, for comparison.
agreement, exit depth (in layers): means over tokens of held-out text.
layers run, tokens/s: of generated texts, medians over runs.
times full: the median ratio over pairs of runs, with its 95 % interval."""
TEMPERATURE = 0.7  # of the sample that is shown
MARGIN = 0.003  # margin of agreement: a threshold at the edge of its target might miss it
EVAL_TOKENS = 150_000  # held-out tokens scored at every exit
PROMPT_TOKENS, PROMPTS = 64, 12


def tiny(experiment):
    """Return the same experiment in a size that shows only that everything works."""
    change = dataclasses.replace
    exits = tuple(change(experiment.model.exits[0], boundary=n) for n in (1, 2))
    return change(
        experiment,
        model=experiment.model.replace(
            n_layers=4,
            d_model=32,
            n_heads=2,
            n_kv_heads=2,
            head_dim=16,
            d_ff=64,
            context_length=128,
            exits=exits,
        ),
        exit_weights=change(experiment.exit_weights, weights=(0.5, 0.5)),
        data=change(experiment.data, length=128, max_bytes=300_000),
        optimizer=change(experiment.optimizer, learning_rate=1e-2, warmup_steps=5),
        train=change(
            experiment.train, steps=30, batch_size=4, log_every=5, eval_every=10, eval_batches=2
        ),
    )


def main() -> None:
    from eejax import calibration
    from eejax.checkpoint.files import unwritable, write_text
    from eejax.checkpoint.model import CHECKPOINTS
    from eejax.train.config import Experiment
    from eejax.train.loop import fit
    from eejax.train.runs import open_run

    workdir = expanded(_WORKDIR.value or ("runs/tiny" if _TINY.value else "runs/demo"))
    begin = time.perf_counter()
    experiment = Experiment.from_dict(_CONFIG.value)
    experiment = tiny(experiment) if _TINY.value else experiment
    pairs, tokens = (3, 4096) if _TINY.value else (_PAIRS.value, EVAL_TOKENS)
    say(f"[1/4] training on {experiment.data.source}")
    result = fit(experiment, workdir)
    launch.end_if_stopped(result)
    run = open_run(workdir)
    model = run.model
    trained = time.perf_counter()

    say("[2/4] scoring every exit on held-out documents, beside a trigram and zlib")
    dataset = run.dataset()
    batches, labels = held_out(dataset.split("validation"), experiment.data.length, tokens)
    scores = calibration.score(model.params, model.config, batches)
    quality = exit_quality(dataset, model, scores, labels)

    say("[3/4] sweeping thresholds; timing recompute against full on held-out prompts")
    per_token = scores.bytes_per_token(model.tokenizer)
    points = calibration.sweep(scores, (*THRESHOLDS, 1.0))
    measured, sample = measure(model, points, prompts(dataset.split("validation")), pairs)

    say("[4/4] drawing")
    summary = {
        "steps": model.step,
        "parameters": sum(int(a.size) for a in leaves(model.params)),
        "bits_per_byte": quality,
        "measured": measured,
        "sweep": [
            dataclasses.asdict(p) | {"bits_per_byte": p.bits_per_byte(per_token)} for p in points
        ],
        "seconds": {"train": trained - begin, "rest": time.perf_counter() - trained},
    }
    try:
        draw(workdir, model, summary, sample)
        write_text(workdir / "summary.json", json.dumps(summary, indent=1))
    except OSError as error:
        raise unwritable(error, workdir / CHECKPOINTS) from error
    show(workdir, model, summary, sample)
    if _JSON.value:
        print(json.dumps({k: summary[k] for k in ("bits_per_byte", "measured", "seconds")}))


def held_out(split, length: int, tokens: int):
    """Return batches evenly over the split, and the positions of their counted labels in it."""
    from eejax import data

    size = 16
    limit = max(1, tokens // (size * length))
    windows = data.even_windows(split, length, limit * size)
    where = windows[:, None] * length + 1 + np.arange(length)[None]
    return data.batches(split, size, length, limit=limit), where[where < len(split)]


def exit_quality(dataset, model, scores, labels: np.ndarray) -> dict[str, float]:
    """Return bits per byte of every exit, of the trigram on the same tokens, and of zlib."""
    from eejax import analysis
    from eejax.train.metrics import exit_names

    train, validation = dataset.split("train"), dataset.split("validation")
    nats = scores.nlls.mean(1, dtype=np.float64)
    per_token = scores.bytes_per_token(model.tokenizer)
    scale = 1 / np.log(2) / per_token
    quality = dict(zip(exit_names(model.config), (nats * scale).tolist(), strict=True))
    text = validation.read(0, len(validation))
    if model.config.vocab_size <= 512:  # a trigram over bytes
        trigram = analysis.Trigram(train.read(0, len(train)), model.config.vocab_size)
        # The split's second token has one token before it; it is given the end of a document.
        bits = trigram.bits(np.append(np.int32(validation.eos_id), text))
        quality["trigram"] = float(bits[labels - 1].mean() / per_token)
    quality["zlib"] = analysis.compression_bits_per_byte(model.tokenizer.decode(text).encode())
    return quality


def prompts(split) -> list[list[int]]:
    """Return beginnings for generation, evenly over the held-out text."""
    starts = np.linspace(0, len(split) - PROMPT_TOKENS - 1, PROMPTS).astype(int)
    return [split.read(int(s), PROMPT_TOKENS).tolist() for s in starts]


def measure(model, points, starts, pairs: int):
    """Time `recompute` against `full` at the thresholds that keep TARGETS.

    Pairs of whole generations are interleaved (same prompt, same number of tokens, greedy, batch
    1).
    """
    from eejax import analysis, calibration
    from eejax.inference import Generator

    new = model.config.context_length - PROMPT_TOKENS
    full = Generator.make(model.params, model.config, "full")
    early = Generator.make(model.params, model.config, "recompute")
    chosen = {}
    for target in TARGETS:
        point = calibration.fastest(points, min(1.0, target + MARGIN))
        chosen.setdefault(point.threshold, point)
    rows = []
    for threshold, point in chosen.items():
        last = []

        def generate_early(i, threshold=threshold, last=last):
            last.append(early.generate([starts[i % len(starts)]], new, threshold=threshold))

        seconds = analysis.interleave(
            [lambda i: full.generate([starts[i % len(starts)]], new), generate_early],
            pairs,
            time.perf_counter,
        )
        ratio = analysis.median_ratio(*seconds)
        exits = np.concatenate([r.exits[0] for r in last])
        rows.append(
            {
                "threshold": threshold,
                "agreement": point.agreement,
                "depth": point.depth,
                "executed_layers": float(np.mean(np.concatenate([r.layers[0, 1:] for r in last]))),
                "speedup": ratio.median,
                "low": ratio.low,
                "high": ratio.high,
                "tokens_per_second": new / float(np.median(seconds[1])),
                "full_tokens_per_second": new / float(np.median(seconds[0])),
                "shares": [float(np.mean(exits == e)) for e in range(model.config.n_exits + 1)],
                "held_out_shares": list(point.shares),
            }
        )
    # Greedy texts of so small a model soon repeat themselves.
    drawn = dict(threshold=rows[-1]["threshold"], temperature=TEMPERATURE)
    return rows, (starts[0], early.generate([starts[0]], new, **drawn))


def draw(workdir: pathlib.Path, model, summary: dict, sample) -> None:
    from eejax import analysis
    from eejax.train.metrics import read_metrics

    quality, measured = summary["bits_per_byte"], summary["measured"]
    per_byte = quality["final"] / summary["sweep"][-1]["nll"]
    # No line for the trigram: it is scored on other held-out text than the run's own evaluations.
    loss = analysis.loss_curves(read_metrics(workdir), bits_scale=per_byte, unit="bits per byte")
    analysis.save(loss, workdir / "loss.png")
    speed = analysis.quality_against_speed(
        summary["sweep"], model.config.n_layers, measured=measured
    )
    analysis.save(speed, workdir / "quality_speed.png")
    fast = measured[-1]
    shares = {"held-out text": fast["held_out_shares"], "generated": fast["shares"]}
    title = f"Where tokens leave (threshold {fast['threshold']:g})"
    histogram = analysis.exit_histogram(shares, model.config.exit_boundaries, title=title)
    analysis.save(histogram, workdir / "exits.png")
    prompt, result = sample
    text = model.tokenizer.decode(prompt) + result.colored(0, model.tokenizer.decode)
    (workdir / "sample.txt").write_text(text + "\n", encoding="utf-8")


def show(workdir: pathlib.Path, model, summary: dict, sample) -> None:
    from eejax import analysis

    prompt, result = sample
    decode = model.tokenizer.decode
    new = (result.colored if sys.stdout.isatty() else result.text)(0, decode)
    threshold = summary["measured"][-1]["threshold"]
    say(
        f"\nA held-out prompt up to |, and a text after it (threshold {threshold:g}, temperature "
        f"{TEMPERATURE:g}):\n{decode(prompt)}|{new}\n"
    )
    print(result.summary() + "\n")
    quality = summary["bits_per_byte"]
    print(
        analysis.table(
            ["held-out text", "bits/byte"], [[k, f"{v:.3f}"] for k, v in quality.items()]
        )
    )
    rows = [
        [
            f"threshold {m['threshold']:g}",
            f"{m['agreement']:.1%}",
            f"{m['depth']:.2f}",
            f"{m['executed_layers']:.2f}",
            f"{m['tokens_per_second']:.0f} : {m['full_tokens_per_second']:.0f}",
            f"{m['speedup']:.2f} ({m['low']:.2f}-{m['high']:.2f})",
        ]
        for m in summary["measured"]
    ]
    layers = f"{model.config.n_layers:.2f}"
    rows.insert(0, ["full", "100.0%", layers, layers, "", "1"])
    header = [
        "generation",
        "agreement",
        "exit depth",
        "layers run",
        "tokens/s : full's",
        "times full (95 %)",
    ]
    print("\n" + analysis.table(header, rows))
    print(EXPLANATION)
    seconds = summary["seconds"]
    print(
        f"\ntrained in {seconds['train']:.0f} s, the rest took {seconds['rest']:.0f} s. Look at:\n"
        + "\n".join(f"  {workdir / f}" for f in ("loss.png", "quality_speed.png", "exits.png"))
        + f"\n  {launch.shell_command()} generate --workdir={workdir} --prompt='def main('"
        + f" --threshold={summary['measured'][-1]['threshold']:g} --temperature={TEMPERATURE:g}"
    )


def leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted: the same command continues from the last checkpoint")
