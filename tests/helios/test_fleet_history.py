"""A fleet that starts again goes on from what was measured; what is not valid any more is measured
again, and damaged history is refused without being lost."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sqlite3
from types import SimpleNamespace

import jax
import pytest
from adding import add
from controlled import profile, telemetry
from launchers import call
from tiny_fleets import TinyFleet

from eejax.common.errors import ConfigError, DataError
from eejax.common.progress import LOG
from eejax.data.tokenizers import ByteTokenizer
from eejax.helios import build, measurements
from eejax.helios.choices import ControllerOptions, ModelDepth
from eejax.helios.conditions import MeasurementConditions
from eejax.helios.objectives import ServiceObjective
from eejax.helios.pool import FleetMember
from eejax.helios.quality import BenchmarkScore, QualitySource
from eejax.helios.repository import Repository, StoredEvaluation, rebuild

OPTIONS = ControllerOptions(prompts=2, interval=10**6, tokens=8)
NOW = MeasurementConditions("digest", "cpu", "0.10", "0.1", '{"context": 32, "slots": [2, 2]}')


@pytest.fixture
def calls(monkeypatch):
    """Models whose depths were measured, and which wrote answers to be judged, in order."""
    found = []

    def counted(name):
        own = getattr(measurements, name)

        def counting(member, *args, **more):
            found.append((name, member.config.n_layers))
            return own(member, *args, **more)

        monkeypatch.setattr(measurements, name, counting)

    counted("measure")
    counted("generate_answers")
    # What else may have to be compiled is not looked at here.
    monkeypatch.setattr(build, "warm_up", lambda *args, **more: None)
    return found


def serves(fleet) -> ModelDepth:
    """What a fleet serves with once it has evaluated what it wants to."""
    for i in range(20):
        add(fleet, [65 + i, 66], 8)
    fleet.run()
    assert not fleet.controller.state.plan
    return fleet.controller.current


def cut(large: FleetMember, small: FleetMember) -> FleetMember:
    """The first layers of a model as one of its own, whose answers are now and then the same."""
    params = dict(large.params) | {"exits": small.params["exits"]}
    n = small.config.n_layers
    params["layers"] = jax.tree.map(lambda a: a[:n], params["layers"])
    return dataclasses.replace(small, params=params)


@pytest.mark.slow
def test_a_restart_measures_nothing_again(tmp_path, calls, caplog):
    """The larger of two models is the best; the other one is its first layers."""
    path, members = tmp_path / "helios.db", TinyFleet().members()
    members["small"] = cut(members["large"], members["small"])
    prompts = ("a few words to measure on", "and some others that are longer than those")

    def started(objective: str, **limits: float):
        calls.clear()
        caplog.clear()
        config = build.FleetConfig(objective, limits, OPTIONS, path, audits=0.0)
        with caplog.at_level("INFO", LOG):
            made = build.build_fleet(members, ByteTokenizer(), config, slots=2, prompts=prompts)(2)
        return made, [record.getMessage() for record in caplog.records if record.name == LOG]

    fleet, said = started("accuracy")
    assert calls == [
        ("measure", 2),
        ("generate_answers", 2),
        ("measure", 3),
        ("generate_answers", 3),
    ]
    assert sum("as it was not measured before" in line for line in said) == 2
    small, large = (float(re.search(r"quality ([0-9.]+) \(best\)", s)[1]) for s in said[-2:])
    assert 0.01 < small < 0.9 and large == 1.0
    assert serves(fleet) == ModelDepth("large", 2)
    evaluated = [d.choice.model for d in fleet.controller.decisions if d.kind == "evaluate"]
    assert evaluated == ["large"]  # the other one could not be better, were all its tokens right
    fleet.controller.repository.close()

    fleet, said = started("accuracy")
    assert not calls
    for name in members:
        assert sum(line.startswith(f"{name}: as measured at 20") for line in said) == 1
    assert [line for line in said if "not evaluated again" in line][0].startswith("large: ")
    assert [d.kind for d in fleet.controller.decisions] == ["serve"]
    assert serves(fleet) == ModelDepth("large", 2)

    # As if they were measured on a machine on which the larger one takes three times as long. No
    # time that was measured here decides: programs are compiled while requests wait, and a limit on
    # that would be missed on a busy machine.
    repository, seconds = fleet.controller.repository, {"small": 1e-3, "large": 3e-3}
    for name, found in fleet.controller.state.rules.profiles.items():
        times = dict(prefill=(1e-3,) * 2, load=(0.0,) * 2, rebuild=(0.0,) * 2, saved=1.0)
        found = dataclasses.replace(found, seconds=(seconds[name],) * 2, **times)
        repository.keep(name, found, 0.0)
    repository.close()
    for objective, limits, model in (
        ("throughput", {}, "small"),
        ("goodput", dict(accuracy=0.01, ttft_p99=1e9), "small"),
        ("goodput", dict(accuracy=0.97, ttft_p99=1e9), "large"),
        ("perplexity", {}, None),
    ):
        fleet, _ = started(objective, **limits)
        assert not calls
        found = serves(fleet).model
        if model is None:

            def perplexity(m, c=fleet.controller):
                return c.state.rules.profiles[m].perplexity_at(1.0)

            model = min(members, key=perplexity)
        assert found == model
        fleet.controller.repository.close()

    members["small"] = dataclasses.replace(members["small"], rules=dict(threshold=0.3))
    fleet, said = started("throughput")
    assert calls == [("measure", 2), ("generate_answers", 2)]
    again = "small, model 1 of 1: measuring it at 2 depths"
    assert any(again in s and "a change of rules" in s for s in said)
    fleet.controller.repository.close()


def test_exits_that_were_tuned_are_another_model():
    member = TinyFleet().members()["small"]
    own = measurements.parameters(member.params, member.config)
    name = member.config.exits[0].name
    exits = {name: {"norm": {"scale": member.params["exits"][name]["norm"]["scale"] * 2}}}
    other = member.params | {"exits": member.params["exits"] | exits}
    assert measurements.parameters(other, member.config) != own
    assert measurements.parameters(dict(member.params), member.config) == own


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(model="other"), "a change of its parameters"),
        (dict(jax="0.11"), r"a change of jax \(0.10, now 0.11\)"),
        (dict(device="H100", eejax="0.2"), r"device \(cpu, now H100\), eejax \(0.1, now 0.2\)"),
        (dict(serving='{"context": 64, "slots": [2, 2]}'), "a change of context$"),
    ],
)
def test_what_is_measured_again_and_why(tmp_path, changes, said):
    repository = Repository(tmp_path / "models.db")
    assert repository.profile("m", NOW) == (None, "it was not measured before")
    own = dataclasses.replace(profile(), quality=((0.5, 0.25), (1.0, 0.75)), ceiling=0.75)
    repository.keep("m", own, 1e9)
    found, since = repository.profile("m", NOW)
    assert found == own and since.startswith("2001-09")
    other, why = repository.profile("m", NOW._replace(**changes))
    assert other is None and re.search(said, why)
    assert repository.evaluated("m") == (None, "")


def test_what_is_evaluated_again_and_why(tmp_path, caplog):
    """An evaluation holds for as long as what its quality is compared with."""
    repository = Repository(tmp_path / "models.db")
    profiles = {name: profile() for name in ("a", "b")}
    source = QualitySource.parse("benchmark")
    score = BenchmarkScore("a", 0, "sums", "acc", 0.5)

    def again(profiles=profiles, source=source, reference=None) -> tuple[set[str], str]:
        caplog.clear()
        for name in profiles:
            repository.profile(name, NOW._replace(model=name))
        with caplog.at_level("INFO", LOG):
            scores = repository.scores()
            found = measurements.earlier_evaluations(
                repository, profiles, source, scores, reference
            )
        return {*found}, " ".join(caplog.messages)

    repository.import_scores([score])
    assert again() == (set(), "")
    told = telemetry()
    for name in profiles:
        repository.add(StoredEvaluation(1e9, name, 4, 2, 8, (8, 0, 0, 0), "operations", told))
    found, said = again()
    assert found == {"a", "b"} and said.count("not evaluated again, as it was at 2001-09") == 2
    better = profiles | {"b": dataclasses.replace(profile(), quality=((1.0, 0.5),), ceiling=0.5)}
    found, said = again(better)
    assert found == {"a"} and "b: evaluated again, as since 2001-09" in said
    assert "there is a change of profile" in said
    for changed, why in (
        (dict(source=QualitySource.parse("benchmark:sums")), "change of tasks"),
        (dict(reference=SimpleNamespace(least=2.0)), "change of lowest_perplexity"),
    ):
        found, said = again(**changed)
        assert not found and said.count(why) == 2
    repository.import_scores([score._replace(value=0.6)])
    found, said = again()
    assert not found and said.count("change of scores") == 2
    repository.import_scores([score])
    row = StoredEvaluation(1e9 + 1, "a", 4, 2, 8, (8, 0, 0, 0), "operations", told, strictness=2)
    again()
    repository.add(row)
    assert again()[0] == {"a", "b"}  # by thresholds as they are at the beginning
    assert repository.history("a") == [row]
    for level, levels in ((1, "1 level"), (2, "2 levels")):
        name = f"new {level}"
        again({name: profile()})
        repository.add(row._replace(model=name, strictness=level))
        found, said = again({name: profile()})
        assert not found and f"its thresholds were {levels} stricter at 2001-09" in said


def test_an_evaluation_that_cannot_be_read_is_of_one_model_alone(caplog):
    """Those of the others hold, and new ones of all are kept with what they are compared with."""
    repository, profiles = Repository(), {"a": profile(), "b": profile()}
    source = QualitySource.parse("best")

    def again():
        return measurements.earlier_evaluations(repository, profiles, source, [], None)

    for name in profiles:
        repository.profile(name, NOW._replace(model=name))
    again()
    for name in profiles:
        row = StoredEvaluation(1e9, name, 4, 2, 8, (8, 0, 0, 0), "operations", telemetry())
        repository.add(row)
    kept = dict(repository.judged)
    with repository._connection as db:
        db.execute("update history set exits = 'none' where model = 'a'")
    repository.judged.clear()
    assert again() == {"b": row} and repository.judged == kept
    assert re.search("a: evaluated again: .*cannot be read", caplog.text)


def test_who_is_served_does_not_depend_on_a_file_that_cannot_be_written(tmp_path, caplog):
    repository = Repository(tmp_path / "models.db")
    profiles = {"slow": profile(2.0), "fast": profile()}
    assert measurements.with_profiles(repository, profiles) is repository
    repository._connection.execute("pragma query_only = on")
    made = measurements.with_profiles(repository, profiles)
    (said,) = caplog.messages
    assert re.match(r"measurements are not kept: .*models.db: cannot be written \(.*readonly", said)
    order = made.candidates(["slow", "fast"], ServiceObjective.of("throughput"))
    assert made.path == ":memory:" and order == ["fast", "slow"]


def test_a_file_that_is_in_use_for_a_moment_is_used_once_it_is_free(tmp_path, caplog):
    """Meanwhile candidates are chosen by what is in memory."""
    file = tmp_path / "models.db"
    repository, profiles = Repository(file), {"slow": profile(2.0), "fast": profile()}
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("begin exclusive")
        assert measurements.with_profiles(repository, profiles) is repository
        assert [text.split(":")[0] for text in caplog.messages] == ["slow", "fast"]
        assert "its benchmark is not kept: " in caplog.text and "locked" in caplog.text
        order = repository.candidates(["slow", "fast"], ServiceObjective.of("throughput"))
        assert order == ["fast", "slow"]
    row = StoredEvaluation(1e9, "slow", 4, 2, 8, (8, 0, 0, 0), "operations", telemetry())
    repository.add(row)
    assert Repository(file).history("slow") == [row]


def test_profiles_that_cannot_be_read_are_measured(tmp_path, monkeypatch):
    """The file comes to be in use between opening it and reading what is in it."""
    file, found = tmp_path / "models.db", profile()
    repository = Repository(file)
    repository.profile("m", NOW)
    repository.keep("m", found, 1e9)
    setup = SimpleNamespace(
        members={"m": None},
        slots={"m": (2,)},
        context=32,
        reference=None,
        conditions=lambda *of: NOW,
        texts=lambda: [[1, 2, 3]],
    )

    def again():
        return measurements.measure_members(setup, repository, QualitySource.parse("best"), "nvml")

    measured = []
    monkeypatch.setattr(measurements, "measure", lambda *of, **own: measured.append(1) or found)
    assert again() == {"m": found} and not measured
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("begin exclusive")
        with (
            pytest.warns(UserWarning, match="a measurement is not used: .*locked"),
            pytest.warns(UserWarning, match="a measurement is not kept: .*locked"),
        ):
            assert again() == {"m": found}
    assert measured == [1]


def test_history_that_cannot_be_read_is_refused_and_nothing_of_it_is_lost(tmp_path):
    file = tmp_path / "models.db"

    def ask(*flags):
        return call(
            "eejax.experiments.serve",
            "--model=a=/none",
            "--objective=energy",
            f"--repository={file}",
            *flags,
        )

    repository = Repository(file)
    repository.profile("m", NOW)
    repository.keep("m", profile(), 1.0)
    repository.close()
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute("update profile set profile = '{\"seconds\": [1]}'")
    whole = file.read_bytes()
    pages = b"x" * 4096
    for content, said in (
        (whole, "a profile of other fields"),
        (whole[:4096] + pages * (len(whole) // 4096 - 1), "malformed|damaged|not a database"),
        (b"no database" * 100, "not a database"),
    ):
        file.write_bytes(content)
        told = rf"--repository: .*models.db: cannot .*({said}).*--repository=.*models.db --rebuild"
        with pytest.raises(ConfigError, match=told):
            ask()
        with pytest.warns(UserWarning, match="measurements are not kept: .*models.db"):
            assert measurements.open_repository(file).path == ":memory:"
        assert file.read_bytes() == content
        aside = rebuild(file)
        with open(aside, "rb") as old:
            assert old.read() == content
        Repository(file).check()
    assert len({*tmp_path.iterdir()}) == 4


def test_the_launcher_rebuilds_on_request(tmp_path, capsys):
    file = tmp_path / "models.db"
    file.write_bytes(b"something else")
    with pytest.raises(DataError, match="models.db: cannot be used as a repository"):
        call("eejax.experiments.repository", f"--repository={file}")
    call("eejax.experiments.repository", f"--repository={file}", "--rebuild")
    told = capsys.readouterr().out
    assert re.search(r"models.db is new; what was there is in \S+models.db.old-", told)
    Repository(file).check()
    assert sorted(p.read_bytes()[:9] for p in tmp_path.iterdir())[1] == b"something"
