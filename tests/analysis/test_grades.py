"""Figures of a grade say what was put in."""

import numpy as np
from matplotlib.image import imread

from eejax.analysis import save
from eejax.analysis.grades import draft_speeds, exits_by_depth, gate_speeds, tuned_exits


def drawn(figure, path):
    image = imread(save(figure, path))
    assert image.shape[0] > 400 and image.std() > 0.02
    return figure.axes


def test_exits_by_depth(tmp_path):
    figure = exits_by_depth([1, 2, 4], [0.2, 0.6, 1.0], [3.0, None, 1.5], own=[2])
    left, right = drawn(figure, tmp_path / "a.png")
    np.testing.assert_array_equal(left.lines[0].get_xydata(), [[1, 0.2], [2, 0.6], [4, 1.0]])
    np.testing.assert_array_equal(left.lines[1].get_xydata(), [[2, 0.6]])
    np.testing.assert_array_equal(right.lines[0].get_xydata(), [[1, 3.0], [4, 1.5]])
    assert len(right.lines) == 1, "the exit of the model has no loss"


def test_gates_and_their_oracle(tmp_path):
    curves = {"margin": ([0.9, 1.2], [1.0, 0.9]), "router": ([1.0], [0.95])}
    (axes,) = drawn(gate_speeds(curves, (0.95,), 1.7), tmp_path / "b.png")
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_array_equal(lines["margin"].get_xydata(), [[0.9, 1.0], [1.2, 0.9]])
    np.testing.assert_array_equal(lines["oracle"].get_xydata(), [[1.7, 1.0]])


def test_drafts_by_depth(tmp_path):
    (axes,) = drawn(draft_speeds({"logit lens": ([1, 2], [0.8, 1.1])}), tmp_path / "c.png")
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[1, 0.8], [2, 1.1]])
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["logit lens"]


def test_tuned_exits_and_speeds(tmp_path):
    speeds = {"drafts": (1.2, 1.1, 1.3), "early exits": (0.9, 0.8, 1.0)}
    left, right = drawn(tuned_exits([1, 3], [0.1, 0.2], [0.3, 0.5], speeds), tmp_path / "d.png")
    np.testing.assert_allclose([bar.get_height() for bar in left.patches], [0.1, 0.2, 0.3, 0.5])
    intervals = [line.get_xydata().tolist() for line in right.lines[:4:2]]
    assert intervals == [[[1.1, 0], [1.3, 0]], [[0.8, 1], [1.0, 1]]]
    assert [t.get_text() for t in right.get_yticklabels()] == ["drafts", "early exits"]
    assert len(drawn(tuned_exits([1], [0.1], [0.3], {}), tmp_path / "e.png")) == 1
