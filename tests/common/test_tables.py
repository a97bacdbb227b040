"""Columns of a table line up, and cells are shown as they are, wherever it is printed."""

import pytest

from eejax.common.tables import table


def test_columns_are_aligned():
    text = table(["exit", "bits"], [["exit_3", "2.5"], ["final", "12.25"]])
    assert text.splitlines() == [
        "exit     bits",
        "------  -----",
        "exit_3    2.5",
        "final   12.25",
    ]


@pytest.mark.parametrize("rows", [[["1"]], [["1", "2", "3"]]])
def test_ragged_rows_are_refused(rows):
    with pytest.raises(ValueError, match="must have 2 cells"):
        table(["a", "b"], rows)


def test_a_table_without_rows_or_names():
    assert table(["a", "b"], []).splitlines() == ["a  b", "-  -"]
    assert table(["", ""], [["k", "v"]]).splitlines() == ["", "-  -", "k  v"]


def test_cells_are_no_markup():
    text = table(["[b]", "x"], [["[red]a[/red] :smile: [1]", "'s' 1.5 http://a"], ["  in", ""]])
    assert text.splitlines() == [
        "[b]                                      x",
        "------------------------  ----------------",
        "[red]a[/red] :smile: [1]  's' 1.5 http://a",
        "  in",
    ]


def test_wide_characters_take_two_columns():
    assert table(["a", "b"], [["日本", "1"], ["x", "2"]]).splitlines() == [
        "a     b",
        "----  -",
        "日本  1",
        "x     2",
    ]


@pytest.mark.parametrize(
    "setting", [("COLUMNS", "20"), ("TERM", "dumb"), ("FORCE_COLOR", "1"), ("TTY_COMPATIBLE", "1")]
)
def test_a_table_is_the_same_on_every_terminal(monkeypatch, setting):
    monkeypatch.setenv(*setting)
    long = "a long name of many words " * 40
    lines = table(["name", "n"], [[long, "1"]]).splitlines()
    assert len(lines) == 3 and lines[2] == f"{long}  1"
