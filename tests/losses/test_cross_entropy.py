"""The chunked loss and its gradients against float64 numpy, whole and split over a mesh."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from eejax.common.errors import ConfigError
from eejax.losses import cross_entropy
from eejax.losses.cross_entropy import (
    IGNORE,
    exits_cross_entropy,
    linear_cross_entropy,
)
from eejax.models.exits import Head, HeadOptions
from eejax.sharding.mesh import MeshConfig, make_mesh

# Sums of at most a few hundred float32 products, relative to the largest entry of each result.
# Observed: 1e-6.
FP32 = 1e-5
# Inputs are exact in bfloat16 and logits accumulate in float32, but the logits' gradient and the
# result are rounded to 8 bits of mantissa (relative 2^-9 each); twice their sum.
BF16 = 2.0**-7


class Case(NamedTuple):
    h: np.ndarray  # [n, d]
    table: np.ndarray  # [v, d]
    bias: np.ndarray | None  # [v]
    labels: np.ndarray  # [n]
    weights: np.ndarray | None  # [n]
    options: HeadOptions


class Gradients(NamedTuple):
    h: np.ndarray
    table: np.ndarray
    bias: np.ndarray | None
    weights: np.ndarray | None


def make_case(
    seed,
    n,
    d,
    vocab,
    padding=0,
    bias=False,
    weighted=False,
    softcap=None,
    temperature=1.0,
    ignored=0.2,
):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    labels = rng.integers(0, vocab, n).astype(np.int32)
    labels[rng.random(n) < ignored] = IGNORE
    v = vocab + padding
    return Case(
        normal(n, d),
        normal(v, d),
        normal(v) if bias else None,
        labels,
        rng.uniform(0, 2, n).astype(np.float32) if weighted else None,
        HeadOptions(vocab, softcap, temperature),
    )


def reference(case: Case) -> tuple[float, Gradients]:
    """Loss and gradients in float64 from the formulas, not by autodiff."""

    def f8(a):
        return None if a is None else a.astype(np.float64)

    h, table, bias, o = f8(case.h), f8(case.table), f8(case.bias), case.options
    table, counted = table[: o.vocab_size], case.labels != IGNORE
    weight = counted * (1.0 if case.weights is None else f8(case.weights))
    z = h @ table.T + (0.0 if bias is None else bias[: o.vocab_size])
    slope = 1.0 / o.temperature
    if o.softcap is not None:
        t = np.tanh(z / o.softcap)
        z, slope = o.softcap * t, slope * (1 - t**2)
    z = z / o.temperature
    top = z.max(-1, keepdims=True)
    lse = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
    hot = case.labels[:, None] == np.arange(o.vocab_size)
    nll = np.where(counted, lse[:, 0] - (z * hot).sum(-1), 0.0)
    g = (np.exp(z - lse) - hot) * weight[:, None] * slope
    pad = case.table.shape[0] - o.vocab_size
    gradients = Gradients(
        g @ table,
        np.pad(g.T @ h, ((0, pad), (0, 0))),
        None if bias is None else np.pad(g.sum(0), (0, pad)),
        None if case.weights is None else nll,
    )
    return (weight * nll).sum(), gradients


def run(case: Case, h_dtype=jnp.float32, table_dtype=jnp.float32):
    """Loss and gradients by the library."""

    def loss(h, table, bias, weights):
        head = Head(table, bias, case.options)
        return linear_cross_entropy(h, head, jnp.asarray(case.labels), weights=weights)

    arguments = (
        jnp.asarray(case.h, h_dtype),
        jnp.asarray(case.table, table_dtype),
        case.bias,
        case.weights,
    )
    arguments = tuple(None if a is None else jnp.asarray(a) for a in arguments)
    present = tuple(i for i, a in enumerate(arguments) if a is not None)
    value, got = jax.jit(jax.value_and_grad(loss, argnums=present))(*arguments)
    gradients = dict(zip(present, got, strict=True))
    return value, Gradients(*(gradients.get(i) for i in range(4)))


def assert_near(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1e-3, np.abs(want).max()))


def assert_same(got, want, tolerance):
    for name, a, b in zip(Gradients._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if b is not None:
            assert_near(a, b, tolerance)


def small_chunks(tokens):
    return mock.patch.multiple(cross_entropy, MIN_CHUNK=tokens, CHUNK_LOGITS=1)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 99),
    n=st.integers(1, 40),
    d=st.integers(1, 9),
    vocab=st.integers(1, 30),
    padding=st.sampled_from([0, 3]),
    bias=st.booleans(),
    weighted=st.booleans(),
    softcap=st.sampled_from([None, 2.5]),
    temperature=st.sampled_from([1.0, 1.7]),
    chunk=st.integers(1, 50),
)
@example(0, 40, 8, 30, 3, True, True, 2.5, 1.7, 7)  # everything at once, the last chunk not full
def test_loss_and_gradients_are_those_of_float64(
    seed, n, d, vocab, padding, bias, weighted, softcap, temperature, chunk
):
    case = make_case(seed, n, d, vocab, padding, bias, weighted, softcap, temperature)
    with small_chunks(chunk):
        loss, gradients = run(case)
    want_loss, want = reference(case)
    assert_near(loss, want_loss, FP32)
    assert_same(gradients, want, FP32)


def test_undifferentiated_loss_is_the_differentiated_one():
    case = make_case(1, 33, 5, 20, 3, True, True, 2.5, 1.3)
    head = Head(jnp.asarray(case.table), jnp.asarray(case.bias), case.options)
    labels = jnp.asarray(case.labels)
    with small_chunks(8):
        alone = jax.jit(lambda h, w: linear_cross_entropy(h, head, labels, weights=w))(
            jnp.asarray(case.h), jnp.asarray(case.weights)
        )
        loss, _ = run(case)
    assert_near(alone, loss, FP32)


@pytest.mark.parametrize("table_dtype", [jnp.float32, jnp.bfloat16])
def test_bfloat16_states_accumulate_in_float32(table_dtype):
    case = make_case(2, 64, 16, 48, 0, False, True)

    def round_(a):
        return np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32)

    case = case._replace(h=round_(case.h), table=round_(case.table))
    with small_chunks(16):
        loss, gradients = run(case, jnp.bfloat16, table_dtype)
    want_loss, want = reference(case)
    assert loss.dtype == jnp.float32
    assert gradients.h.dtype == jnp.bfloat16 and gradients.table.dtype == table_dtype
    assert_near(loss, want_loss, FP32)
    assert_same(gradients, want, BF16)


def test_a_batch_without_counted_tokens_costs_nothing():
    case = make_case(3, 12, 4, 9, 2, True, True, 2.0, 1.5, ignored=1.1)
    assert (case.labels == IGNORE).all()
    loss, gradients = run(case)
    assert loss == 0
    for g in gradients:
        assert (np.asarray(g) == 0).all()


@pytest.mark.parametrize("label", [9, 11, -2, 2**31 - 1])
def test_a_label_outside_the_vocabulary_shows(label):
    case = make_case(4, 12, 4, 9, 3, ignored=0)
    case.labels[5] = label
    loss, gradients = run(case)
    assert np.isnan(loss) and np.isnan(gradients.table).any()


def test_large_logits_neither_overflow_nor_lose_the_loss():
    case = make_case(5, 16, 4, 9)
    case = case._replace(h=case.h * 1e4)
    loss, gradients = run(case)
    want_loss, want = reference(case)
    # Logits near 1e4 carry an absolute error of about 1e-3 each in float32.
    assert_near(loss, want_loss, FP32)
    assert_near(gradients.h, want.h, 1e-3)


def test_exits_that_share_a_table_are_the_weighted_sum_of_each():
    cases = [make_case(6, 21, 5, 13, 3, True, True, 2.5, t) for t in (1.0, 1.4, 0.7)]
    h_of = [c.h * (i + 1) for i, c in enumerate(cases)]
    cases = [c._replace(h=h) for c, h in zip(cases, h_of, strict=True)]
    c = np.array([0.25, 0.0, 1.5], np.float32)
    labels = jnp.asarray(cases[0].labels)

    def loss(hs, table, biases, weights, c):
        heads = [Head(table, b, k.options) for b, k in zip(biases, cases, strict=True)]
        return exits_cross_entropy(hs, heads, labels, c, weights=weights)

    def pick(f):
        return [jnp.asarray(f(k)) for k in cases]

    with small_chunks(6):
        (total, sums), (d_h, d_table, d_bias, d_weights, d_c) = jax.jit(
            jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)
        )(
            pick(lambda k: k.h),
            jnp.asarray(cases[0].table),
            pick(lambda k: k.bias),
            pick(lambda k: k.weights),
            jnp.asarray(c),
        )
    want = [reference(k) for k in cases]
    want_sums = np.array([w[0] for w in want])
    assert_near(sums, want_sums, FP32)
    assert_near(total, c @ want_sums, FP32)
    assert_near(d_c, want_sums, FP32)
    assert_near(d_table, sum(x * w[1].table for x, w in zip(c, want, strict=True)), FP32)
    for e, (x, w) in enumerate(zip(c, want, strict=True)):
        assert_near(d_h[e], x * w[1].h, FP32)
        assert_near(d_bias[e], x * w[1].bias, FP32)
        assert_near(d_weights[e], x * w[1].weights, FP32)


def test_exits_of_different_tables_are_refused():
    h, table = jnp.ones((2, 3)), jnp.ones((4, 3))
    heads = [Head(table, None, HeadOptions(4)), Head(table + 1, None, HeadOptions(4))]
    with pytest.raises(ConfigError, match="share one table"):
        exits_cross_entropy([h, h], heads, jnp.zeros(2, jnp.int32), jnp.ones(2))


@pytest.mark.parametrize("outside", [False, True], ids=["grad-inside", "grad-outside"])
@pytest.mark.parametrize("data, model", [(1, 2), (2, 4), (4, 1)])
def test_split_vocabulary_gives_the_gradients_of_the_whole(data, model, outside):
    # 16 rows of which 11 are tokens: split four ways, the last shard holds padding alone.
    case = make_case(7, 24, 5, 11, 5, True, True, 2.5, 1.4)
    mesh = make_mesh(MeshConfig(data=data, model=model), devices=jax.devices()[: data * model])
    axis = "model" if model > 1 else None
    split = P("model") if model > 1 else P()
    specs = (P("data"), split, split, P("data"), P(), P("data"))

    def local(h, table, bias, weights, c, labels):
        head = Head(table, bias, case.options)
        return exits_cross_entropy((h,), (head,), labels, c, weights=(weights,), axis=axis)[0]

    def gradient(f):
        return jax.value_and_grad(f, argnums=range(5))

    def total(*a):
        return jax.lax.psum(local(*a), "data")

    if outside:
        f = gradient(jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P()))
    else:
        out = (P(), specs[:5])
        f = jax.shard_map(gradient(total), mesh=mesh, in_specs=specs, out_specs=out)
    arguments = (case.h, case.table, case.bias, case.weights, np.ones(1, np.float32), case.labels)
    with small_chunks(5):
        loss, gradients = jax.jit(f)(*map(jnp.asarray, arguments))
    want_loss, want = reference(case)
    assert_near(loss, want_loss, FP32)
    assert_same(gradients[:4], want, FP32)
    assert_near(gradients[4], [want_loss], FP32)


def test_memory_is_that_of_a_chunk_and_grows_by_one_state_per_exit():
    n, d, v = 2048, 64, 8192
    whole = n * v * 4
    table = jax.ShapeDtypeStruct((v, d), jnp.float32)
    labels = jax.ShapeDtypeStruct((n,), jnp.int32)

    def temporary(exits):
        def loss(x, table, labels, c):
            hs = [jnp.tanh(x * (e + 1.0)) for e in range(exits)]
            heads = [Head(table, None, HeadOptions(v))] * exits
            return exits_cross_entropy(hs, heads, labels, c)[0]

        x = jax.ShapeDtypeStruct((n, d), jnp.float32)
        c = jax.ShapeDtypeStruct((exits,), jnp.float32)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, table, labels, c).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    sizes = [temporary(exits) for exits in (1, 2, 3)]
    assert sizes[0] < 0.5 * whole  # one chunk, n/4 tokens, and the table's gradient
    # An exit may keep its state and that state's gradient, and nothing of the vocabulary's size.
    assert max(b - a for a, b in zip(sizes, sizes[1:], strict=False)) <= 2 * n * d * 4 + 4096
