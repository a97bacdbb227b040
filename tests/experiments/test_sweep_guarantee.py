"""Curves of every gate, and thresholds with a guarantee, of a run that took seconds."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import small_runs
from endings import ended
from launchers import call, functions_of
from matplotlib.image import imread

from eejax.calibration import ExitScores, at_threshold
from eejax.common.errors import ConfigError, DataError
from eejax.gates.confidence import GATES
from eejax.models.config import ExitConfig, ModelConfig
from eejax.train.config import Experiment
from eejax.train.loop import fit

guarantee = functions_of("eejax.experiments.reproduce.guarantee")
held_out = functions_of("eejax.experiments.held_out")
sweep = functions_of("eejax.experiments.sweep")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Three layers with two exits, 14 steps."""
    folder = tmp_path_factory.mktemp("run")
    small_runs.write_text(folder)
    values = small_runs.config(folder, microbatches=1, eval_every=0)
    values["model"] |= {"n_layers": 3, "exits": [{"boundary": 1}, {"boundary": 2}]}
    values["exit_weights"] = {"weights": [0.5, 0.5]}
    fit(Experiment.from_dict(values), folder / "run")
    return folder / "run"


def launch(name, *arguments):
    return ended(f"eejax.experiments.{name}", *arguments)


def refused(name, message, *arguments):
    with pytest.raises((ConfigError, DataError), match=re.escape(message)):
        call(f"eejax.experiments.{name}", *arguments)


