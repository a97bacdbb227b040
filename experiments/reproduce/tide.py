"""TIDE's experiments on one small model, and what they would be worth with layers really skipped.

    python -m experiments.reproduce.tide --json

Jaber and Jaber, "TIDE: Token-Informed Depth Execution" (arXiv 2603.21365): exit rates in the
prompt's pass (Table 3), its latency (Table 4), throughput by batch size (Table 5), and how states
converge over depth (section 5.5). The model is a plain checkpoint of bytes ($EEJAX_DATA/models/
tinylm); routers sit every --every layers and learn from text before the last --unseen bytes, on
which all is judged. Three rules for who should leave, each with bottlenecks of 64, 128 and 256:

- cosine: the paper's, a cosine of 0.98 to the last layer's state. Where fewer than 100 tokens
  have it, there is nothing to learn and no router, which is told.
- cosine, matched: at each exit the cosine that as many tokens have as there are right ones.
- top1: the exit's most likely token is the full model's.

"rate": share of tokens that leave before the last layer, which is never an exit here: TIDE puts a
router there too where the interval divides the depth, whose 98-100 % save nothing. "post-hoc"
engines run every layer and only look where a token would have left, as TIDE's does; "skipping" is
`recompute`, which does not run the layers above, with exact keys and values. Speeds are over `full`
in interleaved pairs, of --width, at --threshold. What is claimed, and checked (exit status 1 where
it fails):

- post-hoc runs all layers of every token; skipping runs fewer, and as many as its exits ask for;
- a token has the exit that it has post-hoc, but for near-ties.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import numpy as np
from absl import flags

from experiments import launch
from experiments.windows import batches, cut, divided, given, prompts

_MODEL = flags.DEFINE_string("model", None, "A checkpoint of bytes; tinylm by default.")
_TEXT = flags.DEFINE_string("text", None, "Its text; tinyshakespeare by default.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/tide", "Where the figure and all numbers go.")
_UNSEEN = flags.DEFINE_integer("unseen", 55_000, "Bytes at its end to judge on.", lower_bound=5_000)
_WINDOWS = flags.DEFINE_integer("windows", 400, "To calibrate on.", lower_bound=20)
_EVERY = flags.DEFINE_integer("every", 4, "Layers between routers.", lower_bound=1)
_WIDTHS = flags.DEFINE_multi_integer("width", [64, 128, 256], "Bottlenecks; one of them is timed.")
_EPOCHS = flags.DEFINE_integer("epochs", 12, "Of a router's training.", lower_bound=1)
_THRESHOLDS = flags.DEFINE_multi_float("threshold", [0.85, 0.5], "Of all routers.")
_BATCHES = flags.DEFINE_multi_integer("batch", [1, 4, 8], "Batch sizes of Table 5.")
_PAIRS = flags.DEFINE_integer("pairs", 6, "Pairs of runs to time.", lower_bound=2)
_NEW = flags.DEFINE_integer("new", 96, "Tokens of a timed run.", lower_bound=8)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")

PROMPT, BOUND = 64, 0.98
PAPER = {
    "prefill exit rate": "100 % (5 % after layer 11, the others at the last of 32)",
    "prefill latency": "-7.2 %", "throughput, batch 1": "+6.6 %",
    "throughput, batch 8": "+8.1 % (Qwen3 8B)", "decoding exit rate": "98-99 %",
}  # fmt: skip
"""DeepSeek R1 Distill 8B on an A100, from the paper's abstract."""


def main() -> None:
    import eejax
    from eejax import analysis

    folder, text = given(_MODEL.value, _TEXT.value)
    earlier, unseen = divided(text.read_bytes(), _UNSEEN.value)
    windows, judged, asked = cut(earlier, _WINDOWS.value), cut(unseen), prompts(unseen, PROMPT)
    model = eejax.load(folder, tokenizer="bytes")
    workdir = pathlib.Path(_WORKDIR.value)
    result: dict = {"paper": PAPER}
    result["convergence"], figure = convergence(model, judged)
    analysis.save(figure, workdir / "convergence.png")
    print(show_convergence(result["convergence"]), flush=True)
    result["rules"], kept = [], None
    for rule, label, bound in rules(model, windows):
        for width in _WIDTHS.value:
            launch.say(f"{rule}, {width} wide ...")
            row, found = of_rule(model, windows, judged, label, bound, width)
            result["rules"].append({"rule": rule, "width": width} | row)
            if label == "top1" and (kept is None or width == 128):
                kept = found
    print(show_rules(result["rules"]), flush=True)
    launch.say("timing ...")
    result["latency"] = latency(model, kept, unseen)
    result["throughput"] = [
        row for size in _BATCHES.value for row in throughput(model, kept, asked, size)
    ]
    print(show_speeds(result))
    result["failed"] = failed(result["throughput"], model.config.n_layers)
    for claim in result["failed"]:
        print(f"NOT so: {claim}")
    (workdir / "tide.json").write_text(json.dumps(result, indent=1) + "\n")
    if _JSON.value:
        print(json.dumps(result))
    sys.exit(1 if result["failed"] else 0)


