"""Figures of training and of early exit: numbers in, a matplotlib figure out, without a display."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

if TYPE_CHECKING:  # older versions of matplotlib lack it
    from matplotlib.typing import RcKeyType

FINAL = "final"
INK, ACCENT, GRID = "#1f2933", "#d1495b", "#d9dee4"
# Colors and markers of curves side by side; markers also differ in black and white.
# Color-blind readers can tell the colors apart (after Okabe and Ito).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", INK, "#e69f00", "#56b4e9", "#8c6d31")
MARKERS = ("o", "s", "^", "v", "D", "x")
STYLE: dict[RcKeyType, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def save(figure: Figure, path: str | os.PathLike) -> pathlib.Path:
    """Write the figure as PNG (or by the path's suffix) and create its folder if necessary."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def loss_curves(
    records: Sequence[Mapping[str, Any]],
    *,
    bits_scale: float = 1.0,
    unit: str = "nats per token",
    references: Mapping[str, float] | None = None,
    title: str = "Loss of every exit",
) -> Figure:
    """Draw the training and held-out loss of every exit over the steps.

    Args:
      records: lines of metrics.jsonl, with "step", "loss/NAME" and "eval/loss/NAME".
      bits_scale: factor of the losses (for bits per byte: 1 / (ln 2 · bytes per token)).
      unit: unit of the scaled losses, for the label.
      references: horizontal lines by name, in that unit.
      title: title of the figure.
    """
    names = list(dict.fromkeys(k[5:] for r in records for k in r if k.startswith("loss/")))
    with matplotlib.rc_context(STYLE):
        figure = figure_of(7.0, 4.4)
        axes = figure.subplots()
        for name, color in zip(names, exit_colors(len(names)), strict=True):
            steps, values = _series(records, f"loss/{name}")
            axes.plot(steps, [v * bits_scale for v in values], color=color, lw=1.0, alpha=0.45)
            steps, values = _series(records, f"eval/loss/{name}")
            label = f"{exit_label(name)}, held-out"
            axes.plot(
                steps, [v * bits_scale for v in values], "o-", ms=3.5, color=color, label=label
            )
        for (name, value), dashes in zip(
            (references or {}).items(), ("--", ":", "-."), strict=False
        ):
            axes.axhline(value, color=ACCENT, ls=dashes, lw=1.2, label=f"{name}: {value:.2f}")
        axes.plot([], [], color="gray", lw=1.0, alpha=0.6, label="thin lines: training batches")
        lasting = [
            v * bits_scale
            for name in names
            for step, v in zip(*_series(records, f"loss/{name}"), strict=True)
            if step >= 0.03 * records[-1]["step"]
        ]
        if lasting:  # the first steps fall from log(vocabulary) and would flatten the rest
            low = min(lasting + list((references or {}).values()))
            axes.set_ylim(low - 0.05 * (max(lasting) - low), max(lasting))
        axes.set(title=title, xlabel="training step", ylabel=f"cross entropy ({unit})")
        axes.set_xlim(left=0)
        axes.legend(loc="upper right")
    return figure


def quality_against_speed(
    points: Sequence[Mapping[str, Any]],
    n_layers: int,
    *,
    measured: Sequence[Mapping[str, Any]] = (),
    target: float | None = 0.95,
    title: str = "Quality against speed",
) -> Figure:
    """Draw agreement with the full model, and bits per byte, against the speed-up.

    Args:
      points: "threshold", "agreement", "depth" (mean layers) and "bits_per_byte" of each threshold,
        on held-out text.
      n_layers: layers of the model.
      measured: "threshold", "agreement", "speedup" (wall-clock, median over pairs) and its interval
        "low", "high".
      target: agreement at which a line is drawn, None for no line.
      title: title of the figure.
    """
    points = sorted((p for p in points if p["depth"] > 0), key=lambda p: p["depth"])
    bound = [n_layers / p["depth"] for p in points]
    with matplotlib.rc_context(STYLE):
        figure = figure_of(10.0, 4.4)
        left, right = figure.subplots(1, 2)
        left.plot(
            bound,
            [p["agreement"] for p in points],
            "o-",
            ms=3.5,
            color=INK,
            label="layers ÷ mean depth, teacher-forced",
        )
        if measured:
            ratio = [m["speedup"] for m in measured]
            error = [
                [m["speedup"] - m["low"] for m in measured],
                [m["high"] - m["speedup"] for m in measured],
            ]
            left.errorbar(
                ratio,
                [m["agreement"] for m in measured],
                xerr=error,
                fmt="D",
                ms=6,
                color=ACCENT,
                capsize=3,
                label="wall-clock: time of full ÷ recompute",
            )
            for m in measured:
                left.annotate(
                    f"{m['threshold']:g}",
                    (m["speedup"], m["agreement"]),
                    color=ACCENT,
                    textcoords="offset points",
                    xytext=(5, -12),
                    fontsize=8,
                )
        if target is not None:
            left.axhline(target, color="gray", ls="--", lw=1.0, label=f"{target:.0%} agreement")
        for p in _spread(points, left_to_right=bound):
            left.annotate(
                f"{p['threshold']:g}",
                (n_layers / p["depth"], p["agreement"]),
                textcoords="offset points",
                xytext=(5, 5),
                fontsize=8,
            )
        left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        left.set(
            title=title,
            xlabel="speed-up over all layers (×)",
            ylabel="tokens equal to the full model's (held-out)",
        )
        left.set_ylim(top=1.0 + 0.04 * (1.0 - left.get_ylim()[0]))
        left.legend(loc="upper left", bbox_to_anchor=(0, -0.16), fontsize=9)
        right.plot(
            [p["depth"] for p in points],
            [p["bits_per_byte"] for p in points],
            "o-",
            ms=3.5,
            color=INK,
        )
        for p in _spread(points, left_to_right=[-p["depth"] for p in points]):
            right.annotate(
                f"{p['threshold']:g}",
                (p["depth"], p["bits_per_byte"]),
                textcoords="offset points",
                xytext=(5, 5),
                fontsize=8,
            )
        right.set(
            title="The price in bits",
            xlabel=f"mean depth of emitted tokens (of {n_layers} layers)",
            ylabel="bits per byte of the emitted distribution",
        )
        figure.supxlabel("numbers beside points are thresholds", fontsize=8, color="gray")
    return figure


