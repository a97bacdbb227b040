"""What is wanted of models, and what is known of them on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import sqlite3
import time
import warnings

import pytest
from controlled import THROUGHPUT, World, profile, telemetry
from hypothesis import given, settings
from hypothesis import strategies as st
from launchers import functions_of

from eejax.common.errors import ConfigError, DataError
from eejax.helios.choices import ModelDepth
from eejax.helios.conditions import MeasurementConditions
from eejax.helios.expectations import Expectations
from eejax.helios.measurements import open_repository
from eejax.helios.objectives import ServiceObjective
from eejax.helios.quality import BenchmarkScore, with_benchmarks
from eejax.helios.repository import (
    Repository,
    RepositoryLockedError,
    StoredEvaluation,
    advice,
    rebuild,
)

measurement_tables = functions_of("eejax.experiments.repository").measurement_tables


def test_a_repository_that_cannot_be_written_stops_nobody(tmp_path):
    repository = Repository(tmp_path / "models.db")
    world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)}, repository=repository)
    repository._connection.execute("drop table history")
    with pytest.warns(UserWarning, match="an evaluation is not kept: .*models.db: cannot be"):
        for _ in range(7):
            world.prompt()
    assert world.served[-1] == ModelDepth("m", 1)


@pytest.mark.parametrize(
    "name, fix",
    [
        ("runs", "Give a file; this is a folder"),
        ("link", "Give a file; this is a folder"),
        ("none/models.db", "Make the folder .*none, or give another file"),
        ("runs/one/models.db", "Make the folder .*one, or give another file"),
        ("pipe", "Give another file"),
        ("text", "Give another file, or rebuild it: .*--repository=.*text --rebuild"),
    ],
)
def test_a_rebuild_is_advised_where_it_can_work(tmp_path, name, fix):
    """Whatever stands at the path: only a file may be renamed aside."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "model.txt").write_text("days of training")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    (tmp_path / "text").write_text("no database")
    os.mkfifo(tmp_path / "pipe")
    before, path = sorted(tmp_path.rglob("*")), str(tmp_path / name)
    if name == "pipe":  # SQLite would read of it until something is written
        assert re.fullmatch(f"{fix}.", advice(path))
    else:
        with pytest.raises(DataError, match=rf"cannot be used as a repository .*\. {fix}\.$"):
            Repository(path)
    if "rebuild" in fix:
        assert pathlib.Path(rebuild(path)).read_text() == "no database"
        return
    with pytest.raises(DataError, match=rf"{fix}\.$"):
        rebuild(path)
    assert sorted(tmp_path.rglob("*")) == before
    if "Make" in fix:
        os.makedirs(os.path.dirname(path))
        Repository(path).check()


def test_history_lasts(tmp_path):
    file = tmp_path / "models.db"
    repository = Repository(file)
    repository.put("a", {4: telemetry(throughput=10.0)})
    repository.put("b", {9: telemetry()})
    two, four = telemetry(throughput=50.0, accuracy=0.5), telemetry(throughput=20.0)
    repository.put("b", {2: two, 4: four})  # in place of what there was
    world = World({"a": profile()}, {"a": (0.6, 0.2, 0.1, 0.1)}, repository=repository)
    for _ in range(7):
        world.prompt()
    repository.close()
    again = Repository(file)
    assert again.benchmark("b") == {
        2: telemetry(throughput=50.0, accuracy=0.5),
        4: telemetry(throughput=20.0),
    }
    assert again.candidates(["a", "b", "c"], THROUGHPUT) == ["b", "a"]
    assert again.candidates(["a", "b"], ServiceObjective.of("throughput", accuracy=1.0)) == [
        "b",
        "a",
    ]
    (row,) = again.history("a")
    assert row.model == "a" and sum(row.exits) == row.tokens == 100
    assert row.counted == "operations"  # no energy, and not called so
    again.close()
    with sqlite3.connect(file) as other:
        other.execute("pragma user_version = 7")
    other.close()
    with pytest.raises(DataError, match=r"are of version 7, these of 3\). Give another"):
        Repository(file)
    file.write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match="cannot be used as a repository"):
        Repository(file)


FOREIGN = (
    ("create table users (name text)", "it has no table benchmark, but users"),
    (
        "create table benchmark (name text, seconds real); create table history (id integer)",
        r"its table benchmark has the columns \(name text, seconds real\), and must have \(model ",
    ),
    ("drop table history", "it has no table history, but benchmark"),
    ("alter table history add column joules real", r"joules real\), and must have \(id integer"),
    ("alter table benchmark drop column tpot", "its table benchmark has the columns"),
)


