"""`head_confidence`: its kernels in Triton's interpreter, beside float64 and its reference."""

from __future__ import annotations

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kernel_checks import ROUNDING, small, wide

from eejax.common.errors import ConfigError
from eejax.kernels import call
from eejax.kernels.head_confidence.api import HeadStatistics, head_confidence
from eejax.kernels.head_confidence.arg_specs import SPECS, draw
from eejax.kernels.head_confidence.reference import (
    HeadConfidenceOptions,
    LogitStatistics,
    head_statistics,
    merge,
)
from eejax.kernels.specs import LAYER, ONE, RMS

WHICH = ("reference", "interpreter")

# NumPy, in which the interpreter computes, speaks of what the hardware passes over.
unremarked = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def exact_states(options: HeadConfidenceOptions, x, scale, bias):
    """[n, d] in float64, not rounded when they are normed."""
    h, norm = wide(x), options.norm
    if norm is not None:
        if norm.kind == "layernorm":
            h = h - h.mean(1, keepdims=True)
        h = h / np.sqrt((h * h).mean(1, keepdims=True) + norm.eps) * (wide(scale) + norm.plus_one)
        h = h if bias is None else h + wide(bias)
    return h


def exact_logits(options: HeadConfidenceOptions, x, scale, bias, table, head_bias):
    """[n, vocab_size] in float64."""
    y = exact_states(options, x, scale, bias) @ wide(table).T
    if head_bias is not None:
        y = y + wide(head_bias)
    if options.softcap is not None:
        y = options.softcap * np.tanh(y / options.softcap)
    return (y / options.temperature)[:, : options.vocab_size]


def exact(y) -> HeadStatistics:
    """Of logits [n, v] in float64, from probabilities and their order."""
    shifted = y - y.max(1, keepdims=True)
    p = np.exp(shifted)
    p = p / p.sum(1, keepdims=True)
    order = np.sort(p, 1)
    lse = y.max(1) + np.log(np.exp(shifted).sum(1))
    plogp = np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0)
    second = order[:, -2] if y.shape[1] > 1 else np.zeros(len(y))
    return HeadStatistics(np.argmax(p, 1), order[:, -1], second, lse, -plogp.sum(1))


def assert_near(got: HeadStatistics, y, bound: float) -> None:
    """That `got` is of the logits y [n, v], which are known to `bound`."""
    want = exact(y)
    # Probabilities move by as much as p, log-sum-exp by as much as the logits; entropy by as much
    # as those times how far they are spread about their mean, here less than 8.
    for name, most in (("top", bound), ("second", bound), ("lse", bound), ("entropy", 8 * bound)):
        a = np.asarray(getattr(got, name))
        assert a.dtype == np.float32
        assert np.abs(a - getattr(want, name)).max() <= most, name
    token = np.asarray(got.token)
    assert token.dtype == np.int32
    # Another token than the first is as good where both are as likely, as far as that is known.
    lost = y.max(1) - np.take_along_axis(y, token[:, None], 1)[:, 0]
    assert lost.max() <= 2 * bound
    assert (lost == 0).mean() >= 0.9


@small(SPECS)
def test_kernels_beside_float64(spec, interpreted):
    args = spec.args(1)
    got = jax.jit(partial(spec.run, implementation="interpreter"))(*args)
    y = exact_logits(spec.options["options"], *args)
    # Logits are sums of terms of order 1 with a standard deviation of 2, before the temperature.
    assert_near(got, y, 4 * ROUNDING[args[0].dtype.name])


@small(SPECS)
def test_the_reference_beside_float64(spec):
    args = spec.args(2)
    got = jax.jit(partial(spec.run, implementation="reference"))(*args)
    y = exact_logits(spec.options["options"], *args)
    assert_near(got, y, 4 * ROUNDING[args[0].dtype.name])


