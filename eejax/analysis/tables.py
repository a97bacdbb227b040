"""Tables in Markdown, and differences between settings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows under a header in Markdown, aligned as by `common.tables.table`.

    Cells are text: characters that Markdown would read as markup are escaped.
    """

    def line(cells):
        return f"| {' | '.join(cells)} |"

    aligned = ["---", *["---:"] * (len(header) - 1)]
    body = [[_escape(cell) for cell, _ in zip(row, header, strict=True)] for row in rows]
    return "\n".join([line(map(_escape, header)), line(aligned), *map(line, body)])


def differences(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings that are not the same everywhere: 'section.field' -> {name: value}.

    A name that does not have a field is left out of that field's values. For a list of mappings
    (the exits) only the fields that differ between its elements are given.

    Args:
      settings: JSON values by name, nested at any depth.
    """
    flat = {name: dict(_leaves("", values)) for name, values in settings.items()}
    fields = dict.fromkeys(field for values in flat.values() for field in values)
    found = {}
    for field in fields:
        values = {name: v[field] for name, v in flat.items() if field in v}
        if len(values) < len(flat) or len(set(map(_canonical, values.values()))) > 1:
            found[field] = _telling(values)
    return found


def _leaves(path: str, value: Any):
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value


def _canonical(value: Any) -> str:
    """Return text that is equal for equal settings: for 1 and 1.0, but not for 1 and true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    return json.dumps(value, sort_keys=True)


def _telling(values: dict[str, Any]) -> dict[str, Any]:
    lists = [v for v in values.values() if isinstance(v, list)]
    items = [item for v in lists for item in v]
    if len(lists) < len(values) or not all(isinstance(item, Mapping) for item in items):
        return values
    keys = dict.fromkeys(key for item in items for key in item)
    telling = [k for k in keys if len({json.dumps(item.get(k)) for item in items}) > 1]
    if not telling:
        return values
    return {n: [{k: i[k] for k in telling if k in i} for i in v] for n, v in values.items()}


def _escape(cell: str) -> str:
    cell = " ".join(cell.split())
    return re.sub(r"([\\`*$<|\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", cell)
