"""Bubbles filled with microbatches: the executor's gradient is exact, or right on average."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import T, batch_of, compare, placed

from eejax.losses.multi_exit import multi_exit_loss
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.pipeline import runner
from eejax.pipeline.config import PipelineConfig
from eejax.pipeline.layout import StageLayout
from eejax.pipeline.partition import partition
from eejax.pipeline.plan import plan
from eejax.pipeline.stage import Pipeline
from eejax.sharding.mesh import MeshConfig, make_mesh

MODEL = ModelConfig(
    vocab_size=24, n_layers=4, d_model=16, n_heads=2, d_ff=24, context_length=T, head="tied"
)


def filled(config: ModelConfig, stages: int, microbatches: int, fill: str = "both"):
    """(layout, mesh, compiled gradients, factors) of a pipeline with inserted microbatches."""
    mesh = make_mesh(MeshConfig(pipe=stages))
    layout = StageLayout(partition(config, stages))
    pipeline = Pipeline(layout, mesh)
    schedule, factors = plan(
        PipelineConfig(fill=fill), layout.partition, microbatches, length=T, remat="dots"
    )
    schedule.check()
    assert schedule.microbatches == microbatches
    return layout, mesh, jax.jit(runner.gradients(pipeline, schedule, factors)), factors


@pytest.mark.parametrize("stages, head", [(4, "tied"), (4, "own"), (8, "tied"), (8, "own")])
def test_identical_microbatches_give_the_exact_gradient(stages, head):
    config = MODEL.replace(
        n_layers=stages, head=head,
        exits=tuple(ExitConfig(n, head=head) for n in range(1, stages)),
    )  # fmt: skip
    layout, mesh, run, factors = filled(config, stages, 2 * stages)
    value, weights = params.init(config, jax.random.key(1)), jnp.linspace(0.3, 1.0, stages)
    one = batch_of(config, 2)
    batch = {k: np.tile(v, (2 * stages, 1)) for k, v in one.items()}
    sums = run(placed(layout, value, mesh), {}, weights, None, batch, jnp.zeros((), jnp.int32))
    loss = lambda v: multi_exit_loss(v, config, one["tokens"], one["labels"], weights)
    (total, exits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(value)
    n = factors.main
    assert n < 2 * stages  # some were inserted
    got = jax.tree.map(lambda g: np.asarray(g) / n, layout.from_stages(jax.device_get(sums.grads)))
    compare(got, grads, 2e-6)
    np.testing.assert_allclose(sums.total / n, total, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(sums.exits.sums) / n, exits.sums, rtol=1e-6)
    assert int(sums.exits.count) == n * int(exits.count)


def test_on_real_text_the_gradient_is_unbiased_and_less_noisy(eejax_data):
    """Over 200 draws of microbatches the mean gradient is that of the text within 3 standard
    errors, and its variance below that of the whole microbatches alone (Proposition C.2)."""
    text = np.frombuffer((eejax_data / "tinyshakespeare/train.txt").read_bytes(), np.uint8)
    config = MODEL.replace(vocab_size=256, exits=tuple(ExitConfig(n) for n in (1, 2, 3)))
    value, weights = params.init(config, jax.random.key(1)), jnp.array([0.5, 0.6, 0.7, 1.0])
    rng = np.random.default_rng(0)
    starts = rng.integers(0, text.size - T - 1, (40, 2))  # the population: 40 microbatches
    windows = text[starts[..., None] + np.arange(T + 1)].astype(np.int32)

    def one(window):
        loss = lambda v: multi_exit_loss(v, config, window[:, :-1], window[:, 1:], weights)[0]
        return jax.grad(loss)(value)

    each = jax.device_get(jax.jit(lambda w: jax.lax.map(one, w))(windows))
    m = 8
    layout, mesh, run, factors = filled(config, 4, m)
    here, step = placed(layout, value, mesh), jnp.zeros((), jnp.int32)
    # Fixed directions: a random projection of the gradient of each stage and of the tied matrix.
    means = jax.tree.map(lambda g: g.mean(0), each)
    directions = jax.tree.map(lambda g: rng.normal(size=(3, *g.shape)) / np.sqrt(g.size), means)
    project = lambda grads: np.stack([
        np.array([(np.asarray(g) * d[i]).sum() for i in range(3)])
        for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(directions), strict=True)
    ])  # fmt: skip
    want, drawn, alone = project(means), [], []
    for _ in range(200):
        chosen = rng.integers(0, 40, m)
        tokens = windows[chosen].reshape(2 * m, T + 1)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        sums = run(here, {}, weights, None, batch, step)
        grads = layout.from_stages(jax.device_get(sums.grads))
        drawn.append(project(grads) / factors.main)
        first = chosen[: factors.main]
        alone.append(project(jax.tree.map(lambda g, first=first: g[first].mean(0), each)))
    drawn, alone = np.stack(drawn), np.stack(alone)
    error = drawn.std(0, ddof=1) / np.sqrt(len(drawn))
    z = (drawn.mean(0) - want) / error
    # 3 standard errors for a single figure; of many the largest may be a little further away.
    assert np.mean(np.abs(z) <= 3) > 0.98 and np.abs(z).max() < 4.5, np.abs(z).max()
    assert abs(z.mean()) < 3 / np.sqrt(z.size) * 3
    ratio = (drawn.var(0) / alone.var(0)).mean()
    assert ratio < 0.97, ratio
