"""Tables of plain text."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.rule import Rule
from rich.table import Column, Table

WIDTH = 2**20  # columns; a table is as wide as its cells, whatever the terminal's width


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows of text under a header, the first column left-aligned, the others right-aligned.

    Lines are never cut or wrapped and have no colours, so that a table is the same on a terminal,
    in a pipe and in a file.

    Raises:
      ValueError: for a row with another number of cells than the header.
    """
    grid = Table.grid(Column(), *(Column(justify="right") for _ in header[1:]), padding=(0, 2))
    for row in (header, [Rule(characters="-", style="") for _ in header], *rows):
        if len(row) != len(header):
            raise ValueError(f"row = {row!r}: must have {len(header)} cells, as the header.")
        grid.add_row(*row)
    console = Console(
        file=io.StringIO(),
        width=WIDTH,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))
