"""`decode_attention`: its kernels in Triton's interpreter, beside float64 and its reference."""

from __future__ import annotations

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_attention import exact, same_as_exact
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kernel_checks import small, wide

from eejax.common.errors import ConfigError
from eejax.kernels import interpreter
from eejax.kernels.decode_attention.api import decode_attention
from eejax.kernels.decode_attention.arg_specs import SPECS, draw, layout
from eejax.kernels.decode_attention.reference import AttentionOptions
from eejax.models import attention
from eejax.models.config import ModelConfig

BOTH = ("reference", "interpreter")


@pytest.mark.parametrize("which", BOTH)
@small(SPECS)
def test_beside_float64(spec, which, interpreted):
    args = spec.args(4)
    run = jax.jit(partial(spec.run, implementation=which))
    same_as_exact(run(*args), spec.options["options"], args)


@st.composite
def calls(draw):
    """Options and arguments of slots with rows and without, cut into spans anywhere, in any order,
    with rows of nobody and spans that are not there between them."""
    slots, width = draw(st.integers(1, 4)), draw(st.sampled_from([1, 4]))
    n_kv, g, h = draw(st.sampled_from([(1, 1, 16), (2, 3, 20)]))
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    s = draw(st.sampled_from([24, 150]))
    slot, position, first, most = [], [], [], 1
    for i in draw(st.permutations(range(slots))):
        count = draw(st.integers(0, 9))
        start = draw(st.integers(0, s - count))
        cut = 0
        while cut < count:
            first.append(len(slot) + cut)
            cut += draw(st.integers(1, min(width, count - cut)))
        slot += [i] * count
        position += range(start, start + count)
        nobody = draw(st.integers(0, 2))
        slot += [draw(st.sampled_from([slots, slots + 3, -1]))] * nobody
        position += [draw(st.integers(0, s - 1))] * nobody
        most = max(most, count)
    slot, position = (a or [b] for a, b in ((slot, slots), (position, 0)))
    first = draw(st.permutations(first + [len(slot), len(slot) + 9]))
    options = AttentionOptions(
        width,
        most + draw(st.integers(0, 1)),
        h**-0.5,
        draw(st.sampled_from([None, 1, 5, 70])),
        draw(st.sampled_from([None, 3.0])),
    )
    rng, r = np.random.default_rng(draw(st.integers(0, 99))), len(slot)

    def make(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype))

    slopes = jnp.asarray(rng.uniform(0, 0.5, (n_kv, g)), jnp.float32)
    return options, (
        make(r, n_kv, g, h),
        make(r, n_kv, h),
        make(r, n_kv, h),
        make(slots * n_kv, s, h),
        make(slots * n_kv, s, h),
        *(jnp.asarray(a, jnp.int32) for a in (slot, position, first)),
        draw(st.sampled_from([None, slopes])),
    )


@partial(jax.jit, static_argnums=0, static_argnames="which")
def _attend(options, *args, which):
    *own, slopes = args
    return decode_attention(*own, options=options, slopes=slopes, implementation=which)


def attend(options, *args, which="interpreter"):
    return _attend(options, *args, which=which)


@settings(max_examples=2)
@given(calls())
def test_any_layout_beside_float64(interpreted, call):
    check_beside_float64(call)


@pytest.mark.slow
@settings(max_examples=60)
@given(calls())
def test_any_layout_beside_float64_widely(interpreted, call):
    check_beside_float64(call)


def check_beside_float64(call):
    options, args = call
    for which in BOTH:
        same_as_exact(attend(options, *args, which=which), options, args)


def arguments(dtype="float32", starts=(70, 30, 100), s=200, window=None, slopes=False):
    """Options and arguments of three slots of 3, 6 and 2 rows from `starts` on, and 2 of nobody."""
    counts, (n_kv, g, h) = (3, 6, 2), (2, 2, 16)
    args = draw(
        jax.random.key(1),
        counts,
        s,
        n_kv,
        g,
        h,
        width=4,
        nobody=2,
        no_span=1,
        slopes=slopes,
        dtype=dtype,
    )
    rows = map(jnp.asarray, layout(counts, starts, 4, 2, 1))
    return AttentionOptions(4, 6, h**-0.5, window), (*args[:5], *rows, args[8])


def as_bits(a) -> np.ndarray:
    return np.asarray(a).view(np.uint8)


