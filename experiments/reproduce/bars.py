"""Groups of bars: one number for each of several things, in each of several settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from eejax.analysis.plots import STYLE, exit_colors, figure_of


def grouped_bars(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    groups: Sequence[str],
    *,
    xlabel: str = "",
) -> Figure:
    """Draw panels of grouped bars, three in a row.

    A panel has a title, which names the unit, and by the name of a series one number for each of
    the `groups`. Series have the same names in all panels, and one legend.
    """
    names = list(next(iter(panels.values())))
    with matplotlib.rc_context(STYLE):
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure = figure_of(0.8 + 3.8 * columns, 0.8 + 3 * rows)
        every = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in every[len(panels) :]:
            axes.remove()
        width = 0.8 / len(names)
        for axes, (title, series) in zip(every, panels.items(), strict=False):
            colors = exit_colors(len(names))
            for k, (name, color) in enumerate(zip(names, colors, strict=True)):
                x = np.arange(len(groups)) + (k - (len(names) - 1) / 2) * width
                axes.bar(x, series[name], width, color=color, label=name)
            axes.set_xticks(range(len(groups)), groups)
            axes.set(title=title, xlabel=xlabel)
            axes.grid(axis="x", visible=False)
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(names))
    return figure