@pytest.mark.parametrize("script, said", FOREIGN)
def test_databases_of_other_tables(tmp_path, script, said):
    """Though their version is the same, as many programs have a first one."""
    file = tmp_path / "other.db"
    if not script.startswith("create"):
        Repository(file).close()
    with contextlib.closing(sqlite3.connect(file)) as other:
        other.executescript(f"{script}; pragma user_version = 3;")
    before = file.read_bytes()
    with pytest.raises(DataError, match=rf"other.db: cannot be .*{said}.*Give another file"):
        Repository(file)
    assert file.read_bytes() == before


def test_a_repository_may_have_more_tables(tmp_path):
    file = tmp_path / "models.db"
    Repository.of({"m": profile()}, file).close()
    with contextlib.closing(sqlite3.connect(file)) as other:
        other.executescript("create view best as select max(throughput) from benchmark; analyze;")
    assert Repository(file).benchmark("m") == profile().benchmark()


@pytest.mark.parametrize("by", ["deleted", "replaced", "folder"])
def test_a_file_that_goes_while_it_is_used(tmp_path, by):
    """It is made anew by the next write, and candidates are chosen as before."""
    folder = tmp_path / "kept"
    folder.mkdir()
    file = folder / "models.db"
    repository = Repository.of({"a": profile(2.0), "b": profile(), "c": profile(3.0)}, file)
    world = World({"a": profile()}, {"a": (0.6, 0.2, 0.1, 0.1)}, repository=repository)
    best = ["b", "a"]
    assert repository.candidates(["a", "b", "c"], THROUGHPUT) == best
    if by == "replaced":
        other = Repository.of({"d": profile()}, tmp_path / "other.db")
        (tmp_path / "other.db").replace(file)
    elif by == "folder":
        shutil.rmtree(folder)
        with pytest.raises(DataError, match="models.db: cannot be written"):
            repository.put("b", profile().benchmark())
        folder.mkdir()
    else:
        file.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(7):
            world.prompt()
    again = Repository(file)
    (row,) = again.history("a")
    assert row.tokens == 100 and repository.history("a") == [row]
    for found in (repository, again):
        assert found.candidates(["a", "b", "c"], THROUGHPUT) == best
    if by == "replaced":
        assert again.benchmark("d") == profile().benchmark()
        other.close()
    repository.put("a", {})
    assert again.benchmark("a") == {}


def test_a_repository_that_another_process_holds(tmp_path):
    """It is told soon, by every method; nobody who is served depends on it."""
    file = tmp_path / "models.db"
    repository = Repository(file)
    repository.put("m", profile().benchmark())
    repository.close()
    repository = Repository(file)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("begin exclusive")
    begin = time.monotonic()
    for call in (
        lambda: repository.benchmark("m"),
        lambda: repository.history("m"),
        lambda: repository.candidates(["m"], THROUGHPUT),
        lambda: repository.import_scores([BenchmarkScore("m", 0, "sums", "acc", 0.5)]),
        lambda: Repository(file),
    ):
        with pytest.raises(RepositoryLockedError, match="models.db: cannot be .*locked.*Wait for"):
            call()
    assert time.monotonic() - begin < 4
    with (
        pytest.warns(UserWarning, match="all models are candidates: .*locked"),
        pytest.warns(UserWarning, match="an evaluation is not kept: .*locked"),
    ):
        world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)}, repository=repository)
        for _ in range(7):
            world.prompt()
    assert world.served[-1] == ModelDepth("m", 1)
    with pytest.warns(UserWarning, match="measurements are not kept: .*locked"):
        open_repository(file).put("m", profile().benchmark())
    other.execute("rollback")
    other.close()
    with repository._connection as db:
        db.execute("update benchmark set throughput = -1")
    with pytest.raises(DataError, match="models.db: cannot be read .*throughput = -1"):
        repository.benchmark("m")


GOOD_PROFILE = json.dumps(dataclasses.asdict(profile()))
SERVING = MeasurementConditions("digest", "cpu", "0.10", "0.1", '{"context": 32}')
COLUMNS = {
    "profile": ("model", "conditions", "time", "profile"),
    "history": (
        "time",
        "model",
        "conditions",
        "depth",
        "prompts",
        "tokens",
        "exits",
        "counted",
        "strictness",
        "throughput",
        "accuracy",
        "perplexity",
    ),
    "benchmark": ("model", "depth", "throughput"),
    "score": ("model", "layers", "task", "metric", "value"),
}
VALUES = st.one_of(
    st.integers(-9, 99),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from(["[8, 0, 0]", "[1]", "[8, 0, 0, 0]", "{}", "null", "NaN", "[[]]", SERVING.key]),
    st.sampled_from([*dataclasses.asdict(profile())]).flatmap(
        lambda field: st.sampled_from([None, [], [1], "x", {}, -1, math.inf, [[1, 2, 3]]]).map(
            lambda value: json.dumps(json.loads(GOOD_PROFILE) | {field: value})
        )
    ),
)


