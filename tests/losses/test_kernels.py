"""The loss of several exits by its kernels, in Triton's interpreter, beside the loss without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eejax.kernels import call
from eejax.losses.cross_entropy import IGNORE, Teacher, exits_cross_entropy
from eejax.losses.objective import LossObjective
from eejax.models.exits import Head, HeadOptions
from eejax.sharding.mesh import MeshConfig, make_mesh

N, D, V = 30, 64, 40
OPTIONS = (HeadOptions(37), HeadOptions(37, 5.0, 0.7), HeadOptions(37), HeadOptions(37, None, 1.5))
OBJECTIVES = (
    LossObjective(),
    LossObjective(0.01, True),
    LossObjective(distillation=0.5),
    LossObjective(z_loss=0.01),
)


def draw(seed: int = 0):
    rng = np.random.default_rng(seed)

    def single(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    hs = tuple(single(2, N // 2, D) for _ in OPTIONS)
    labels = rng.integers(0, 37, (2, N // 2))
    labels[0, 3] = IGNORE
    weights = tuple(jnp.asarray(rng.uniform(0.5, 1.5, labels.shape), jnp.float32) for _ in OPTIONS)
    coefficients = jnp.array([0.3, 0.0, 0.5, 1.0])
    return hs, single(V, D) * 0.3, single(V), jnp.asarray(labels), weights, coefficients


def run(hs, table, bias, labels, weights, coefficients, sparse=False, axis=None):
    heads = [Head(table, bias, o) for o in OPTIONS]
    return exits_cross_entropy(
        hs,
        heads,
        labels,
        coefficients,
        weights=weights,
        objectives=OBJECTIVES,
        teacher=Teacher(hs[3], heads[3]),
        sparse=sparse,
        axis=axis,
    )


def gradients(args, **kwargs):
    hs, table, bias, labels, weights, coefficients = args

    def cost(hs, t, b, w, c):
        return run(hs, t, b, labels, w, c, **kwargs)

    # A function of its own for each call, so that each is traced with its implementation.
    return jax.jit(jax.value_and_grad(cost, (0, 1, 2, 3, 4), has_aux=True))(
        hs, table, bias, weights, coefficients
    )


def same(got, want):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * max(1e-3, np.abs(b).max())


@pytest.fixture
def by_kernels(interpreted):
    with call.implementation("interpreter"):
        yield


@pytest.mark.parametrize("sparse", [False, True])
def test_losses_and_gradients_are_those_without_kernels(sparse, by_kernels):
    args = draw()
    with call.implementation("reference"):
        want = gradients(args, sparse=sparse)
    same(gradients(args, sparse=sparse), want)
    same(run(*args, sparse=sparse), want[0])
    assert (want[0][1][1] == 0) == sparse  # the exit that is left out


def test_over_a_mesh(by_kernels):
    args = draw(1)
    with call.implementation("reference"):
        want = gradients(args)
    mesh = make_mesh(MeshConfig(data=2, model=2))
    rows, table = P("data"), P("model")

    def local(hs, t, b, labels, weights, c):
        def cost(hs, t, b, w, c):
            return jax.lax.psum(run(hs, t, b, labels, w, c, axis="model")[0], "data")

        value, grads = jax.value_and_grad(cost, (0, 1, 2, 3, 4))(hs, t, b, weights, c)
        return value, grads

    specs = (rows, table, table, rows, rows, P())
    out = (P(), (rows, table, table, rows, P()))
    value, grads = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out))(*args)
    same(value, want[0][0])
    same(grads, want[1])


def test_a_bad_label_makes_all_of_it_nan(by_kernels):
    hs, table, bias, labels, weights, coefficients = draw()
    labels = labels.at[1, 2].set(37)
    value, _ = run(hs, table, bias, labels, weights, coefficients)
    assert np.isnan(value)
