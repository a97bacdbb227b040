"""TIDE's tables and numbers on one small model, and what layers that are really skipped bring.

    eejax reproduce tide --workdir=runs/tide --json

Jaber and Jaber, "TIDE: Token-Informed Depth Execution" (arXiv 2603.21365): exits in a prompt's pass
(Table 3), its latency and throughput by batch size (Table 4), decoding of one worked problem (Table
5), and how states converge over depth (section 5.5). The model is a plain checkpoint of bytes
($EEJAX_DATA/models/tinylm, or one that is trained here). Routers sit every --every layers (section
3.1) and learn from text before the last --unseen bytes, on which all is judged. Three rules for who
should leave, each with bottlenecks of 64, 128 and 256:

- cosine: the paper's, a cosine of 0.98 to the last layer's state. Where fewer than 100 tokens
  have it, there is nothing to learn and no router, which is told.
- cosine, matched: at each exit the cosine that as many tokens have as there are right ones.
- top1: the exit's most likely token is the full model's.

The last two are trained by the paper's recipe, too (100 epochs of Adam at 1e-3), at a width of 128.

"rate": share of tokens that leave before the last layer, which is never an exit here: TIDE puts a
router there too where the interval divides the depth, whose 98-100 % save nothing. "post-hoc"
engines run every layer and only look where a token would have left, as TIDE's does; "skipping" is
`recompute`, which does not run the layers above, with exact keys and values. Speeds are over `full`
in interleaved pairs, of --width, at --threshold.

--workdir is left with tide.json, whose last field `findings` has the paper's value and ours for
every claim. What this project claims of itself is checked, and the exit status is 1 where it fails:

- post-hoc runs all layers of every token; skipping runs fewer, and as many as its exits ask for;
- a token has the exit that it has post-hoc, but for near-ties.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from absl import flags

from eejax.common.paths import expanded
from eejax.experiments import launch
from eejax.experiments.reproduce import tide_findings, tide_model, tide_paper, tide_problem
from eejax.experiments.windows import batches, cut, divided, prompts

_MODEL = flags.DEFINE_string("model", None, "A checkpoint of bytes; tinylm by default.")
_TEXT = flags.DEFINE_string("text", None, "Its text; tinyshakespeare by default.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/tide", "Where the figure and all numbers go.")
_UNSEEN = flags.DEFINE_integer("unseen", 55_000, "Bytes at its end to judge on.", lower_bound=5_000)
_WINDOWS = flags.DEFINE_integer("windows", 400, "To calibrate on.", lower_bound=20)
_EVERY = flags.DEFINE_integer("every", 4, "Layers between routers.", lower_bound=1)
_WIDTHS = flags.DEFINE_multi_integer("width", [64, 128, 256], "Bottlenecks; one of them is timed.")
_EPOCHS = flags.DEFINE_integer("epochs", 12, "Of a router's training by our recipe.", lower_bound=1)
_THRESHOLDS = flags.DEFINE_multi_float("threshold", [0.85, 0.5], "Of all routers.")
_BATCHES = flags.DEFINE_multi_integer("batch", [1, 8], "Batch sizes of Table 4.")
_PAIRS = flags.DEFINE_integer("pairs", 6, "Pairs of runs to time.", lower_bound=2)
_NEW = flags.DEFINE_integer("new", 96, "Tokens of a timed run.", lower_bound=8)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")

PROMPT, BOUND = 64, 0.98
LOWER = (0.95, 0.9)  # bounds that section 5.5 speaks of, too
WIDTH = 128  # the paper's


def main() -> None:
    import eejax
    from eejax import analysis

    workdir = expanded(_WORKDIR.value)
    folder, text, tokenizer = tide_model.checkpoint(
        _MODEL.value, _TEXT.value, workdir, _UNSEEN.value
    )
    earlier, unseen = divided(text.read_bytes(), _UNSEEN.value)
    windows, judged, asked = cut(earlier, _WINDOWS.value), cut(unseen), prompts(unseen, PROMPT)
    model = eejax.load(folder, tokenizer=tokenizer)
    result: dict = {
        "layers": model.config.n_layers,
        "every": _EVERY.value,
        "windows": len(windows),
        "tokens": int(windows[:, 1:].size),
    }
    result["convergence"], figure = convergence(model, judged)
    analysis.save(figure, workdir / "convergence.png")
    print(show_convergence(result["convergence"]), flush=True)
    result["rules"], kept = [], None
    for rule, label, bound in rules(model, windows):
        for recipe, width, options in trainings():
            if recipe == "paper" and label == "cosine" and bound == BOUND:
                continue  # there is nothing to learn, by whatever recipe
            launch.say(f"{rule}, {width} wide, recipe: {recipe} ...")
            row, found = of_rule(
                model, windows, judged, dict(width=width, label=label, bound=bound) | options
            )
            result["rules"].append({"rule": rule, "width": width, "recipe": recipe} | row)
            if label == "top1" and recipe == "ours" and (kept is None or width == WIDTH):
                kept = found
    print(show_rules(result["rules"]), flush=True)
    launch.say("timing ...")
    result["latency"] = [latency(model, kept, unseen, t) for t in _THRESHOLDS.value]
    result["throughput"] = [
        row for size in _BATCHES.value for row in throughput(model, kept, asked, size)
    ]
    print(show_speeds(result))
    result["problem"] = tide_problem.solve(model, kept)
    print(tide_problem.show(result["problem"]), flush=True)
    result["failed"] = failed(result["throughput"], model.config.n_layers)
    for claim in result["failed"]:
        print(f"NOT so: {claim}")
    result["findings"] = tide_findings.findings(result, scale(model))
    (workdir / "tide.json").write_text(json.dumps(result, indent=1) + "\n")
    if _JSON.value:
        print(json.dumps(result))
    sys.exit(1 if result["failed"] else 0)


def scale(model) -> str:
    from eejax.models import params

    return (
        f"{params.count(model.config) / 1e6:.1f}M parameters, {model.config.n_layers} layers, "
        "bytes, on a CPU"
    )


def trainings() -> list[tuple[str, int, dict]]:
    """Return recipe, width and options of every training of a rule's routers."""
    ours = [("ours", width, {"epochs": _EPOCHS.value}) for width in _WIDTHS.value]
    width = WIDTH if WIDTH in _WIDTHS.value else _WIDTHS.value[0]
    return [*ours, ("paper", width, tide_paper.RECIPE)]


