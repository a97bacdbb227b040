"""Plain-text tables for terminals and logs."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text under a header, columns aligned: the first to the left, the others right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]

    def line(cells):
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)])
