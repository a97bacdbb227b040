"""Figures of a model's grade: exits by depth, frontiers of gates, and drafts by depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eejax.analysis.plots import ACCENT, COLORS, INK, MARKERS, STYLE, figure_of

Curve = tuple[Sequence[float], Sequence[float]]


def exits_by_depth(
    boundaries: Sequence[int],
    agreement: Sequence[float],
    losses: Sequence[float | None],
    own: Sequence[int] = (),
) -> Figure:
    """Draw the agreement with the final exit, and the loss, of exits at every depth.

    Args:
      boundaries: layers below each exit, the final one last.
      agreement: share of the tokens of each exit that are the final exit's.
      losses: nats per token, None where there is none.
      own: boundaries of the exits that the model has, which are marked.
    """
    with matplotlib.rc_context(STYLE):
        figure = figure_of(10.0, 3.8)
        left, right = figure.subplots(1, 2)
        known = [(b, x) for b, x in zip(boundaries, losses, strict=True) if x is not None]
        left.plot(boundaries, agreement, "o-", ms=4, color=COLORS[0], label="logit lens")
        right.plot(*zip(*known, strict=True), "o-", ms=4, color=COLORS[0], label="logit lens")
        for axes, values in ((left, agreement), (right, losses)):
            marked = [
                (b, x)
                for b, x in zip(boundaries, values, strict=True)
                if b in own and x is not None
            ]
            if marked:
                x, y = zip(*marked, strict=True)
                axes.plot(x, y, "D", ms=7, color=ACCENT, label="exit of the model")
                axes.legend(loc="best")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set(xlabel="layers below the exit")
        left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        left.set(title="Tokens that are the final exit's", ylim=(0, 1.02))
        right.set(title="Loss", ylabel="nats per token")
    return figure


def gate_speeds(
    curves: Mapping[str, Curve],
    targets: Sequence[float],
    oracle: float | None = None,
) -> Figure:
    """Draw agreement against predicted speed of every gate.

    Args:
      curves: (speeds over the full model, agreements) by the name of a gate.
      targets: agreements at which lines are drawn.
      oracle: speed of a gate that is always right, or None.
    """
    with matplotlib.rc_context(STYLE):
        figure = figure_of(7.0, 4.2)
        axes = figure.subplots()
        _draw(axes, curves)
        for target in targets:
            axes.axhline(target, color="gray", ls="--", lw=0.8)
        if oracle is not None:
            axes.plot([oracle], [1.0], "*", ms=12, color=ACCENT, label="oracle", clip_on=False)
        axes.axvline(1.0, color=INK, lw=0.8)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(
            title="Gates: agreement and predicted speed",
            xlabel="speed over the full model (×)",
            ylabel="tokens that are the full model's",
        )
        axes.legend(loc="best")
    return figure


def draft_speeds(curves: Mapping[str, Curve]) -> Figure:
    """Draw the predicted speed of lossless drafts by the depth of the exit that drafts.

    Args:
      curves: (boundaries, speeds over the full model) by name.
    """
    with matplotlib.rc_context(STYLE):
        figure = figure_of(7.0, 3.8)
        axes = figure.subplots()
        _draw(axes, curves)
        axes.axhline(1.0, color=INK, lw=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(
            title="Drafts: predicted speed, same text",
            xlabel="layers below the exit that drafts",
            ylabel="speed over the full model (×)",
        )
        axes.legend(loc="best")
    return figure


def tuned_exits(
    boundaries: Sequence[int],
    before: Sequence[float],
    after: Sequence[float],
    speeds: Mapping[str, tuple[float, float, float]],
) -> Figure:
    """Draw the agreement of exits before and after tuning, and speeds beside the full model.

    Args:
      boundaries: layers below each exit.
      before: share of tokens that were the final exit's.
      after: share of tokens that are.
      speeds: (speed over the full model, lower and upper end of its interval) by name; without
        any, agreement alone is drawn.
    """
    with matplotlib.rc_context(STYLE):
        panels = 2 if speeds else 1
        figure = figure_of(5.0 * panels, 3.8)
        left, *more = figure.subplots(1, panels, squeeze=False)[0]
        for shift, values, label, color in (
            (-0.2, before, "before tuning", COLORS[1]),
            (0.2, after, "after", COLORS[0]),
        ):
            places = [i + shift for i in range(len(boundaries))]
            bars = left.bar(places, values, 0.38, label=label, color=color)
            left.bar_label(bars, [f"{v:.0%}" for v in values], fontsize=9, padding=2)
        names = [f"exit after\nlayer {n}" for n in boundaries]
        left.set_xticks(range(len(boundaries)), names)
        left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        left.set(title="Tokens that are the final exit's", ylim=(0, 1.02))
        left.legend(loc="best")
        for right in more:
            for i, (speed, low, high) in enumerate(speeds.values()):
                right.plot([low, high], [i, i], color=COLORS[0], lw=2)
                right.plot([speed], [i], "o", color=COLORS[0])
            right.axvline(1.0, color=INK, lw=0.8)
            right.set_yticks(range(len(speeds)), list(speeds))
            right.set(
                title="Speed of whole answers",
                xlabel="times the full model's (95 % interval)",
                ylim=(len(speeds) - 0.4, -0.6),
            )
    return figure


def _draw(axes: Axes, curves: Mapping[str, Curve]) -> None:
    """Draw curves by name, each in a color and with a marker of its own."""
    for i, (name, (x, y)) in enumerate(curves.items()):
        color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        axes.plot(x, y, color=color, marker=marker, ms=4, label=name)