def seen_everywhere(model, windows: np.ndarray, every: int):
    """Return boundaries of training-free exits, and their `States`."""
    from eejax.calibration.calibration import boundaries_for, with_exits
    from eejax.calibration.states import collect

    where = boundaries_for(model.config, every)
    params, config = with_exits(model.params, model.config, where)
    return where, collect(params, config, batches(windows), windows.size)


def convergence(model, judged: np.ndarray):
    """Return section 5.5's convergence of states to the last layer's, and its figure."""
    from eejax import analysis

    where, states = seen_everywhere(model, judged, 1)
    right = states.tokens[:-1] == states.tokens[-1]
    rows = [
        {
            "boundary": n,
            "cosine": float(c.mean()),
            "near": float((c >= BOUND).mean()),
            "nearer_than": {f"{bound:g}": float((c >= bound).mean()) for bound in LOWER},
            "same_token": float(r.mean()),
            "kl": float(kl.mean()),
        }
        for n, c, r, kl in zip(where, states.cosine, right, states.kl, strict=True)
    ]
    return rows, analysis.convergence_by_depth(where, states.cosine, right)


def rules(model, windows: np.ndarray):
    """Return the rules for tokens that should leave: name, label, bound."""
    _, states = seen_everywhere(model, windows, _EVERY.value)
    share = (states.tokens[:-1] == states.tokens[-1]).mean(1)
    matched = [float(np.quantile(c, 1 - s)) for c, s in zip(states.cosine, share, strict=True)]
    return [
        ("cosine", "cosine", BOUND),
        ("cosine, matched", "cosine", matched),
        ("top1", "top1", None),
    ]


