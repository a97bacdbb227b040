"""Measurements of models on disk: profiles, benchmark scores, and their performance while serving.

HELIOS (Kumar et al., 2025), §3.3.1 and §3.4: the model repository and the performance history
table. A restarted server continues from these, as long as they were measured under the same
conditions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import sqlite3
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eejax.common.errors import ConfigError, DataError
from eejax.helios.choices import ModelProfile
from eejax.helios.conditions import MeasurementConditions
from eejax.helios.objectives import METRICS, ServiceObjective, Telemetry
from eejax.helios.quality import BenchmarkScore
from eejax.helios.stored_rows import check_rows, profile_of

VERSION = 3  # of the tables
WAIT = 0.2  # seconds to wait for a locked file; requests wait meanwhile

_SCHEMA = f"""
create table if not exists benchmark (
    model text, depth integer, {", ".join(f"{m} real not null" for m in METRICS)},
    primary key (model, depth)
);
create table if not exists history (
    id integer primary key, time real not null, model text not null, conditions text not null,
    depth integer not null, prompts integer not null, tokens integer not null,
    exits text not null, counted text not null, strictness integer not null,
    {", ".join(f"{m} real not null" for m in METRICS)}
);
create index if not exists history_model on history (model, id);
create table if not exists profile (
    model text not null, conditions text not null, time real not null, profile text not null,
    primary key (model, conditions)
);
create table if not exists score (
    model text not null, layers integer not null, task text not null, metric text not null,
    value real not null, primary key (model, layers, task, metric)
);
"""


class StoredEvaluation(NamedTuple):
    """A row of the history: an evaluation that began at `time`.

    `prompts` prompts with `tokens` tokens were served by a model with `depth` of its exits loaded.

    Attributes:
      exits: number of tokens by exit.
      counted: unit of the energy in `telemetry`: joules by "nvml" or "rapl", or "operations", which
        are not energy.
      strictness: level of the thresholds (`choices.stricter`).
    """

    time: float
    model: str
    depth: int
    prompts: int
    tokens: int
    exits: tuple[int, ...]
    counted: str
    telemetry: Telemetry
    strictness: int = 0


class RepositoryLockedError(DataError):
    """Another process has held a repository's file for `WAIT` seconds."""


