"""Training curves of several seeds: their progress, and a figure of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eejax.analysis.plots import ACCENT, STYLE, exit_colors


class SeedSpread(NamedTuple):
    """Mean, minimum and maximum of a number over seeds."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedSpread:
        return cls(float(np.mean(values)), float(np.min(values)), float(np.max(values)))

    def text(self, digits: int = 3) -> str:
        """Return the text '1.234 (1.229-1.240)'."""
        return f"{self.mean:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def bin_means(values: np.ndarray, bins: int) -> np.ndarray:
    """Average consecutive, nearly equal parts of the steps: [..., steps] -> [..., bins].

    A step without a value (NaN) does not count. Fewer steps than `bins` give as many bins.
    """
    parts = np.array_split(values, min(bins, values.shape[-1]), axis=-1)
    return np.stack([np.nanmean(part, axis=-1) for part in parts], axis=-1)


def falls(losses: np.ndarray, parts: int = 4) -> bool:
    """Return whether every quarter of a run has a lower mean loss than the quarter before.

    losses [seeds, steps]: the mean over seeds is judged, as it is drawn.
    """
    means = bin_means(losses, parts).mean(0)
    return bool(np.all(np.diff(means) < 0))


def training_curves(
    panels: Mapping[str, Mapping[str, np.ndarray]],
    standard: Mapping[str, np.ndarray],
    tokens_per_step: int,
    *,
    bins: int = 80,
) -> Figure:
    """Draw the training loss of every exit against tokens, one panel for each model.

    Lines are means over the seeds, of `bins` parts of the run each; shaded is from the lowest seed
    to the highest.

    Args:
      panels: title -> name of the exit -> losses [seeds, steps] in nats per token, the final exit
        last.
      standard: title -> losses of the model without early exits, drawn dashed into the panel.
      tokens_per_step: the number of tokens that a step trains on.
      bins: points of a line.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.8 + 5.2 * len(panels), 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        every_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        shown = list(standard.values())
        for axes, (title, exits) in zip(every_axes, panels.items(), strict=True):
            for (name, losses), color in zip(exits.items(), exit_colors(len(exits)), strict=True):
                _curve(axes, losses, tokens_per_step, bins, color=color, label=name)
                shown.append(losses)
            line = {"color": ACCENT, "label": "standard model", "ls": "--"}
            _curve(axes, standard[title], tokens_per_step, bins, **line)
            axes.set(title=title, xlabel="training tokens (millions)")
            axes.set_xlim(left=0)
            axes.legend(loc="upper right")
        # The first steps fall from log(vocabulary) and would flatten the rest.
        lasting = [bin_means(a, bins)[:, 3:] for a in shown if a.shape[-1] > 3]
        if lasting:
            low, high = min(a.min() for a in lasting), max(a.max() for a in lasting)
            every_axes[0].set_ylim(low - 0.05 * (high - low), high + 0.02 * (high - low))
        every_axes[0].set_ylabel("training loss (nats per token)")
    return figure


def _curve(axes, losses: np.ndarray, tokens_per_step: int, bins: int, *, color, label, ls="-"):
    steps = np.arange(1, losses.shape[-1] + 1, dtype=np.float64)
    x = bin_means(steps, bins) * tokens_per_step / 1e6
    y = bin_means(losses, bins)
    axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.18, lw=0)
    axes.plot(x, y.mean(0), color=color, ls=ls, label=label)
