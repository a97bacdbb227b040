"""Which training recipe makes exits agree best with the final one, at equal training tokens.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \\
        eejax reproduce recipes --workdir=runs/recipes

The demo's model and text, trained anew by each recipe and with the same seeds: as it is
("plain"); with LayerSkip's layer dropout and rotating exit curriculum (Elhoushi et al. 2024); with
exits that learn half from labels and half from the final exit ("distillation"). Reported on
held-out text, for every exit: bits per byte, and agreement, the share of positions where its most
likely byte is the final exit's. The best recipe is that of the highest mean agreement among those
whose final exit is no worse than the plain one's. Every run has its own folder in --workdir, so
the same command continues what was stopped. Leaves results.json there.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
from absl import flags

from eejax.common.paths import expanded
from eejax.experiments import launch

_WORKDIR = flags.DEFINE_string("workdir", "runs/recipes", "Where everything is left.")
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of every recipe.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", None, "Another number of training steps.", lower_bound=1)
_RECIPES = flags.DEFINE_list("recipes", None, "Only these, and plain; all by default.")
_TINY = flags.DEFINE_bool("tiny", False, "A size for testing: seconds, and it shows nothing.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

PLAIN = "plain"
RECIPES = {
    PLAIN: {},
    "layer_dropout": {
        # LayerSkip's settings for training from scratch.
        "train": {"layer_dropout": 0.1, "layer_dropout_growth": "exponential"},
        "exit_weights": {"curriculum": "rotating"},
    },
    "distillation": {"loss": {"distillation": 0.5}},
    "confidence": {"loss": {"confidence_weighted": True}},
}
HELD_OUT = 150_000  # tokens


def experiment(recipe: str, seed: int, steps: int | None, packed: pathlib.Path, tiny: bool):
    from eejax.configs import demo
    from eejax.configs import tiny as small
    from eejax.train.config import Experiment

    config = (small if tiny else demo).get_config()
    for section, values in RECIPES[recipe].items():
        config[section].update(values)
    config.data.packed = str(packed)
    config.train.update(seed=seed, eval_every=0)
    if steps is not None:
        config.train.steps = steps
    return Experiment.from_dict(config)


def measure(workdir: pathlib.Path, tokens: int) -> dict[str, dict[str, float]]:
    """Return bits per byte and agreement with the final exit, by the name of the exit."""
    from eejax import calibration, data
    from eejax.train.metrics import exit_names
    from eejax.train.runs import open_run

    run = open_run(workdir)
    model, length = run.model, run.experiment.data.length
    split = run.dataset().split("validation")
    batches = data.batches(split, 16, length, limit=max(1, tokens // (16 * length)))
    scores = calibration.score(model.params, model.config, batches)
    bits = 1 / (np.log(2) * scores.bytes_per_token(model.tokenizer))
    return {
        name: {
            "bits_per_byte": float(scores.nlls[e].mean() * bits),
            "agreement": float((scores.tokens[e] == scores.tokens[-1]).mean()),
        }
        for e, name in enumerate(exit_names(model.config))
    }


def main() -> None:
    from eejax.checkpoint.files import write_text
    from eejax.common.errors import require_one_of
    from eejax.train.loop import fit

    for name in _RECIPES.value or ():
        require_one_of("--recipes", name, tuple(RECIPES))
    names = [name for name in RECIPES if name in (PLAIN, *(_RECIPES.value or RECIPES))]
    workdir = expanded(_WORKDIR.value).absolute()
    results: dict[str, list[dict]] = {name: [] for name in names}
    for seed in range(_SEEDS.value):
        for name in names:
            print(f"{name}, seed {seed}", flush=True)
            one = experiment(name, seed, _STEPS.value, workdir / "data", _TINY.value)
            folder = workdir / f"{name}_{seed}"
            result = fit(one, folder)
            launch.end_if_stopped(result)
            results[name].append(measure(folder, 2048 if _TINY.value else HELD_OUT))
    rows = {name: mean_of(seeds) for name, seeds in results.items()}
    summary = {"recipes": rows, "best": best(rows), "seeds": results, "findings": findings(rows)}
    write_text(workdir / "results.json", json.dumps(summary, indent=1))
    show(rows, summary["best"])
    if _JSON.value:
        print(json.dumps(summary))


def mean_of(seeds: list[dict]) -> dict[str, dict[str, float]]:
    """Return the mean over seeds of every figure of every exit."""
    return {
        name: {key: float(np.mean([seed[name][key] for seed in seeds])) for key in seeds[0][name]}
        for name in seeds[0]
    }


def best(rows: dict[str, dict]) -> str:
    """Return the recipe of the highest mean agreement whose final exit is no worse than plain's."""
    limit = rows[PLAIN]["final"]["bits_per_byte"]
    allowed = [name for name, row in rows.items() if row["final"]["bits_per_byte"] <= limit]

    def early(row):
        return np.mean([v["agreement"] for k, v in row.items() if k != "final"])

    return max(allowed, key=lambda name: early(rows[name]))


def findings(rows: dict[str, dict]) -> list[dict]:
    """Return the findings on LayerSkip's recipe; none if it was not trained."""
    from eejax.experiments.reproduce.claims import Finding, Verdict

    if "layer_dropout" not in rows:
        return []
    plain, own = rows[PLAIN], rows["layer_dropout"]
    early = [name for name in plain if name != "final"]
    told = ", ".join(
        f"{name} {own[name]['agreement']:.1%} (plain {plain[name]['agreement']:.1%})"
        for name in early
    )
    more = own["final"]["bits_per_byte"] / plain["final"]["bits_per_byte"] - 1
    better = all(own[name]["agreement"] > plain[name]["agreement"] for name in early)
    holds = better and more < 0.02
    why = (
        "So early in training the labels' gradient at the exits helps the layers below them, and "
        "the recipe takes some of it away."
    )
    one = Finding(
        "LayerSkip",
        "Section 4.1",
        "Layer dropout and a curriculum of exit losses make early exits more accurate, at little "
        "cost to the last layer.",
        "shown for Llama models; no value taken over",
        f"agreement with the final exit: {told}; final exit {more:+.1%} bits per byte",
        "the demo's model and text, 2 cores",
        Verdict.HOLDS if holds else Verdict.FAILS,
        "" if holds else why,
    )
    return [one.to_dict()]


def show(rows: dict[str, dict], chosen: str) -> None:
    from eejax import analysis

    exits = list(rows[PLAIN])
    header = ["recipe", *(f"{e}, bits/byte" for e in exits), *(f"{e} agrees" for e in exits[:-1])]
    cells = [
        [
            name,
            *(f"{row[e]['bits_per_byte']:.3f}" for e in exits),
            *(f"{row[e]['agreement']:.1%}" for e in exits[:-1]),
        ]
        for name, row in rows.items()
    ]
    print("\n" + analysis.table(header, cells))
    print(f"\nbest agreement with a final exit no worse than plain's: {chosen}", flush=True)


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted: the same command continues from the last checkpoint")
