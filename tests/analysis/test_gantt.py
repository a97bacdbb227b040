"""Bars of a pipeline's picture lie where they were given, and say what they were given."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from eejax.analysis import save
from eejax.analysis.gantt import LOOKS, gantt
from eejax.analysis.plots import ACCENT
from eejax.common.errors import ConfigError

BARS = [
    (0, 0.0, 1.0, "forward", "0", True),
    (1, 1.0, 2.0, "forward", "0", True),
    (1, 2.0, 2.5, "exits", "0", False),
    (1, 2.5, 4.5, "backward", "0", True),
    (0, 4.5, 6.5, "backward", "12", True),
]


def boxes(axes):
    found = [p for p in axes.patches if isinstance(p, Rectangle)]

    def place(r):
        return (r.get_y() + r.get_height() / 2, r.get_x(), r.get_x() + r.get_width())

    filled = [(*place(r), to_hex(r.get_facecolor())) for r in found if r.get_facecolor()[3]]
    outlined = [place(r) for r in found if not r.get_facecolor()[3]]
    assert all(to_hex(r.get_edgecolor()) == ACCENT for r in found if not r.get_facecolor()[3])
    return filled, outlined


def test_bars_lie_where_they_are_given(tmp_path):
    figure = gantt({"one": BARS, "other": BARS[:2]}, unit="ms")
    one, other = figure.axes
    for axes, bars in ((one, BARS), (other, BARS[:2])):
        filled, outlined = boxes(axes)
        assert filled == [(s, a, b, LOOKS[kind][0]) for s, a, b, kind, _, _ in bars]
        assert outlined == [(s, a, b) for s, a, b, *_, critical in bars if critical]
        assert [t.get_text() for t in axes.texts] == [bar[4] for bar in bars]
        assert axes.get_ylim() == (1.5, -0.5)  # stage 0 at the top
        assert [t.get_text() for t in axes.get_yticklabels()] == ["stage 0", "stage 1"]
    assert one.get_xlim() == other.get_xlim()
    assert one.get_title(loc="left") == "one: 6.5" and other.get_title(loc="left") == "other: 2"
    assert other.get_xlabel() == "ms"
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == [
        "layers forward",
        "layers backward",
        "exits forward and backward",
        "critical path",
    ]
    image = imread(save(figure, tmp_path / "gantt.png"))
    assert image.shape[0] > 300 and image.std() > 0.02


def test_a_bar_without_room_has_no_number():
    (axes,) = gantt({"t": [*BARS, (0, 6.5, 1000.0, "forward", "7", False)]}).axes
    assert [t.get_text() for t in axes.texts] == ["7"]


@pytest.mark.parametrize(
    "panels, message",
    [
        ({}, "panels = {}"),
        ({"t": []}, r"panels\['t'\] = \[\]: must have at least one bar"),
        ({"t": [(0, 0, 1, "sleep", "0", False)]}, "kind = 'sleep': must be one of forward, "),
    ],
)
def test_what_cannot_be_drawn_is_named(panels, message):
    with pytest.raises(ConfigError, match=message):
        gantt(panels)