class Repository:
    """An SQLite file with measurements of models; ":memory:" keeps nothing.

    Every method raises DataError for a file that is not a repository, and RepositoryLockedError for
    one that is in use. A file that is deleted meanwhile is created again by the next write.

    Attributes:
      conditions: by model, the conditions of its present measurements (`profile`).
      judged: the conditions of its evaluations, by default the same.
    """

    def __init__(self, path: str | os.PathLike = ":memory:"):
        self.path = os.path.expanduser(os.fspath(path))
        self.conditions: dict[str, MeasurementConditions] = {}
        self.judged: dict[str, MeasurementConditions] = {}
        self._benchmarks: dict[str, dict[int, Telemetry]] = {}  # arguments of `put`
        with self._using("be used as a repository"):
            self._use(open_connection(self.path))

    def _use(self, connection: sqlite3.Connection) -> None:
        self._connection, self._file = connection, identity(self.path)
        # From Python 3.13 on a connection warns if it is not closed.
        weakref.finalize(self, _close, connection).atexit = False

    @classmethod
    def of(cls, profiles: Mapping[str, Any], path: str | os.PathLike = ":memory:") -> Repository:
        """Make a repository with the benchmarks of profiles, by model."""
        made = cls(path)
        for model, profile in profiles.items():
            made.put(model, profile.benchmark())
        return made

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def _using(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, ConfigError) as error:
            kind, fix = DataError, advice(self.path)
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                kind, fix = (
                    RepositoryLockedError,
                    "Wait for the process that uses it, or give another file.",
                )
            raise kind(f"{self.path}: cannot {what} ({error}). {fix}") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._using("be written"):
            if identity(self.path) != self._file:  # SQLite cannot write to a deleted file
                self._renew()
            with self._connection:
                yield self._connection

    def _renew(self) -> None:
        """Continue with the file that is there now, and create it if there is none.

        Benchmarks are copied to it, because candidates are chosen by them.
        """
        old, rows = self._connection, []
        with contextlib.suppress(sqlite3.Error):  # continue without them if they cannot be read
            rows = old.execute("select * from benchmark").fetchall()
        self._use(open_connection(self.path, rows))
        old.close()

    def put(self, model: str, by_depth: Mapping[int, Telemetry]) -> None:
        """Replace the benchmark telemetry of a model, by the number of its loaded exits.

        Candidates are chosen by it even if the file cannot be written.
        """
        self._benchmarks[model] = dict(by_depth)
        rows = [(model, d, *(getattr(t, m) for m in METRICS)) for d, t in by_depth.items()]
        marks = ", ".join("?" * (2 + len(METRICS)))
        with self._writing() as db:
            db.execute("delete from benchmark where model = ?", (model,))
            db.executemany(f"insert into benchmark values ({marks})", rows)

    def benchmark(self, model: str) -> dict[int, Telemetry]:
        """Return the benchmark telemetry of a model by depth."""
        asked = f"select depth, {', '.join(METRICS)} from benchmark where model = ? order by depth"
        with self._using("be read"):
            rows = self._connection.execute(asked, (model,))
            return {depth: Telemetry(*values) for depth, *values in rows}

    def candidates(
        self, models: Sequence[str], objective: ServiceObjective, k: int = 2
    ) -> list[str]:
        """Return the k best models for an objective by their benchmarks with all layers.

        Models that miss a limit come after all that keep it; models without a benchmark come last.
        """
        put = self._benchmarks
        known = {m: put[m] if m in put else self.benchmark(m) for m in models}

        def best(m):
            return objective.rank(known[m][max(known[m])])

        measured = sorted((m for m in models if known[m]), key=best, reverse=True)
        return [*measured, *(m for m in models if not known[m])][:k]

    def add(self, row: StoredEvaluation) -> None:
        """Add an evaluation, made under the present conditions of its model."""
        metrics = (getattr(row.telemetry, m) for m in METRICS)
        conditions = self._judged(row.model)
        key = "" if conditions is None else conditions.key
        values = (*row[:5], json.dumps(row.exits), row.counted, row.strictness, key, *metrics)
        marks = ", ".join("?" * len(values))
        columns = (
            "time, model, depth, prompts, tokens, exits, counted, strictness, conditions, "
            f"{', '.join(METRICS)}"
        )
        with self._writing() as db:
            db.execute(f"insert into history ({columns}) values ({marks})", values)

    def _judged(self, model: str) -> MeasurementConditions | None:
        return self.judged.get(model) or self.conditions.get(model)

    def check(self) -> None:
        """Raise DataError, which names the row, unless every row can be read and used."""
        with self._using("be used as a repository"):
            found = [text for (text,) in self._connection.execute("pragma quick_check")]
            if found != ["ok"]:
                raise ValueError(f"it is damaged: {found[0]}")
            check_rows(self._connection)

    def profile(
        self, model: str, conditions: MeasurementConditions
    ) -> tuple[ModelProfile | None, str]:
        """Return (a model's profile under its conditions, its time), or (None, why there is none).

        From now on the model's evaluations are stored with these conditions.
        """
        self.conditions[model] = conditions
        with self._using("be read"):
            rows = self._connection.execute(
                "select conditions, time, profile from profile where model = ? order by time desc",
                (model,),
            ).fetchall()
            for key, time, text in rows:
                if key == conditions.key:
                    return profile_of(text), date(time)
            if not rows:
                return None, "it was not measured before"
            key, time, _ = rows[0]
            return None, f"since {date(time)} there is a change of {conditions.differs(key)}"

    def keep(self, model: str, profile: ModelProfile, time: float) -> None:
        """Keep a profile that was measured under the model's conditions."""
        with self._writing() as db:
            key = self.conditions[model].key if model in self.conditions else ""
            row = (model, key, time, json.dumps(dataclasses.asdict(profile)))
            db.execute("insert or replace into profile values (?, ?, ?, ?)", row)

    def evaluated(self, model: str) -> tuple[StoredEvaluation | None, str]:
        """Return (a model's last evaluation under its conditions, when it was), or (None, why not).

        It is the last one with the initial thresholds. The reason is "" if there is none at all.
        """
        conditions = self._judged(model)
        if conditions is None:
            return None, ""
        with self._using("be read"):
            asked = "select conditions, strictness from history where model = ? order by id desc"
            found = self._connection.execute(asked, (model,)).fetchall()
            if (conditions.key, 0) in found:
                (row,) = self.history(model, conditions=conditions.key, strictness=0)
                return row, date(row.time)
            if not found:
                return None, ""
            (last,) = self.history(model)
            since, (key, level) = date(last.time), found[0]
            if key == conditions.key:
                levels = "1 level" if level == 1 else f"{level} levels"
                return None, f"its thresholds were {levels} stricter at {since}"
            return None, f"since {since} there is a change of {conditions.differs(key)}"

    def import_scores(self, scores: Sequence[BenchmarkScore]) -> None:
        """Store benchmark scores; they replace those of the same model, layers, task and metric."""
        with self._writing() as db:
            db.executemany("insert or replace into score values (?, ?, ?, ?, ?)", scores)

    def models(self) -> list[str]:
        """Return the names of the models that were evaluated."""
        with self._using("be read"):
            rows = self._connection.execute("select distinct model from history order by model")
            return [model for (model,) in rows]

    def scores(self) -> list[BenchmarkScore]:
        """Return all benchmark scores."""
        with self._using("be read"):
            rows = self._connection.execute("select * from score order by model, layers, task")
            return [BenchmarkScore(*row) for row in rows]

    def history(
        self,
        model: str,
        last: int = 1,
        conditions: str | None = None,
        strictness: int | None = None,
    ) -> list[StoredEvaluation]:
        """Return a model's last rows, oldest first, all or of some conditions or strictness."""
        wanted = dict(model=model, conditions=conditions, strictness=strictness)
        wanted = {column: value for column, value in wanted.items() if value is not None}
        where = " and ".join(f"{column} = ?" for column in wanted)
        with self._using("be read"):
            rows = self._connection.execute(
                "select time, model, depth, prompts, tokens, exits, counted, strictness, "
                f"{', '.join(METRICS)} from history where {where} order by id desc limit ?",
                (*wanted.values(), last),
            ).fetchall()
            return [_evaluation(row) for row in reversed(rows)]