@pytest.mark.parametrize(
    "norm, dtype",
    [
        (RMS, "bfloat16"),
        (LAYER, "float16"),
        pytest.param(LAYER, "bfloat16", marks=pytest.mark.slow),
        pytest.param(ONE, "float16", marks=pytest.mark.slow),
    ],
)
def test_states_are_rounded_as_the_reference_rounds_them(norm, dtype, interpreted):
    options = HeadConfidenceOptions(300, norm)
    args = arguments(32, 200, 300, options, head_bias=False, dtype=dtype)
    # States in the middle of two numbers are rounded by the order of the norm's sum.
    h = exact_states(options, *args[:3])
    margin = 4e-7 * np.abs(h) + 1e-7
    clear = ((h - margin).astype(args[0].dtype) == (h + margin).astype(args[0].dtype)).all(1)
    assert clear.sum() >= 10
    x = args[0][np.flatnonzero(clear)]

    def run(which):
        return jax.jit(partial(head_confidence, options=options, implementation=which))

    got, want = run("interpreter")(x, *args[1:]), run("reference")(x, *args[1:])
    # A state that is rounded the other way moves a logit by 1e-4 and more, and its probability by
    # 1e-5 and more; none is. The order of a product's sum moves both by less than 3e-6.
    np.testing.assert_allclose(got.lse, want.lse, atol=3e-6, rtol=0)
    np.testing.assert_allclose(got.top, want.top, atol=3e-6, rtol=0)
    assert (got.token == want.token).all()


def arguments(n=6, d=96, rows=200, options=None, bias=True, head_bias=True, dtype="float32"):
    options = options or HeadConfidenceOptions(rows, RMS)
    own = n, d, rows, bias, head_bias, dtype, options
    return jax.jit(lambda key: draw(key, *own))(jax.random.key(3))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_programs_of_several_tiles(dtype, interpreted, monkeypatch):
    from eejax.kernels.head_confidence import triton

    monkeypatch.setattr(triton, "PROGRAMS", 3)
    options = HeadConfidenceOptions(990, LAYER, softcap=20.0)
    args = arguments(9, 300, 1000, options, dtype=dtype)
    sizes = triton._blocks(9, 300, 1000, args[0].dtype.itemsize)
    assert sizes["TILES"] == 6 and sizes["STEPS"] > 2
    got = head_confidence(*args, options=options, implementation="interpreter")
    assert_near(got, exact_logits(options, *args), 4 * ROUNDING[dtype])


def logits_as_arguments(y):
    """Arguments whose logits [n, v] are y to the bit: states that each pick a column of table."""
    y = jnp.asarray(y, jnp.float32)
    d = max(16, len(y))
    return jnp.eye(len(y), d), None, None, jnp.pad(y, ((0, d - len(y)), (0, 0))).T, None


@pytest.mark.parametrize(
    "which, programs",
    [
        ("reference", 216),
        ("interpreter", 2),
        pytest.param("interpreter", 216, marks=pytest.mark.slow),
    ],
)
def test_the_first_of_equals_is_taken(which, programs, interpreted, monkeypatch):
    from eejax.kernels.head_confidence import triton

    monkeypatch.setattr(triton, "PROGRAMS", programs)
    places = ([0, 299], [17, 18], [63, 64], [70, 130], [5, 140, 260], [299], [0], range(300))
    y = np.array([[3.0 if i in p else 1.0 + i % 2 for i in range(300)] for p in places])
    for options, peaks in (
        (HeadConfidenceOptions(300), 3.0),
        (HeadConfidenceOptions(300, softcap=2.0), None),
    ):
        got = head_confidence(*logits_as_arguments(y), options=options, implementation=which)
        assert np.asarray(got.token).tolist() == [p[0] for p in places]
        shared = np.array([len(p) > 1 for p in places])
        assert (np.asarray(got.second) == np.asarray(got.top)).tolist() == shared.tolist()
        if peaks:
            assert_near(got, y, 1e-6)
    # The first of the second most likely is no concern, but a token that has no equal is.
    got = head_confidence(
        *logits_as_arguments(y[:, :1]), options=HeadConfidenceOptions(1), implementation=which
    )
    assert np.asarray(got.second).tolist() == [0.0] * 8
    assert np.asarray(got.top).tolist() == [1.0] * 8
    assert np.asarray(got.entropy).tolist() == [0.0] * 8


@unremarked
@pytest.mark.parametrize("which", WHICH)
def test_large_logits_and_those_of_minus_infinity(which, interpreted):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(6, 400)) * 2
    y[0] += 1e4
    y[1] -= 1e4
    y[2] *= 1e4
    y[3, :350] = -1e30
    y[4] = np.where(np.arange(400) == 123, 3e38, -3e38)
    y[5] = 0.0
    y = y.astype(np.float32).astype(np.float64)
    got = head_confidence(
        *logits_as_arguments(y), options=HeadConfidenceOptions(400), implementation=which
    )
    want = exact(y)
    assert all(np.isfinite(a).all() for a in got)
    assert (np.asarray(got.token) == want.token).all()
    for name in ("top", "second", "entropy"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6)
    # Tokens that a bias forbids, all tiles of some programs among them.
    forbidden = np.where(np.arange(400) % 7 < 5, -np.inf, 0.0) + np.where(
        np.arange(400) < 100, -np.inf, 0.0
    )
    y = y[5:] + rng.normal(size=(3, 400))
    *args, _ = logits_as_arguments(y)
    bias = jnp.asarray(forbidden, jnp.float32)
    got = head_confidence(*args, bias, options=HeadConfidenceOptions(400), implementation=which)
    assert_near(got, np.float64(np.float32(y)) + forbidden, 1e-6)
    # All of them: no distribution, and nothing that a threshold is compared with.
    got = head_confidence(
        *args, jnp.full((400,), -jnp.inf), options=HeadConfidenceOptions(400), implementation=which
    )
    assert np.asarray(got.token).tolist() == [0] * 3
    assert all(np.isnan(a).all() for a in got[1:])


