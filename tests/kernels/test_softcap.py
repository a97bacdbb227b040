"""Soft caps in kernels: what they cost of precision, however large they are."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from eejax.kernels.head_confidence.api import head_confidence
from eejax.kernels.head_confidence.reference import HeadConfidenceOptions
from eejax.kernels.linear_cross_entropy.api import linear_cross_entropy
from eejax.kernels.linear_cross_entropy.reference import LossOptions


@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0, 1e3, 1e6])
def test_logits_keep_their_digits_whatever_the_cap(softcap, interpreted):
    rng = np.random.default_rng(0)
    x, table = (rng.normal(0, s, (n, 16)).astype(np.float32) for n, s in ((5, 1.0), (90, 0.7)))
    y = softcap * np.tanh(x.astype(np.float64) @ table.T.astype(np.float64) / softcap)
    lse = np.log(np.exp(y).sum(1))
    got = head_confidence(
        jnp.asarray(x),
        None,
        None,
        jnp.asarray(table),
        None,
        options=HeadConfidenceOptions(90, softcap=np.float32(softcap)),
        implementation="interpreter",
    )
    np.testing.assert_allclose(got.lse, lse, rtol=2e-6, atol=2e-6)
    labels = np.arange(5, dtype=np.int32)
    sums, gradients = linear_cross_entropy(
        jnp.asarray(x),
        jnp.asarray(table),
        None,
        jnp.asarray(labels),
        options=LossOptions(90, softcap=softcap),
        into=jnp.zeros(table.shape),
        implementation="interpreter",
    )
    want = (lse - y[np.arange(5), labels]).sum()
    assert float(sums.cost) == pytest.approx(want, rel=3e-6)
    g = np.exp(y - lse[:, None])
    g[np.arange(5), labels] -= 1
    want = (g * (1 - (y / softcap) ** 2)) @ table
    np.testing.assert_allclose(gradients.h, want, rtol=1e-4, atol=1e-5)
