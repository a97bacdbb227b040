"""HELIOS' reproduction: of tiny models, and of tables that are made by hand."""

from __future__ import annotations

import copy
import dataclasses
import json
import types

import jax
import numpy as np
import pytest
from launchers import call, functions_of

from eejax.common.errors import ConfigError, DataError
from eejax.data import ByteTokenizer
from eejax.inference.batch_simulator import Costs
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.serving.choices import Profile
from eejax.serving.traces import ModelTrace, Trace
from eejax.train import runs
from experiments.reproduce import helios_evidence as evidence
from experiments.reproduce import helios_models, helios_simulated

NAME = "experiments.reproduce.helios"


@pytest.fixture
def models(monkeypatch, tmp_path):
    """Two and three layers, untrained, in place of runs; and prompts of two tasks."""

    def model(layers):
        exits = tuple(ExitConfig(b) for b in range(1, layers))
        config = ModelConfig(
            vocab_size=257, n_layers=layers, d_model=16, n_heads=2, context_length=32,
            exits=exits, head="tied",
        )  # fmt: skip
        made = params.init(config, jax.random.key(layers))
        return types.SimpleNamespace(params=made, config=config, tokenizer=ByteTokenizer())

    found = {"small": model(2), "large": model(3)}
    monkeypatch.setattr(runs, "open_run", lambda path: types.SimpleNamespace(model=found[path]))
    rows = [{"prompt": "gate token exit " * (1 + i % 3), "task": f"t{i // 7}"} for i in range(14)]
    (tmp_path / "data" / "mixed_prompts").mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "data" / "mixed_prompts" / "mixed_prompts.jsonl").write_text(lines)
    monkeypatch.setenv("EEJAX_DATA", str(tmp_path / "data"))
    return found


def drawn(p=24, new=12):
    """`Measured` of tokens drawn at random, in two tasks."""
    rng = np.random.default_rng(0)
    shape = lambda e: (p, new, e)
    traces, profiles, costs = {}, {}, {}
    for name, layers in (("small", 2), ("large", 3)):
        sure = rng.random(shape(layers)).astype(np.float32)
        tokens = rng.integers(0, 3, shape(layers)).astype(np.int32)
        lengths = rng.integers(3, 20, p).astype(np.int32)
        limits, stops = (0.5,) * (layers - 1), tuple(range(1, layers + 1))
        traces[name] = ModelTrace(stops, limits, False, lengths, tokens, sure)
        each = lambda value, n=layers: (value,) * n
        profiles[name] = Profile(
            each(1e-3), each(1e-2), each(1e-2), each(1e-5), each(1e6), each(1e6), each(1.0),
            each(0.9), each(2), each(1e5),
        )  # fmt: skip
        own = Costs(1e-4, (2e-3, 1e-3, 2e-3), (1e-4,) * 3, 0.0, 5e-3, 0.0, each(1))
        costs[name] = dataclasses.asdict(own) | {"buckets": (2, 4), "tokens": 16}
    kinds = tuple("ab"[i % 2] for i in range(p))
    along = {("large", "small"): traces["large"], ("small", "large"): traces["small"]}
    return helios_models.Measured(Trace(traces, kinds), along, profiles, costs, 2)


def test_it_leaves_what_it_promises(tmp_path, monkeypatch, capsys):
    for name in ("INTERVALS", "BREACHES", "WINDOWS", "EARLY"):
        kept = getattr(helios_simulated, name)
        some = (10, 50, 150) if name == "INTERVALS" else kept[::2]
        monkeypatch.setattr(helios_simulated, name, some)
    helios_models.save(drawn(), tmp_path / "trace.npz")
    with pytest.raises(SystemExit) as ended:
        call(NAME, f"--trace={tmp_path / 'trace.npz'}", f"--output={tmp_path / 'out'}", "--json")
    told = capsys.readouterr().out
    result = json.loads(told.splitlines()[-1])
    assert ended.value.code == (0 if all(c["holds"] for c in result["claims"]) else 1)
    assert "Table 1" in told and "Figure 17" in told and "SIMULATED" in told
    assert result == json.loads((tmp_path / "out" / "results.json").read_text())
    for name in ("sensitivity.png", "unchanged.png"):
        assert (tmp_path / "out" / name).stat().st_size > 10_000
    assert result["prompts"] == 24 and result["new"] == 12
    assert [*result["objectives"]] == ["mixed", "by task"]
    for rows in result["objectives"].values():
        of = {r["name"]: r for r in rows}
        assert of["small, no early exits"]["agreement"] == 1.0
        assert of["large, whole"]["bytes"] > of["large, 1 exits"]["bytes"]
        assert of["large, whole"]["throughput"] > of["large, no early exits"]["throughput"]
        assert all(r["throughput"] > 0 for r in rows)