@unremarked
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("norm", [RMS, pytest.param(None, marks=pytest.mark.slow)])
def test_what_is_nan_stays(which, norm, interpreted):
    options = HeadConfidenceOptions(190, norm, softcap=10.0)
    args = arguments(d=32, options=options, bias=norm is not None)
    x, *rest = args
    x = x.at[2, 5].set(jnp.nan).at[4].set(jnp.inf)
    got = head_confidence(x, *rest, options=options, implementation=which)
    clean = head_confidence(*args, options=options, implementation=which)
    bad = [2, 4]
    assert np.asarray(got.token)[bad].tolist() == [0, 0]
    for a, b in zip(got[1:], clean[1:], strict=True):
        assert np.isnan(np.asarray(a)).tolist() == [i in bad for i in range(6)]
        assert (np.delete(np.asarray(a), bad) == np.delete(np.asarray(b), bad)).all()
    # One token alone that is NaN says nothing of the others either.
    x, scale, bias, table, head_bias = args
    table = table.at[150, 0].set(jnp.nan)
    got = head_confidence(x, scale, bias, table, head_bias, options=options, implementation=which)
    assert all(np.isnan(a).all() for a in got[1:]) and not np.asarray(got.token).any()
    # Of what pads the vocabulary nothing is read.
    table = args[3].at[190:].set(jnp.nan)
    got = head_confidence(x, scale, bias, table, head_bias, options=options, implementation=which)
    assert all((a == b).all() for a, b in zip(got, clean, strict=True))


def test_gradients_are_the_references(interpreted):
    options = HeadConfidenceOptions(190, LAYER, softcap=10.0, temperature=0.8)
    inputs = arguments(options=options)
    weight = jnp.arange(1.0, 7.0)

    def cost(top, second, lse, entropy):
        return jnp.sum(weight * (top**2 + 3 * second + 0.1 * lse**2 - entropy))

    def by_op(implementation, *inputs):
        got = head_confidence(*inputs, options=options, implementation=implementation)
        return cost(*got[1:])

    def by_hand(x, scale, bias, table, head_bias):
        x = x - jnp.mean(x, 1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + LAYER.eps)
        y = jnp.dot(x * scale[None] + bias[None], table.T, precision="highest") + head_bias[None]
        logp = jax.nn.log_softmax((10.0 * jnp.tanh(y / 10.0) / 0.8)[:, :190], 1)
        most = jax.lax.top_k(logp, 2)[0]
        lse = jax.nn.logsumexp((10.0 * jnp.tanh(y / 10.0) / 0.8)[:, :190], 1)
        entropy = -jnp.sum(jnp.exp(logp) * logp, 1)
        return cost(jnp.exp(most[:, 0]), jnp.exp(most[:, 1]), lse, entropy)

    numbers = tuple(range(5))
    want = jax.jit(jax.grad(by_hand, numbers))(*inputs)
    for which in WHICH:
        got = jax.jit(jax.grad(partial(by_op, which), numbers))(*inputs)
        for a, b in zip(got, want, strict=True):
            assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()


