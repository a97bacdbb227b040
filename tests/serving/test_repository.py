"""What is wanted of models, and what is known of them on disk."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
import warnings

import pytest
from controlled import THROUGHPUT, World, profile, telemetry

from eejax.common.errors import ConfigError, DataError
from eejax.serving.choices import Choice
from eejax.serving.measurements import kept
from eejax.serving.objectives import Objective
from eejax.serving.repository import Repository


def test_a_repository_that_cannot_be_written_stops_nobody(tmp_path):
    repository = Repository(tmp_path / "models.db")
    world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)}, repository=repository)
    repository._connection.execute("drop table history")
    with pytest.warns(UserWarning, match="an evaluation is not kept: .*models.db: cannot be"):
        for _ in range(7):
            world.prompt()
    assert world.served[-1] == Choice("m", 1)


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
        2: telemetry(throughput=50.0, accuracy=0.5), 4: telemetry(throughput=20.0)
    }  # fmt: skip
    assert again.candidates(["a", "b", "c"], THROUGHPUT) == ["b", "a"]
    assert again.candidates(["a", "b"], Objective.of("throughput", accuracy=1.0)) == ["b", "a"]
    (row,) = again.history("a")
    assert row.model == "a" and sum(row.exits) == row.tokens == 100
    assert row.counted == "operations"  # no energy, and not called so
    again.close()
    with sqlite3.connect(file) as other:
        other.execute("pragma user_version = 7")
    other.close()
    with pytest.raises(DataError, match=r"are of version 7, these of 2\). Give another"):
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
        other.executescript(f"{script}; pragma user_version = 2;")
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
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("begin exclusive")
    begin = time.monotonic()
    for call in (
        lambda: repository.benchmark("m"), lambda: repository.history("m"),
        lambda: repository.put("m", {}), lambda: repository.candidates(["m"], THROUGHPUT),
        lambda: Repository(file),
    ):  # fmt: skip
        with pytest.raises(DataError, match="models.db: cannot be .*locked"):
            call()
    assert time.monotonic() - begin < 4
    with (
        pytest.warns(UserWarning, match="all models are candidates: .*locked"),
        pytest.warns(UserWarning, match="an evaluation is not kept: .*locked"),
    ):
        world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)}, repository=repository)
        for _ in range(7):
            world.prompt()
    assert world.served[-1] == Choice("m", 1)
    with pytest.warns(UserWarning, match="measurements are not kept: .*locked"):
        kept(file).put("m", profile().benchmark())
    other.execute("rollback")
    with repository._connection as db:
        db.execute("update benchmark set throughput = -1")
    with pytest.raises(DataError, match="models.db: cannot be read .*throughput = -1"):
        repository.benchmark("m")


def test_objectives():
    fast, good = telemetry(throughput=200.0, accuracy=0.8), telemetry(ttft=0.05)
    assert Objective.of("throughput").score(fast) > Objective.of("throughput").score(good)
    assert Objective.of("accuracy").score(good) > Objective.of("accuracy").score(fast)
    assert Objective.of("response_time").score(good) > Objective.of("response_time").score(fast)
    goal = Objective.of("goodput", accuracy=0.9, ttft_p99=0.2)
    assert goal.rank(good) > goal.rank(fast)
    with pytest.raises(ConfigError, match="objective = 'speed': must be of throughput, "):
        Objective.of("speed")
    with pytest.raises(ConfigError, match="objective = 'goodput': needs limits of accuracy"):
        Objective.of("goodput", ttft_p99=1.0)
    for wrong in ("speed", "name", "cls"):
        with pytest.raises(ConfigError, match=f"limits = '{wrong}': must be of"):
            Objective.of("throughput", **{wrong: 1.0})
    with pytest.raises(ConfigError, match="limits.accuracy = 95: must be a share, at most 1"):
        Objective.of("throughput", accuracy=95)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="limits.ttft = .*: must be a number above 0"):
            Objective.of("throughput", ttft=wrong)
    over = telemetry().with_overhead(10.0, 100.0, 10, 100)
    assert over.throughput == pytest.approx(1000 / 20) and over.ttft == pytest.approx(1.1)
    assert over.energy == pytest.approx(1.1)
