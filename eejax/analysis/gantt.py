"""Gantt charts of a pipeline's stages over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from eejax.analysis.plots import ACCENT, GRID, INK, STYLE, figure_of
from eejax.common.errors import require

# kind of work: its colour and its name in the legend
LOOKS = {
    "forward": ("#8fb8de", "layers forward"),
    "backward": ("#f4d58d", "layers backward"),
    "exits": ("#7fb685", "exits forward and backward"),
    "exit forward": ("#b5d99c", "exits forward"),
    "exit backward": ("#5f9e6e", "exits backward"),
}
SMALLEST_LABEL = 0.008  # of the width; a narrower bar has no room for its number
ROW = 0.8  # height of a bar, of 1


def gantt(
    panels: Mapping[str, Sequence[tuple[int, float, float, str, str, bool]]],
    *,
    unit: str = "time",
) -> Figure:
    """Draw schedules one below the other on a common time axis, each under its title.

    Bars are (stage, begin, end, kind, label, critical): the kind is one of `LOOKS`, the label is
    written on the bar (a microbatch's number), and critical bars have a dashed outline. Stages
    count from the top.

    Raises:
      ConfigError: for a panel without bars or an unknown kind.
    """
    require(bool(panels), "panels", dict(panels), "must have at least one")
    for title, bars in panels.items():
        require(len(bars) > 0, f"panels[{title!r}]", bars, "must have at least one bar")
        for bar in bars:
            require(bar[3] in LOOKS, "kind", bar[3], f"must be one of {', '.join(LOOKS)}")
    rows = {title: 1 + max(bar[0] for bar in bars) for title, bars in panels.items()}
    end = max(bar[2] for bars in panels.values() for bar in bars)
    with matplotlib.rc_context(STYLE):
        figure = figure_of(12, 0.9 + sum(0.42 * n + 0.75 for n in rows.values()))
        every = figure.subplots(
            len(panels),
            1,
            sharex=True,
            squeeze=False,
            gridspec_kw={"height_ratios": list(rows.values())},
        )[:, 0]
        for axes, (title, bars) in zip(every, panels.items(), strict=True):
            _draw(axes, title, bars, rows[title], end)
        every[-1].set_xlabel(unit)
        used = {bar[3] for bars in panels.values() for bar in bars}
        keys = [
            Patch(facecolor=c, edgecolor=INK, label=n) for k, (c, n) in LOOKS.items() if k in used
        ]
        if any(bar[5] for bars in panels.values() for bar in bars):
            keys.append(Patch(facecolor="none", edgecolor=ACCENT, ls="--", label="critical path"))
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys))
    return figure


def _draw(axes: Axes, title: str, bars: Sequence, rows: int, end: float) -> None:
    last = max(bar[2] for bar in bars)
    axes.set_title(f"{title}: {last:g}")
    # Outlines lie above all bars, so that a neighbour does not cover them.
    for stage, begin, stop, kind, label, critical in bars:
        box = ((begin, stage - ROW / 2), stop - begin, ROW)
        axes.add_patch(Rectangle(*box, facecolor=LOOKS[kind][0], edgecolor=INK, lw=0.4))
        if critical:
            axes.add_patch(
                Rectangle(*box, facecolor="none", edgecolor=ACCENT, lw=1.4, ls="--", zorder=3)
            )
        if stop - begin >= SMALLEST_LABEL * end:
            axes.text(
                (begin + stop) / 2, stage, label, ha="center", va="center", fontsize=7, zorder=4
            )
    axes.axvline(last, color=GRID, zorder=0)
    axes.set(xlim=(0, 1.01 * end), ylim=(rows - 0.5, -0.5))
    axes.set_yticks(range(rows), [f"stage {i}" for i in range(rows)])
    axes.grid(False)
