"""Routers of a pretrained model against those of the package tide-inference, on the same weights.

    make bench-env && eejax bench routers --json
    eejax bench routers --json --tuned=runs/tuned     # tuned exits too

The model is a plain checkpoint of bytes ($EEJAX_DATA/models/tinylm) and the text one file, of which
the last --unseen bytes are the test text: neither the model nor a router was trained on them. Both
libraries get the same earlier windows, an exit behind every layer, and the same number of threads.

Disagreement is the share of tokens that are not the full model's most likely one; depth the mean of
layers below the emitting exit, of those that a common threshold leaves at most that disagreement.
`depth_at_5`, `depth_at_10`: ours, training-free; `by_exit`: thresholds of each exit chosen on
earlier text, and their result on the test text. TIDE's are given with its final logits corrected
(`mended`; it norms the last layer twice) and as they are. `auc` at every shared layer, for
predicting which tokens are the full model's. `calibration_time_vs_tide`: seconds from text to
trained routers, ours over theirs. `tokens_per_s_vs_tide`: greedy, one request at a time, in
interleaved pairs after warm-up, ours `recompute` at at most 5 % disagreement; `speedup_over_full`
is over our own full model. `tuned_*`: exits of --tuned, by their routers if they have any and else
by the probability of the most likely token; they must not be trained on the last bytes either.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import tempfile
import time

import numpy as np
from absl import flags

from eejax.common.errors import ConfigError
from eejax.experiments import launch, peer_device
from eejax.experiments.windows import BATCH, LENGTH, batches, cut, divided, model_and_text, prompts

_MODEL = flags.DEFINE_string("model", None, "A checkpoint of bytes; tinylm by default.")
_TEXT = flags.DEFINE_string("text", None, "Its text; tinyshakespeare by default.")
_UNSEEN = flags.DEFINE_integer("unseen", 55_000, "Bytes at its end to judge on.", lower_bound=5_000)
_WINDOWS = flags.DEFINE_integer("windows", 400, "Windows to calibrate on.", lower_bound=20)
_EPOCHS = flags.DEFINE_integer("epochs", 12, "Epochs of our training.", lower_bound=1)
_PAIRS = flags.DEFINE_integer("pairs", 12, "Pairs of runs to time.", lower_bound=2)
_NEW = flags.DEFINE_integer("new", 96, "Tokens of a timed run.", lower_bound=8)
_TUNED = flags.DEFINE_string("tuned", None, "A run of eejax tune, or routers on it.")
_TIDE = flags.DEFINE_bool("tide", True, "Compare with tide-inference.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")

PROMPT, WIDTH = 64, 128


def main() -> None:
    with peer_device.exact_products():
        result = measured()
    print(table(result))
    if _JSON.value:
        print(json.dumps(result))


def measured() -> dict:
    """Calibrate, judge and time the routers, without TF32 on either side."""
    import eejax
    from eejax import calibration

    folder, text = model_and_text(_MODEL.value, _TEXT.value)
    earlier, unseen = divided(text.read_bytes(), _UNSEEN.value)
    windows, judged, asked = cut(earlier, _WINDOWS.value), cut(unseen), prompts(unseen, PROMPT)

    model = eejax.load(folder, tokenizer="bytes")
    result = {"windows": len(windows), "judged": judged.size, "threads": os.cpu_count()}
    launch.say("calibrating ...")
    begin = time.perf_counter()
    found = routers(model, windows, every=1)
    result["calibration_seconds"] = time.perf_counter() - begin
    launch.say(f"... {result['calibration_seconds']:.1f} s; judging ...")
    scores = calibration.score(found.params, found.config, batches(judged))
    result |= frontier(scores, "router")
    result["by_exit"] = transferred(found, scores)
    result["oracle_depth"] = oracle(scores)
    result["auc"] = aucs(scores, "router")
    limit = result["thresholds"]["0.05"]
    mine = {"threshold": limit, "gate": "router"}
    timed = {
        "ours": decoder(found.params, found.config, "recompute", asked, **mine),
        "full": decoder(model.params, model.config, "full", asked),
    }
    if _TUNED.value:
        tuned, judged_tuned = of_tuned(judged)
        result |= {f"tuned_{k}": v for k, v in judged_tuned.items()}
        point = {"threshold": judged_tuned["thresholds"]["0.05"], "gate": judged_tuned["gate"]}
        timed["tuned"] = decoder(tuned.params, tuned.config, "recompute", asked, **point)
    if _TIDE.value:
        peer = Tide(folder)
        result["peer_device"] = peer_device.described(peer.device)
        launch.say("calibrating TIDE ...")
        result["tide_calibration_seconds"] = peer.calibrate(windows)
        launch.say(f"... {result['tide_calibration_seconds']:.1f} s; judging ...")
        result["calibration_time_vs_tide"] = (
            result["calibration_seconds"] / result["tide_calibration_seconds"]
        )
        theirs = peer.scores(judged, scores)
        result["tide"] = {name: frontier(s, "router") for name, s in theirs.items()}
        result["tide_auc"] = aucs(theirs["mended"], "router")
        result["auc_at_least_tides"] = all(
            a >= b for a, b in zip(result["auc"], result["tide_auc"], strict=True)
        )
        timed["tide"] = peer.decoder(asked, result["tide"]["mended"]["thresholds"]["0.05"])
    return result | speeds(timed)


def routers(model, windows: np.ndarray, every: int):
    from eejax import calibration

    options = calibration.RouterOptions(width=WIDTH, epochs=_EPOCHS.value)
    return calibration.calibrate_model(
        model,
        batches(windows),
        options,
        every=every,
        tokens=windows.size,
        watch=launch.say,
    )


def frontier(scores, gate: str) -> dict:
    """Return the least depth by a common threshold at two disagreements."""
    from eejax import calibration

    said = scores.confidences[gate][:-1]
    grid = sorted({*np.quantile(said, np.linspace(0, 1, 400)).tolist(), 1.0})
    points = [calibration.at_threshold(scores, min(max(t, 0.0), 1.0), gate=gate) for t in grid]
    found = {"thresholds": {}}
    for most, name in ((0.05, "depth_at_5"), (0.1, "depth_at_10")):
        best = calibration.fastest(points, 1 - most)
        if best is None:  # not even without exits
            best = points[-1]
        found[name] = best.depth
        found["thresholds"][str(most)] = best.threshold
        found[f"{name}_disagreement"] = 1 - best.agreement
    return found


def transferred(found, scores) -> dict:
    from eejax import calibration

    told = {}
    for agreement in (0.96, 0.95, 0.91, 0.9):
        chosen = found.calibration.point(agreement).threshold
        point = calibration.at_threshold(scores, chosen, gate="router")
        told[str(agreement)] = {"disagreement": 1 - point.agreement, "depth": point.depth}
    return told


def oracle(scores) -> float:
    """Return the depth if every token left at the first exit where it is the full model's."""
    right = scores.tokens == scores.tokens[-1]
    return float(np.asarray(scores.config.exit_boundaries)[right.argmax(0)].mean())


