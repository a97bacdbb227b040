"""`linear_cross_entropy`: its kernels in Triton's interpreter, beside float64, its reference, and
the loss that the library has."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kernel_checks import ROUNDING, names, small, wide

from eejax.common.errors import ConfigError
from eejax.kernels import call
from eejax.kernels.linear_cross_entropy import api
from eejax.kernels.linear_cross_entropy.api import linear_cross_entropy
from eejax.kernels.linear_cross_entropy.arg_specs import EVERYTHING, SPECS, draw
from eejax.kernels.linear_cross_entropy.arg_specs import value_and_gradients as through
from eejax.kernels.linear_cross_entropy.reference import LossOptions
from eejax.losses import cross_entropy
from eejax.losses.objective import LossObjective
from eejax.models.exits import Head, HeadOptions

# Sums of at most a few hundred float32 products, relative to the largest entry of each result; in
# whatever dtype the products are of, which are exact.
FP32 = 2.0**-18


@pytest.fixture
def chunks_of_eight(monkeypatch):
    """Tokens are taken eight at a time."""
    monkeypatch.setattr(api, "SCRATCH", 1)


def exact(options: LossOptions, h, table, bias, labels, weights):
    """(cost, -log p) summed in float64, and the gradients, from formulas and not by autodiff."""
    h, table, weights, labels = wide(h), wide(table), wide(weights), np.asarray(labels)
    size, padding = options.vocab_size, len(table) - options.vocab_size
    table, counted = table[:size], labels >= 0
    y = h @ table.T + (0.0 if bias is None else wide(bias)[:size])
    slope = np.ones_like(y)
    if options.softcap is not None:
        tanh = np.tanh(y / options.softcap)
        y, slope = options.softcap * tanh, 1 - tanh**2
    y, slope = y / options.temperature, slope / options.temperature
    top = y.max(1, keepdims=True)
    lse = (top + np.log(np.exp(y - top).sum(1, keepdims=True)))[:, 0]
    p, hot = np.exp(y - lse[:, None]), labels[:, None] == np.arange(size)
    nll = np.where(counted, lse - (y * hot).sum(1), 0.0)
    factor = p.max(1) if options.confidence_weighted else np.ones(len(p))
    cost = np.where(counted, nll * factor + options.z_loss * lse**2, 0.0)
    g = (p - hot) * factor[:, None] + p * (2 * options.z_loss * lse)[:, None]
    g = g * (weights * counted)[:, None] * slope

    def pad(a):
        return np.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1))

    gradients = g @ table, pad(g.T @ h), None if bias is None else pad(g.sum(0)), cost
    return ((weights * cost).sum(), (weights * nll).sum()), gradients


def assert_near(got, want, tolerances) -> None:
    """tolerances: for each result, relative to its largest entry."""
    for a, b, tolerance in zip(got, want, tolerances, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-3, np.abs(b).max()))


def assert_exact(spec, args, implementation: str) -> None:
    total, gradients, plain = jax.jit(partial(spec.run, implementation=implementation))(*args)
    want, want_gradients = exact(spec.options["options"], *args)
    assert_near(total, want, (FP32, FP32))
    assert_near(plain, want, (FP32, FP32))
    # Gradients of logits are rounded as states are, and what they are made of once more.
    bound = 2 * ROUNDING[args[0].dtype.name]
    assert_near(gradients, want_gradients, (bound, bound, bound, 4 * FP32))
    assert [a.dtype for a in gradients if a is not None] == [
        a.dtype for i, a in enumerate(args) if a is not None and i != 3
    ]


@small(SPECS)
def test_kernels_beside_float64(spec, interpreted):
    assert_exact(spec, spec.args(1), "interpreter")


@pytest.mark.parametrize(
    "spec", [s for s in SPECS if s.small and "float16-" == s.name[:8]], ids=names
)
def test_the_reference_beside_float64_in_chunks(spec, chunks_of_eight):
    assert_exact(spec, spec.args(2), "reference")


def arguments(n=20, d=72, v=300, padding=4, bias=True, dtype="float32", **options):
    args = draw(jax.random.key(3), n, d, v, padding, bias, dtype)
    return args, LossOptions(v - padding, **options)


def sums_and_gradients(h, table, *args, **kwargs):
    into = jnp.zeros(table.shape, jnp.float32)
    return linear_cross_entropy(h, table, *args, into=into, **kwargs)


def loss(options: LossOptions, h, table, bias, labels, weights, axis=None):
    """(cost, -log p) by the differentiable loss, which takes the op for a chunk."""
    head = Head(table, bias, HeadOptions(options.vocab_size, options.softcap, options.temperature))
    total, sums = cross_entropy.exits_cross_entropy(
        (h,),
        (head,),
        labels,
        jnp.ones((1,)),
        weights=(weights,),
        objectives=(LossObjective(options.z_loss, options.confidence_weighted),),
        axis=axis,
    )
    return total, sums[0]


def gradients_of(cost, args):
    """Of cost(h, table, bias, labels, weights), in all but the labels."""
    return jax.jit(jax.grad(cost, tuple(i for i in (0, 1, 2, 4) if args[i] is not None)))(*args)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param(EVERYTHING, id="everything"),
    ],
)
def test_beside_autodiff_of_the_logits(options, interpreted, chunks_of_eight):
    args, options = arguments(**options)

    def by_hand(h, table, bias, labels, weights):
        y = jnp.dot(h, table.T, precision="highest") + bias[None]
        if options.softcap is not None:
            y = jnp.tanh(y / options.softcap) * options.softcap
        log_p = jax.nn.log_softmax(y[:, : options.vocab_size] / options.temperature)
        nll = -jnp.sum(jax.nn.one_hot(labels, options.vocab_size) * log_p, 1)
        z = jax.nn.logsumexp(y[:, : options.vocab_size] / options.temperature, 1)
        if options.confidence_weighted:
            nll = nll * jax.lax.stop_gradient(jnp.exp(log_p.max(1)))
        return jnp.sum(jnp.where(labels >= 0, weights * (nll + options.z_loss * z**2), 0.0))

    want = gradients_of(by_hand, args)
    for which in ("reference", "interpreter"):
        run = partial(sums_and_gradients, options=options, implementation=which)
        assert_near(jax.jit(run)(*args)[1], want, [1e-5] * 4)
    with call.implementation("interpreter"):
        got = gradients_of(lambda *a: loss(options, *a)[0], args)
    assert_near(got, want, [1e-5] * 4)


@pytest.mark.parametrize(
    "dtype, options, objective",
    [
        (
            "float32",
            HeadOptions(296, 5.0, 0.7),
            LossObjective(z_loss=0.01, confidence_weighted=True),
        ),
        ("bfloat16", HeadOptions(296), LossObjective()),
    ],
    ids=["float32-everything", "bfloat16-plain"],
)
def test_it_is_the_loss_that_the_library_has(dtype, options, objective, interpreted):
    args, mine = arguments(
        dtype=dtype,
        softcap=options.softcap,
        temperature=options.temperature,
        z_loss=objective.z_loss,
        confidence_weighted=objective.confidence_weighted,
    )
    args = (args[0], args[1].astype(jnp.float32), *args[2:])
    total, sums = jax.jit(partial(loss, mine))(*args)
    want = gradients_of(lambda *a: loss(mine, *a)[0], args)
    bound = 2 * ROUNDING[dtype]
    for which in ("reference", "interpreter"):
        run = partial(sums_and_gradients, options=mine, implementation=which, scale=0.3)
        got, d = jax.jit(run)(*args)
        assert_near(got, (total, sums), (FP32, FP32))
        scaled = (*(None if g is None else g.astype(jnp.float32) * 0.3 for g in want[:3]), want[3])
        assert_near([g.astype(jnp.float32) for g in d], scaled, (bound, bound, bound, 1e-5))
    if objective == LossObjective():
        h, table, bias, labels, _ = args
        alone = cross_entropy.linear_cross_entropy(h, Head(table, bias, options), labels)
        got, _ = linear_cross_entropy(h, table, bias, labels, options=mine)
        assert_near((got.cost,), (alone,), (FP32,))


def test_what_is_added_scaled_and_skipped(interpreted, chunks_of_eight):
    (h, table, bias, labels, weights), options = arguments(z_loss=0.01)
    run = partial(sums_and_gradients, options=options, implementation="interpreter")
    total, d = run(h, table, bias, labels, weights)
    args = h, table, bias, labels, weights
    both, want, _ = through(*args, options=options, implementation="interpreter")
    assert_near([*total, *d], [*both, *want], [0] * 6)
    into = jnp.arange(table.size, dtype=jnp.float32).reshape(table.shape) * 1e-3
    add = partial(linear_cross_entropy, options=options, implementation="interpreter", into=into)
    scaled, more = add(h, table, bias, labels, weights, scale=0.5)
    assert_near(scaled, total, (0, 0))
    want = (0.5 * d.h, into + 0.5 * d.table, 0.5 * d.bias, d.weights)
    assert_near(more, want, [1e-6] * 4)
    traced = jax.jit(lambda skip: add(h, table, bias, labels, weights, skip=skip))
    total_again, again = traced(False)
    assert_near(total_again, total, (1e-6, 1e-6))
    assert_near(again, d._replace(table=d.table + into), [1e-6] * 4)
    none, kept = traced(True)
    assert not any(np.any(a) for a in (*none, kept.h, kept.bias, kept.weights))
    assert (kept.table == into).all()
    for skip in (False, True):
        alone = partial(linear_cross_entropy, options=options, implementation="interpreter")
        sums, _ = alone(*args, skip=jnp.bool(skip))
        assert_near(sums, none if skip else total, (1e-6, 1e-6))


def test_no_rows(interpreted):
    (h, table, bias, labels, weights), options = arguments()
    args = h[:0], table, bias, labels[:0], weights[:0]
    for which in (None, "reference", "interpreter"):
        sums, d, _ = through(*args, options=options, implementation=which)
        assert [float(s) for s in sums] == [0.0, 0.0]
        assert d.h.shape == (0, 72) and not d.table.any() and not d.bias.any()


def test_no_token_counts(interpreted):
    (h, table, bias, labels, weights), options = arguments(**EVERYTHING)
    for ignored, by in ((jnp.full_like(labels, -1), weights), (labels, weights * 0)):
        for which in ("reference", "interpreter"):
            total, gradients, plain = through(
                h, table, bias, ignored, by, options=options, implementation=which
            )
            leaves = jax.tree.leaves((total, plain, gradients._replace(weights=None)))
            assert not any(np.any(a) for a in leaves)
            assert np.any(gradients.weights) == (by is not weights)


@pytest.mark.parametrize(
    "label", [-2, 296, *(pytest.param(n, marks=pytest.mark.slow) for n in (299, 2**31 - 1))]
)
def test_a_label_that_is_no_token_makes_nan(label, interpreted):
    (h, table, bias, labels, weights), options = arguments()
    labels = labels.at[3].set(label)
    for which in ("reference", "interpreter"):
        total, d, plain = through(
            h, table, bias, labels, weights, options=options, implementation=which
        )
        assert np.isnan([*total, *plain]).all()
        assert np.isnan(d.table).all() and np.isnan(d.bias).all()
        bad = np.isnan(np.asarray(d.h)).all(1)
        assert bad.tolist() == [i == 3 for i in range(20)]


def test_tokens_that_a_bias_rules_out_are_as_if_they_were_not(interpreted):
    """-infinity for whole tiles of them."""
    (h, table, bias, labels, weights), _ = arguments()
    bias = jnp.where(jnp.arange(300) < 100, bias, -jnp.inf)
    args = h, table, bias, jnp.where(labels >= 100, 7, labels), weights
    for which in ("reference", "interpreter"):
        got, want = (
            jax.tree.leaves(through(*args, options=LossOptions(size), implementation=which))
            for size in (296, 100)
        )
        assert_near(got, want, [1e-6] * 8)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's, of the interpreter
def test_nan_states_stay(interpreted):
    (h, *rest), options = arguments()
    h = h.at[2, 5].set(jnp.nan)
    got, _ = linear_cross_entropy(h, *rest, options=options, implementation="interpreter")
    assert np.isnan(got.cost)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.slow)])
def test_huge_logits_do_not_overflow(dtype, interpreted):
    (h, table, bias, labels, weights), options = arguments(dtype=dtype, z_loss=1e-4)
    args = h * 60, table * 60, bias, labels, weights  # a deviation of 1e4
    assert wide(args[0] @ args[1].T).max() > 1e4
    want, want_d = exact(options, *args)
    total, d, plain = through(*args, options=options, implementation="interpreter")
    assert_near([*total, *plain], [*want, *want], [1e-5] * 4)
    # A logit of 1e4 has an error of 1e-3 in float32, and so has what p and 1 - p are taken of.
    bound = 1e-2 + 2 * ROUNDING[dtype]
    assert_near(d, want_d, (bound, bound, bound, 1e-5))


def test_confident_tokens_keep_their_small_gradients(interpreted):
    """1 - p(label) = 1e-3 is less than the rounding of a probability near 1 in bfloat16."""
    n, d, v = 16, 64, 40
    labels = jnp.arange(n, dtype=jnp.int32)
    table = jnp.eye(v, d, dtype=jnp.bfloat16)
    h = (jax.nn.one_hot(labels, d) * 10.5).astype(jnp.bfloat16)
    args, options = (h, table, None, labels, jnp.ones((n,))), LossOptions(v)
    _, want = exact(options, *args)
    _, got = sums_and_gradients(*args, options=options, implementation="interpreter")
    rows = np.arange(n)
    own = np.asarray(got.table)[rows, rows] / want[1][rows, rows]
    assert np.abs(own - 1).max() < 2.0**-8


def test_runs_are_equal_to_the_bit_and_under_vmap_and_scan(interpreted):
    (h, table, _, labels, weights), options = arguments(n=12, bias=False, **EVERYTHING)

    def run(h, table, labels, weights):
        return sums_and_gradients(
            h, table, None, labels, weights, options=options, implementation="interpreter"
        )

    one = jax.jit(run)
    want = jax.tree.leaves(one(h, table, labels, weights))
    again = jax.tree.leaves(one(h, table, labels, weights))
    assert all((a == b).all() for a, b in zip(want, again, strict=True))

    def near(got, want):
        return assert_near(*map(jax.tree.leaves, (got, want)), [1e-6] * 5)

    near(run(h, table, labels, weights), want)
    xs = [a.reshape(3, 4, *a.shape[1:]) for a in (h, labels, weights)]
    parts = [one(xs[0][i], table, xs[1][i], xs[2][i]) for i in range(3)]
    parts = jax.tree.map(lambda *a: jnp.stack(a), *parts)
    assert_near((parts[1].h.reshape(h.shape),), (want[2],), (1e-6,))
    near(jax.jit(jax.vmap(run, (0, None, 0, 0)))(xs[0], table, *xs[1:]), parts)

    def body(c, xs):
        return (c, run(xs[0], table, *xs[1:]))

    near(jax.jit(lambda: jax.lax.scan(body, 0, xs)[1])(), parts)
    tables = jnp.stack([table, 2 * table])
    each = jax.jit(jax.vmap(run, (None, 0, None, None)))(h, tables, labels, weights)
    near(jax.tree.map(lambda a: a[0], each), want)
    near(jax.tree.map(lambda a: a[1], each), one(h, tables[1], labels, weights))

    # The same through its derivative.
    def cost(h, table):
        return loss(options, h, table, None, labels, weights)[0]

    with call.implementation("interpreter"):
        each = jax.jit(jax.vmap(jax.grad(cost, (0, 1)), (None, 0)))(h, tables)
    assert_near([a[0] for a in each], want[2:4], [1e-6] * 2)


@pytest.mark.parametrize(
    "which, data",
    [
        ("interpreter", 2),
        ("reference", 2),
        pytest.param("interpreter", 1, marks=pytest.mark.slow),
    ],
)
def test_over_shards_of_vocabulary_and_tokens(which, data, interpreted, monkeypatch):
    monkeypatch.setattr(api, "FEW", 8)
    # The last of four shards has no token, the one before it 30 of them.
    args, options = arguments(n=24, v=400, padding=170, **EVERYTHING)
    mesh = Mesh(np.array(jax.devices()[: 4 * data]).reshape(data, 4), ("data", "model"))
    by = P("data"), P("model"), P("model"), P("data"), P("data")

    def local(*args):
        return jax.lax.psum(loss(options, *args, axis="model"), "data")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=by, out_specs=P())
    want, want_d = exact(options, *args)
    with call.implementation(which):
        assert_near(jax.jit(sharded)(*args), want, (FP32, FP32))
        got = gradients_of(lambda *a: sharded(*a)[0], args)
    assert_near(got, want_d, (1e-5,) * 4)
    run = partial(sums_and_gradients, options=options, axis="model", implementation=which)

    def partly(*args):
        total, d = run(*args)

        def everywhere(a):
            return jax.lax.pmean(jax.lax.psum(a, "data"), "model")

        whole = jax.lax.psum(d.h, "model"), jax.lax.psum((d.table, d.bias), "data")
        return jax.tree.map(everywhere, total), whole

    outs = P(), (P("data"), (P("model"), P("model")))
    sharded = jax.shard_map(partly, mesh=mesh, in_specs=by, out_specs=outs)
    total, (d_h, (d_table, d_bias)) = jax.jit(sharded)(*args)
    assert_near([*total, d_h, d_table, d_bias], [*want, *want_d[:3]], [1e-5] * 5)


def test_what_does_not_fit_is_named():
    (h, table, bias, labels, weights), options = arguments()
    run = partial(linear_cross_entropy, options=options)
    with pytest.raises(ConfigError, match=r"h = \(1, 20, 72\): must be states \[n, d\]"):
        run(h[None], table, bias, labels)
    with pytest.raises(ConfigError, match=r"table = \(300, 71\): must be rows .* \(v, 72\)"):
        run(h, table[:, 1:], bias, labels)
    with pytest.raises(ConfigError, match=r"weights = \(19,\): must be of shape \(20,\)"):
        run(h, table, bias, labels, weights[1:])
    with pytest.raises(ConfigError, match="labels = .*float32.*: must be signed integers"):
        run(h, table, bias, labels.astype(jnp.float32))
    with pytest.raises(ConfigError, match="options.vocab_size = 296: must be at most the table's"):
        run(h, table[:200], None, labels)
    with pytest.raises(ConfigError, match=r"into = .*: must be float32 of shape \(300, 72\)"):
        run(h, table, bias, labels, into=table.T)
    with pytest.raises(ConfigError, match="implementation = 'cuda': must be one of 'reference'"):
        run(h, table, bias, labels, implementation="cuda")
    with pytest.raises(ConfigError, match=r"LossOptions.softcap = 0.0: must be positive or None"):
        LossOptions(5, softcap=0.0)


def test_a_dtype_without_a_kernel_is_the_references_with_a_warning(interpreted):
    with jax.enable_x64(True):
        (h, table, bias, labels, weights), options = arguments()
        args = h.astype(jnp.float64), table, bias, labels, weights

        def run(which):
            return jax.jit(
                lambda: sums_and_gradients(*args, options=options, implementation=which)
            )()

        with pytest.warns(UserWarning, match="no kernel covers float64 states; the reference runs"):
            got = run("interpreter")
        want = run("reference")
        again = run("interpreter")  # warns once
    assert got[1].h.dtype == np.float64
    for a in (got, again):
        assert all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (a, want)), strict=True))


LOWERED = """
import json, re, sys
import jax, jax.numpy as jnp
import compiled_kernels as compiled
from eejax.kernels import call
from eejax.kernels.linear_cross_entropy.api import linear_cross_entropy
from eejax.kernels.linear_cross_entropy.reference import LossOptions

