"""Columns of a table line up."""

import pytest

from eejax.analysis import table


def test_columns_are_aligned():
    text = table(["exit", "bits"], [["exit_3", "2.5"], ["final", "12.25"]])
    assert text.splitlines() == [
        "exit     bits",
        "------  -----",
        "exit_3    2.5",
        "final   12.25",
    ]


def test_ragged_rows_are_refused():
    with pytest.raises(ValueError):
        table(["a", "b"], [["1"]])