def frontiers(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    x: str = "depth",
    xlabel: str = "mean depth of emitted tokens (layers)",
    target: float | None = 0.95,
    title: str = "Quality against speed",
) -> Figure:
    """Draw agreement with the full model, and bits per byte, of several ways to leave early.

    Args:
      curves: points in any order by name, such as a gate's: "agreement", "bits_per_byte" and the
        value at the key `x`.
      x: key of the cost, of which less is faster.
      xlabel: label of the x axis.
      target: agreement at which a line is drawn, None for no line.
      title: title of the figure.
    """
    with matplotlib.rc_context(STYLE):
        figure = figure_of(10.0, 4.4)
        left, right = figure.subplots(1, 2)
        for axes, key in ((left, "agreement"), (right, "bits_per_byte")):
            for i, (name, points) in enumerate(curves.items()):
                points = sorted(points, key=lambda p: p[x])
                axes.plot(
                    [p[x] for p in points],
                    [p[key] for p in points],
                    label=name,
                    ms=4,
                    color=COLORS[i % len(COLORS)],
                    marker=MARKERS[i % len(MARKERS)],
                )
            axes.set(xlabel=xlabel)
        if target is not None:
            left.axhline(target, color="gray", ls="--", lw=1.0, label=f"{target:.0%} agreement")
        left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        left.set(title=title, ylabel="tokens equal to the full model's (held-out)")
        right.set(title="The price in bits", ylabel="bits per byte of the emitted distribution")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 7))
    return figure


def exit_histogram(
    shares: Mapping[str, Sequence[float]],
    boundaries: Sequence[int],
    *,
    title: str = "Where tokens leave",
) -> Figure:
    """Draw the share of tokens by exit, one group of bars for each exit.

    Args:
      shares: by name, one share for each of `boundaries`, such as {"held-out text": `[...]`,
        "generated": `[...]`}.
      boundaries: boundaries of the exits, the final one last.
      title: title of the figure.
    """
    with matplotlib.rc_context(STYLE):
        figure = figure_of(7.0, 4.0)
        axes = figure.subplots()
        width = 0.8 / max(len(shares), 1)
        colors = ("#33658a", "#f6ae2d", "#86bbd8", "#758e4f")
        for i, (name, values) in enumerate(shares.items()):
            x = [j + (i - (len(shares) - 1) / 2) * width for j in range(len(boundaries))]
            bars = axes.bar(x, values, width * 0.94, label=name, color=colors[i % len(colors)])
            axes.bar_label(bars, [f"{v:.0%}" for v in values], fontsize=9, padding=2)
        labels = [f"exit after\nlayer {s}" for s in boundaries[:-1]] + [
            f"final\n({boundaries[-1]} layers)"
        ]
        axes.set_xticks(range(len(boundaries)), labels)
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.margins(y=0.12)
        axes.set(title=title, ylabel="share of tokens")
        axes.legend(loc="best")
    return figure


def exit_colors(n: int) -> list:
    """Return a color for each of n exits, darker with depth, the final exit's the darkest."""
    scale = matplotlib.colormaps["viridis_r"]
    return [scale(0.15 + 0.7 * i / max(n - 1, 1)) for i in range(n - 1)] + [INK]


def figure_of(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, which needs no display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _series(records, key: str) -> tuple[list[int], list[float]]:
    have = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return [s for s, _ in have], [v for _, v in have]


def exit_label(name: str) -> str:
    """Return the label of 'exit_3' or 'final': 'exit 3', 'final exit'."""
    return "final exit" if name == FINAL else name.replace("_", " ")


def _spread(points, left_to_right: Sequence[float], most: int = 7) -> list:
    """Return at most `most` points, evenly along the curve, for labels that do not collide."""
    span = max(left_to_right) - min(left_to_right) if points else 0.0
    chosen, last = [], None
    for p, x in zip(points, left_to_right, strict=True):
        if last is None or abs(x - last) >= span / most:
            chosen.append(p)
            last = x
    return chosen