@pytest.mark.slow
def test_what_is_recorded_is_what_is_loaded(models, tmp_path):
    found = helios_models.opened({"small": "small", "large": "large"})
    made = helios_models.record(found, 12, 6, 2, 20)
    helios_models.save(made, tmp_path / "trace.npz")
    again = helios_models.load(tmp_path / "trace.npz")
    assert again.profiles == made.profiles and again.slots == 2 and len(again.trace) == 6
    assert helios_models.paces(again) == helios_models.paces(made)
    for name, model in made.trace.models.items():
        np.testing.assert_array_equal(again.trace.models[name].tokens, model.tokens)
    reads = again.along["large", "small"]
    assert reads.exits == 3 and not np.array_equal(reads.same, made.trace.models["large"].same)


def test_what_is_missing_is_told(models, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="--small = None: must name a training run"):
        call(NAME)
    models["large"].tokenizer = types.SimpleNamespace(fingerprint="another")
    with pytest.raises(ConfigError, match="--large = 'large': has another tokenizer"):
        call(NAME, "--small=small", "--large=large")
    monkeypatch.delenv("EEJAX_DATA", raising=False)
    with pytest.raises(ConfigError, match="EEJAX_DATA: must name the folder of mixed_prompts"):
        helios_models.prompts(None, 100, None)
    made().save(tmp_path / "trace.npz")
    with pytest.raises(DataError, match="trace.npz.json: cannot be read"):
        helios_models.load(tmp_path / "trace.npz")


def test_long_prompts_keep_their_end(models):
    model = helios_models.opened({"small": "small", "large": "large"})["small"]
    ids, tasks, cut = helios_models.prompts(model, 12, 8)
    assert tasks == ("t0",) * 7 + ("t1",) and cut == 5
    assert [len(i) for i in ids] == [16, 20, 20] * 2 + [16, 20]
    assert bytes(ids[1]) == b"gate token exit gate token exit "[-20:]
    with pytest.raises(ConfigError, match="--new: leaves no room"):
        helios_models.prompts(model, 40, 8)


def made() -> Trace:
    """Two prompts of two tokens."""
    sure = np.array([[[0.9, 1.0], [0.2, 1.0]], [[0.1, 1.0], [0.6, 1.0]]], np.float32)
    tokens = np.array([[[1, 1], [2, 3]], [[4, 4], [5, 6]]], np.int32)
    lengths = np.array([1, 1], np.int32)
    model = ModelTrace((1, 2), (0.5,), True, lengths, tokens, sure)
    return Trace({"small": model}, ("a", "b"))


def test_evidence_worked_by_hand():
    trace = made()
    limits = {"small": 0.5}
    rows = evidence.by_task(trace, limits)
    assert [(r["task"], r["shares"], r["agreement"]) for r in rows] == [
        ("all", [0.5, 0.5], 0.75), ("a", [0.5, 0.5], 1.0), ("b", [0.5, 0.5], 0.5)
    ]  # fmt: skip
    (row,) = evidence.unchanged(trace, limits)
    assert row["below"] == 0.5 and row["unchanged"] == 0.5 and row["all"] == 0.5
    assert row["low"] == 1.0 and row["by_confidence"][2] == 0.0 and sum(row["counts"]) == 4
    # One that reads along is sure of the first token of each.
    sure = np.array([[[0.9, 1.0], [0.2, 1.0]], [[0.8, 1.0], [0.3, 1.0]]], np.float32)
    small = trace.models["small"]
    other = ModelTrace((3, 4), (0.5,), True, small.prompts, small.tokens, sure)
    (row,) = evidence.complementary(trace, {("large", "small"): other}, limits | {"large": 0.5})
    assert (row["early"], row["reader_early"], row["rescued"]) == (0.5, 0.5, 0.5)
    assert row["either"] == 0.75 and row["late_early"] == 0.5 and row["same_text"] == 1.0
    for share, leave in ((0.25, 1), (0.5, 2), (1.0, 4)):
        threshold = evidence.threshold_for(small, share)
        assert (small.leaves(threshold)[0] == 0).sum() == leave