def aucs(scores, gate: str) -> list[float]:
    from eejax.calibration.quality import auc

    right = scores.tokens[:-1] == scores.tokens[-1]
    return [auc(a, b) for a, b in zip(scores.confidences[gate][:-1], right, strict=True)]


def of_tuned(judged: np.ndarray):
    from eejax import calibration
    from eejax.checkpoint.model import load_run
    from eejax.inference.policy import available_gates

    run = load_run(_TUNED.value)
    if not run.config.exits:
        raise ConfigError(f"--tuned = {_TUNED.value}: has no exits. Run eejax tune.")
    gate = "router" if "router" in available_gates(run.config) else "max_probability"
    scores = calibration.score(run.params, run.config, batches(judged))
    told = {"gate": gate, "auc": aucs(scores, gate), "oracle_depth": oracle(scores)}
    return run, frontier(scores, gate) | told


def decoder(params, config, engine: str, prompts: list, **kwargs):
    """Return a function run(i) -> number of tokens made for the i-th prompt."""
    from eejax.inference import Generator

    generator = Generator.make(params, config, engine)

    def run(i: int) -> int:
        asked = [prompts[i % len(prompts)]]
        result = generator.generate(asked, _NEW.value, stop_token_ids=(2,), **kwargs)
        run.results[i] = result
        return int(result.lengths[0])

    run.results = {}
    return run