@pytest.mark.parametrize("which", BOTH)
@pytest.mark.parametrize(
    "dtype, window",
    [
        ("float32", None),
        ("bfloat16", 6),
        pytest.param("float32", 6, marks=pytest.mark.slow),
        pytest.param("bfloat16", None, marks=pytest.mark.slow),
    ],
)
def test_garbage_that_nobody_attends_to_does_not_leak(dtype, window, which, interpreted):
    options, args = arguments(dtype, window=window)
    want, *_ = attend(options, *args, which=which)
    keys, values, (slot, position) = *map(np.array, args[3:5]), map(np.asarray, args[5:7])
    written, kept = np.zeros(keys.shape[:2], bool), np.zeros(keys.shape[:2], bool)
    for i in range(3):
        start = position[slot == i].min()
        kept[2 * i : 2 * i + 2, max(0, start - window + 1) if window else 0 : start] = True
        written[2 * i : 2 * i + 2, position[slot == i]] = True
    for a in (keys, values):
        junk = np.array([np.nan, np.inf, -np.inf, -0.0], a.dtype)
        a[~kept] = np.resize(junk, (int((~kept).sum()), a.shape[2]))
    got, *caches = attend(
        options, *args[:3], jnp.asarray(keys), jnp.asarray(values), *args[5:], which=which
    )
    assert (as_bits(got) == as_bits(want)).all()
    for now, before in zip(caches, (keys, values), strict=True):
        assert (as_bits(now)[~written] == as_bits(before)[~written]).all()
        assert np.isfinite(wide(now)[written]).all()


@pytest.mark.parametrize("which", BOTH)
def test_who_attends_to_a_key_that_is_nan_gets_nan(which, interpreted):
    options, args = arguments()
    q, k, v, keys, *rest = args
    # Flat rows: slot 2 has 0 and 1, slot 1 has 2 to 7, slot 0 has 8 to 10, nobody 11 and 12.
    got, *_ = attend(options, q, k, v, keys.at[3, 17].set(jnp.nan), *rest, which=which)
    bad = np.isnan(np.asarray(got))
    assert bad[2:8, 1].all() and not bad[2:8, 0].any() and not bad[:2].any() and not bad[8:].any()
    for new in ((k.at[4, 0, 3].set(jnp.nan), v), (k, v.at[4, 0, 3].set(jnp.inf))):
        got, *_ = attend(options, q, *new, keys, *rest, which=which)
        bad = np.isnan(np.asarray(got))
        assert bad[4:8, 0].all() and not bad[:4].any() and not bad[4:8, 1].any()
        assert not bad[8:].any()


@pytest.mark.parametrize("which", BOTH)
def test_a_window_leaves_nan_keys_behind(which, interpreted):
    options, args = arguments(window=6)
    q, k, v, keys, *rest = args
    # Slot 1 begins at 30: position 27 is seen up to 32, by the rows 2 to 4.
    got, *_ = attend(options, q, k, v, keys.at[2, 27].set(jnp.nan), *rest, which=which)
    bad = np.isnan(np.asarray(got))
    assert bad[2:5, 0].all() and not bad[5:].any() and not bad[:2].any() and not bad[:, 1].any()