def last_line(done):
    code, out, err = done
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def test_curves_of_every_gate_and_their_times(workdir):
    done = launch("sweep", f"--workdir={workdir}", "--tokens=1000000", "--time", "--json")
    result = last_line(done)
    assert imread(workdir / "sweep.png").std() > 0.02 and str(workdir / "sweep.png") in done[1]
    assert list(result["curves"]) == list(GATES[:-1]) and result["exits"] == [1, 2]
    segments, heads = result["costs"]["segments"], result["costs"]["heads"]
    assert len(segments) == len(heads) == 3 and segments[0] > 0 and min(heads) > 0
    full = sum(segments) + heads[-1]
    for gate, points in result["curves"].items():
        depths = [p["depth"] for p in points]
        assert depths == sorted(depths) and len(set(depths)) > 2, gate
        assert (points[-1]["agreement"], depths[-1], points[-1]["time"]) == (1.0, 3.0, 1.0)
        assert f"\n{gate} " in done[1]
        for p in points:
            assert p["time"] == pytest.approx(p["seconds"] / full)
    # Each exit alone is what an evaluation of the run says of it.
    evaluated = last_line(launch("evaluate", f"--workdir={workdir}"))
    assert evaluated["tokens"] == result["tokens"]
    fixed = result["curves"]["fixed"]
    assert [p["threshold"] for p in fixed] == [[0.0, 1.0], [1.0, 0.0], 1.0]
    for point, name, time in zip(
        fixed,
        ("exit_1", "exit_2", "final"),
        (segments[0] + heads[0], sum(segments[:2]) + heads[1], full),
        strict=True,
    ):
        assert point["perplexity"] == pytest.approx(evaluated[f"eval/perplexity/{name}"], rel=1e-5)
        bits = evaluated[f"eval/bits_per_byte/{name}"]
        assert point["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        assert point["seconds"] == pytest.approx(time)


def test_curves_of_chosen_gates_exits_and_thresholds_on_other_text(workdir, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text("early exit token gate " * 40)
    done = launch(
        "sweep",
        f"--workdir={workdir}",
        f"--text={text}",
        "--gates=patience,margin",
        "--exits=2",
        "--thresholds=0,0.05,0.5",
        "--decay=2",
        f"--out={tmp_path / 'a.png'}",
        "--json",
    )
    result = last_line(done)
    assert list(result["curves"]) == ["patience", "margin"] and result["exits"] == [2]
    assert result["costs"] is None and " time " not in done[1] and (tmp_path / "a.png").exists()
    assert 800 <= result["tokens"] <= 880
    for points in result["curves"].values():
        assert all(p["shares"][0] == 0 and p["time"] is None for p in points)
    # One exit agrees with nobody.
    assert {p["threshold"] for p in result["curves"]["patience"]} == {1.0}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gates=router"], "--gates = 'router': no exit of this model has a router"),
        (
            ["--exits=1", "--min_exit_layer=2"],
            "leave no early exit active of this model's, at [1, 2]",
        ),
        (["--exits=one"], "--exits = 'one': must be numbers"),
        (["--thresholds=0.5,2"], "--thresholds = 2.0: must lie in [0, 1]"),
        (["--text=absent.txt"], "absent.txt"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(workdir, arguments, message):
    refused("sweep", message, f"--workdir={workdir}", *arguments)


def test_what_is_refused_is_one_line(workdir):
    code, _, err = launch("sweep", f"--workdir={workdir}", "--gates=trust")
    assert code == 1 and "Traceback" not in err and err.count("\n") == 1
    assert err.startswith("error: --gates = 'trust': must be one of")


def scores_of(units=400, tokens=10):
    """Texts of one early exit that is wrong half as often as it is unsure."""
    rng, n = np.random.default_rng(0), units * tokens
    config = ModelConfig(
        vocab_size=7, n_layers=4, d_model=8, n_heads=2, context_length=8, exits=(ExitConfig(1),)
    )
    sure = rng.random(n, np.float32)
    wrong = rng.random(n) < (1 - sure) / 2
    return ExitScores(
        config,
        np.zeros(n, int),
        np.repeat(np.arange(units), tokens),
        np.stack([wrong.astype(int), np.zeros(n, int)]),
        np.zeros((2, n)),
        {"max_probability": np.stack([sure, np.ones(n, np.float32)])},
    )


def test_own_thresholds_tell_positions_apart():
    scores = scores_of()
    points = [
        at_threshold(scores, t) for t in sweep.gate_thresholds(scores, "max_probability", [1])
    ]
    shares = [p.shares[0] for p in points]
    np.testing.assert_allclose(shares, 1 - np.arange(12) / 12, atol=0.01)
    assert sweep.gate_thresholds(scores, "patience", [1]) == [0.0]


def test_a_text_of_nothing_to_score_is_refused(workdir, tmp_path):
    (tmp_path / "tiny.txt").write_text("a")
    code, _, err = launch(
        "sweep",
        f"--workdir={workdir}",
        f"--text={tmp_path / 'tiny.txt'}",
        f"--out={tmp_path / 'out.png'}",
    )
    assert code == 1 and "Traceback" not in err
    assert re.search(r"^error: --text = .*tiny.txt.*: must hold at least two", err, re.MULTILINE)


def test_divisions_measure_what_was_promised():
    scores = scores_of()

    def run(**change):
        return guarantee.divide(
            scores,
            **dict(delta=0.1, epsilon=0.1, splits=100, gate="max_probability", by_hand=0.2)
            | change,
        )

    result = run()
    # A text's risk at threshold t is (1 - t)^2 / 4, its depth 1 + 3 t: at 0.1, t = 0.37.
    t = result["threshold"]["mean"]
    assert 0.37 < t < 0.6 and result["kept"] and result["exceeded"] <= result["limit"]
    assert result["risk"]["mean"] == pytest.approx((1 - t) ** 2 / 4, rel=0.1)
    assert result["depth"]["mean"] == pytest.approx(1 + 3 * t, rel=0.03)
    assert result["limit"] == pytest.approx(0.1 + 3 * 0.03)
    # The half that picks is bounded by its own test, the half that judges is not.
    assert result["calibration_risk"]["high"] < result["risk"]["high"]
    hand = result["hand_picked"]
    assert hand["exceeded"] == 1.0 and hand["risk"]["mean"] == pytest.approx(0.16, rel=0.1)
    assert hand["depth"]["mean"] == pytest.approx(1.6, rel=0.03)
    assert run() == result
    # Half of 400 texts cannot show this, so no token leaves early.
    none = run(delta=0.01)
    assert none["never_exits"] == 1.0 and none["risk"]["high"] == 0.0
    assert none["depth"]["low"] == none["depth"]["high"] == 4.0
    with pytest.raises(DataError, match="1 texts: must be at least 2"):
        guarantee.divide(
            dataclasses.replace(scores, units=np.zeros(len(scores), int)),
            0.1,
            0.1,
            5,
            gate="fixed",
            by_hand=0.8,
        )


def test_prompts_are_rows_cut_to_the_context():
    rows = [np.arange(5), np.arange(2), *[np.arange(9)] * 16]
    first, second = held_out.padded([(row, 1) for row in rows], 6)
    assert first["tokens"].shape == second["labels"].shape == (16, 6)
    assert first["tokens"][0].tolist() == [0, 1, 2, 3, 0, 0]
    assert first["labels"][0].tolist() == [1, 2, 3, 4, -1, -1]
    assert first["labels"][1].tolist() == [1, -1, -1, -1, -1, -1]
    assert second["labels"][1].tolist() == [1, 2, 3, 4, 5, 6]
    assert (second["labels"][2:] == -1).all()


def test_the_experiment_on_windows_and_on_prompts(workdir, tmp_path):
    common = (f"--workdir={workdir}", "--splits=20", "--delta=0.3", "--json")
    windows = last_line(launch("reproduce.guarantee", *common, "--units=100", "--pairs=2"))
    assert windows["units"] == 96 and windows["splits"] == 20 and windows["kept"]
    (found,) = windows["findings"]
    assert (found["paper"], found["verdict"], found["why"]) == ("CALM", "holds", "")
    for measured in (windows, windows["hand_picked"]):
        assert 0 < measured["speed"]["low"] <= measured["speed"]["ratio"]
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": i, "question": f"gate {i} exit token {'early ' * (i % 4)}"} for i in range(60)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = launch(
        "reproduce.guarantee",
        *common,
        f"--text={prompts}",
        "--text_field=question",
        "--gate=margin",
        "--pairs=0",
    )
    result = last_line(done)
    assert (result["units"], result["gate"]) == (60, "margin") and "speed" not in result
    assert result["tokens"] == sum(min(len(row["question"]) - 1, 16) for row in rows)
    assert "Learn-then-Test" in done[1] and "promised: at most 10%" in done[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gate=trust"], "--gate = 'trust': must be one of"),
        (["--gate=router"], "--gate = 'router': no exit of this model has a router"),
        (["--delta=1"], "--delta = 1.0: must lie strictly between 0 and 1"),
    ],
)
def test_an_experiment_that_cannot_be_is_refused(workdir, arguments, message):
    refused("reproduce.guarantee", message, f"--workdir={workdir}", *arguments)