def _evaluation(row: Sequence[Any]) -> StoredEvaluation:
    time, model, depth, prompts, tokens, exits, counted, strictness, *metrics = row
    exits = tuple(json.loads(exits))
    own = (time, model, depth, prompts, tokens, exits, counted, Telemetry(*metrics), strictness)
    return StoredEvaluation(*own)


REBUILD = "eejax repository --repository={} --rebuild"


def date(time: float) -> str:
    """Return a time in seconds since 1970 as a local date with minutes."""
    return datetime.datetime.fromtimestamp(time).isoformat(" ", "minutes")


def advice(path: str) -> str:
    """Say what to do about a path that cannot be used as a repository."""
    folder = os.path.dirname(path) or os.curdir
    if os.path.isdir(path):
        return "Give a file; this is a folder."
    if not os.path.isdir(folder):
        return f"Make the folder {folder}, or give another file."
    if os.path.isfile(path):
        return f"Give another file, or rebuild it: {REBUILD.format(path)}."
    return "Give another file."


def rebuild(path: str | os.PathLike) -> str | None:
    """Rename a file that cannot be used, and make a new one in its place.

    Returns:
      The new path of the old file; None if there was none.

    Raises:
      DataError: if the path is not a file, or has no folder; nothing is renamed.
    """
    path = os.path.expanduser(os.fspath(path))
    aside = None
    if os.path.exists(path):
        if not os.path.isfile(path):
            raise DataError(f"{path}: cannot be rebuilt, as it is not a file. {advice(path)}")
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        numbers = (f"{path}.old-{stamp}{'' if i == 0 else f'-{i}'}" for i in itertools.count())
        aside = next(name for name in numbers if not os.path.exists(name))
        for suffix in ("", "-journal", "-wal", "-shm"):  # SQLite's files beside it
            with contextlib.suppress(FileNotFoundError):
                os.rename(path + suffix, aside + suffix)
    Repository(path).close()
    return aside


def _close(connection: sqlite3.Connection) -> None:
    """Close a connection, unless another thread than this one opened it."""
    with contextlib.suppress(sqlite3.ProgrammingError):
        connection.close()


def open_connection(path: str, benchmarks: Sequence[tuple] = ()) -> sqlite3.Connection:
    """Open a repository's file, and create it if there is none.

    Rows of `benchmarks` are written unless the file has others in their place. Raises ValueError
    for a database with other tables, and sqlite3.Error.
    """
    db = sqlite3.connect(path, timeout=WAIT)
    try:
        db.execute("begin")  # one view of both: another process may make the tables meanwhile
        (version,) = db.execute("pragma user_version").fetchone()
        found = tables(db)
        db.rollback()
        if found:
            check_tables(found, version)
        else:  # in one transaction, as another process may open it at the same time
            made = f"{_SCHEMA} pragma user_version = {VERSION};"
            db.executescript(f"begin immediate; {made} commit;")
        if benchmarks:
            marks = ", ".join("?" * (2 + len(METRICS)))
            with db:
                db.executemany(f"insert or ignore into benchmark values ({marks})", benchmarks)
    except BaseException:
        db.close()
        raise
    return db


def check_tables(found: Mapping[str, list[str]], version: int) -> None:
    """Raise ValueError for tables that are not a repository's; further tables are allowed.

    The version alone says little: many programs have a first one.
    """
    if version != VERSION:
        raise ValueError(f"its tables are of version {version}, these of {VERSION}")
    with contextlib.closing(sqlite3.connect(":memory:")) as own:
        own.executescript(_SCHEMA)
        must = tables(own)
    for name, columns in must.items():
        if name not in found:
            raise ValueError(f"it has no table {name}, but {', '.join(found)}")
        if found[name] != columns:
            has, want = ", ".join(found[name]), ", ".join(columns)
            raise ValueError(f"its table {name} has the columns ({has}), and must have ({want})")


def tables(db: sqlite3.Connection) -> dict[str, list[str]]:
    """Return the columns of a database's own tables, and of its views, as they were declared."""
    asked = (
        "select name from sqlite_master "
        "where type in ('table', 'view') and name not glob 'sqlite_*' order by rowid"
    )
    columns = (
        "select name || ' ' || lower(type) || iif(\"notnull\", ' not null', '') "
        "|| iif(pk, ' primary key', '') from pragma_table_info(?)"
    )
    names = [name for (name,) in db.execute(asked).fetchall()]
    return {name: [column for (column,) in db.execute(columns, (name,))] for name in names}


def identity(path: str) -> tuple[int, int] | None:
    """Return the identity of a file, which changes if it is replaced; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
