"""A table that several stages hold is one parameter, and rows that fill up a stage are none."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from eejax.models.config import ExitConfig, ModelConfig
from eejax.pipeline.config import PipelineConfig
from eejax.pipeline.layout import ABSENT, TABLES
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train.config import DataConfig, ExitWeights, Experiment, TrainConfig
from eejax.train.optimizer import OptimizerConfig
from eejax.train.program import Program
from eejax.train.step import put_batch

T, STEPS = 8, 4
X = ExitConfig
# Tied exits on every stage, one of them inside of it, and a table that has no copy.
MODEL = ModelConfig(
    vocab_size=24,
    n_layers=5,
    d_model=16,
    n_heads=2,
    d_ff=24,
    context_length=T,
    head="tied",
    exits=(X(0), X(1), X(2), X(4, head="own")),
    head_bias=True,
)


def run(mesh: MeshConfig, **pipeline):
    """(program, last state, metrics of every step)."""
    e = Experiment(
        model=MODEL,
        data=DataConfig(length=T),
        train=TrainConfig(steps=STEPS, batch_size=8, microbatches=4, ema=0.5),
        optimizer=OptimizerConfig(
            learning_rate=1e-2, warmup_steps=1, weight_decay=0.5, clip_norm=0.1
        ),
        exit_weights=ExitWeights((0.3, 0.5, 0.7, 0.4)),
        mesh=mesh,
        pipeline=PipelineConfig(**pipeline),
    )
    program = Program(e, make_mesh(mesh))
    step, now, records = program.train_step(), program.create(), []
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = rng.integers(0, MODEL.vocab_size, (8, T + 1)).astype(np.int32)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        now, metrics = step(now, put_batch(batch, program.mesh))
        records.append(jax.device_get(metrics))
    return program, now, records


@pytest.fixture(scope="module")
def alone():
    _, now, records = run(MeshConfig())
    return jax.device_get(now), records


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, pipeline",
    [
        (MeshConfig(data=2, pipe=3), {}),  # layers (2, 2, 1)
        (MeshConfig(pipe=4, model=2), {"layers": (1, 1, 1, 2), "placement": "earlier"}),
    ],
    ids=str,
)
def test_copies_are_counted_once_and_stay_alike(alone, mesh, pipeline):
    want, wanted = alone
    program, now, records = run(mesh, **pipeline)
    layout = program.placement.stages
    stages_with_it = [s for s in layout.slots[TABLES]["tokens"] if s != ABSENT]
    assert len(stages_with_it) == 3 and not layout.partition.even
    for got, one in zip(records, wanted, strict=True):
        # Were a copy counted twice, the norm would be larger by that gradient: clipped, all else.
        np.testing.assert_allclose(got["grad_norm"], one["grad_norm"], rtol=1e-4)
        np.testing.assert_allclose(got["exit_losses"], one["exit_losses"], rtol=1e-4)
    moments = now.opt_state[0]
    rows = len(layout.copies(TABLES)) // mesh.pipe
    filling = layout.layer_rows == ABSENT
    for tree in jax.device_get((now.params, now.ema, moments.mu, moments.nu)):
        for slots in layout.slots[TABLES].values():
            held = [tree[TABLES][i * rows + s] for i, s in enumerate(slots) if s != ABSENT]
            for copy in held[1:]:
                np.testing.assert_array_equal(copy, held[0])
        for leaf in jax.tree.leaves(tree["layers"]):
            assert not leaf[filling].any() and leaf[~filling].any()
    # Weight decay and average of each parameter are those of one device.
    there = jax.device_get(program.to_portable(now))
    for tree, expected in ((there.params, want.params), (there.ema, want.ema)):
        for a, b in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
            # Adam's first steps are as large for a gradient of rounding as for any other.
            assert np.abs(a - b).max() <= 1e-3 * max(1e-2, np.abs(b).max())
