"""Groups of bars are as high as the numbers given."""

import pytest
from matplotlib.image import imread

from eejax.analysis import save
from eejax.experiments.reproduce.bars import grouped_bars


def test_grouped_bars(tmp_path):
    panels = {str(n): {"a": [1.0 + n, 2.0], "b": [3.0, 4.0 + n]} for n in range(4)}
    figure = grouped_bars(panels, ["x", "y"], xlabel="what")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["0", "1", "2", "3"]
    for n, axes in enumerate(figure.axes):
        a, b = axes.containers
        assert [bar.get_height() for bar in a] == [1.0 + n, 2.0]
        assert [bar.get_height() for bar in b] == [3.0, 4.0 + n]
        left, right = (bars[0] for bars in (a, b))  # of one group, side by side about its tick
        assert left.get_x() + left.get_width() == pytest.approx(right.get_x())
        assert right.get_x() == pytest.approx(0)
        assert [t.get_text() for t in axes.get_xticklabels()] == ["x", "y"]
        assert axes.get_xlabel() == "what"
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["a", "b"]
    assert imread(save(figure, tmp_path / "bars.png")).std() > 0.02