def test_the_same_input_gives_the_same_bits(interpreted):
    options, args = arguments()
    first, again = (attend(options, *args) for _ in range(2))
    assert all((as_bits(a) == as_bits(b)).all() for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("which", BOTH)
def test_rows_of_nobody_are_zeros_and_write_nothing(which, interpreted):
    options, (*own, slot, position, first, slopes) = arguments(starts=(0, 190, 198))
    for of in (3, 2**30, -1):
        y, *caches = attend(
            options, *own, jnp.full_like(slot, of), position, first, slopes, which=which
        )
        assert not np.asarray(y).any()
        assert all((a == b).all() for a, b in zip(caches, own[3:], strict=True))


def test_what_was_there_is_not_written_over(interpreted):
    options, (*own, slopes) = arguments(starts=(0, 30, 50), s=60)
    args, before = own, [np.array(a) for a in own[3:5]]
    decode_attention(*own, options=options, slopes=slopes, implementation="interpreter")
    assert all((np.asarray(a) == b).all() for a, b in zip(args[3:5], before, strict=True))


def test_no_rows_and_no_spans_are_the_references(interpreted):
    options, (q, k, v, keys, values, slot, position, first, slopes) = arguments()
    for which in (None, *BOTH):
        y, *caches = attend(
            options,
            q[:0],
            k[:0],
            v[:0],
            keys,
            values,
            slot[:0],
            position[:0],
            first,
            slopes,
            which=which,
        )
        assert y.shape == (0, *q.shape[1:])
        assert all((a == b).all() for a, b in zip(caches, (keys, values), strict=True))
        y, *_ = attend(
            options, q, k, v, keys, values, slot + 3, position, first[:0], slopes, which=which
        )
        assert not np.asarray(y).any()


@pytest.mark.parametrize("which", BOTH)
def test_decoding_in_a_loop_is_attention_to_all_that_came(which, interpreted):
    """Rows come one by one, by one branch or the other, and see what came before them."""
    n, n_kv, g, h = 5, 2, 2, 16

    def make(i, *shape):
        return jax.random.normal(jax.random.key(i), shape)

    q, k, v = make(0, n, 2, n_kv, g, h), make(1, n, 2, n_kv, h), make(2, n, 2, n_kv, h)
    options, rows = AttentionOptions(1, 1, h**-0.5), jnp.arange(2, dtype=jnp.int32)

    def step(order, carry):
        i, out, keys, values = carry
        y, keys, values = decode_attention(
            q[i][order],
            k[i][order],
            v[i][order],
            keys,
            values,
            order,
            jnp.full((2,), i),
            rows,
            options=options,
            implementation=which,
        )
        return i + 1, out.at[i, order].set(y), keys, values

    def body(carry):
        return jax.lax.switch(carry[0] % 2, [partial(step, rows), partial(step, rows[::-1])], carry)

    empty = jnp.full((2 * n_kv, n, h), jnp.nan)
    carry = jnp.int32(0), jnp.zeros_like(q), empty, empty
    _, got, keys, _ = jax.jit(lambda c: jax.lax.while_loop(lambda c: c[0] < n, body, c))(carry)
    assert (np.asarray(keys).reshape(2, n_kv, n, h) == np.transpose(k, (1, 2, 0, 3))).all()
    scores = jnp.einsum("tbkgh,sbkh->bkgts", q, k, precision="highest") * h**-0.5
    scores = jnp.where(jnp.tri(n, dtype=bool)[None, None, None], scores, -jnp.inf)
    want = jnp.einsum("bkgts,sbkh->tbkgh", jax.nn.softmax(scores, -1), v, precision="highest")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", BOTH)
def test_in_a_shard_map_with_heads_spread(which, interpreted):
    options, (q, k, v, keys, values, *rows, slopes) = arguments(slopes=True)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))

    def split(a):
        return jnp.concatenate([a[0::2], a[1::2]])  # a device's heads together

    heads, spread = P(None, "model"), P("model")

    def run(q, k, v, keys, values, slopes, *rows):
        def again(_, carry):
            y, keys, values = carry
            new, keys, values = attend(options, q, k, v, keys, values, *rows, slopes, which=which)
            return y + new, keys, values

        return jax.lax.fori_loop(0, 2, again, (q * 0, keys, values))

    sharded = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(heads, heads, heads, spread, spread, spread, P(), P(), P()),
        out_specs=(heads, spread, spread),
    )
    got = jax.jit(sharded)(q, k, v, split(keys), split(values), slopes, *rows)
    y, *caches = attend(options, q, k, v, keys, values, *rows, slopes, which="reference")
    np.testing.assert_allclose(got[0], 2 * y, rtol=1e-5, atol=1e-5)
    for a, b in zip(got[1:], caches, strict=True):
        assert (np.asarray(a) == np.asarray(split(b))).all()


def test_it_is_what_the_engine_mixes(interpreted):
    """Beside `models.attention.packed_attention`, for what both define."""
    config = ModelConfig(
        vocab_size=8,
        n_layers=1,
        d_model=64,
        n_heads=4,
        n_kv_heads=2,
        context_length=200,
        attention_softcap=4.0,
    )
    options, (q, k, v, keys, values, slot, position, first, slopes) = arguments(slopes=True)
    options = AttentionOptions(options.width, options.max_rows, 16**-0.5, softcap=4.0)
    first = first[:-1]
    packed = attention.PackedRows(slot, position, first, jnp.int32(len(first)), options.width)
    j = jnp.arange(keys.shape[1])[None, None]
    distance = position[:, None, None] - j
    want, cache = attention.packed_attention(
        q[:, None],
        k[:, None],
        v[:, None],
        (keys, values),
        distance >= 0,
        distance,
        slopes,
        config,
        packed,
    )
    real = np.asarray(slot) < 3
    for which in BOTH:
        y, *caches = attend(
            options, q, k, v, keys, values, slot, position, first, slopes, which=which
        )
        np.testing.assert_allclose(y[real], want[real, 0], rtol=1e-5, atol=1e-5)
        for i in range(3):  # behind its rows `packed_attention` leaves what it does not need
            end = int(np.asarray(position)[np.asarray(slot) == i].max()) + 1
            for a, b in zip(caches, cache, strict=True):
                own = slice(2 * i, 2 * i + 2), slice(0, end)
                assert (np.asarray(a)[own] == np.asarray(b)[own]).all()


@pytest.mark.parametrize(
    "slots, s, parts",
    [
        (1, 640, 10),
        (1, 4096, 13),
        (8, 640, 1),
        (8, 4096, 3),
        (64, 640, 1),
        (64, 4096, 1),
    ],
)
def test_few_programs_are_cut_into_parts(slots, s, parts, interpreted):
    triton = importlib.import_module("eejax.kernels.decode_attention.triton")
    options = AttentionOptions(width=4, max_rows=4, scale=1.0)
    assert triton.sizes(options, slots, 16, 1, 128, s, 2)["PARTS"] == parts


