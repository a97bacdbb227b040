"""Bubbles filled with microbatches: the executor's gradient is exact, or right on average."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import T, batch_of, compare, placed

from eejax.common.trees import path_name
from eejax.losses.multi_exit import multi_exit_loss
from eejax.losses.objective import CROSS_ENTROPY, LossObjective
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.pipeline import runner
from eejax.pipeline.config import PipelineConfig
from eejax.pipeline.layout import StageLayout
from eejax.pipeline.partition import partition
from eejax.pipeline.plan import plan
from eejax.pipeline.schedule import one_f_one_b
from eejax.pipeline.stage import Pipeline
from eejax.sharding.mesh import MeshConfig, make_mesh

MODEL = ModelConfig(
    vocab_size=24, n_layers=4, d_model=32, n_heads=2, d_ff=88, context_length=T, head="tied"
)


def filled(
    config: ModelConfig, stages: int, microbatches: int, fill: str = "both", objective=CROSS_ENTROPY
):
    """(layout, mesh, compiled gradients, factors) of a pipeline with inserted microbatches."""
    mesh = make_mesh(MeshConfig(pipe=stages))
    layout = StageLayout(partition(config, stages))
    pipeline = Pipeline(layout, mesh, objective=objective)
    schedule, factors = plan(
        PipelineConfig(fill=fill),
        layout.partition,
        microbatches,
        length=T,
        remat="dots",
        objective=objective,
    )
    schedule.check()
    assert schedule.microbatches == microbatches
    return layout, mesh, jax.jit(runner.gradients(pipeline, schedule, factors)), factors


MORE = (4, "tied"), (8, "own"), (8, "tied")
FILLED = [(4, "own"), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]


@pytest.mark.parametrize("stages, head", FILLED)
def test_identical_microbatches_give_the_exact_gradient(stages, head):
    config = MODEL.replace(
        n_layers=stages,
        head=head,
        exits=tuple(ExitConfig(n, head=head) for n in range(1, stages)),
    )
    layout, mesh, run, factors = filled(config, stages, 2 * stages)
    value, weights = params.init(config, jax.random.key(1)), jnp.linspace(0.3, 1.0, stages)
    one = batch_of(config, 2)
    batch = {k: np.tile(v, (2 * stages, 1)) for k, v in one.items()}
    sums = run(placed(layout, value, mesh), {}, weights, None, batch, jnp.zeros((), jnp.int32))

    def loss(v):
        return multi_exit_loss(v, config, one["tokens"], one["labels"], weights)

    (total, exits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(value)
    n = factors.main
    assert factors.losses.min() < 1 and factors.gradients.min() < 1  # both parts are there
    got = jax.tree.map(lambda g: np.asarray(g) / n, layout.from_stages(jax.device_get(sums.grads)))
    compare(got, grads)
    # Each microbatch rounds as it does without insertions: only the sums differ.
    pipeline = Pipeline(layout, mesh)
    alone = jax.jit(
        runner.gradients(pipeline, one_f_one_b(stages, 1, exit_stages=range(1, stages)))
    )
    want = alone(placed(layout, value, mesh), {}, weights, None, one, jnp.zeros((), jnp.int32))
    compare(got, layout.from_stages(jax.device_get(want.grads)), 1e-6)
    np.testing.assert_allclose(sums.squares / n, want.squares, rtol=1e-5)
    np.testing.assert_allclose(sums.total / n, total, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(sums.exits.sums) / n, exits.sums, rtol=1e-6)
    assert int(sums.exits.num_tokens) == n * int(exits.num_tokens)


def test_exits_are_distilled_in_filled_bubbles():
    config = MODEL.replace(exits=tuple(ExitConfig(n) for n in range(1, 4)))
    objective = LossObjective(distillation=0.5)
    layout, mesh, run, factors = filled(config, 4, 8, "part2", objective)
    value, weights = params.init(config, jax.random.key(1)), jnp.linspace(0.3, 1.0, 4)
    one = batch_of(config, 2)
    batch = {k: np.tile(v, (8, 1)) for k, v in one.items()}
    sums = run(placed(layout, value, mesh), {}, weights, None, batch, jnp.zeros((), jnp.int32))

    def loss(v):
        return multi_exit_loss(
            v, config, one["tokens"], one["labels"], weights, objective=objective
        )[0]

    assert factors.main < 8
    got = jax.tree.map(lambda g: g / factors.main, layout.from_stages(jax.device_get(sums.grads)))
    compare(got, jax.jit(jax.grad(loss))(value))


@pytest.mark.slow
def test_on_real_text_the_gradient_is_unbiased_and_less_noisy(eejax_data):
    """Over 200 draws of microbatches the mean gradient is that of the text within 3 standard
    errors, and its variance below that of the whole microbatches alone (Proposition C.2)."""
    text = np.frombuffer((eejax_data / "tinyshakespeare/train.txt").read_bytes(), np.uint8)
    exits = tuple(ExitConfig(n) for n in (1, 2, 3))
    config = MODEL.replace(vocab_size=256, d_model=64, d_ff=176, head_dim=32, exits=exits)
    value, weights = params.init(config, jax.random.key(1)), jnp.array([0.5, 0.6, 0.7, 1.0])
    rng = np.random.default_rng(0)
    starts = rng.integers(0, text.size - T - 1, (40, 2))  # the population: 40 microbatches
    windows = text[starts[..., None] + np.arange(T + 1)].astype(np.int32)

    def one(window):
        def loss(v):
            return multi_exit_loss(v, config, window[:, :-1], window[:, 1:], weights)[0]

        return jax.grad(loss)(value)

    each = jax.device_get(jax.jit(lambda w: jax.lax.map(one, w))(windows))
    m = 8
    layout, mesh, run, factors = filled(config, 4, m)
    assert factors.losses.min() < 1 and factors.gradients.min() < 1
    here, step = placed(layout, value, mesh), jnp.zeros((), jnp.int32)
    # Every gradient's component along its true mean: where a missing factor would show most.
    means = jax.tree.map(lambda g: g.mean(0), each)
    unit = [g / np.linalg.norm(g) for g in jax.tree.leaves(means)]

    def project(grads):
        return np.array(
            [np.vdot(np.asarray(g), u) for g, u in zip(jax.tree.leaves(grads), unit, strict=True)]
        )

    # Projections are linear: that of a mean is the mean of those of its microbatches.
    of_each = np.stack([project(jax.tree.map(lambda g, i=i: g[i], each)) for i in range(40)])
    want, drawn, alone = project(means), [], []
    for _ in range(200):
        chosen = rng.integers(0, 40, m)
        tokens = windows[chosen].reshape(2 * m, T + 1)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        sums = run(here, {}, weights, None, batch, step)
        grads = layout.from_stages(jax.device_get(sums.grads))
        drawn.append(project(grads) / factors.main)
        alone.append(of_each[chosen[: factors.main]].mean(0))
    drawn, alone = np.stack(drawn), np.stack(alone)
    names = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(means)[0]]
    error = drawn.std(0, ddof=1) / np.sqrt(len(drawn))
    z = (drawn.mean(0) - want) / error
    assert np.abs(z).max() <= 3, z
    # Without the factors the same test fails: the first exit's gradient would be 7/6 of its own.
    first = names.index("exits/exit_1/norm/scale")
    assert drawn[:, first].mean() / factors.losses.min() - want[first] > 3 * error[first]
    ratio = dict(zip(names, drawn.var(0) / alone.var(0), strict=True))
    assert np.mean(list(ratio.values())) < 1
    # One microbatch more than 6 comes to the first exit, another to the last layer.
    for name in ("exits/exit_1/norm/scale", "final/norm/scale"):
        assert ratio[name] < 0.95, (name, ratio)
