"""Several runs in one figure: the data that was given, told apart, nothing over anything else."""

import hypothesis
import matplotlib
import numpy as np
import pytest
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from eejax.analysis import Panel, compare
from eejax.analysis.panels import look, running_mean

STEPS = np.arange(1.0, 101.0)


def panel(curves, **how):
    return Panel("title", "step", "loss", curves, **how)


def named(figure, axes, names):
    """name -> its line, found by color and dashes in the legend."""

    def style(line):
        return (to_hex(line.get_color()), line.get_linestyle())

    (legend,) = figure.legends
    handles = [style(h) for h in legend.get_lines()]
    lines = {style(line): line for line in axes.lines if line.get_alpha() is None}
    return {name: lines[h] for name, h in zip(names, handles, strict=True) if h in lines}


def test_lines_are_what_was_given_and_keep_their_color_in_every_panel():
    a, b = (STEPS, STEPS**0.5), (STEPS[::3], STEPS[::3] * 2)
    names = ["a", "b", "c"]
    figure = compare([panel({"a": a, "b": b}), panel({"b": b, "c": a})], names, title="T")
    left, right = (named(figure, axes, names) for axes in figure.axes)
    assert set(left) == {"a", "b"} and set(right) == {"b", "c"}
    for line, (x, y) in ((left["a"], a), (left["b"], b), (right["b"], b), (right["c"], a)):
        np.testing.assert_array_equal(line.get_xdata(), x)
        np.testing.assert_allclose(line.get_ydata(), y, rtol=1e-12)
    assert figure.get_suptitle() == "T"
    assert figure.axes[0].get_xlabel() == "step" and figure.axes[0].get_ylabel() == "loss"


def test_thirty_runs_look_different():
    assert len({tuple(look(i).items()) for i in range(30)}) == 30


