"""`compact`: beside a sort in Python."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kernel_checks import small

from eejax.common.errors import ConfigError
from eejax.kernels.compact.api import compact
from eejax.kernels.compact.arg_specs import SPECS


def check(keep: np.ndarray, got) -> None:
    want = [*np.flatnonzero(keep), *np.flatnonzero(~keep)]
    assert np.asarray(got.order).tolist() == want
    assert np.asarray(got.counts).tolist() == [keep.sum(), (~keep).sum()]
    assert got.order.dtype == got.counts.dtype == jnp.int32


@pytest.mark.parametrize("which", ["reference", "interpreter"])
@small(SPECS)
def test_rows_are_split_stably(spec, which, interpreted):
    (keep,) = spec.args(1)
    check(np.asarray(keep), spec.run(keep, implementation=which))


@settings(max_examples=20)
@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_any_rows(interpreted, flags):
    keep = np.array(flags)
    check(keep, compact(jnp.array(keep), implementation="interpreter"))


@pytest.mark.parametrize("kept", [[], [4095], [4096], [8191, 8192], range(0, 12000, 1024)])
def test_at_the_edges_of_blocks(kept, interpreted):
    keep = np.isin(np.arange(12000), list(kept))
    check(keep, compact(jnp.array(keep), implementation="interpreter"))


def test_under_jit_vmap_and_scan(interpreted):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, (3, 50))

    def run(keep):
        return compact(keep, implementation="interpreter")

    for got in (
        jax.jit(jax.vmap(run))(keep),
        jax.lax.scan(lambda c, k: (c, run(k)), 0, keep)[1],
    ):
        for i in range(3):
            check(np.asarray(keep[i]), jax.tree.map(lambda a, i=i: a[i], got))


def test_in_a_shard_map(interpreted):
    keep = jax.random.bernoulli(jax.random.key(1), 0.5, (4, 20))
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def run(keep):
        order, counts = compact(keep[0], implementation="interpreter")
        return order[None], counts[None]

    split = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    order, counts = jax.jit(split)(keep)
    for i in range(4):
        assert order[i].tolist() == compact(keep[i], implementation="reference").order.tolist()
        assert counts[i].tolist() == [int(keep[i].sum()), int((~keep[i]).sum())]


@pytest.mark.parametrize("keep", [jnp.zeros((2, 3), bool), jnp.zeros(0, bool), jnp.zeros(3)])
def test_what_is_no_row_of_bools_is_named(keep):
    with pytest.raises(ConfigError, match=r"keep = .*: must be bools \[n\], n at least 1"):
        compact(keep)