def tables():
    row = lambda name, **own: {
        "name": name, "throughput": 10.0, "ttft": {"mean": 1.0}, "agreement": 0.95, "bytes": 100.0,
        "flops": 5.0,
    } | own  # fmt: skip
    rows = [
        row("small, whole", whole=True, bytes=50.0), row("large, whole", whole=True),
        row("HELIOS: throughput", throughput=15.0), row("HELIOS, one model at a time", bytes=40.0),
        row("HELIOS: response_time", ttft={"mean": 0.5}), row("HELIOS: energy", flops=2.0),
        row("at random", throughput=8.0), row("hindsight, as right", throughput=16.0),
    ]  # fmt: skip
    value = lambda v, throughput=10.0, **own: {
        "value": v,
        "throughput": throughput,
        "below": 0.1,
        **own,
    }
    over = {
        "interval": [value(10, 8.0), value(50), value(150)],
        "breaches": [value(10), value(90, below=0.4)],
        "early": [value(0.2, 30.0, static={"a": 10.0}), value(0.9, static={"a": 10.0})],
    }
    unchanged = [{"model": "small", "layers": 1, "unchanged": 0.8}]
    both = [{"writer": "small", "reader": "large", "rescued": 0.6, "late_early": 0.7,
             "either": 0.9, "early": 0.75}]  # fmt: skip
    return [{"mixed": rows}, over, unchanged, both]


def test_a_claim_that_does_not_hold_is_said_to_fail():
    held = lambda given: [c["holds"] for c in helios_simulated.claims(*given)]
    assert len(held(tables())) == 14 and all(held(tables()))

    def failing(change):
        given = copy.deepcopy(tables())
        change(*given)
        return [i for i, holds in enumerate(held(given)) if not holds]

    slow = lambda t, *_: t["mixed"][2].update(throughput=9.0)
    assert failing(slow) == [3]
    assert failing(lambda t, *_: t["mixed"][2].update(agreement=0.9)) == [4]
    assert failing(lambda t, *_: t["mixed"][3].update(bytes=200.0)) == [5]
    assert failing(lambda t, *_: t["mixed"][4].update(ttft={"mean": 1.5})) == [6]
    assert failing(lambda t, *_: t["mixed"][5].update(flops=6.0)) == [7]
    assert failing(lambda t, *_: t["mixed"][6].update(throughput=16.0)) == [8]
    assert failing(lambda t, *_: t["mixed"][7].update(throughput=14.0)) == [9]
    assert failing(lambda t, over, *_: over["interval"][1].update(throughput=20.0)) == [10]
    assert failing(lambda t, over, *_: over["breaches"][1].update(below=0.0)) == [12]
    assert failing(lambda t, over, *_: over["early"][0].update(throughput=5.0)) == [13]
    assert failing(lambda t, o, unchanged, _: unchanged[0].update(unchanged=0.4)) == [0]
    assert failing(lambda t, o, u, both: both[0].update(rescued=0.4, either=0.76)) == [1, 2]


def test_pictures_are_of_what_there_is(tmp_path):
    functions_of(NAME)
    over = tables()[1] | {"window": [{"value": 50, "throughput": 1.0, "below": 0.0}]}
    row = {"model": "small", "layers": 1, "by_confidence": [None, 0.5, *(None,) * 8]}
    drawn = helios_simulated.figures(over, [row])
    assert {*drawn} == {"sensitivity.png", "unchanged.png"}
