"""Reading arrays by indices that lie within them, beside NumPy's own indexing."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.indexing import gather, gather_each, ring_index

SIZES = st.integers(1, 5)


@settings(max_examples=20)
@given(b=SIZES, m=SIZES, n=SIZES, d=st.integers(0, 3), seed=st.integers(0, 99))
def test_entries_are_those_that_numpy_reads(b, m, n, d, seed):
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 1000, (b, m, d) if d else (b, m)).astype(np.int32)
    row, column = rng.integers(0, b, (n, 2)), rng.integers(0, m, (n, 2))
    np.testing.assert_array_equal(gather(jnp.asarray(a), jnp.asarray(row)), a[row])
    np.testing.assert_array_equal(
        gather(jnp.asarray(a), jnp.asarray(row), jnp.asarray(column)), a[row, column]
    )
    each = rng.integers(0, m, (b, n))
    got = gather_each(jnp.asarray(a), jnp.asarray(each))
    np.testing.assert_array_equal(got, a[np.arange(b)[:, None], each])


def test_an_index_beyond_the_end_reads_the_last_entry():
    a = jnp.arange(6).reshape(2, 3)
    assert gather(a, jnp.array([7]), jnp.array([1])).tolist() == [4]
    assert gather_each(a, jnp.array([[1, 9], [0, 3]])).tolist() == [[1, 2], [3, 5]]


def test_an_index_takes_no_more_operations_than_a_gather_needs():
    jaxpr = jax.make_jaxpr(gather)(
        jnp.zeros((4, 5)), jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32)
    )
    names = [e.primitive.name for e in jaxpr.eqns]
    assert names == ["broadcast_in_dim", "broadcast_in_dim", "concatenate", "gather"]


@given(size=SIZES, rounds=st.integers(-1, 4), behind=st.integers(0, 4))
def test_places_in_a_ring_are_those_of_the_remainder(size, rounds, behind):
    position = jnp.array([rounds * size + behind % size], jnp.int32)
    assert int(ring_index(position, size)[0]) == behind % size
