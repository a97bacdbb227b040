"""The cross entropy with a teacher's likeliest tokens, and its gradient, against float64 numpy."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.losses import soft_targets
from eejax.losses.soft_targets import SoftTargets, soft_cross_entropy
from eejax.models.exits import Head, HeadOptions


def case(seed, n, v, k, padded, bias):
    rng = np.random.default_rng(seed)
    h, table = rng.normal(size=(n, 6)), rng.normal(size=(v + padded, 6))
    rows = np.stack([rng.permutation(v)[:k] for _ in range(n)])
    q = rng.dirichlet(np.ones(k), n)
    q[:, -1] = 0 if k > 1 else 1  # a token that does not count
    q /= q.sum(-1, keepdims=True)
    weights = rng.choice([0.0, 1.0, 0.5], n)
    return h, table, rng.normal(size=v + padded) if bias else None, rows, q, weights


def oracle(h, table, bias, rows, q, weights, o: HeadOptions):
    """Return the cost and its gradient in h, by the formulas, in float64."""
    z = h @ table.T + (0 if bias is None else bias)
    y = z if o.softcap is None else o.softcap * np.tanh(z / o.softcap)
    slope = 1.0 if o.softcap is None else 1 - np.tanh(z / o.softcap) ** 2
    y = (y / o.temperature)[:, : o.vocab_size]
    p = np.exp(y - y.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dense = np.zeros_like(p)
    np.put_along_axis(dense, rows, q, 1)
    g = np.zeros_like(z)
    g[:, : o.vocab_size] = (p - dense) * weights[:, None] / o.temperature
    cost = -(weights[:, None] * dense * np.log(p)).sum()
    return cost, (g * slope) @ table


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    n=st.sampled_from([1, 5]),
    v=st.sampled_from([3, 11]),
    k=st.integers(1, 3),
    padded=st.sampled_from([0, 2]),
    softcap=st.sampled_from([None, 2.0]),
    temperature=st.sampled_from([1.0, 0.7]),
    bias=st.booleans(),
    chunk=st.sampled_from([1, 26, 10_000]),
)
def test_cost_and_gradient(seed, n, v, k, padded, softcap, temperature, bias, chunk):
    options = HeadOptions(v, softcap, temperature)
    h, table, own_bias, rows, q, weights = case(seed, n, v, k, padded, bias)
    f32 = [None if a is None else jnp.asarray(a, jnp.float32) for a in (h, table, own_bias)]
    targets = SoftTargets(jnp.asarray(rows), *(jnp.asarray(a, jnp.float32) for a in (q, weights)))

    def cost(h, table, bias):
        return 3 * soft_cross_entropy(h, Head(table, bias, options), targets)

    with mock.patch.object(soft_targets, "CHUNK_LOGITS", chunk):
        plain = cost(*f32)
        found, gradients = jax.value_and_grad(cost, argnums=(0, 1))(*f32)
    expected, slope = oracle(h, table, own_bias, rows, q, weights, options)
    assert np.allclose([plain, found], 3 * expected, rtol=1e-5, atol=1e-5)
    assert np.allclose(gradients[0], 3 * slope, atol=2e-5)
    assert not np.any(gradients[1])  # the head is held constant