def test_under_jit_vmap_and_scan(interpreted):
    options = HeadConfidenceOptions(100, RMS)
    x, *rest = arguments(n=12, d=32, rows=100, options=options)

    def run(x, *w):
        return head_confidence(x, *w, options=options, implementation="interpreter")

    want = run(x, *rest)

    def fold(a):
        return a.reshape(3, 4, *a.shape[1:])

    def same(got, want=want):
        assert (got.token.reshape(-1) == want.token).all()
        for a, b in zip(got[1:], want[1:], strict=True):
            np.testing.assert_allclose(a.reshape(-1), b, rtol=1e-5, atol=1e-7)

    same(jax.vmap(lambda x: run(x, *rest))(fold(x)))
    same(jax.jit(jax.vmap(jax.vmap(lambda x: run(x, *rest))))(fold(x)[:, :, None]))
    same(jax.jit(partial(jax.lax.scan, lambda c, x: (c, run(x, *rest)), 0))(fold(x))[1])
    # Tables of their own for each: one by one.
    scale, bias, table, head_bias = rest
    tables = jnp.stack([table, 2 * table])
    each = jax.jit(jax.vmap(lambda table: run(x, scale, bias, table, head_bias)))(tables)
    same(jax.tree.map(lambda a: a[0], each))
    same(jax.tree.map(lambda a: a[1], each), jax.jit(run)(x, scale, bias, tables[1], head_bias))


@unremarked
@pytest.mark.parametrize("which", WHICH)
def test_a_vocabulary_over_shards(which, interpreted):
    # The last shard holds padding alone, the one before it some.
    options = HeadConfidenceOptions(170, LAYER, softcap=20.0)
    x, scale, bias, table, head_bias = arguments(n=8, d=32, rows=240, options=options)
    table = table.at[100].set(table[33])  # equals of different shards
    head_bias = head_bias.at[100].set(90.0).at[33].set(90.0)
    x = x.at[5, 0].set(jnp.nan)
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))

    def run(x, scale, bias, table, head_bias):
        return head_confidence(
            x, scale, bias, table, head_bias, options=options, axis="model", implementation=which
        )

    specs = (P(), P(), P(), P("model"), P("model"))
    # That results are the same on all shards of the vocabulary is known to `shard_map`.
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P()))
    one = jax.jit(partial(head_confidence, options=options, implementation="reference"))
    for of_head in (head_bias, head_bias.at[33].set(0.0)):
        args = x, scale, bias, table, of_head
        got, want = sharded(*args), one(*args)
        assert (got.token == want.token).all()
        good = [i for i in range(8) if i != 5]
        assert all(np.isnan(a[5]) for a in got[1:])
        for a, b in zip(got[1:], want[1:], strict=True):
            np.testing.assert_allclose(a[jnp.array(good)], b[jnp.array(good)], rtol=1e-5, atol=1e-6)
    assert np.asarray(want.token)[good].tolist() == [100] * 7
    tied = sharded(x, scale, bias, table, head_bias)
    assert np.asarray(tied.token)[good].tolist() == [33] * 7
    assert (tied.top == tied.second)[jnp.array(good)].all()


def test_gradients_of_a_vocabulary_over_shards(interpreted):
    options = HeadConfidenceOptions(170, RMS)
    args = arguments(n=8, d=32, rows=240, options=options)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    specs = (P("data"), P(), P(), P("model"), P("model"))

    def cost(axis, implementation, *args):
        got = head_confidence(*args, options=options, axis=axis, implementation=implementation)
        total = jnp.sum(got.top + got.second * 2 + got.entropy * got.lse)
        return jax.lax.psum(total, "data") if axis else total

    def sharded(which):
        return jax.shard_map(
            partial(cost, "model", which), mesh=mesh, in_specs=specs, out_specs=P()
        )

    numbers = tuple(range(5))
    want = jax.jit(jax.grad(partial(cost, None, "reference"), numbers))(*args)
    for which in WHICH:
        got = jax.jit(jax.grad(sharded(which), numbers))(*args)
        for a, b in zip(got, want, strict=True):
            assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()


def left_of(y) -> LogitStatistics:
    """Statistics [n] of logits [n, v], in float64."""
    peak = y.max(1)
    below = np.maximum(y - np.where(peak > -np.inf, peak, 0.0)[:, None], -1e3)
    second = np.sort(y, 1)[:, -2] if y.shape[1] > 1 else np.full(len(y), -np.inf)
    e = np.exp(below)
    return LogitStatistics(peak, y.argmax(1), second, e.sum(1), (e * below).sum(1))


def merged(parts) -> LogitStatistics:
    """`merge` of up to 12 parts, and of nothing in place of the rest."""
    nothing = LogitStatistics(*(np.full(2, a) for a in (-np.inf, 0, -np.inf, 0.0, 0.0)))
    arrays = zip(*parts, *[nothing] * (12 - len(parts)), strict=True)
    dtypes = LogitStatistics(np.float32, np.int32, *[np.float32] * 3)
    return _merge(
        LogitStatistics(*(np.stack(a).astype(t) for a, t in zip(arrays, dtypes, strict=True)))
    )


_merge = jax.jit(merge)


