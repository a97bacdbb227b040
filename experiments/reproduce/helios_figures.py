"""Pictures of HELIOS' figures, by the paper's numbers. Those of serving are SIMULATED."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

from eejax.experiments.reproduce import helios_evidence as evidence

NAMES = ("small only", "large only", "HELIOS")
TIMELINES = {
    "figure_13.png": ("throughput", "tokens/s, 1 / TPOT", "throughput"),
    "figure_14.png": ("ttft", "seconds to the first token", "response time"),
    "figure_16.png": ("perplexity", "perplexity, own probabilities", "accuracy"),
}
"""File -> (field of a `PromptCurves`, axis, objective that HELIOS serves under)."""
MOST = 0.995  # quantile above which a timeline is cut off, so that loading does not flatten it


def figures(result: Mapping[str, Any], lines: Mapping[str, Any]) -> dict[str, Any]:
    """Return matplotlib figures by file name."""
    drawn = {
        "figure_6.png": by_layer(result["figure_6"]),
        "figure_7.png": exits_by_task(result["figure_7"]),
        "figure_8.png": unchanged(result["figure_8"]),
        "figure_9.png": complementary(result["figure_7"], result["figure_9"]),
        "figure_15.png": requests(result["figure_15"]),
        "figure_17.png": sensitivity(result["figure_17"]),
    }
    for file, (field, label, objective) in TIMELINES.items():
        shown = [lines["small only"], lines["large only"], lines[f"HELIOS, {objective}"]]
        number = file.removeprefix("figure_").removesuffix(".png")
        title = f"Figure {number}, SIMULATED, objective: {objective}"
        drawn[file] = over_prompts(shown, field, label, title)
    return drawn


def over_prompts(shown: Sequence[Any], field: str, label: str, title: str):
    """Draw each model alone and HELIOS, prompt by prompt, with HELIOS' decisions."""
    from eejax.analysis.plots import STYLE, exit_colors, figure_of

    top = max(float(np.quantile(getattr(line, field), MOST)) for line in shown)
    with matplotlib.rc_context(STYLE):
        figure = figure_of(11, 3.4)
        figure.suptitle(title)
        every = figure.subplots(1, len(shown), sharey=True)
        colors = exit_colors(len(shown))
        for axes, line, name, color in zip(every, shown, NAMES, colors, strict=True):
            values = getattr(line, field)
            axes.plot(np.minimum(values, top), color=color, lw=0.8)
            axes.axhline(values.mean(), color="black", lw=0.8, ls="--")
            axes.set(title=f"{name}: mean {values.mean():.3g}", xlabel="prompt")
        for prompt in shown[-1].assessments:
            every[-1].axvline(prompt, color="gray", lw=0.8, ls=":")
        for prompt, mark in shown[-1].changes:
            every[-1].annotate(mark, (prompt, top), fontsize=7, ha="center", va="bottom")
        every[0].set(ylabel=label, ylim=(0, 1.08 * top))
    return figure


def by_layer(rows: Sequence[Mapping[str, Any]]):
    """Draw Figure 6: operations and weights of a token by the layer of its exit."""
    from eejax import analysis

    names = [*dict.fromkeys(row["model"] for row in rows)]

    def curve(name, key):
        return (
            [r["layer"] for r in rows if r["model"] == name],
            [r[key] for r in rows if r["model"] == name],
        )

    panels = [
        analysis.Panel(title, "exit layer", label, {name: curve(name, key) for name in names})
        for title, label, key in (
            ("(a)", "gigaflops a token", "gigaflops"),
            ("(b)", "gigabytes of weights", "gigabytes"),
        )
    ]
    return analysis.compare(panels, names, title="Figure 6", columns=2)


def exits_by_task(rows: Sequence[Mapping[str, Any]]):
    """Draw Figures 7 and 11a: shares of tokens by exit."""
    from eejax.experiments.reproduce.bars import grouped_bars

    tasks = [*dict.fromkeys(row["task"] for row in rows)]
    panels = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        own = {row["task"]: row for row in rows if row["model"] == name}
        layers = own["all"]["layers"]
        panels[f"{name}: % of tokens by layers"] = {
            f"exit {e + 1}": [100 * own[task]["shares"][e] for task in tasks]
            for e in range(len(layers))
        }
    return grouped_bars(panels, [task[:4] for task in tasks])


def unchanged(rows: Sequence[Mapping[str, Any]]):
    """Draw Figure 8: share of tokens that stay the same, by the threshold that keeps them."""
    from eejax import analysis

    tasks = [*dict.fromkeys(row["task"] for row in rows)]
    panels = []
    for name in dict.fromkeys(row["model"] for row in rows):
        curves = {}
        for row in (row for row in rows if row["model"] == name):
            points = [
                (100 * limit, 100 * share)
                for limit, share in zip(evidence.LIMITS, row["unchanged"], strict=True)
                if share is not None
            ]
            curves[row["task"]] = tuple(map(list, zip(*points, strict=True)))
        label = "% of tokens that stay the same"
        panels.append(analysis.Panel(name, "confidence threshold, %", label, curves))
    return analysis.compare(panels, tasks, title="Figure 8", columns=2)


def complementary(own: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]):
    """Draw Figures 9 and 11b: a model's tokens, and those past its first exit in the other."""
    from eejax.experiments.reproduce.bars import grouped_bars

    panels = {}
    for row in rows:
        alone = next(r for r in own if r["model"] == row["reader"] and r["task"] == "all")
        panels[f"{row['reader']}: % of tokens"] = {
            "of its own text": [100 * share for share in alone["shares"]],
            "past the other's first exit": [100 * share for share in row["past_first"]],
        }
    groups = [f"exit {e + 1}" for e in range(len(rows[0]["past_first"]))]
    return grouped_bars(panels, groups)


def requests(rows: Sequence[Mapping[str, Any]]):
    """Draw Figure 15: requests at a time over those of the whole model."""
    from eejax.experiments.reproduce.bars import grouped_bars

    ones = [1.0 for _ in rows]
    ratios = [row["ratio"] for row in rows]
    panels = {"requests, whole model = 1": {"whole model": ones, "up to the first exit": ratios}}
    return grouped_bars(panels, [row["model"] for row in rows])


def sensitivity(over: Mapping[str, Sequence[Mapping[str, Any]]]):
    """Draw Figure 17: throughput over the reassessment interval and the threshold."""
    from eejax import analysis

    interval, early = over["interval"], sorted(over["early"], key=_threshold)
    names = ["HELIOS", *(f"{m} only" for m in early[0]["static"])]
    x = [100 * _threshold(row) for row in early]
    curves = {f"{m} only": (x, [r["static"][m] for r in early]) for m in early[0]["static"]}
    curves["HELIOS"] = (x, [r["throughput"] for r in early])
    line = ([r["value"] for r in interval], [r["throughput"] for r in interval])
    panels = [
        analysis.Panel("(a)", "prompts between reassessments", "tokens/s", {"HELIOS": line}),
        analysis.Panel("(b)", "threshold of the small model, %", "tokens/s", curves),
    ]
    return analysis.compare(panels, names, title="Figure 17, SIMULATED", columns=2)


def _threshold(row: Mapping[str, Any]) -> float:
    return row["thresholds"]["small"]