n, d = 16384, 1024
shape = jax.ShapeDtypeStruct
for v in (32768, 131072):
    run = lambda h, table, labels, v=v: linear_cross_entropy(
        h,
        table,
        None,
        labels,
        options=LossOptions(v),
        into=jnp.zeros(table.shape),
        implementation="triton",
    )
    args = shape((n, d), "bfloat16"), shape((v, d), "float32"), shape((n,), "int32")
    with call.compute_capability(90):
        lowered = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = set(re.findall(r"tensor<((?:\\d+x)+)(f32|bf16|i32|i1|f64|i64)>", lowered))
    shapes = [([int(s) for s in sizes.split("x")[:-1]], dtype) for sizes, dtype in found]
    atomic = [
        k.name for k in compiled.kernels(run, *args, capability=90)
        if re.search(r"\\b(atom|red)\\.", k.ptx)
    ]
    print(json.dumps(dict(n=n, d=d, v=v, shapes=shapes, atomic=atomic)))
"""


def test_memory_does_not_grow_with_the_vocabulary(for_cuda):
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOWERED], env=for_cuda, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    most = {}
    for told in map(json.loads, done.stdout.splitlines()):
        n, d, v = told["n"], told["d"], told["v"]
        assert told["atomic"] == []
        sizes = {"f32": 4, "bf16": 2, "i32": 4, "i1": 1}
        of_logits = [(s, t) for s, t in told["shapes"] if np.prod(s) != v * d]
        assert all(np.prod(s) <= n * v // 2 for s, _ in of_logits)
        most[v] = max(np.prod(s) * sizes[t] for s, t in of_logits)
        assert ([n, d], "bf16") in [(s, t) for s, t in of_logits]
    assert most == {32768: api.SCRATCH, 131072: api.SCRATCH}
