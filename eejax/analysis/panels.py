"""Several runs in one figure: a panel for each quantity, a line for each run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from eejax.analysis.plots import COLORS, STYLE, figure_of

# After all colors come dashes.
DASHES = ("-", "--", ":", "-.")
NICE = (1, 2, 2.5, 5, 10)  # steps between ticks
LONGEST = 48  # letters of a name in a legend

Points = tuple[Sequence[float], Sequence[float]]


class Look(TypedDict):
    """Color and dashes of a line, as matplotlib names them."""

    color: str
    ls: str


@dataclasses.dataclass(frozen=True)
class Panel:
    """One quantity of several runs.

    Attributes:
      title: title of the panel.
      xlabel: label of the x axis.
      ylabel: label of the y axis.
      curves: points (x, y) by the name of a run, x ascending, both finite; a run without points may
        be left out.
      noisy: whether the running mean is drawn, with the points faintly behind it.
      log: whether y has a logarithmic scale, where all values are positive and differ much.
      cut: for losses, whether the first steps, and runs that diverged, may leave the picture where
        they would flatten the rest.
    """

    title: str
    xlabel: str
    ylabel: str
    curves: Mapping[str, Points]
    noisy: bool = False
    log: bool = False
    cut: bool = False


def compare(
    panels: Sequence[Panel], names: Sequence[str], *, title: str, columns: int = 3
) -> Figure:
    """Draw the panels in rows of at most `columns`, under one legend of all `names`.

    A name has the same color and dashes wherever `names` has the same order.
    """
    columns = max(1, min(columns, len(panels)))
    rows = math.ceil(len(panels) / columns)
    width = max(7.0, 4.4 * columns)
    shown = [_shorten(name) for name in names]
    entries = max(1, int(width / (0.7 + 0.085 * max(map(len, shown), default=1))))
    entries = min(entries, max(len(names), 1))
    legend_rows = math.ceil(len(names) / entries)
    looks = {name: look(i) for i, name in enumerate(names)}
    with matplotlib.rc_context(STYLE):
        figure = figure_of(width, 0.5 + 2.9 * rows + 0.21 * (legend_rows + 1))
        figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
        figure.suptitle(title, fontsize=13, fontweight="bold")
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for panel, axes in zip(panels, grid, strict=False):
            _draw(axes, panel, looks)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        legend = figure.legend(
            [Line2D([], [], **looks[name]) for name in names],
            # Before matplotlib 3.10 a label that begins with _ is left out.
            [f" {name}" if name.startswith("_") else name for name in shown],
            loc="outside lower center",
            ncols=entries,
            fontsize=9,
            handlelength=2.6,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def look(i: int) -> Look:
    """Return the color and dashes of the i-th run."""
    return {"color": COLORS[i % len(COLORS)], "ls": DASHES[i // len(COLORS) % len(DASHES)]}


def running_mean(values: Sequence[float] | np.ndarray, width: int) -> np.ndarray:
    """Compute the mean over `width` values around each one, or over fewer near the beginning.

    It does not lag behind, as an exponential mean does, so runs with different logging intervals
    can be compared.
    """
    sums = np.append(0.0, np.cumsum(np.asarray(values, np.float64)))
    here = np.arange(len(values))
    half = np.minimum(width // 2, here)
    end = np.minimum(here + half + 1, len(values))
    return (sums[end] - sums[here - half]) / (end - here + half)


def _draw(axes: Axes, panel: Panel, looks: Mapping[str, Look]) -> None:
    axes.set_title(panel.title)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    points = {name: panel.curves[name] for name in looks if len(panel.curves.get(name, ((),))[0])}
    points = {name: tuple(np.asarray(p, np.float64) for p in xy) for name, xy in points.items()}
    if not points:
        axes.text(0.5, 0.5, "nothing recorded", ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    lines = {}
    for name, (x, y) in points.items():
        width = max(len(x) // 20, min(len(x) // 4, 15)) if panel.noisy else 0
        lines[name] = x, running_mean(y, width)
        if width > 1:
            axes.plot(x, y, color=looks[name]["color"], lw=0.7, alpha=0.18)
    for i, (name, line) in enumerate(lines.items()):
        # Runs that share a schedule draw the same line: the earlier ones show beside the later.
        hidden = sum(np.array_equal(line, other) for other in list(lines.values())[i + 1 :])
        axes.plot(
            *line,
            **looks[name],
            lw=1.5 + 2.0 * min(hidden, 3),
            solid_capstyle="butt",
            marker="." if len(line[0]) < 20 else "",
            ms=6,
        )
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=NICE, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    values = np.concatenate([y for _, y in points.values()])
    if panel.log and values.min() > 0 and values.max() > 3 * values.min():
        ratio = values.max() / values.min()
        subs = (1, 2, 3, 5) if ratio < 10 else (1, 2, 5) if ratio < 100 else (1,)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=NICE))
        if panel.cut:
            axes.set_ylim(_lasting(points, lines))
    axes.yaxis.set_major_formatter(FuncFormatter(_number))


def _lasting(points, lines) -> tuple[float, float] | None:
    """Return limits of y that hold the lines and nearly all points.

    They leave out the first 3 % of x, and values above three times the median.
    """
    begin = 0.03 * max(x[-1] for x, _ in points.values())

    def late(curves):
        return np.concatenate([y[x >= min(begin, x[-1])] for x, y in curves.values()])

    values, means = late(points), late(lines)
    most = 3 * np.median(values)
    values, means = values[values <= most], means[means <= most]
    if not len(values) or not len(means):
        return None
    low, high = np.quantile(values, (0.01, 0.99))
    low, high = min(low, means.min()), max(high, means.max())
    margin = 0.05 * (high - low)
    return (low - margin, high + margin) if margin else None


def _number(value: float, _: int | None = None) -> str:
    """Format a number, such as 12.5M, 0.003 or 1e-05."""
    return EngFormatter(sep="")(value) if abs(value) >= 1e4 else f"{value:g}"


def _shorten(name: str) -> str:
    """Leave out the middle of a long name: runs differ at the beginning or at the end."""
    half = LONGEST // 2
    return name if len(name) <= LONGEST else f"{name[:half]}…{name[-half + 1 :]}"