def speeds(timed: dict) -> dict:
    """Return ratios of tokens per second, of interleaved pairs."""
    from eejax import analysis

    names, made = list(timed), {name: {} for name in timed}

    def note(name):
        return lambda i: made[name].__setitem__(i, timed[name](i))

    seconds = analysis.interleave([note(n) for n in names], _PAIRS.value, time.perf_counter)
    each = {
        name: row / np.array([made[name][i] for i in range(_PAIRS.value)])
        for name, row in zip(names, seconds, strict=True)
    }

    def ratio(a, b):
        return dict(
            zip(("ratio", "low", "high"), analysis.median_ratio(each[a], each[b]), strict=True)
        )

    told = {f"{name}_tokens_per_s": float(1 / np.median(row)) for name, row in each.items()}
    told["speedup_over_full"] = ratio("full", "ours")
    if "tide" in timed:
        told["tokens_per_s_vs_tide"] = ratio("tide", "ours")
    if "tuned" in timed:
        told["tuned_speedup_over_full"] = ratio("full", "tuned")
    for name in ("ours", "tuned"):
        if name in timed:
            results = list(timed[name].results.values())
            told[f"{name}_layers_run"] = float(
                np.mean([r.layers[0, 1 : r.lengths[0]].mean() for r in results])
            )
    return told


class Tide:
    """The package tide-inference as it is, on a checkpoint of bytes."""

    def __init__(self, folder: pathlib.Path):
        import torch
        import transformers

        self.torch, self.transformers = torch, transformers
        torch.set_num_threads(os.cpu_count())
        self.device = peer_device.torch_device()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = self.model.eval().to(self.device)
        self.runtime = None

    def calibrate(self, windows: np.ndarray) -> float:
        """Return the seconds of its whole calibration."""
        # A function of the same name hides the module in the package.
        module = importlib.import_module("TIDE.calibrate")
        from TIDE.config import TIDEConfig
        from TIDE.runtime import TIDERuntime

        texts = ["".join(map(chr, row[:-1])) for row in windows]
        config = TIDEConfig(
            checkpoint_interval=1,
            min_layers=0,
            calibration_samples=len(texts),
            router_bottleneck_dim=WIDTH,
        )
        module._load_calibration_texts = lambda name, n: texts
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/router.pt"
            begin = time.perf_counter()
            module.calibrate(self.model, self._tokenize, config, save_path=path)
            seconds = time.perf_counter() - begin
            self.runtime = TIDERuntime(self.model, path, config)
        return seconds

    def _tokenize(self, texts, **_):
        ids = self.torch.tensor([[ord(c) for c in text] for text in texts], device=self.device)
        return self.transformers.BatchEncoding(
            {"input_ids": ids, "attention_mask": self.torch.ones_like(ids)}
        )

    def scores(self, windows: np.ndarray, ours) -> dict:
        """Return scores of its routers on windows: {"mended": ..., "as_it_is": ...}."""
        from eejax.calibration import ExitScores

        torch, runtime = self.torch, self.runtime
        n_layers = ours.config.n_layers
        said, tokens, twice = [], [], []
        with torch.no_grad():
            for begin in range(0, len(windows), BATCH):
                ids = torch.tensor(windows[begin : begin + BATCH, :-1].astype(np.int64))
                seen = self.model(ids.to(self.device), output_hidden_states=True)
                hidden = seen.hidden_states

                def top(h):
                    return runtime._lm_head(h).argmax(-1).reshape(-1).cpu().numpy()

                exits = [hidden[layer] for layer in range(1, n_layers)]
                row = [runtime._score_router(h, i).reshape(-1) for i, h in enumerate(exits)]
                row = [scores.cpu().numpy() for scores in row]
                said.append(np.stack([*row, np.zeros_like(row[0])]))
                final = seen.logits.argmax(-1).reshape(-1).cpu().numpy()
                tokens.append(np.stack([*(top(runtime._final_norm(h)) for h in exits), final]))
                twice.append(top(runtime._final_norm(hidden[-1])))
        tokens = np.concatenate(tokens, 1).astype(np.int32)
        nothing = np.zeros(tokens.shape, np.float32)
        labels = windows[:, 1:].reshape(-1)
        units = np.repeat(np.arange(len(windows)), LENGTH)
        said = {"router": np.concatenate(said, 1)}
        mended = ExitScores(ours.config, labels, units, tokens, nothing, said)
        # As it is, a token that never leaves comes from the state normed twice. Agreement is with
        # the last row, so such a token counts as wrong for all exits that do not predict it.
        return {"mended": mended, "as_it_is": twice_normed(mended, np.concatenate(twice))}

    def decoder(self, prompts: list, threshold: float):
        self.runtime.config.exit_threshold = threshold

        def run(i: int) -> int:
            ids = self.torch.tensor([prompts[i % len(prompts)]], device=self.device)
            out = self.runtime.generate(ids, max_new_tokens=_NEW.value, temperature=0.0)
            return out.shape[1] - ids.shape[1]

        return run