def filled() -> Repository:
    repository = Repository.of({"m": profile()})
    repository.profile("m", SERVING)
    repository.keep("m", profile(), 1e9)
    repository.add(StoredEvaluation(1e9, "m", 4, 2, 8, (8, 0, 0, 0), "operations", telemetry()))
    repository.import_scores([BenchmarkScore("m", 0, "sums", "acc", 0.5)])
    repository.check()
    return repository


def used(repository: Repository) -> None:
    """All that a server does with a file when it starts again."""
    found, _ = repository.profile("m", SERVING)
    repository.profile("m", SERVING._replace(serving='{"context": 64}'))  # says what differs
    repository.profile("m", SERVING)
    row, _ = repository.evaluated("m")
    if found is not None and row is not None:
        Expectations(8.0).learn(found, row)
    repository.benchmark("m")
    for model in repository.models():
        measurement_tables(repository)
        repository.history(model, last=-1)
    if scores := repository.scores():
        with contextlib.suppress(ConfigError):  # of other models, or on other tasks
            with_benchmarks({"m": profile()}, {"m": (1, 2, 3, 4)}, scores)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([(t, c) for t, own in COLUMNS.items() for c in own]), VALUES)
def test_a_row_is_refused_by_name_or_can_be_used(at, value):
    """Whatever stands in one column of one row."""
    (table, column), repository = at, filled()
    try:
        with repository._connection as db:
            db.execute(
                f"update {table} set {column} = ? where rowid = (select min(rowid) from {table})",
                (value,),
            )
    except sqlite3.IntegrityError:  # which SQLite itself refuses
        return
    try:
        repository.check()
    except DataError as error:
        assert re.search(rf"row \d+ of table {table}: ", str(error))
        with pytest.raises(DataError, match=re.escape(str(error))):
            measurement_tables(repository)
    else:
        used(repository)
    repository.close()


@pytest.mark.parametrize(
    "change, said",
    [
        ("history set tokens = 0", "row 1 of table history: tokens = 0: must be an integer of at"),
        ("history set exits = '[4, 4]'", "of table history: depth = 4: must be at most 2, the ex"),
        ("history set depth = 1, exits = '[4, 4]'", "history: exits = 2: must be 4, as in the mod"),
        ("history set exits = '[4, 0, 0, 0]'", "history: exits = .*: must be 8 tokens together"),
        ("history set exits = '7'", "history: exits = '7': must be a list of whole numbers"),
        ("history set time = 'today'", "history: time = 'today': must be seconds since 1970"),
        ("history set conditions = '[]'", "history: conditions = .*: must be an object with the"),
        ("profile set profile = '[]'", "row 1 of table profile: a profile of other fields: 'list'"),
        ("profile set profile = '{}'", "table profile: a profile of other fields: .*seconds"),
        ("score set value = 'much'", "row 1 of table score: value = 'much': must be a number in"),
    ],
)
def test_bad_rows_are_named(change, said):
    repository = filled()
    with repository._connection as db:
        db.execute(f"update {change}")
    with pytest.raises(DataError, match=said):
        repository.check()


def test_objectives():
    fast, good = telemetry(throughput=200.0, accuracy=0.8), telemetry(ttft=0.05)
    assert ServiceObjective.of("throughput").score(fast) > ServiceObjective.of("throughput").score(
        good
    )
    assert ServiceObjective.of("accuracy").score(good) > ServiceObjective.of("accuracy").score(fast)
    assert ServiceObjective.of("response_time").score(good) > ServiceObjective.of(
        "response_time"
    ).score(fast)
    goal = ServiceObjective.of("goodput", accuracy=0.9, ttft_p99=0.2)
    assert goal.rank(good) > goal.rank(fast)
    with pytest.raises(ConfigError, match="objective = 'speed': must be of throughput, "):
        ServiceObjective.of("speed")
    with pytest.raises(ConfigError, match="objective = 'goodput': needs limits of accuracy"):
        ServiceObjective.of("goodput", ttft_p99=1.0)
    for wrong in ("speed", "name", "cls"):
        with pytest.raises(ConfigError, match=f"limits = '{wrong}': must be of"):
            ServiceObjective.of("throughput", **{wrong: 1.0})
    with pytest.raises(ConfigError, match="limits.accuracy = 95: must be a share, at most 1"):
        ServiceObjective.of("throughput", accuracy=95)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="limits.ttft = .*: must be a number above 0"):
            ServiceObjective.of("throughput", ttft=wrong)
    over = telemetry().with_overhead(10.0, 100.0, 10, 100)
    assert over.throughput == pytest.approx(1000 / 20) and over.ttft == pytest.approx(1.1)
    assert over.energy == pytest.approx(1.1)
