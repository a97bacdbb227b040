"""The benchmarks run to their end and report what they promise (figures are not judged here)."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest
import small_runs
from launchers import functions_of

from eejax.models.config import ExitConfig, ModelConfig
from eejax.pipeline.schedule import BACKWARD, EXITS, FORWARD, one_f_one_b
from eejax.pipeline.simulate import step_costs
from eejax.train.config import Experiment
from eejax.train.loop import fit

batch_runs = functions_of("eejax.experiments.batch_runs")
bench_engines = functions_of("eejax.experiments.bench_engines")
bench_pipeline = functions_of("eejax.experiments.bench_pipeline")
slot_costs = functions_of("eejax.experiments.slot_costs")


def run(module: str, *flags: str) -> dict:
    command = [
        sys.executable,
        "-P",
        "-m",
        f"eejax.experiments.{module}",
        "--json",
        "--pairs=2",
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("peer", [False, True])
def test_bench_routers(eejax_data, peer):
    if peer:
        pytest.importorskip("TIDE")
    flags = ("--windows=40", "--epochs=2", "--new=8", "--unseen=6000")
    got = run("bench_routers", *flags, "--tide" if peer else "--notide")
    assert got["oracle_depth"] < got["depth_at_10"] <= got["depth_at_5"] < 12
    assert got["depth_at_5_disagreement"] <= 0.05 and got["depth_at_10_disagreement"] <= 0.1
    assert len(got["auc"]) == 11 and min(got["auc"]) > 0.55
    assert ("tokens_per_s_vs_tide" in got) == peer
    if peer:
        assert got["tide"]["mended"]["depth_at_5"] <= 12 and got["auc_at_least_tides"]


@pytest.mark.slow
def test_bench_train():
    pytest.importorskip("transformers")
    got = run("bench_train", "--warmup=1", "--max_exits=1")
    low, high = got["train_vs_transformers_interval"]
    assert 0 < low <= got["train_vs_transformers"] <= high
    assert got["exit_temp_bytes_ratio"] <= 0.125  # bytes, not seconds: the same everywhere


@pytest.mark.slow
def test_bench_decode():
    pytest.importorskip("transformers")
    got = run("bench_decode")
    low, high = got["decode_vs_transformers_interval"]
    assert 0 < low <= got["decode_vs_transformers"] <= high
    assert got["exit_efficiency"] > 0


@pytest.mark.slow
def test_bench_slots():
    got = run("bench_slots", "--layers=3", "--slots=2", "--slots=3", "--active=2", "--new=4")
    assert set(got["lone"]) == {"2", "3"} and set(got["active"]) == {"2"}
    for one in (*got["lone"].values(), *got["active"].values()):
        low, high = one["interval"]
        assert 0 < low <= one["ratio"] <= high and min(one["tokens_per_second"]) > 0


@pytest.mark.slow
def test_bench_pipeline():
    got = run("bench_pipeline", "--smoke")
    rows = {(r["remat"], r["exits"]): r for r in got["policies"]}
    assert len(rows) == 9 and rows["none", "mixed"]["memory"] == got["exit_memory_overhead"] <= 1e-3
    assert rows["none", "aligned"]["memory"] > got["exit_memory_overhead"]
    assert rows["full", "mixed"]["gib"] < rows["none", "mixed"]["gib"]
    low, high = got["schedule_overhead_interval"]
    assert low <= got["schedule_overhead"] <= high and got["simulator_error"] >= 0
    assert set(got["measured"]["seconds"]) == {"with exits", "without exits"}


@pytest.mark.slow
def test_bench_engines(tmp_path):
    small_runs.write_text(tmp_path)
    values = small_runs.config(tmp_path, microbatches=1, eval_every=0)
    values["model"] |= {"n_layers": 3, "exits": [{"boundary": 1}, {"boundary": 2}]}
    values["model"]["context_length"] = 96
    values["exit_weights"] = {"weights": [0.5, 0.5]}
    fit(Experiment.from_dict(values), tmp_path / "run")
    got = run("bench_engines", f"--workdir={tmp_path / 'run'}", "--prompts=2", "--tokens=2000")
    assert got["recompilations"] == got["speculative"]["different_tokens"] == 0
    assert got["full_own_output"]["agreement"] == 1
    for target in ("97%", "99%"):
        point = got[f"recompute_{target}"]
        assert point["agreement"] >= float(target[:-1]) / 100
        assert 1 <= point["executed_layers"] <= 3 and point["ratio"] > 0
    assert got["skip_accounting"] > 0 and set(got["exit_efficiency_by_exit"]) == {"1", "2"}
    assert got["frontier"][-1]["depth"] == 3 and got["frontier"][-1]["agreement"] == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bench_batched(small_run):
    got = run(
        "bench_batched",
        f"--workdir={small_run}",
        "--batch=2",
        "--batch=3",
        "--new=16",
        "--tokens=2000",
        "--calls=40",
        "--queues=2",
        "--drafts=2",
    )
    for batch in ("batch_2", "batch_3"):
        one = got[batch]
        assert one["exits"]["ratio"] > 0 and one["exits"]["undrafted"]["drafts"] == 0
        assert set(one["curve"]) >= {"0.3", "0.5", "0.7", "0.9"}
        assert one["simulator_error"] >= 0 and one["ideal"] > 0
        assert abs(sum(one["time"].values()) - 1) < 1e-6
        for name in ("latency full", "latency exits"):
            assert 0 <= one[name]["p50"] <= one[name]["p99"]
    each = [got["batch_2"], got["batch_3"]]
    assert got["no_exit_overhead"] == max(one["no_exit_overhead"] for one in each)
    assert got["auto_ratio"] == min(one["auto"]["ratio"] for one in each)
    assert all(ratio > 0.5 for ratio in got["gpu_simulated"].values())


def test_costs_by_bytes_and_products():
    """A layer of few rows takes what reading its weights does, of many what their products do."""
    costs = batch_runs.roofline(
        [6, 18], 1000, 50_000, 100, (8, 1, 4096), bandwidth=1e12, flops=1e14, start=1e-6
    )
    weights = 12 * 1000**2 * 2
    cache = 100 * 1000 * 2
    assert costs.layer[1] == pytest.approx(1e-6 + weights / 1e12)
    assert costs.layer[0] == pytest.approx(costs.layer[1] + 8 * cache / 1e12)
    assert costs.layer[2] == pytest.approx(1e-6 + 4096 * 2 * 12 * 1000**2 / 1e14)
    assert costs.exit_check[1] == pytest.approx(1e-6 + 50_000 * 1000 * 2 / 1e12)
    assert costs.span == pytest.approx(cache / 1e12) and costs.depths == (6, 18)


def test_time_is_accounted_by_rows_that_went_through():
    config = ModelConfig(
        vocab_size=7,
        n_layers=6,
        d_model=4,
        n_heads=1,
        context_length=32,
        exits=(ExitConfig(2), ExitConfig(3)),
    )
    # Layers run and exits of: the prefill; two tokens that leave first; one that goes to the second
    # exit with them; one to the end, which carries four; one more, alone.
    run = types.SimpleNamespace(
        layers=np.array([[6, 2, 2, 3, 6, 6]]), exits=np.array([[2, 0, 0, 1, 2, 2]])
    )
    rows = np.array([[1.0, 10, 100], [2, 20, 200], [3, 30, 300], [4, 40, 400]])
    got = bench_engines.accounted([run], config, (1, 2, 3, 4), rows, np.array([0.1, 0.2, 0.4]))
    first, second, last = 5 * 1, 30 + 10 + 10, 400 + 100
    np.testing.assert_allclose(got, first + second + last + 0.1 * 2 + 0.3 + 0.7 * 2)


def seconds_of(parts, layers: int, more: int, remat: str):
    """What tables would take if every operation took what `parts` says, steps one by one."""
    tables = slot_costs.slot_tables(more, remat == "full")
    costs = parts.costs((layers,) * 3, (0, 1, 0))
    return {
        key: np.full(3, step_costs(t, costs).max(1).sum() + len(t.steps) * parts.exchange)
        for key, t in tables.items()
    }


@pytest.mark.parametrize("remat", ["none", "full"])
def test_parts_are_told_apart(remat):
    # Nobody embeds again.
    embedding = (0.0, 0.5) if remat == "full" else (0.25, 0.5)
    parts = slot_costs.MicrobatchCosts((1.0, 2.0), (0.5, 1.0), (0.75, 1.5), embedding, 0.125, {})
    got = slot_costs.parts_of(seconds_of(parts, 3, 4, remat), 3, 4, remat)
    assert set(got.spread) == {f"{k} {i}" for k, i in slot_costs.SLOTS}
    for name in ("layer", "exit", "final", "embedding", "exchange"):
        assert getattr(got, name) == pytest.approx(getattr(parts, name)), name


def test_tables_have_more_of_one_operation_each():
    tables = slot_costs.slot_tables(5, False)
    base = tables.pop(None)
    assert base == one_f_one_b(3, 1, exit_stages=(1,)) and len(tables) == 7
    for (kind, stage), table in tables.items():
        assert len(table.steps) == len(base.steps) + 5 and table.steps[5:] == base.steps

        def count(t, k, i):
            return sum(op.kind == k for s in t.steps for op in s.ops[i])

        for k in (FORWARD, EXITS, BACKWARD):
            for i in range(3):
                assert count(table, k, i) - count(base, k, i) == 5 * ((k, i) == (kind, stage))


@pytest.mark.slow
def test_operations_are_measured_on_devices():
    model = ModelConfig(
        vocab_size=4096,
        n_layers=4,
        d_model=64,
        n_heads=2,
        context_length=32,
        exits=(ExitConfig(2, norm=False),),
    )
    got = slot_costs.measure(model, 1, 8, 32, repetitions=3, more=20)
    assert slot_costs.three_stages(model, 1).n_layers == 3
    assert sum(got.exit) > 0 and sum(got.final) > 0
    assert got.exit[1] == pytest.approx(2 * got.exit[0])


def test_memory_of_the_executor():
    """Bytes of parameters and gradients, which are there whatever XLA does, and more with exits."""
    without = bench_pipeline.device_bytes(32, "full", "mixed", ())
    exits = bench_pipeline.device_bytes(32, "full", "mixed", (6, 12))
    d, v = 64, 50304 // 32
    stage = 4 * (6 * (12 * d * d + 4 * d) + v * d)
    assert 2 * stage < without < exits < 1.01 * without
