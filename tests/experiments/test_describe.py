"""`eejax describe`, as a user starts it."""

import json
import os
import subprocess
import sys

import pytest
from launchers import functions_of

from eejax.models import params
from eejax.models.config import ModelConfig


def describe(root, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "eejax.experiments.describe", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
    )


def test_a_model_too_large_for_this_machine_is_described(repo_root):
    done = describe(repo_root, "--config=configs/ee_llm_7b.py", "--json")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
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


def test_compiling_adds_what_xla_says(repo_root):
    done = describe(repo_root, "--config=configs/tiny.py", "--compile", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    xla, sizes = result["compiled"], result["memory"]
    assert xla["aliased"] == sizes["state"] and xla["temporary"] > 0
    assert "XLA, per device" in done.stdout


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


def test_what_is_no_experiment_is_one_line(repo_root):
    done = describe(repo_root, "--config=configs/tune_exits.py")
    assert done.returncode == 1 and done.stderr.startswith("error: config.model: missing")
    few = describe(repo_root, "--config=configs/tiny.py", "--config.mesh.data=2", "--compile")
    assert few.returncode == 1 and "needs 2 devices" in few.stderr and "Traceback" not in few.stderr
