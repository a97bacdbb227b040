"""The comparison of recipes, at a size that shows nothing but that it works."""

from __future__ import annotations

import json

from endings import ended
from launchers import functions_of

from eejax.train.metrics import read_metrics

recipes = functions_of("eejax.experiments.reproduce.recipes")


def run(workdir):
    return ended(
        "eejax.experiments.reproduce.recipes",
        "--tiny",
        "--seeds=1",
        "--steps=6",
        "--recipes=layer_dropout",
        f"--workdir={workdir}",
        "--json",
    )


def test_recipes_are_trained_once_and_compared(tmp_path):
    first, second = run(tmp_path), run(tmp_path)
    assert first.status == 0, first.err
    summary = json.loads(first.out.splitlines()[-1])
    assert list(summary["recipes"]) == ["plain", "layer_dropout"]
    assert json.loads((tmp_path / "results.json").read_text()) == summary
    for row in summary["recipes"].values():
        assert row["final"]["agreement"] == 1.0 and 0 <= row["exit_1"]["agreement"] <= 1
        assert 1 < row["final"]["bits_per_byte"] < 9
    assert summary["best"] in summary["recipes"]
    (found,) = summary["findings"]
    assert found["paper"] == "LayerSkip" and found["verdict"] in ("holds", "does not hold")
    # The recipe was one: with two exits at most one early exit, it has its turn at every step,
    # but layers were dropped and the weights of the two runs differ.
    plain, dropped = (read_metrics(tmp_path / f"{n}_0") for n in ("plain", "layer_dropout"))
    assert plain[-1]["eval/loss/final"] != dropped[-1]["eval/loss/final"]
    assert json.loads(second.out.splitlines()[-1]) == summary, "nothing was trained again"


def test_the_best_recipe_agrees_most_and_is_no_worse_in_the_end():
    def row(final, agreement):
        return {
            "exit_3": {"bits_per_byte": 3.0, "agreement": agreement},
            "final": {"bits_per_byte": final, "agreement": 1.0},
        }

    rows = {"plain": row(2.0, 0.7), "a": row(2.01, 0.9), "b": row(1.99, 0.8), "c": row(1.5, 0.6)}
    assert recipes.best(rows) == "b"
    assert recipes.best({"plain": row(2.0, 0.7), "a": row(2.1, 0.9)}) == "plain"


def test_an_unknown_recipe_is_named(tmp_path):
    done = ended("eejax.experiments.reproduce.recipes", "--recipes=magic", f"--workdir={tmp_path}")
    assert done.status == 1 and "--recipes = 'magic'" in done.err
    assert done.err.count("\n") == 1