def of_rule(model, windows: np.ndarray, judged: np.ndarray, options: dict):
    """Return Table 3's row and the model with its routers, or None without positives to learn."""
    from eejax import calibration
    from eejax.calibration.quality import auc
    from eejax.common.errors import DataError

    begin = time.perf_counter()
    try:
        found = calibration.calibrate_model(
            model,
            batches(windows),
            calibration.RouterOptions(**options),
            every=_EVERY.value,
            tokens=windows.size,
        )
    except DataError as error:
        return {"refused": str(error)}, None
    seconds = time.perf_counter() - begin
    refused = {q.boundary: q.refused for q in found.calibration.qualities if q.refused}
    scores = calibration.score(found.params, found.config, batches(judged))
    right = scores.tokens[:-1] == scores.tokens[-1]

    def told(gate):
        return [auc(a, b) for a, b in zip(scores.confidences[gate], right, strict=False)]

    boundaries = [e.boundary for e in found.config.exits]
    points = {}
    for threshold in _THRESHOLDS.value:
        point = calibration.at_threshold(scores, threshold, gate="router")
        points[f"{threshold:g}"] = {
            "rate": 1 - point.shares[-1],
            "disagreement": 1 - point.agreement,
            "depth": point.depth,
            "by_exit": dict(zip(boundaries, point.shares, strict=False)),
            "tokens": int(right.shape[1]),
        }
    return {
        "seconds": seconds,
        "no_router": refused,
        "boundaries": boundaries,
        "positives": [q.positives for q in found.calibration.qualities if not q.refused],
        "auc_right": told("router"),
        "auc_right_entropy": told("entropy"),
        "points": points,
    }, found


def latency(model, found, text: bytes, threshold: float) -> dict:
    """Time Table 4: a prompt as long as a context, which runs all layers either way."""
    from eejax.analysis import interleave, median_ratio

    whole = [list(text[: model.config.context_length - 1])]
    plain = generator(model, "full")
    routed = generator(found, "posthoc")
    runs = [
        lambda _: plain.generate(whole, 1),
        lambda _: routed.generate(whole, 1, gate="router", threshold=threshold, prefill_exit=True),
    ]
    seconds = interleave(runs, max(_PAIRS.value, 12), time.perf_counter)
    ratio = median_ratio(seconds[1], seconds[0])
    return {
        "threshold": threshold,
        "tokens": len(whole[0]),
        "full_ms": 1e3 * float(np.median(seconds[0])),
        "routed_ms": 1e3 * float(np.median(seconds[1])),
        "routed_over_full": dict(zip(("ratio", "low", "high"), ratio, strict=True)),
    }


def generator(model, engine: str):
    from eejax.inference import Generator

    return Generator.make(model.params, model.config, engine)


def throughput(model, found, asked: list, size: int) -> list[dict]:
    """Time Table 4: decoding at a batch size, post-hoc and skipping, at every threshold."""
    from eejax.analysis import interleave, median_ratio

    engines = {name: generator(found, name) for name in ("posthoc", "recompute")}
    full = generator(model, "full")

    def group(i):
        return [asked[(i * size + j) % len(asked)] for j in range(size)]

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
            "batch": size,
            "engine": name,
            "threshold": threshold,
            "tokens_per_s": _NEW.value * size / float(np.median(own)),
            "full_tokens_per_s": _NEW.value * size / float(np.median(seconds[0])),
            "over_full": dict(zip(("ratio", "low", "high"), ratio, strict=True)),
            "rate": float((left < model.config.n_layers).mean()),
            "depth": float(left.mean()),
            "layers_run": float(ran.mean()),
            "distinct_tokens": float(np.mean([len(set(r.ids(0))) for r in texts])),
        }
        if name == "recompute":
            oracle = [results["posthoc", threshold, i] for i in range(_PAIRS.value)]
            row |= unlike(texts, oracle)
        rows.append(row)
    return rows


