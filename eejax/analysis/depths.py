"""Convergence of hidden states to those of the last layer, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eejax.analysis.plots import ACCENT, COLORS, INK, MARKERS, STYLE, figure_of

BOUNDS = (0.9, 0.95, 0.98)


def convergence_by_depth(
    boundaries: Sequence[int], cosine: np.ndarray, agree: np.ndarray
) -> Figure:
    """Draw TIDE's convergence analysis (section 5.5).

    Args:
      boundaries: layers below each state.
      cosine: [e, n] cosine of the states at the boundaries and the last layer's state.
      agree: [e, n] bool, whether the token is the full model's.
    """
    with matplotlib.rc_context(STYLE):
        figure = figure_of(10.0, 4.0)
        left, right = figure.subplots(1, 2)
        low, middle, high = np.quantile(cosine, (0.1, 0.5, 0.9), axis=1)
        left.fill_between(boundaries, low, high, color=COLORS[0], alpha=0.2, label="80 % of tokens")
        left.plot(boundaries, middle, color=COLORS[0], marker=MARKERS[0], label="median")
        left.set(title="Cosine to the last layer's state", xlabel="layers", ylabel="cosine")
        for bound, color, marker in zip(BOUNDS, COLORS[2:], MARKERS[1:], strict=False):
            share = (cosine >= bound).mean(1)
            right.plot(boundaries, share, color=color, marker=marker, label=f"cosine ≥ {bound}")
        right.plot(boundaries, agree.mean(1), color=ACCENT, marker="*", label="same token")
        right.plot(
            boundaries,
            np.logical_and.accumulate(agree[::-1])[::-1].mean(1),
            color=INK,
            ls="--",
            label="same token from here on",
        )
        right.set(title="Share of tokens that could leave", xlabel="layers", ylim=(0, 1))
        right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        for axes in (left, right):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend(loc="best")
    return figure
