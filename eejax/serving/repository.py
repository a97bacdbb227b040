"""What is known of models, on disk: benchmark telemetry, and how they did while serving.

HELIOS (Kumar et al., 2025), section 4: the model repository and the performance history table.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from eejax.common.errors import DataError
from eejax.serving.objectives import METRICS, Objective, Telemetry

_SCHEMA = f"""
create table if not exists benchmark (
    model text, depth integer, {", ".join(f"{m} real not null" for m in METRICS)},
    primary key (model, depth)
);
create table if not exists history (
    id integer primary key, time real not null, model text not null, depth integer not null,
    prompts integer not null, tokens integer not null, exits text not null,
    {", ".join(f"{m} real not null" for m in METRICS)}
);
create index if not exists history_model on history (model, id);
"""


class Evaluation(NamedTuple):
    """A row of the history: what `prompts` prompts of `tokens` tokens were like, served by a model
    with `depth` of its exits loaded, which began at `time`. exits: tokens by the exit that they
    left by."""

    time: float
    model: str
    depth: int
    prompts: int
    tokens: int
    exits: tuple[int, ...]
    telemetry: Telemetry


class Repository:
    """An SQLite file; ":memory:" keeps nothing. Raises DataError for a file that is none."""

    def __init__(self, path: str | os.PathLike = ":memory:"):
        self.path = os.fspath(path)
        try:
            self._connection = sqlite3.connect(self.path)
            with self._connection:
                self._connection.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise DataError(f"{self.path}: cannot be used as a repository ({error}).") from error

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._connection:
                yield self._connection
        except sqlite3.Error as error:
            raise DataError(f"{self.path}: cannot be written ({error}).") from error

    def put(self, model: str, depth: int, telemetry: Telemetry) -> None:
        """Benchmark telemetry of a model with so many of its exits, in place of what was there."""
        row = (model, depth, *(getattr(telemetry, m) for m in METRICS))
        marks = ", ".join("?" * len(row))
        with self._writing() as db:
            db.execute(f"insert or replace into benchmark values ({marks})", row)

    def benchmark(self, model: str) -> dict[int, Telemetry]:
        """By depth."""
        rows = self._connection.execute(
            f"select depth, {', '.join(METRICS)} from benchmark where model = ? order by depth",
            (model,),
        )
        return {depth: Telemetry(*values) for depth, *values in rows}

    def candidates(self, models: Sequence[str], objective: Objective, k: int = 2) -> list[str]:
        """The k models that are best for an objective, by their benchmarks with all layers, best
        first. Who misses a limit comes after all who keep them; who was never measured, last."""
        known = {model: self.benchmark(model) for model in models}
        best = lambda m: objective.rank(known[m][max(known[m])])
        measured = sorted((m for m in models if known[m]), key=best, reverse=True)
        return [*measured, *(m for m in models if not known[m])][:k]

    def add(self, row: Evaluation) -> None:
        values = (*row[:5], json.dumps(row.exits), *(getattr(row.telemetry, m) for m in METRICS))
        marks = ", ".join("?" * len(values))
        columns = f"time, model, depth, prompts, tokens, exits, {', '.join(METRICS)}"
        with self._writing() as db:
            db.execute(f"insert into history ({columns}) values ({marks})", values)

    def history(self, model: str, last: int = 1) -> list[Evaluation]:
        """The last rows of a model, oldest first."""
        rows = self._connection.execute(
            "select time, model, depth, prompts, tokens, exits, "
            f"{', '.join(METRICS)} from history where model = ? order by id desc limit ?",
            (model, last),
        ).fetchall()
        made = lambda r: Evaluation(*r[:5], tuple(json.loads(r[5])), Telemetry(*r[6:]))
        return [made(row) for row in reversed(rows)]
