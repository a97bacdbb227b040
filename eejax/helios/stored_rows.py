"""Checks of the contents of a repository's file, row by row."""

from __future__ import annotations

import datetime
import json
import math
import sqlite3
from typing import Any

from eejax.common.errors import require, require_count
from eejax.helios.choices import STRICTEST, ModelProfile
from eejax.helios.conditions import MeasurementConditions
from eejax.helios.objectives import METRICS, Telemetry
from eejax.helios.quality import BenchmarkScore, check_score

# Errors that a bad value of a row may raise while it is read.
BAD = (ValueError, TypeError, AttributeError, LookupError, OverflowError, OSError, RecursionError)


def check_rows(db: sqlite3.Connection) -> None:
    """Raise ValueError, which names table, row and value, for a row that cannot be used."""
    exits: dict[str, int] = {}  # by digest of a model
    for number, model, conditions, time, text in _rows(db, "profile", _PROFILE):
        with _Named("profile", number):
            _check_text("model", model)
            _check_time(time)
            found = profile_of(text)
            if conditions:
                digest = _conditions_of(conditions)["model"]
                require_equal_exits(found.exits, exits.setdefault(digest, found.exits))
    for number, *row in _rows(db, "history", _HISTORY):
        with _Named("history", number):
            _check_evaluation(row, exits)
    for number, model, depth, *metrics in _rows(db, "benchmark", f"model, depth, {_METRICS}"):
        with _Named("benchmark", number):
            _check_text("model", model)
            require_count("depth", depth)
            Telemetry(*metrics)
    for number, *row in _rows(db, "score", ", ".join(BenchmarkScore._fields)):
        with _Named("score", number):
            check_score(BenchmarkScore(*row))


_METRICS = ", ".join(METRICS)
_PROFILE = "model, conditions, time, profile"
_HISTORY = (
    f"time, model, conditions, depth, prompts, tokens, exits, counted, strictness, {_METRICS}"
)


def _rows(db: sqlite3.Connection, table: str, columns: str) -> list[tuple[Any, ...]]:
    return db.execute(f"select rowid, {columns} from {table} order by rowid").fetchall()


class _Named:
    """Context that names the row in an error raised while it is checked."""

    def __init__(self, table: str, number: int):
        self._row = f"row {number} of table {table}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, BAD):
            raise ValueError(f"{self._row}: {error}") from error


def _check_evaluation(row: list[Any], exits: dict[str, int]) -> None:
    time, model, conditions, depth, prompts, tokens, text, counted, strictness, *metrics = row
    _check_time(time)
    _check_text("model", model)
    _check_text("counted", counted)
    for name, value in (("depth", depth), ("prompts", prompts), ("tokens", tokens)):
        require_count(name, value)
    require_count("strictness", strictness, minimum=0)
    require(strictness <= STRICTEST, "strictness", strictness, f"must be at most {STRICTEST}")
    counts = json.loads(text)
    good = isinstance(counts, list) and all(type(n) is int and n >= 0 for n in counts)
    require(good, "exits", text, "must be a list of whole numbers from 0 on")
    require(sum(counts) == tokens, "exits", text, f"must be {tokens} tokens together")
    require(depth <= len(counts), "depth", depth, f"must be at most {len(counts)}, the exits")
    Telemetry(*metrics)
    if conditions:
        digest = _conditions_of(conditions)["model"]
        require_equal_exits(len(counts), exits.get(digest, len(counts)))


def require_equal_exits(found: int, expected: int) -> None:
    require(found == expected, "exits", found, f"must be {expected}, as in the model's profile")


def profile_of(text: str) -> ModelProfile:
    """Read a profile that `Repository.keep` wrote. Raises ValueError for another text."""

    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    try:
        found = json.loads(text)
        return ModelProfile(**{name: frozen(value) for name, value in found.items()})
    except BAD as error:
        raise ValueError(f"a profile of other fields: {error}") from error


def _conditions_of(text: str) -> dict[str, str]:
    found, fields = json.loads(text), MeasurementConditions._fields
    good = isinstance(found, dict) and {*found} == {*fields}
    good = good and all(isinstance(value, str) for value in found.values())
    require(good, "conditions", text, f"must be an object with the texts {', '.join(fields)}")
    serving = json.loads(found["serving"])
    require(isinstance(serving, dict), "conditions.serving", serving, "must be an object")
    return found


def _check_text(name: str, value: Any) -> None:
    require(isinstance(value, str) and value != "", name, value, "must be a nonempty string")


def _check_time(value: Any) -> None:
    good = isinstance(value, int | float) and math.isfinite(value)
    require(good, "time", value, "must be seconds since 1970")
    datetime.datetime.fromtimestamp(value)  # raises