def seen_everywhere(model, windows: np.ndarray, every: int):
    """(boundaries, `States`) of training-free exits."""
    from eejax.calibration.pretrained import boundaries_for, with_exits
    from eejax.calibration.states import collect

    where = boundaries_for(model.config, every)
    params, config = with_exits(model.params, model.config, where)
    return where, collect(params, config, batches(windows), windows.size)


def convergence(model, judged: np.ndarray):
    """Section 5.5: of every boundary how near its states are to the last layer's, and whether they
    would say the same."""
    from eejax import analysis

    where, states = seen_everywhere(model, judged, 1)
    right = states.tokens[:-1] == states.tokens[-1]
    rows = [
        {"boundary": n, "cosine": float(c.mean()), "near": float((c >= BOUND).mean()),
         "same_token": float(r.mean()), "kl": float(kl.mean())}
        for n, c, r, kl in zip(where, states.cosine, right, states.kl, strict=True)
    ]  # fmt: skip
    return rows, analysis.convergence_by_depth(where, states.cosine, right)


def rules(model, windows: np.ndarray):
    """(name, label, bound) of who should leave."""
    _, states = seen_everywhere(model, windows, _EVERY.value)
    share = (states.tokens[:-1] == states.tokens[-1]).mean(1)
    matched = [
        float(np.quantile(c, 1 - s)) for c, s in zip(states.cosine, share, strict=True)
    ]  # fmt: skip
    return [("cosine", "cosine", BOUND), ("cosine, matched", "cosine", matched),
            ("top1", "top1", None)]  # fmt: skip


def of_rule(model, windows: np.ndarray, judged: np.ndarray, label: str, bound, width: int):
    """(Table 3's row, the model with its routers), None where there is nothing to learn."""
    from eejax import calibration
    from eejax.calibration.quality import auc
    from eejax.common.errors import DataError

    options = calibration.RouterOptions(width, label, bound, epochs=_EPOCHS.value)
    try:
        found = calibration.calibrate_model(
            model.params, model.config, batches(windows), options, every=_EVERY.value,
            tokens=windows.size,
        )  # fmt: skip
    except DataError as error:
        return {"refused": str(error)}, None
    refused = {q.boundary: q.refused for q in found.qualities if q.refused}
    scores = calibration.score(found.params, found.config, batches(judged))
    right = scores.tokens[:-1] == scores.tokens[-1]
    said = scores.confidences["router"]
    boundaries = [e.boundary for e in found.config.exits]
    points = {}
    for threshold in _THRESHOLDS.value:
        point = calibration.at_threshold(scores, threshold, gate="router")
        points[f"{threshold:g}"] = {
            "rate": 1 - point.shares[-1], "disagreement": 1 - point.agreement,
            "depth": point.depth,
            "by_exit": dict(zip(boundaries, point.shares, strict=False)),
        }  # fmt: skip
    return {
        "no_router": refused, "boundaries": boundaries,
        "positives": [q.positives for q in found.qualities if not q.refused],
        "auc_right": [auc(a, b) for a, b in zip(said, right, strict=False)], "points": points,
    }, found  # fmt: skip


def latency(model, found, text: bytes) -> dict:
    """Table 4: of a prompt as long as a context, which runs all layers either way."""
    from eejax.analysis import interleave, median_ratio

    whole = [list(text[: model.config.context_length - 1])]
    plain = generator(model, "full")
    routed = generator(found, "posthoc")
    runs = [
        lambda _: plain.generate(whole, 1),
        lambda _: routed.generate(
            whole, 1, gate="router", threshold=_THRESHOLDS.value[0], prefill_exit=True
        ),
    ]
    seconds = interleave(runs, max(_PAIRS.value, 12), time.perf_counter)
    ratio = median_ratio(seconds[1], seconds[0])
    return {"tokens": len(whole[0]), "full_ms": 1e3 * float(np.median(seconds[0]))} | {
        "routed_over_full": dict(zip(("ratio", "low", "high"), ratio, strict=True))
    }


def generator(model, engine: str):
    from eejax.inference import Generator

    return Generator.make(model.params, model.config, engine)