def twice_normed(scores, twice: np.ndarray):
    """Return scores with one more exit at the end, so that the full depth's token may be wrong."""
    import dataclasses

    from eejax.models.config import ExitConfig

    config = scores.config
    whole = config.replace(
        n_layers=config.n_layers + 1,
        exits=(*config.exits, ExitConfig(config.n_layers, norm=False, router=WIDTH)),
    )

    def add(a, row):
        return np.concatenate([a[:-1], row[None], a[-1:]])

    sure = np.full(twice.shape, 0.9999, np.float32)
    return dataclasses.replace(
        scores,
        config=whole,
        tokens=add(scores.tokens, twice),
        nlls=add(scores.nlls, scores.nlls[-1]),
        confidences={"router": add(scores.confidences["router"], sure)},
    )


def table(result: dict) -> str:
    from eejax import analysis

    rows = [["ours", f"{result['depth_at_5']:.2f}", f"{result['depth_at_10']:.2f}"]]
    if "tuned_depth_at_5" in result:
        rows.append(
            [
                "tuned exits",
                f"{result['tuned_depth_at_5']:.2f}",
                f"{result['tuned_depth_at_10']:.2f}",
            ]
        )
    for name, one in result.get("tide", {}).items():
        rows.append([f"TIDE, {name}", f"{one['depth_at_5']:.2f}", f"{one['depth_at_10']:.2f}"])
    lines = [analysis.table(["routers", "depth at 5 %", "depth at 10 %"], rows), ""]
    rows = [
        [name, f"{result[f'{name}_tokens_per_s']:.0f}"]
        for name in ("ours", "full", "tuned", "tide")
        if f"{name}_tokens_per_s" in result
    ]
    lines += [analysis.table(["decoding", "tokens/s"], rows), ""]
    for name in ("speedup_over_full", "tuned_speedup_over_full", "tokens_per_s_vs_tide"):
        if name in result:
            r = result[name]
            lines.append(f"{name} {r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]")
    if "calibration_time_vs_tide" in result:
        lines.append(f"calibration_time_vs_tide {result['calibration_time_vs_tide']:.3f}")
        lines.append(f"auc_at_least_tides {result['auc_at_least_tides']}")
    return "\n".join(lines)


if __name__ == "__main__":
    launch.run(main)
