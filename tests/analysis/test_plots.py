"""Figures say what was put in: lines, bars, labels; and are written without a display."""

import numpy as np
import pytest
from matplotlib.image import imread

from eejax.analysis import exit_histogram, frontiers, loss_curves, quality_against_speed, save

RECORDS = [
    {"step": s, "loss/exit_3": 5.5 / s**0.2, "loss/final": 5.2 / s**0.25, "loss": 7.0}
    for s in range(1, 101)
]
RECORDS += [{"step": s, "eval/loss/exit_3": 2.3, "eval/loss/final": 2.0} for s in (50, 100)]
POINTS = [
    {"threshold": t, "agreement": 0.8 + 0.2 * t, "depth": 12 * t, "bits_per_byte": 2.5 - t / 2}
    for t in np.linspace(0.0, 1.0, 6)
]


def drawn(figure, path):
    image = imread(save(figure, path))
    assert image.shape[0] > 400 and image.std() > 0.02
    return figure


def test_loss_curves(tmp_path):
    figure = loss_curves(
        RECORDS, bits_scale=2.0, unit="bits", references={"trigram": 2.6}, title="T"
    )
    axes = drawn(figure, tmp_path / "new" / "loss.png").axes[0]
    labels = [t.get_text() for t in axes.get_legend().get_texts()]
    assert labels[:3] == ["exit 3, held-out", "final exit, held-out", "trigram: 2.60"]
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    np.testing.assert_allclose(lines["final exit, held-out"], [4.0, 4.0])  # 2.0 · scale
    assert len(axes.lines[0].get_ydata()) == 100
    assert axes.get_ylabel() == "cross entropy (bits)" and axes.get_title(loc="left") == "T"


def test_quality_against_speed(tmp_path):
    measured = [{"threshold": 0.8, "agreement": 0.96, "speedup": 1.2, "low": 1.1, "high": 1.4}]
    figure = quality_against_speed(POINTS, 12, measured=measured)
    left, right = drawn(figure, tmp_path / "speed.png").axes
    x, y = left.lines[0].get_data()
    want = [p for p in POINTS if p["depth"]]  # depth 0 has no speed-up to draw
    np.testing.assert_allclose(sorted(x), sorted(12 / p["depth"] for p in want))
    np.testing.assert_allclose(sorted(y), [p["agreement"] for p in want])
    np.testing.assert_allclose(sorted(right.lines[0].get_xdata()), [p["depth"] for p in want])
    assert any("95% agreement" in t.get_text() for t in left.get_legend().get_texts())


def test_frontiers(tmp_path):
    curves = {"margin": POINTS[::-1], "fixed": POINTS[:2]}
    left, right = drawn(frontiers(curves, xlabel="layers"), tmp_path / "sweep.png").axes
    for axes, key in ((left, "agreement"), (right, "bits_per_byte")):
        for line, n in zip(axes.lines[:2], (6, 2), strict=True):
            np.testing.assert_allclose(line.get_xdata(), [p["depth"] for p in POINTS[:n]])
            np.testing.assert_allclose(line.get_ydata(), [p[key] for p in POINTS[:n]])
        assert axes.get_xlabel() == "layers"
    labels = [t.get_text() for t in left.figure.legends[0].get_texts()]
    assert labels == ["margin", "fixed", "95% agreement"]
    timed = {"margin": [p | {"time": p["depth"] / 24} for p in POINTS]}
    assert max(frontiers(timed, x="time").axes[0].lines[0].get_xdata()) == 0.5


def test_exit_histogram(tmp_path):
    shares = {"held-out text": [0.5, 0.2, 0.3], "generated": [0.6, 0.3, 0.1]}
    axes = drawn(exit_histogram(shares, (3, 6, 12)), tmp_path / "exits.png").axes[0]
    assert [b.get_height() for b in axes.patches] == pytest.approx(
        [*shares["held-out text"], *shares["generated"]]
    )
    ticks = [t.get_text() for t in axes.get_xticklabels()]
    assert ticks == ["exit after\nlayer 3", "exit after\nlayer 6", "final\n(12 layers)"]