def throughput(model, found, asked: list, size: int) -> list[dict]:
    """Table 5: decoding at a batch size, post-hoc and skipping, at every threshold."""
    from eejax.analysis import interleave, median_ratio

    engines = {name: generator(found, name) for name in ("posthoc", "recompute")}
    full = generator(model, "full")
    group = lambda i: [asked[(i * size + j) % len(asked)] for j in range(size)]
    runs, keys = [lambda i: full.generate(group(i), _NEW.value)], []
    results: dict = {}

    def run(name, threshold):
        def call(i):
            results[name, threshold, i] = engines[name].generate(
                group(i), _NEW.value, gate="router", threshold=threshold
            )

        return call

    for threshold in _THRESHOLDS.value:
        for name in engines:
            keys.append((name, threshold))
            runs.append(run(name, threshold))
    seconds = interleave(runs, _PAIRS.value, time.perf_counter)
    rows = []
    for (name, threshold), own in zip(keys, seconds[1:], strict=True):
        ratio = median_ratio(seconds[0], own)
        texts = [results[name, threshold, i] for i in range(_PAIRS.value)]
        left, ran = (
            np.concatenate([getattr(r, a)[:, 1:].reshape(-1) for r in texts])
            for a in ("boundaries", "layers")
        )
        row = {
            "batch": size, "engine": name, "threshold": threshold,
            "tokens_per_s": _NEW.value * size / float(np.median(own)),
            "over_full": dict(zip(("ratio", "low", "high"), ratio, strict=True)),
            "rate": float((left < model.config.n_layers).mean()),
            "depth": float(left.mean()), "layers_run": float(ran.mean()),
            "distinct_tokens": float(np.mean([len(set(r.ids(0))) for r in texts])),
        }  # fmt: skip
        if name == "recompute":
            oracle = [results["posthoc", threshold, i] for i in range(_PAIRS.value)]
            row |= unlike(texts, oracle)
        rows.append(row)
    return rows


def unlike(texts: list, oracle: list) -> dict:
    """Texts whose tokens or exits are not the oracle's: near_ties, where its own margin says that
    rounding may have decided at the first one, and others."""
    from experiments.decode_times import TIE

    found = {"near_ties": 0, "others": 0}
    for one, right in zip(texts, oracle, strict=True):
        for i in range(len(one.tokens)):
            differ = (one.tokens[i] != right.tokens[i]) | (one.exits[i] != right.exits[i])
            if differ.any():
                tied = right.margins[i, int(differ.argmax())] < TIE
                found["near_ties" if tied else "others"] += 1
    return found


def failed(rows: list[dict], layers: int) -> list[str]:
    """Claims that do not hold, of a model of so many layers."""
    wrong = []
    for r in rows:
        where = f"batch {r['batch']}, threshold {r['threshold']:g}"
        if r["engine"] == "posthoc" and r["layers_run"] != layers:
            wrong.append(f"post-hoc runs all layers ({where}: {r['layers_run']:.2f})")
        if r["engine"] == "recompute" and r["rate"] > 0.01:
            if r["batch"] == 1 and not r["depth"] <= r["layers_run"] < layers:
                wrong.append(f"skipping runs fewer layers ({where}: {r['layers_run']:.2f})")
            if r["others"]:
                wrong.append(f"exits are those post-hoc ({where}: {r['others']} texts differ)")
    return wrong


def show_convergence(rows: list[dict]) -> str:
    from eejax.analysis import table

    cells = [
        [str(r["boundary"]), f"{r['cosine']:.3f}", f"{r['near']:.2%}", f"{r['same_token']:.1%}",
         f"{r['kl']:.3f}"]
        for r in rows
    ]  # fmt: skip
    header = ["layers", "mean cosine", f"cosine >= {BOUND}", "same token", "KL, nats"]
    return f"Section 5.5: convergence\n{table(header, cells)}\n"


def show_rules(rows: list[dict]) -> str:
    from eejax.analysis import table

    cells = []
    for r in rows:
        if "refused" in r:
            cells.append(
                [r["rule"], str(r["width"]), "no router: too few tokens have it", *5 * [""]]
            )
            continue
        for threshold, p in r["points"].items():
            shares = ", ".join(f"{n}: {s:.1%}" for n, s in p["by_exit"].items())
            aucs = " ".join(f"{a:.2f}" for a in r["auc_right"])
            cells.append(
                [r["rule"], str(r["width"]), aucs, threshold, f"{p['rate']:.1%}", shares,
                 f"{p['depth']:.2f}", f"{p['disagreement']:.1%}"]
            )  # fmt: skip
    header = ["rule", "width", "AUC of right tokens", "threshold", "rate", "by exit", "depth",
              "disagree"]  # fmt: skip
    return f"Table 3: exit rates on unseen text\n{table(header, cells)}\n"


def show_speeds(result: dict) -> str:
    from eejax.analysis import table

    ratio = lambda r: f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"
    one = result["latency"]
    lines = [
        f"Table 4: a prompt of {one['tokens']} tokens takes {one['full_ms']:.1f} ms; with routers "
        f"{ratio(one['routed_over_full'])} times as long (keys and values need all layers)\n",
        "Table 5: throughput",
    ]
    names = {"posthoc": "post-hoc", "recompute": "skipping"}
    cells = [
        [str(r["batch"]), f"{r['threshold']:g}", names[r["engine"]], f"{r['tokens_per_s']:.0f}",
         ratio(r["over_full"]), f"{r['rate']:.1%}", f"{r['depth']:.2f}", f"{r['layers_run']:.2f}"]
        for r in result["throughput"]
    ]  # fmt: skip
    header = [
        "batch",
        "threshold",
        "engine",
        "tokens/s",
        "over full",
        "rate",
        "depth",
        "layers run",
    ]
    lines.append(table(header, cells))
    lines.append("\nThe paper, of DeepSeek R1 Distill 8B on an A100:")
    lines += [f"  {name}: {value}" for name, value in result["paper"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    launch.run(main)
