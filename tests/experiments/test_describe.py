"""`eejax describe`, as its command."""

import json

import pytest
from endings import ended
from launchers import functions_of

from eejax.models import params
from eejax.models.config import ModelConfig


def describe(*arguments):
    return ended("eejax.experiments.describe", *arguments)


def test_a_model_too_large_for_this_machine_is_described():
    done = describe("--config=ee_llm_7b", "--json")
    assert done.status == 0, done.err
    *lines, last = done.out.splitlines()
    names = [line.split("  ")[0] for line in lines]
    assert names[2:8] == ["embedding", "layers", "exit_8", "exit_16", "final", "total"]
    result = json.loads(last)
    counted = dict(result["parameters"])
    assert counted["exit_8"] == counted["embedding"] == 32_000 * 4096
    assert counted.pop("total") == sum(counted.values())
    work = result["compute"]
    assert work["tokens per step"] == 2048 * 2048 and work["tokens"] == 36_000 * 2048 * 2048
    share = work["heads of early exits"] / work["FLOPs per token"]
    assert work["share of early-exit heads"] == share
    assert work["FLOPs"] == pytest.approx(work["FLOPs per token"] * work["tokens"])
    sizes = result["memory"]
    assert sizes["total"] == sizes["state"] + sizes["temporary"] and "compiled" not in result
    assert any(line.split() == ["params", "25.892"] for line in lines)  # GiB


def test_compiling_adds_what_xla_says():
    done = describe("--config=tiny", "--compile", "--json")
    assert done.status == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    xla, sizes = result["compiled"], result["memory"]
    assert xla["aliased"] == sizes["state"] and xla["temporary"] > 0
    assert "XLA, per device" in done.out


def test_parameters_by_part_are_all_of_them():
    parameters = functions_of("eejax.experiments.describe").parameters

    shared = {"boundary": 1, "head": "shared", "mlp": True}
    model = ModelConfig.from_dict(
        dict(
            vocab_size=50,
            n_layers=3,
            d_model=8,
            n_heads=2,
            context_length=16,
            d_ff=24,
            mlp_gated=False,
            head="shared",
            exits=[shared, {"boundary": 2, "head": "own"}],
        )
    )
    got = parameters(model)
    assert got == {
        "embedding": 50 * 8,
        "layers": 3 * (4 * 8 * 8 + 2 * 8 * 24 + 2 * 8),
        "exit_1": 2 * 8 * 24 + 8 + 8,
        "exit_2": 50 * 8 + 8,
        "final": 8,
        "shared head": 50 * 8,
        "total": params.count(model),
    }
    assert sum(got.values()) == 2 * got["total"]


def test_what_is_no_experiment_is_one_line():
    done = describe("--config=tune_exits")
    assert done.status == 1 and done.err.startswith("error: config.model: missing")
    wide = ("--config.mesh.data=32", "--config.train.batch_size=32")  # of 16 devices
    few = describe("--config=tiny", *wide, "--compile")
    assert few.status == 1 and "needs 32 devices" in few.err and "Traceback" not in few.err
