"""Percentiles by nearest rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eejax.common.ranks import nearest_rank


@pytest.mark.parametrize(
    "values, share, want",
    [
        ([2, 1], 0.5, 1),
        ([3, 1, 2], 0.5, 2),
        (range(100), 0.99, 98),
        (range(101), 0.99, 99),
        ([7], 0.99, 7),
        ([5, 4], 0.0, 4),
        ([5, 4], 1.0, 5),
    ],
)
def test_the_nearest_rank(values, share, want):
    assert nearest_rank(values, share) == want


@given(st.lists(st.floats(-9, 9), min_size=1), st.sampled_from([0.01, 0.5, 0.9, 0.99]))
def test_it_is_numpys(values, share):
    assert nearest_rank(values, share) == np.quantile(values, share, method="inverted_cdf")