def unlike(texts: list, oracle: list) -> dict:
    """Count the texts whose tokens or exits are not the oracle's.

    `near_ties` are those in which, by the oracle's margin, rounding may have decided at the first
    difference; `others` are the rest.
    """
    from eejax.experiments.decode_times import TIE

    found = {"near_ties": 0, "others": 0}
    for one, right in zip(texts, oracle, strict=True):
        for i in range(len(one.tokens)):
            differ = (one.tokens[i] != right.tokens[i]) | (one.exits[i] != right.exits[i])
            if differ.any():
                tied = right.margins[i, int(differ.argmax())] < TIE
                found["near_ties" if tied else "others"] += 1
    return found


def failed(rows: list[dict], layers: int) -> list[str]:
    """Return the claims of this project that do not hold, for a model of `layers` layers."""
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
        [
            str(r["boundary"]),
            f"{r['cosine']:.3f}",
            f"{r['near']:.2%}",
            *(f"{share:.2%}" for share in r["nearer_than"].values()),
            f"{r['same_token']:.1%}",
            f"{r['kl']:.3f}",
        ]
        for r in rows
    ]
    near = [f"cosine >= {bound}" for bound in (BOUND, *LOWER)]
    header = ["layers", "mean cosine", *near, "same token", "KL, nats"]
    return f"Section 5.5: convergence\n{table(header, cells)}\n"


def show_rules(rows: list[dict]) -> str:
    from eejax.analysis import table

    cells = []
    for r in rows:
        name = [r["rule"], str(r["width"]), r["recipe"]]
        if "refused" in r:
            cells.append([*name, "no router: too few tokens have it", *5 * [""]])
            continue
        for threshold, p in r["points"].items():
            shares = ", ".join(f"{n}: {s:.1%}" for n, s in p["by_exit"].items())
            aucs = " ".join(f"{a:.2f}" for a in r["auc_right"])
            cells.append(
                [
                    *name,
                    aucs,
                    threshold,
                    f"{p['rate']:.1%}",
                    shares,
                    f"{p['depth']:.2f}",
                    f"{p['disagreement']:.1%}",
                ]
            )
    header = ["rule", "width", "recipe", "AUC of right tokens", "threshold", "rate", "by exit"]
    header += ["depth", "disagree"]
    return f"Table 3: exit rates on unseen text\n{table(header, cells)}\n"


def show_speeds(result: dict) -> str:
    from eejax.analysis import table

    def ratio(r):
        return f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"

    lines = ["Table 4: latency of a prompt (keys and values need all layers), and throughput"]
    for one in result["latency"]:
        lines.append(
            f"{one['tokens']} tokens at {one['threshold']:g}: {one['full_ms']:.1f} ms, with "
            f"routers {ratio(one['routed_over_full'])} times as long"
        )
    names = {"posthoc": "post-hoc", "recompute": "skipping"}
    cells = [
        [
            str(r["batch"]),
            f"{r['threshold']:g}",
            names[r["engine"]],
            f"{r['full_tokens_per_s']:.0f}",
            f"{r['tokens_per_s']:.0f}",
            ratio(r["over_full"]),
            f"{r['rate']:.1%}",
            f"{r['depth']:.2f}",
            f"{r['layers_run']:.2f}",
        ]
        for r in result["throughput"]
    ]
    header = ["batch", "threshold", "engine", "full, tokens/s", "tokens/s", "over full", "rate"]
    header += ["depth", "layers run"]
    return "\n".join([*lines, table(header, cells)])


if __name__ == "__main__":
    launch.run(main)
