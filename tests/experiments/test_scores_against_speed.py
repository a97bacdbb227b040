"""Scores over speed: what is drawn where."""

import numpy as np

from eejax.experiments.reproduce.scores_against_speed import scores_against_speed


def points(n, measured=False):
    rng = np.random.default_rng(n)
    out = []
    for i in range(n):
        speed = 1 + i / 4
        p = {"threshold": 1 - i / 10, "speed": speed, "a": rng.random(), "b": rng.random()}
        out.append(p | ({"low": speed - 0.1, "high": speed + 0.3} if measured else {}))
    return out


def test_points_intervals_bands_and_thresholds():
    curves = {"measured": points(4, True), "simulated": points(3)}
    full = {"a": {"score": 0.5, "low": 0.4, "high": 0.7}}
    titles = {"a": "first", "b": "second"}
    figure = scores_against_speed(curves, titles, full, shares=["a"])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["first", "second"]
    for axes, key in zip(figure.axes, titles, strict=True):
        drawn = axes.containers
        for container, (name, wanted) in zip(drawn, curves.items(), strict=True):
            assert container.get_label() == name
            x, y = container[0].get_data()
            assert x.tolist() == [p["speed"] for p in wanted]
            assert y.tolist() == [p[key] for p in wanted]
            if name == "measured":
                (bars,) = container[2]
                for (left, right), p in zip(bars.get_segments(), wanted, strict=True):
                    np.testing.assert_allclose(left, [p["low"], p[key]])
                    np.testing.assert_allclose(right, [p["high"], p[key]])
            else:
                assert not container[2]
        assert [t.get_text() for t in axes.texts] == ["1", "0.9", "0.8", "0.7"]
        low, high = axes.get_ylim()
        assert all(low < p[key] < high for points in curves.values() for p in points)
        dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert [line.get_ydata()[0] for line in dashed] == ([0.5] if key == "a" else [])
    first, second = figure.axes
    assert first.yaxis.get_major_formatter()(0.25).endswith("%")
    assert not second.yaxis.get_major_formatter()(0.25).endswith("%")
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.texts] == ["full model (95 %)", "measured", "simulated"]


def test_one_panel_and_three():
    curve = {"only": points(3)}
    assert len(scores_against_speed(curve, {"a": "x"}, {}).axes) == 1
    three = scores_against_speed(
        {"only": [p | {"c": 1.0} for p in points(3)]}, {"a": "x", "b": "y", "c": "z"}, {}
    )
    assert len(three.axes) == 3