@settings(max_examples=60)
@given(st.data())
def test_any_parts_of_a_vocabulary_make_the_whole(data):
    value = st.sampled_from([-np.inf, -1e30, -300.0, -2.0, 0.5, 0.75, 3.0, 1e4])
    v = data.draw(st.integers(1, 12))
    y = np.array([data.draw(st.lists(value, min_size=v, max_size=v)) for _ in range(2)])
    cuts = sorted(data.draw(st.sets(st.integers(1, v - 1)))) if v > 1 else []
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, v], strict=True):
        s = left_of(y[:, begin:end])
        parts.append(s._replace(token=s.token + begin))
    halves = data.draw(st.integers(0, len(parts)))  # of which either may be empty
    trees = merged(parts), merged([merged(parts[:halves]), merged(parts[halves:])])
    with warnings.catch_warnings():  # of rows that are -inf throughout
        warnings.simplefilter("ignore", RuntimeWarning)
        want = exact(y)
    alive = y.max(1) > -np.inf
    for s in trees:
        got = HeadStatistics(*head_statistics(s))
        assert np.asarray(got.token)[alive].tolist() == want.token[alive].tolist()
        assert np.isnan(np.asarray(got.top)).tolist() == (~alive).tolist()
        for a, b in zip(got[1:], want[1:], strict=True):
            np.testing.assert_allclose(np.asarray(a)[alive], b[alive], rtol=1e-5, atol=1e-6)


def test_no_rows(interpreted):
    x, *rest = arguments()
    for which in (None, *WHICH):
        got = head_confidence(
            x[:0], *rest, options=HeadConfidenceOptions(200, RMS), implementation=which
        )
        assert [a.shape for a in got] == [(0,)] * 5


def test_what_does_not_fit_is_named():
    x, scale, bias, table, head_bias = arguments()
    run = partial(head_confidence, options=HeadConfidenceOptions(200, RMS))
    with pytest.raises(ConfigError, match=r"x = \(2, 6, 96\): must be states \[n, d\]"):
        run(jnp.stack([x, x]), scale, bias, table, head_bias)
    with pytest.raises(ConfigError, match=r"table = \(96,\): must be rows of the vocabulary"):
        run(x, scale, bias, table[0], head_bias)
    with pytest.raises(ConfigError, match=r"table = \(200, 95\): must be rows .* \(v, 96\)"):
        run(x, scale, bias, table[:, 1:], head_bias)
    with pytest.raises(ConfigError, match=r"head_bias = \(199,\): must be of shape \(200,\)"):
        run(x, scale, bias, table, head_bias[1:])
    with pytest.raises(
        ConfigError, match=r"scale = None: does not go with HeadConfidenceOptions.norm = NormO"
    ):
        run(x, None, None, table, head_bias)
    with pytest.raises(
        ConfigError, match=r"bias = \(96,\): does not go with HeadConfidenceOptions.norm = None"
    ):
        head_confidence(x, None, bias, table, head_bias, options=HeadConfidenceOptions(200))
    with pytest.raises(ConfigError, match="vocab_size = 201: must be at most 200, the rows"):
        head_confidence(x, scale, bias, table, head_bias, options=HeadConfidenceOptions(201, RMS))
    with pytest.raises(ConfigError, match="implementation = 'cuda': must be one of 'reference'"):
        run(x, scale, bias, table, head_bias, implementation="cuda")
    for given_, why in (
        (dict(vocab_size=0), "vocab_size = 0: must be an integer of at least 1"),
        (dict(vocab_size=2, softcap=0.0), "softcap = 0.0: must be above 0"),
        (dict(vocab_size=2, temperature=-1.0), "temperature = -1.0: must be above 0"),
    ):
        with pytest.raises(ConfigError, match=why):
            HeadConfidenceOptions(**given_)


def test_a_dtype_without_a_kernel_is_the_references_with_a_warning(interpreted, monkeypatch):
    monkeypatch.setattr(call, "_warned", set())
    options = HeadConfidenceOptions(200)
    x, _, _, table, head_bias = arguments(options=options, bias=False)
    x = x.astype(jnp.float8_e4m3fn)
    run = partial(head_confidence, x, None, None, table, head_bias, options=options)
    with pytest.warns(
        UserWarning, match="no kernel covers float8_e4m3fn states; the reference runs instead"
    ):
        got = run(implementation="interpreter")
    want = run(implementation="reference")
    assert all((a == b).all() for a, b in zip(got, want, strict=True))
    run(implementation="interpreter")  # warns once
