"""Sampling filters against a plain numpy version, and draws against their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.inference import sampling as drawing
from eejax.inference.sampling import SamplingParams, restrict
from eejax.kernels import call

V = 12
restrict_for_cpu = jax.jit(restrict)
sample = jax.jit(drawing.sample)  # in one piece, of which less is compiled


@jax.jit
def restrict_for_gpu(logits, sampling):
    with call.compute_capability(90):
        return restrict(logits, sampling)


def allowed_tokens(logits, temperature, top_k, top_p, min_p):
    """The tokens that stay, written with sets and loops in float64."""
    y = logits.astype(np.float64) / temperature
    order = list(np.argsort(-y, kind="stable"))
    if top_k:
        order = order[:top_k]
    p = np.exp(y[order] - y[order[0]])
    p /= p.sum()
    kept, mass = [], 0.0
    for token, q in zip(order, p, strict=True):
        if mass < top_p and q >= min_p * p[0]:
            kept.append(token)
        mass += q
    least = min(y[kept or order[:1]])
    return set(np.flatnonzero(y >= least))  # tokens as likely as the last one stay with it


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, V + 3),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.9),
    ties=st.booleans(),
    restricted=st.sampled_from([restrict_for_cpu, restrict_for_gpu]),
)
def test_filters_equal_numpy(seed, temperature, top_k, top_p, min_p, ties, restricted):
    logits = np.random.default_rng(seed).standard_normal(V).astype(np.float32) * 2
    logits = np.round(logits) if ties else logits  # some of them to -0
    sampling = SamplingParams.make(1, temperature, top_k, top_p, min_p)
    got = set(np.flatnonzero(np.asarray(restricted(jnp.array(logits)[None], sampling))[0] > -1e29))
    want = allowed_tokens(
        logits, np.float32(temperature), top_k, np.float32(top_p), np.float32(min_p)
    )
    if got != want:  # a token whose cumulative mass or ratio lies on the boundary may go either way
        near = [
            allowed_tokens(logits, temperature, top_k, top_p + d, min_p + f)
            for d in (-1e-5, 1e-5)
            for f in (-1e-5, 1e-5)
        ]
        assert got in near


def test_draws_follow_the_distribution():
    logits = jnp.array(np.random.default_rng(0).standard_normal(V), jnp.float32)
    n = 20000
    sampling = SamplingParams.make(n, 0.7, 5, seed=list(range(n)))
    drawn = np.asarray(sample(jnp.broadcast_to(logits, (n, V)), sampling, jnp.full((n,), 3)))
    y = np.asarray(logits, np.float64) / 0.7
    top = np.argsort(-y)[:5]
    p = np.exp(y[top]) / np.exp(y[top]).sum()
    counts = np.array([(drawn == t).sum() for t in top])
    assert counts.sum() == n
    chi2 = ((counts - n * p) ** 2 / (n * p)).sum()
    assert chi2 < 23.5  # 4 degrees of freedom, p = 1e-4


def test_temperature_zero_is_greedy_beside_sampled_rows():
    logits = jnp.array(np.random.default_rng(1).standard_normal((3, V)), jnp.float32)
    sampling = SamplingParams.make(3, [0.0, 5.0, 0.0])
    for position in range(20):
        got = sample(logits, sampling, jnp.full((3,), position))
        assert got[0] == logits[0].argmax() and got[2] == logits[2].argmax()


def test_draws_differ_by_seed_and_position_and_by_nothing_else():
    logits = jnp.zeros((4, 64), jnp.float32)
    sampling = SamplingParams.make(4, 1.0, seed=[1, 1, 2, 1])
    tokens = sample(logits, sampling, jnp.array([5, 5, 5, 6]))
    assert tokens[0] == tokens[1]
    many = [sample(logits, sampling, jnp.array([i, i, i, i + 1])) for i in range(20)]
    assert any(m[0] != m[2] for m in many) and any(m[0] != m[3] for m in many)


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(temperature=float("nan")),
        dict(temperature=[1, [2]]),
        dict(top_k=-1),
        dict(top_p=1.5),
        dict(min_p=2),
        dict(seed=-1),
        dict(seed=True),
        dict(seed=[1, [2]]),
    ],
)
def test_out_of_range_is_refused(kwargs):
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        SamplingParams.make(2, **kwargs)


@pytest.mark.parametrize("temperature", [1e-38, 1e-29, 1e-6])
@pytest.mark.parametrize("filters", [{}, dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1)])
def test_the_coldest_draws_are_greedy(temperature, filters):
    logits = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32) * 5 - 60
    logits[:, 61:] = -1e30
    sampling = SamplingParams.make(64, temperature, seed=list(range(64)), **filters)
    drawn = sample(jnp.array(logits), sampling, jnp.zeros((64,), jnp.int32))
    assert np.asarray(drawn).tolist() == logits.argmax(1).tolist()


def test_near_ties_do_not_pass_top_k():
    logits = jnp.array([[1.0, np.nextafter(np.float32(1), np.float32(0)), 0.0]])
    for temperature in (1.0, 2.0, 1e6):
        kept = restrict_for_cpu(logits, SamplingParams.make(1, temperature, top_k=1)) > -1e29
        assert kept.tolist() == [[True, False, False]]


def test_padded_rows_are_never_drawn_however_hot():
    logits = jnp.where(jnp.arange(96) < 61, jnp.linspace(-3, 3, 96), -1e30)[None].repeat(64, 0)
    for hot in (1e20, 1e30, 1e38):
        sampling = SamplingParams.make(64, temperature=hot, seed=list(range(64)))
        drawn = sample(logits.astype(jnp.float32), sampling, jnp.zeros((64,), jnp.int32))
        assert int(drawn.max()) < 61 and len(set(drawn.tolist())) > 20