def test_a_call_is_one_launch_or_two(interpreted, monkeypatch):
    launched, launch = [], interpreter.launch

    def counted(*args, kernel, **kw):
        return launched.append(kernel) or launch(*args, kernel=kernel, **kw)

    monkeypatch.setattr(interpreter, "launch", counted)
    for s, count in ((60, 1), (200, 2)):
        options, (*own, slopes) = arguments(starts=(0, 30, 50), s=s)
        decode_attention(*own, options=options, slopes=slopes, implementation="interpreter")
        assert len(launched) == count
        launched.clear()


def test_float64_is_the_references_with_a_warning(interpreted):
    with jax.enable_x64(True):
        options, args = arguments()
        args = [a.astype(jnp.float64) for a in args[:5]] + list(args[5:])
        with pytest.warns(UserWarning, match="no kernel covers rows and caches of float64, heads"):
            y, *_ = attend(options, *args)
        narrow = [a.astype(jnp.float32) for a in args[:5]]
        want, *_ = exact(options, *narrow, *args[5:])
        assert np.abs(np.asarray(y) - want).max() < 1e-13


def test_caches_of_another_dtype_are_the_references_with_a_warning(interpreted):
    options, (q, k, v, keys, values, *rest) = arguments("bfloat16")
    caches = keys.astype(jnp.float32), values.astype(jnp.float32)
    with pytest.warns(
        UserWarning, match="rows and caches of bfloat16 and float32, heads of 16; the"
    ):
        y, *got = attend(options, q, k, v, *caches, *rest)
    want, *_ = attend(options, q, k, v, keys, values, *rest, which="reference")
    assert [a.dtype for a in got] == [jnp.float32] * 2
    assert (np.asarray(y) == np.asarray(want)).all()


def test_integers_beyond_32_bits_belong_to_nobody(interpreted):
    with jax.enable_x64(True):
        options, (*own, slot, position, first, slopes) = arguments()
        for of in (2**32, -(2**63)):
            for which in BOTH:
                y, *_ = attend(
                    options,
                    *own,
                    jnp.full(slot.shape, of, jnp.int64),
                    position,
                    first.astype(jnp.int64),
                    slopes,
                    which=which,
                )
                assert not np.asarray(y).any()


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("q", lambda a: a[0], r"q = \(2, 2, 16\): must be queries \[r, n_kv, g, h\]"),
        ("q", lambda a: a.astype(jnp.int32), "q = .*int32.*: must be of a floating dtype"),
        ("k", lambda a: a[1:], r"k = \(12, 2, 16\): must be of shape \(13, 2, 16\)"),
        ("v", lambda a: a[..., 1:], r"v = \(13, 2, 15\): must be of shape \(13, 2, 16\)"),
        ("keys", lambda a: a[1:], r"keys = \(5, 200, 16\): must be of shape \[slots \* 2, s, 16\]"),
        ("values", lambda a: a[:, 1:], r"values = \(6, 199, 16\): must be of the keys' shape"),
        (
            "values",
            lambda a: a.astype(jnp.float16),
            "values = .*float16.*: must be of the keys' dtype",
        ),
        (
            "slot",
            lambda a: a[1:],
            r"slot = \(\(12,\), 'int32'\): must be integers of shape \(13,\)",
        ),
        (
            "position",
            lambda a: a.astype(jnp.float32),
            r"position = .*'float32'\): must be integers",
        ),
        ("first", lambda a: a[None], r"first = \(\(1, 5\), 'int32'\): must be integers \[n\]"),
        ("slopes", lambda a: jnp.ones(2), r"slopes = \(2,\): must be of shape \(2, 2\)"),
    ],
)
def test_what_does_not_fit_is_named(name, change, message):
    options, args = arguments()
    fields = ("q", "k", "v", "keys", "values", "slot", "position", "first", "slopes")
    given = dict(zip(fields, args, strict=True))
    given[name] = change(given[name])
    with pytest.raises(ConfigError, match=message):
        decode_attention(**given, options=options)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(width=0), "AttentionOptions.width = 0: must be an integer of at least 1"),
        (dict(max_rows=1.5), "AttentionOptions.max_rows = 1.5: must be an integer"),
        (dict(window=0), "AttentionOptions.window = 0: must be an integer of at least 1"),
        (dict(softcap=0.0), "AttentionOptions.softcap = 0.0: must be above 0"),
        (dict(scale=-1.0), "AttentionOptions.scale = -1.0: must be above 0"),
    ],
)
def test_options_that_cannot_be_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        AttentionOptions(**dict(width=4, max_rows=4, scale=1.0) | given)


def test_other_options_are_refused():
    options, args = arguments()
    with pytest.raises(ConfigError, match="options = 4: must be `kernels.decode_attention"):
        attend(4, *args)
