"""Bodies that run on carried buffers or do not: the values, and on a mesh what they vary along."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eejax.models.branches import run_branch, run_where


@pytest.mark.parametrize("condition", [False, True])
def test_a_body_runs_once_where_its_condition_holds(condition):
    carry = {"a": jnp.arange(3), "b": (jnp.float32(1.5), jnp.zeros((2, 2), jnp.int8))}

    def body(c):
        return {"a": c["a"] * 2 + 1, "b": (c["b"][0] - 1, c["b"][1] + 3)}

    found = jax.jit(lambda on, c: run_where(on, body, c))(jnp.bool_(condition), carry)
    wanted = body(carry) if condition else carry
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert jax.tree.map(lambda a: a.dtype, found) == jax.tree.map(lambda a: a.dtype, carry)


def test_each_shard_decides_for_itself():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(on, a):
        return run_where(on[0], lambda c: c + 10, a)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    found = jax.jit(sharded)(jnp.array([False, True]), jnp.arange(4))
    np.testing.assert_array_equal(found, [0, 1, 12, 13])


@pytest.mark.parametrize("index", range(4))
def test_one_branch_of_several_runs_or_none(index):
    ways = [lambda a, b: (a + 1, b), lambda a, b: (a, b * 2), lambda a, b: (b, a)]
    carry = jnp.arange(2.0), jnp.arange(2.0) + 5
    found = jax.jit(lambda i, *c: run_branch(i, ways, c))(jnp.int32(index), *carry)
    wanted = ways[index - 1](*carry) if index else carry
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
