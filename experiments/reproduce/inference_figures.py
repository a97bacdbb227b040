"""Figures 8 and 10 of EE-LLM, drawn from scores and speeds of a trained run."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from eejax.experiments.reproduce import inference_tasks

SCORES = {
    "accuracy": "LAMBADA, last words completed",
    "word_loss": "LAMBADA, -log p of the last word (nats)",
    "perplexity": "held-out text, perplexity per token",
    "agreement": "held-out text, agreement with the full model",
}


def draw(out: pathlib.Path, found: Sequence[dict], full: dict, stages: int) -> list[pathlib.Path]:
    from eejax import analysis
    from eejax.experiments.reproduce.scores_against_speed import scores_against_speed

    def values(row):
        return {k: row[k] for k in SCORES} | {"accuracy": row["accuracy"]["score"]}

    def point(row, speed):
        return {"threshold": row["threshold"], "speed": speed} | values(row)

    real = [
        point(row, row["speed"]["ratio"]) | {k: row["speed"][k] for k in ("low", "high")}
        for row in found
    ]

    def curve(engine):
        return [point(row, row["simulated"][engine]) for row in found]

    curves = {
        "recompute, measured": real,
        "recompute, simulated": curve("recompute"),
        f"pipelined on {stages} stages, simulated": curve("pipelined"),
    }
    shares = ("accuracy", "agreement")
    fig8 = scores_against_speed(dict([next(iter(curves.items()))]), SCORES, full, shares=shares)
    some = {k: SCORES[k] for k in ("word_loss", "perplexity")}
    fig10 = scores_against_speed(curves, some, full, shares=shares)
    return [analysis.save(fig8, out / "fig8.png"), analysis.save(fig10, out / "fig10.png")]


def draw_tasks(out: pathlib.Path, tasks: dict[str, list[dict]]) -> pathlib.Path:
    """Draw Figure 8's tasks, a curve each."""
    from eejax import analysis
    from eejax.experiments.reproduce.scores_against_speed import scores_against_speed

    curves = {
        f"{inference_tasks.TASKS[name].title}, {inference_tasks.TASKS[name].metric}": [
            {
                "threshold": row["threshold"],
                "speed": row["speed"]["pipelined"],
                "score": row["score"]["score"],
            }
            for row in rows
        ]
        for name, rows in tasks.items()
    }
    figure = scores_against_speed(curves, {"score": "score by the task's metric"}, {})
    return analysis.save(figure, out / "fig8_tasks.png")
