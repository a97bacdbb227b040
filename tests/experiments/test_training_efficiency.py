"""The reproduction of EE-LLM's training efficiency: its costs, what it leaves, how it judges."""

import copy
import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from launchers import functions_of
from matplotlib.image import imread

from eejax.experiments.reproduce import efficiency_findings, megatron
from eejax.experiments.reproduce.claims import Verdict
from eejax.pipeline.simulate import PassTime

efficiency = functions_of("eejax.experiments.reproduce.training_efficiency")
STANDARD, WITHOUT, ONE, TWO, BOTH = efficiency.ROWS


@pytest.fixture(scope="module")
def gpus():
    return efficiency.fit()


@pytest.fixture(scope="module")
def results(gpus):
    found = {name: {"figure7": efficiency.figure7(name, gpus[name])} for name in ("1.3B", "13B")}
    found["7B"] = {"figure7": found["1.3B"]["figure7"]}
    for name in efficiency.TABLE1:
        found[name]["table1"] = efficiency.table1(name, gpus[name])
    return found


def rows_of(results, name):
    return {row["row"]: row for row in results[name]["table1"]}


def test_the_setting_is_that_of_table_1_and_figure_9():
    for name, layers in (("1.3B", 6), ("7B", 8)):
        run = efficiency.table1_run(name, True)
        assert (run.stages, run.shards, run.rows, run.length) == (4, 1, 2, 2048)
        assert run.rows * run.microbatches == 128 and run.layers == [layers] * 4
        assert [e.boundary * 4 // run.model.n_layers for e in run.model.exits] == [1, 2]
        assert not any(e.norm for e in run.model.exits)
        assert not efficiency.table1_run(name, False).model.exits


def test_the_papers_numbers_are_those_it_prints(results):
    """Extra time in percent, from the seconds of Table 1."""
    for name, more in (("1.3B", (1.53, 1.15, 0.96, 0.19)), ("7B", (1.01, 0.90, 0.34, 0.23))):
        rows = results[name]["table1"][1:]
        assert [round(100 * r["paper_more_time"], 2) for r in rows] == list(more)
    assert [r["paper_gb"] for r in results["1.3B"]["table1"]] == [19.85, 24.05, 22.56, 20.23, 19.85]
    assert [r["paper_gb"] for r in results["7B"]["table1"]] == [62.27, 67.42, 65.79, 62.27, 62.27]


def test_rows_are_told_apart_as_in_the_paper(results):
    for name in efficiency.TABLE1:
        rows = rows_of(results, name)
        more = [rows[r]["more_time"] for r in (WITHOUT, ONE, TWO, BOTH, STANDARD)]
        assert all(a > b for a, b in zip(more, more[1:], strict=False))
        # Deferring by itself saves no time: only exits in front of the gradient do.
        waiting = {r: rows[r]["more_time_waiting"] for r in rows}
        assert waiting[ONE] == pytest.approx(waiting[WITHOUT], abs=1e-9)
        assert waiting[BOTH] == pytest.approx(waiting[TWO], abs=1e-9)


def test_what_is_fitted_fits_and_the_rest_is_near(results):
    rows = {name: rows_of(results, name) for name in efficiency.TABLE1}
    for name, table in efficiency.TABLE1.items():
        assert rows[name][STANDARD]["seconds"] == pytest.approx(table[STANDARD][0], rel=1e-5)
        for row in rows[name].values():
            assert abs(row["more_time"] - row["paper_more_time"]) < 0.005
    saved = rows["1.3B"][ONE]["seconds"] - rows["1.3B"][BOTH]["seconds"]
    assert saved == pytest.approx(5.29 - 5.24, rel=1e-3)


def test_bytes_of_an_exit(results):
    """An exit's table has 18 bytes a parameter; 4 bytes a logit are kept, 6 more come and go."""
    for name, d in (("1.3B", 2048), ("7B", 4096)):
        rows = rows_of(results, name)
        state, logits = 18 * 32_000 * d / 1e9, 2 * 2048 * 32_000 / 1e9
        assert rows[ONE]["more_gb"] == pytest.approx(state + 10 * logits)
        assert rows[WITHOUT]["more_gb"] == pytest.approx(state + (4 * 4 + 6) * logits)
        assert rows[BOTH]["more_gb"] == 0 and rows[BOTH]["peak_stage"] == 1
        grown = np.subtract(rows[TWO]["gb"], rows[STANDARD]["gb"])
        expected = [0, state + (3 * 4 + 6) * logits, state + (2 * 4 + 6) * logits, 0]
        np.testing.assert_allclose(grown, expected, atol=1e-9)


def test_seconds_of_the_parts():
    gpu = megatron.Gpu(flops=1e14, bandwidth=1e12, link=1e11, embedding=0.5)
    run = efficiency.table1_run("7B", True)
    found = megatron.costs(run, gpu)
    tokens, d, v, f = 4096, 4096, 32_000, 10_880
    head = 2 * tokens * d * v

    def second(flops, nbytes):
        return flops / 1e14 + nbytes / 1e12

    assert found.final == pytest.approx(
        PassTime(
            second(head, 38 * tokens * v + 36 * tokens * d),
            second(2 * head, 14 * tokens * v + 84 * tokens * d),
        )
    )
    assert found.entry[1] == pytest.approx(
        PassTime(second(head, 38 * tokens * v), second(2 * head, 14 * tokens * v + 18 * tokens * d))
    )
    assert found.entry[0] == found.entry[3] == PassTime() and found.inner == (PassTime(),) * 4
    embedding = found.layers[0].backward - found.layers[1].backward
    assert embedding == pytest.approx(second(0, 11 * tokens * d + 12 * v * d / 0.5))
    matrices = 2 * tokens * 8 * (4 * d * d + 3 * d * f) + 8 * 4 * tokens * d * 2049 / 2
    elementwise = 8 * ((2 * 36 + 48 + 16 + 14) * tokens * d + 10 * tokens * f)
    assert found.layers[1].forward == pytest.approx(second(matrices, elementwise))


def test_shards_divide_the_work_and_exchange_states():
    run = efficiency.table1_run("7B", True)
    slow = megatron.Gpu(flops=1e14, bandwidth=1e12, link=1e30)
    one, four = run, dataclasses.replace(run, shards=4)

    def seconds(r, gpu):
        return megatron.costs(r, gpu).layers[1].forward

    assert seconds(four, slow) == pytest.approx(seconds(one, slow) / 4)
    linked = megatron.Gpu(flops=1e14, bandwidth=1e12, link=1e11)
    sent = seconds(four, linked) - seconds(four, slow)
    # Of each layer's states: two all-gathers and two reduce-scatters, three quarters received.
    assert sent == pytest.approx(8 * 4 * 2 * 4096 * 4096 * 3 / 4 / 1e11)
    np.testing.assert_allclose(megatron.peak_bytes(four), megatron.peak_bytes(one) / 4)


def test_figure_7_has_the_papers_exits_and_settings():
    assert efficiency.DEPTHS == ((), (1 / 4,), (1 / 4, 1 / 2), (1 / 4, 1 / 2, 0))
    assert {name: s.rows for name, s in efficiency.SETTINGS.items()} == {
        "1.3B": 2,
        "7B": 2,
        "13B": 1,
        "30B": 1,
    }
    model = efficiency.model_of(efficiency.SETTINGS["7B"], efficiency.DEPTHS[-1])
    assert [e.boundary for e in model.exits] == [0, 8, 16]
    assert (efficiency.REPLICAS, efficiency.BATCH, efficiency.LENGTH) == (4, 2048, 2048)


def test_every_finding_of_the_tables_and_a_verdict_that_changes(results):
    found = [
        *efficiency_findings.table1(results),
        *efficiency_findings.figure7(results),
        *efficiency_findings.figure9(results),
    ]
    keys = [f.key for f in found]
    assert keys.count("table-1-time") == 8 and keys.count("table-1-memory") == 10
    assert sum(k.startswith("figure-7") for k in keys) == 3
    assert sum(k.startswith("figure-9") for k in keys) == 3
    assert all(f.verdict is Verdict.HOLDS for f in found if f.place.startswith("Figure"))
    times = {f.ours.split(":")[0]: f for f in found if f.key == "table-1-time"}

    def told(row):
        return (str(times[f"7B, {row}"].verdict), times[f"7B, {row}"].ours)

    # Deferring alone saves nothing (Remark A.2); about 1 % and what optimization 2 saves are seen.
    assert [told(row)[0] for row in (WITHOUT, ONE, TWO, BOTH)] == [
        "holds",
        "does not hold",
        "holds",
        "holds",
    ]
    assert "about 1 %: 0.5% to 1.5%" in told(WITHOUT)[1] and "0.00 points less" in told(ONE)[1]
    assert "released code's order" in told(ONE)[1] and "20 ms less" in times[f"7B, {ONE}"].why
    both = next(f for f in found if f.key == "table-1" and f.ours.startswith("7B"))
    assert both.verdict is times[f"7B, {BOTH}"].verdict
    # A constant is fitted to differences of the 1.3B model's rows: times are judged by 7B alone.
    fitted = [f for f in found if f.ours.startswith("1.3B") and f.key != "table-1-memory"]
    assert len(fitted) == 7 and {f.verdict for f in fitted} == {Verdict.NOT_AT_THIS_SCALE}

    def verdict(change, key):
        changed = copy.deepcopy(results)
        change(changed)
        judged = [
            *efficiency_findings.table1(changed),
            *efficiency_findings.figure7(changed),
            *efficiency_findings.figure9(changed),
        ]

        def mine(f):
            return f.key == key and f.scale != efficiency_findings.FITTED["1.3B"]

        return [f.verdict for f in judged if mine(f)]

    def slower(changed):
        changed["7B"]["table1"][1]["more_time_waiting"] += 0.02

    def released_slower(changed):
        for row in changed["7B"]["table1"][1:]:
            row["more_time"] += 0.02

    def deferral_saves(changed):
        for row, less in zip(changed["7B"]["table1"][2::2], (0.0006, 0.0001), strict=True):
            row["more_time_waiting"] -= less

    def flat(changed):
        for row in changed["13B"]["figure7"]["1 x 8"]:
            row["peak_gb"] = 1.0

    def moved(changed):
        changed["7B"]["table1"][-1]["peak_stage"] = 2

    def slower_waiting(changed):
        changed["7B"]["table1"][-1]["more_time_waiting"] = 0.02

    holds, fails = Verdict.HOLDS, Verdict.FAILS
    assert verdict(slower, "table-1-time") == [fails, holds, holds, holds]
    # The order of the paper's text decides, not that of the released code.
    for change in (lambda changed: None, released_slower):
        assert verdict(change, "table-1") == [holds]
        assert verdict(change, "table-1-order") == [fails]
    # Half of the 0.11 points that the paper's deferral saves suffice.
    assert verdict(deferral_saves, "table-1-time") == [holds] * 4
    assert verdict(deferral_saves, "table-1-order") == [holds]
    assert verdict(slower_waiting, "table-1") == [fails]
    assert verdict(flat, "figure-7-whole") == [fails]
    assert verdict(moved, "figure-9-memory") == [fails]


def test_findings_of_schedules_formulas_and_fillings():
    found = [
        *efficiency_findings.schedules(),
        *efficiency_findings.formulas(20),
        *efficiency_findings.filling(),
    ]
    by_key = {f.key: f for f in found}
    assert list(by_key) == ["figure-3", "iteration-time", "eq-4-6", "figure-4"]
    assert all(f.verdict is Verdict.HOLDS for f in found)
    assert "by the formula 2 each" in by_key["figure-4"].ours


@pytest.mark.slow
def test_the_launcher_leaves_what_it_promises(repo_root, tmp_path):
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "eejax.experiments.reproduce.training_efficiency",
            "--json",
            f"--workdir={tmp_path / 'new'}",
        ],
        cwd=repo_root,
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    written = json.loads((tmp_path / "new" / "results.json").read_text())
    assert json.loads(process.stdout.splitlines()[-1]) == written
    assert {f["paper"] for f in written["findings"]} == {"EE-LLM"}
    assert "Figure 3" in {f["place"] for f in written["findings"]}
    for name in ("fig3.png", "fig4.png", "fig7.png", "fig9.png"):
        assert imread(tmp_path / "new" / name).std() > 0.02
    for name, table in efficiency.TABLE1.items():
        assert f"{name}, Table 1" in process.stdout
        for row, (seconds, gb, _) in table.items():
            lines = [x for x in process.stdout.splitlines() if x.split("  ")[0] == row]
            assert any(f"{seconds:.2f}" in x and f"{gb:.2f}" in x for x in lines)