@hypothesis.given(st.lists(st.floats(-1e6, 1e6), max_size=40), st.integers(0, 50))
def test_running_mean(values, width):
    want = []
    for i in range(len(values)):
        half = min(width // 2, i)
        want.append(np.mean(values[i - half : i + half + 1]))
    np.testing.assert_allclose(running_mean(values, width), want, rtol=1e-9, atol=1e-4)


def test_noise_is_averaged_and_stays_behind_it():
    noisy = 2.0 + np.resize([0.5, -0.5], 100)
    figure = compare([panel({"a": (STEPS, noisy)}, noisy=True)], ["a"], title="T")
    (axes,) = figure.axes
    points, mean = axes.lines
    np.testing.assert_array_equal(points.get_ydata(), noisy)
    assert points.get_alpha() < 0.3
    assert np.abs(mean.get_ydata()[10:] - 2.0).max() < 0.1


def test_the_beginning_and_a_run_gone_astray_do_not_flatten_the_rest():
    falling = 2.0 + 8.0 * np.exp(-STEPS)
    astray = np.where(STEPS < 50, 2.2, 900.0)
    curves = {"a": (STEPS, falling), "b": (STEPS, falling + 0.1), "c": (STEPS, astray)}
    for noisy in (False, True):
        figure = compare([panel(curves, noisy=noisy, cut=True)], list(curves), title="T")
        low, high = figure.axes[0].get_ylim()
        assert low < 2.0 and 2.2 < high < 4.0, "the lasting values are in sight, the others not"
    low, high = compare([panel(curves)], list(curves), title="T").axes[0].get_ylim()
    assert high > 900.0


def test_runs_that_all_went_astray_are_shown():
    curves = {"a": (STEPS, STEPS * 100), "b": (STEPS, STEPS * 110)}
    figure = compare([panel(curves, cut=True)], list(curves), title="T")
    assert figure.axes[0].get_ylim()[1] > 10_000


def test_a_logarithm_is_taken_of_what_has_one():
    def curves(y):
        return {"a": (STEPS, y)}

    panels = [panel(curves(y), log=True) for y in (STEPS, STEPS - 1, STEPS / 1000 + 5)]
    figure = compare(panels, ["a"], title="T")
    assert [axes.get_yscale() for axes in figure.axes[:3]] == ["log", "linear", "linear"]


def test_equal_lines_show_beside_each_other():
    curves = {name: (STEPS, STEPS) for name in "abc"} | {"d": (STEPS, -STEPS)}
    figure = compare([panel(curves)], list(curves), title="T")
    lines = named(figure, figure.axes[0], list(curves))
    widths = [lines[name].get_linewidth() for name in "abcd"]
    assert widths[0] > widths[1] > widths[2] == widths[3]


def test_a_quantity_that_no_run_recorded_says_so():
    nothing = (np.array([]), np.array([]))
    figure = compare([panel({"a": nothing}, noisy=True, cut=True)], ["a", "b"], title="T")
    assert [t.get_text() for t in figure.axes[0].texts] == ["nothing recorded"]


def drawn(figure):
    figure.canvas.draw()
    return figure.canvas.get_renderer()


def overlaps(a, b):
    return a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1


# A figure is drawn for every example: to search for a smaller one takes minutes.
WITHOUT_SHRINKING = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
NAME = st.text("abcdefgh_-$ .0123456789/", min_size=1, max_size=90).filter(str.strip)
SCALE = st.sampled_from([1e-5, 1e-2, 1.0, 300.0, 7e4, 3e8])


@hypothesis.settings(max_examples=12, phases=WITHOUT_SHRINKING)
@hypothesis.given(
    names=st.lists(NAME, min_size=1, max_size=14, unique=True),
    panels=st.integers(1, 7),
    columns=st.integers(1, 3),
    points=st.sampled_from([1, 2, 50]),
    scales=st.tuples(SCALE, SCALE),
    how=st.fixed_dictionaries({k: st.booleans() for k in ("noisy", "log", "cut")}),
)
@hypothesis.example(
    names=[f"{i} {'long ' * 12}" for i in range(12)],
    panels=1,
    columns=3,
    points=50,
    scales=(1.0, 1.0),
    how={"noisy": True, "log": False, "cut": True},
)
def test_nothing_lies_over_anything_else(names, panels, columns, points, scales, how):
    x, y = np.arange(1.0, points + 1) * scales[0] * 1e5, np.geomspace(1, 200, points) * scales[1]
    curves = {name: (x, y * (1 + i)) for i, name in enumerate(names)}
    figure = compare([panel(curves, **how)] * panels, names, title="Title", columns=columns)
    renderer = drawn(figure)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    (legend,) = figure.legends
    parts = [axes.get_tightbbox(renderer) for axes in shown]
    parts += [legend.get_window_extent(renderer), figure.texts[0].get_window_extent(renderer)]
    for i, part in enumerate(parts):
        assert figure.bbox.x0 <= part.x0 and part.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= part.y0 and part.y1 <= figure.bbox.y1
        assert not any(overlaps(part, other) for other in parts[i + 1 :])
    for axes in shown:
        assert axes.get_window_extent(renderer).height > 200, "a panel is squeezed"
        for axis in (axes.xaxis, axes.yaxis):
            texts = [t.label1 for t in axis.get_major_ticks() if t.label1.get_visible()]
            texts = [t.get_window_extent(renderer) for t in texts if t.get_text()]
            inside = [t for t in texts if part_of(t, axes.get_window_extent(renderer), axis)]
            assert not any(overlaps(a, b) for a, b in zip(inside, inside[1:], strict=False))
    assert len(legend.get_texts()) == len(names), "a name was left out"


def part_of(text, area, axis):
    """Whether a tick's label is drawn: those beyond the limits are not."""
    if axis.axis_name == "x":
        return area.x0 - 1 <= (text.x0 + text.x1) / 2 <= area.x1 + 1
    return area.y0 - 1 <= (text.y0 + text.y1) / 2 <= area.y1 + 1


def test_names_are_shown_as_they_are():
    names = ["_private", "cost $x_1$ and $y", "n" * 20 + "middle" * 10 + "end"]
    figure = compare([panel({})], names, title="T")
    drawn(figure)
    texts = [t.get_text().strip() for t in figure.legends[0].get_texts()]
    assert texts[:2] == names[:2]
    assert not any(t.get_parse_math() for t in figure.legends[0].get_texts())
    assert texts[2].startswith("nnnn") and texts[2].endswith("end") and len(texts[2]) == 48


@pytest.mark.parametrize("value, text", [(0.001, "0.001"), (15000.0, "15k"), (-2.5e6, "-2.5M")])
def test_numbers_at_the_axes(value, text):
    from eejax.analysis.panels import _number

    assert _number(value).replace("\N{MINUS SIGN}", "-") == text


def test_settings_of_matplotlib_are_left_alone():
    before = dict(matplotlib.rcParams)
    compare([panel({})], ["a"], title="T")
    assert dict(matplotlib.rcParams) == before
