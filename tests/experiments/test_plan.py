"""`eejax plan`: beside floating-point operations, shapes and schedules counted by
other means."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from launchers import functions_of, parsed
from matplotlib.image import imread

from eejax.common.errors import ConfigError
from eejax.models.config import ExitConfig, ModelConfig
from eejax.pipeline.config import PipelineConfig
from eejax.pipeline.layout import StageLayout
from eejax.pipeline.schedule import one_f_one_b
from eejax.pipeline.simulate import PassTime, exit_time_overhead, simulate, stage_costs
from eejax.sharding.mesh import MeshConfig
from eejax.train.config import DataConfig, ExitWeights, Experiment, TrainConfig

planner = functions_of("eejax.experiments.plan")
slot_costs = functions_of("eejax.experiments.slot_costs")

LENGTH = 64
MODEL = ModelConfig(
    vocab_size=512,
    n_layers=8,
    d_model=64,
    n_heads=4,
    context_length=LENGTH,
    d_ff=256,
    exits=(ExitConfig(2, norm=False), ExitConfig(4, norm=False)),
    dtype="bfloat16",
)


def experiment(model=MODEL, batch=64, microbatches=16, remat="dots", mesh=None, **pipeline):
    return Experiment(
        model=model,
        data=DataConfig(length=LENGTH),
        train=TrainConfig(batch_size=batch, microbatches=microbatches, remat=remat),
        exit_weights=ExitWeights(weights=(0.5,) * model.n_exits),
        mesh=mesh or MeshConfig(pipe=4),
        pipeline=PipelineConfig(**pipeline),
    )


def test_work_of_stages_is_the_floating_point_operations():
    d, v, tokens = 64, 512, 4 * LENGTH
    layer = 4 * d * d + 3 * d * 256 + 2 * d * (LENGTH + 1) / 2
    forward, head = 2e-12 * tokens * 2 * layer, 2e-12 * tokens * d * v
    for remat, again in (("none", 0), ("full", 1)):
        stages = planner.plan(experiment(remat=remat))["stages"]
        got = [[s["forward"], s["backward"], s["exits"]] for s in stages]
        ahead = [1, 1, 1, 1 - again]
        exits = [0, 1, 1, 1]
        want = [
            [f * forward, (2 + again) * forward, 3 * e * head]
            for f, e in zip(ahead, exits, strict=True)
        ]
        np.testing.assert_allclose(got, want, rtol=1e-9)
    assert [s["boundaries"] for s in stages] == [[], [2], [4], [8]]
    halved = planner.plan(experiment(mesh=MeshConfig(pipe=4, model=2), remat="full"))["stages"]
    np.testing.assert_allclose([s["total"] for s in halved], np.sum(want, 1) / 2, rtol=1e-9)


def test_the_step_is_1f1bs_critical_path():
    plain = experiment(MODEL.replace(exits=()), remat="none")
    result = planner.plan(plain)
    f, b = (result["stages"][0][k] for k in ("forward", "backward"))
    one = result["stages"][3]["total"]
    low = 16 * one + 3 * (f + b)
    assert result["step"] == pytest.approx(low)
    assert result["bubble"] == pytest.approx(3 * (f + b) / low)
    earlier = planner.plan(experiment(placement="earlier", remat="none"))
    assert [s["boundaries"] for s in earlier["stages"]] == [[2], [4], [], [8]]
    assert earlier["step"] > planner.plan(experiment(remat="none"))["step"] * (1 - 1e-12)


@pytest.mark.parametrize("mesh", [MeshConfig(pipe=4), MeshConfig(data=2, pipe=2, model=2)], ids=str)
def test_state_is_what_lies_on_a_device(mesh):
    """Beside parameters that do lie on the fake devices."""
    given = experiment(mesh=mesh)
    pipeline, values = slot_costs.pipelined(given.model, mesh, "dots")
    assert isinstance(pipeline.stage_layout, StageLayout)
    held = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(values))
    memory = planner.ExperimentStages.of(given).memory
    assert memory["gradients"] == held
    # Two moments of each parameter, cut over data; what does not divide lies whole.
    assert held * (1 + 2 / mesh.data) <= memory["state"] <= 1.05 * held * (1 + 2 / mesh.data)
    layers = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(values["layers"]))
    assert memory["weights"] == layers // 2


def test_memory_grows_with_what_is_kept():
    result = planner.plan(experiment())
    of = {(r["remat"], r["exits"]): r["bytes"] for r in result["policies"]}
    assert of["none", "mixed"] > of["dots", "mixed"] > of["full", "mixed"]
    assert of["none", "aligned"] >= of["none", "mixed"] == of["none", "deferred"]
    base = planner.ExperimentStages.of(experiment())
    assert base.replace(microbatches=32).memory["residuals"] < base.memory["residuals"]
    cut = planner.ExperimentStages.of(experiment(mesh=MeshConfig(pipe=4, model=2, sequence=True)))
    whole = planner.ExperimentStages.of(experiment(mesh=MeshConfig(pipe=4, model=2)))
    assert cut.memory["residuals"] * 2 == base.memory["residuals"] < 2 * whole.memory["residuals"]
    assert cut.memory["states"] * 2 == whole.memory["states"]


def test_an_exits_mlp_may_be_wider_than_a_part_of_the_layers():
    wide = MODEL.replace(
        exits=(ExitConfig(MODEL.exits[0].boundary, mlp=True, mlp_width=MODEL.d_ff),)
    )
    mesh = MeshConfig(pipe=4, model=2)
    one, other = (
        planner.ExperimentStages.of(experiment(model, mesh=mesh)).memory["residuals"]
        for model in (wide, wide.replace(exits=()))
    )
    assert one >= other > 0


def test_what_is_suggested_is_the_best_of_all():
    result = planner.plan(experiment(remat="full", exits="deferred"), limit=10**12)
    best = result["suggested"]
    assert best["fits"] and best["remat"] == "none" and best["exits"] == "mixed"

    # the smallest number of microbatches with bubbles below a tenth, found in turn
    def bubble(m):
        return planner.ExperimentStages.of(experiment(microbatches=m, remat="none")).bubble

    first = next(m for m in (1, 2, 4, 8, 16, 32) if bubble(m) < 0.1)
    assert best["microbatches"] == first and best["bubble"] < 0.1
    assert planner.plan(experiment(remat="none"))["suggested"]["remat"] == "dots", "no memory given"
    tight = planner.plan(experiment(), limit=1)
    assert tight["suggested"]["fits"] is False and "do not fit" in " ".join(tight["warnings"])
    small = min(r["bytes"] for r in tight["policies"])
    assert tight["suggested"]["bytes"] == small


def test_exits_that_cost_time_are_warned_of_and_moved():
    late = MODEL.replace(exits=(ExitConfig(6, norm=False),))  # with the final exit on one stage
    result = planner.plan(experiment(late, remat="none"))
    assert "stage 3" in result["warnings"][0] and "exit at 6" in result["warnings"][0]
    even = dataclasses.replace(planner.ExperimentStages.of(experiment(late)))
    assert planner.free_boundaries(even) == [4]
    assert planner.free_boundaries(planner.ExperimentStages.of(experiment())) == [2, 4]
    # No boundary is suggested twice.
    six = MODEL.replace(n_layers=6, exits=(ExitConfig(2), ExitConfig(4)))
    for layers in ((2, 2, 1, 1), (2, 2, 2), (1, 1, 2, 2)):
        cut = experiment(six, mesh=MeshConfig(pipe=len(layers)), layers=layers)
        found = planner.free_boundaries(planner.ExperimentStages.of(cut))
        assert len(set(found)) == 2
    assert not planner.plan(experiment(remat="none"))["warnings"]


def test_warnings_of_layers_and_microbatches():
    result = planner.plan(experiment(mesh=MeshConfig(pipe=3), microbatches=2))
    said = " ".join(result["warnings"])
    assert "do not divide by 3 stages" in said and "2 microbatches for 3 stages" in said


def test_what_training_would_refuse_is_refused():
    with pytest.raises(ConfigError, match="mesh.pipe = 9.*8 layers"):
        planner.plan(experiment(mesh=MeshConfig(pipe=9)))
    with pytest.raises(ConfigError, match="train.batch_size = 64.*multiple of.* = 48"):
        planner.plan(experiment(mesh=MeshConfig(data=3, pipe=2)))


def test_measured_times_take_the_place_of_counted_ones():
    parts = slot_costs.MicrobatchCosts((1.0, 2.0), (0.5, 1.0), (0.5, 1.0), (0.0, 0.25), 0.0, {})
    result = planner.plan(experiment(remat="none"), parts=parts)
    assert [s["total"] for s in result["stages"]] == [6.25, 7.5, 7.5, 7.5]
    costs = stage_costs(
        (2,) * 4,
        (0, 1, 1, 0),
        layer=PassTime(1, 2),
        exit=PassTime(0.5, 1.0),
        final=PassTime(0.5, 1.0),
        embedding=PassTime(0, 0.25),
    )
    table = one_f_one_b(4, 16, exit_stages=(1, 2))
    assert result["step"] == pytest.approx(simulate(table, costs).time)
    assert exit_time_overhead(one_f_one_b(4, 16), table, costs) == pytest.approx(0)


def test_the_launcher(repo_root, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "eejax.experiments.plan",
            "--config=configs/ee_llm_13b.py",
            "--json",
            "--config.mesh.pipe=4",
            "--config.mesh.data=4",
            "--config.mesh.model=2",
            "--config.train.microbatches=512",
            "--memory_gib=80",
            f"--out={tmp_path / 'new'}",
        ],
        cwd=repo_root,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    result = json.loads(last)
    assert [s["boundaries"] for s in result["stages"]] == [[], [10], [20], [40]]
    assert any(line.startswith("suggested: pipeline.layers=(10, 10, 10, 10)") for line in lines)
    assert imread(tmp_path / "new" / "gantt.png").std() > 0.02


@pytest.mark.parametrize("value, told", [("nan", "must be a number"), ("inf", "Leave it out")])
def test_memory_that_is_no_number_is_refused(value, told, repo_root, capsys):
    own = f"--config={repo_root}/configs/tiny.py", f"--memory_gib={value}"
    with pytest.raises((SystemExit, ConfigError), match=f"--memory_gib = {value}: .*{told}"):
        with parsed("eejax.experiments.plan", *own):
            functions_of("eejax.experiments.plan").main()
