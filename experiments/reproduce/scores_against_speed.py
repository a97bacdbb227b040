"""Scores over speed: what thresholds cost, by one engine or by several."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from eejax.analysis.plots import COLORS, MARKERS, STYLE, figure_of


def scores_against_speed(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    scores: Mapping[str, str],
    full: Mapping[str, Mapping[str, float]],
    *,
    shares: Collection[str] = (),
) -> Figure:
    """Draw a panel for each score, two in a row: the score over the speed-up, a curve by engine.

    Args:
      curves: points by name, in the order of their thresholds: "threshold", "speed" as a multiple
        of the full model's, its interval "low" and "high" if it was measured, and a number for each
        of the `scores`. The first curve's points have their thresholds written beside them.
      scores: titles by key.
      full: for some keys, the full model's "score" with its interval "low" and "high", drawn as a
        band.
      shares: keys whose numbers are shown in percent.
    """
    columns = min(2, len(scores))
    rows = -(-len(scores) // columns)
    with matplotlib.rc_context(STYLE):
        figure = figure_of(0.6 + 4.9 * columns, 1.0 + 3.4 * rows)
        every = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in every[len(scores) :]:
            axes.remove()
        for axes, (key, title) in zip(every, scores.items(), strict=False):
            if key in full:
                band = full[key]
                axes.axhspan(band["low"], band["high"], color="gray", alpha=0.15, lw=0)
                axes.axhline(
                    band["score"], color="gray", ls="--", lw=1.0, label="full model (95 %)"
                )
            for i, (name, points) in enumerate(curves.items()):
                speeds = [p["speed"] for p in points]
                off = None
                if all("low" in p for p in points):
                    off = [
                        [p["speed"] - p["low"] for p in points],
                        [p["high"] - p["speed"] for p in points],
                    ]
                axes.errorbar(
                    speeds,
                    [p[key] for p in points],
                    xerr=off,
                    label=name,
                    ms=4,
                    elinewidth=0.8,
                    color=COLORS[i % len(COLORS)],
                    marker=MARKERS[i % len(MARKERS)],
                )
            for i, p in enumerate(next(iter(curves.values()))):
                left = i % 2 == 0  # neighbours' labels on either side
                axes.annotate(
                    f"{p['threshold']:g}",
                    (p["speed"], p[key]),
                    textcoords="offset points",
                    xytext=(-4 if left else 4, 4),
                    ha="right" if left else "left",
                    fontsize=7,
                )
            # The points fill the panel, whatever of the band that leaves.
            drawn = [p[key] for points in curves.values() for p in points]
            drawn += [full[key]["score"]] if key in full else []
            if (room := 0.12 * (max(drawn) - min(drawn))) > 0:
                axes.set_ylim(min(drawn) - room, max(drawn) + room)
            if key in shares:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set(title=title, xlabel="speed-up over the full model (×)")
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(len(labels), 4),
            title="numbers beside points are thresholds",
            title_fontsize=8,
        )
    return figure
