"""Functions on every device's share of their arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from eejax.inference import sharded
from eejax.sharding.mesh import MeshConfig, known_mesh


@pytest.mark.parametrize("axes", [("data",), ("model",), ("data", "model")])
def test_arrays_without_elements_keep_their_shares_and_types(axes):
    """XLA of jax 0.11 crashes on a `shard_map` that takes such an array."""
    mesh, seen = known_mesh(MeshConfig(data=2, model=2)), []

    def local(tree, whole):
        seen.append(jax.tree.map(jnp.shape, tree))
        # A loop carries values of one type: these vary over the axes that they are split over.
        grown = lax.fori_loop(0, 3, lambda _, c: jax.tree.map(lambda a, b: a + b, c, tree), tree)
        return grown, whole

    given = {"empty": jnp.zeros((8, 0), jnp.int32), "full": jnp.arange(8.0)}
    run = jax.jit(sharded.shard(local, mesh, (P(axes), P()), (P(axes), P())))
    got, whole = run(given, jnp.zeros((0, 3)))
    part = 8 // 2 ** len(axes)
    assert seen[0] == {"empty": (part, 0), "full": (part,)}
    assert (got["empty"].shape, got["empty"].dtype) == ((8, 0), jnp.int32)
    np.testing.assert_array_equal(got["full"], 4 * np.arange(8.0))
    assert whole.shape == (0, 3)
