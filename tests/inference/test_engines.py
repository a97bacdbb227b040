"""The engines against the oracle, and the oracle against an uncached float64 model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from hypothesis import given, settings
from hypothesis import strategies as st
from near_ties import TIE, assert_same

from eejax.common.errors import ConfigError
from eejax.inference import EngineOptions, Generator
from eejax.inference.generate import decode, prefill
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import Sampling


def reference_greedy(p, config, prompt, n, thresholds):
    """(token, exit boundary) n times by the uncached float64 model, and the smallest margin."""
    ids, out, margin = list(prompt), [], np.inf
    for i in range(n):
        for e, logits in enumerate(reference_model.exit_logits(p, config, ids)):
            top = np.sort(logits[-1])[::-1]
            confidence = 1 / np.exp(logits[-1] - top[0]).sum()
            final = e == config.n_exits
            if not final and i > 0 and thresholds[e] < 1:
                margin = min(margin, abs(confidence - thresholds[e]))
            if final or (i > 0 and thresholds[e] < 1 and confidence >= thresholds[e]):
                margin = min(margin, top[0] - top[1])
                out.append((int(logits[-1].argmax()), config.stops[e], logits[-1], confidence))
                ids.append(out[-1][0])
                break
    return out, margin


@pytest.mark.parametrize("engine", ["full", "posthoc", "recompute"])
def test_engines_equal_uncached_float64(trained, prompts, engine):
    p, config = trained
    prompt = prompts(3, [9])[0]
    thresholds = [1.0] * config.n_exits if engine == "full" else [0.9, 0.7, 0.6, 0.5, 0.5, 1.0]
    want, margin = reference_greedy(p, config, prompt, 14, thresholds)
    assert margin > TIE  # else the prompt is no test
    g = Generator.make(p, config, EngineOptions(engine, cap=4, buckets=(1, 2)))
    got = g.generate([prompt], 14, threshold=thresholds)
    assert got.ids(0) == [w[0] for w in want]
    if engine != "full":
        assert got.exits[0].tolist() == [w[1] for w in want]
        assert len(set(got.exits[0])) >= 3
    for j, (token, _, logits, confidence) in enumerate(want):
        logprob = logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert abs(got.logprobs[0, j] - logprob) < 1e-4
        assert abs(got.confidences[0, j] - confidence) < 1e-4


LAYOUTS = st.sets(st.integers(0, 5), min_size=1, max_size=4).map(sorted).map(tuple)


GEOMETRY = dict(
    layout=LAYOUTS,
    cap=st.integers(1, 9),
    buckets=st.sampled_from([(1,), (1, 2, 4), (3,)]),
    batch=st.integers(1, 4),
    data=st.data(),
)


@settings(max_examples=6)
@given(**GEOMETRY)
def test_recompute_equals_posthoc(trained, subset, prompts, layout, cap, buckets, batch, data):
    check_recompute_equals_posthoc(subset, prompts, layout, cap, buckets, batch, data)


@pytest.mark.slow
@settings(max_examples=80)
@given(**GEOMETRY)
def test_recompute_equals_posthoc_widely(
    trained, subset, prompts, layout, cap, buckets, batch, data
):
    check_recompute_equals_posthoc(subset, prompts, layout, cap, buckets, batch, data)


def check_recompute_equals_posthoc(subset, prompts, layout, cap, buckets, batch, data):
    p, config = subset(layout)
    n = config.n_exits
    options = dict(cap=cap, buckets=buckets)
    oracle, engine = (
        Generator.make(p, config, EngineOptions(name, **options))
        for name in ("posthoc", "recompute")
    )
    excused = left_early = 0
    for _ in range(4):
        threshold = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 0.2, 0.3, 0.5, 1.0]))
        thresholds = data.draw(
            st.lists(st.lists(threshold, min_size=n, max_size=n), min_size=batch, max_size=batch)
        )
        lengths = data.draw(st.lists(st.integers(1, 16), min_size=batch, max_size=batch))
        kwargs = dict(
            threshold=np.array(thresholds, np.float32).reshape(batch, n),
            prefill_exit=data.draw(st.booleans()),
            stop_tokens=data.draw(st.sampled_from([(), (ord(" "), ord("e"))])),
        )
        asked = prompts(data.draw(st.integers(0, 99)), lengths)
        a, b = (g.generate(asked, 30, **kwargs) for g in (oracle, engine))
        excused += assert_same(a, b)
        left_early += int((a.exits < config.n_layers).sum())
        assert (a.layers[a.exits >= 0] == config.n_layers).all()
        # Nothing is emitted from deeper than was run, and depth stays within the model's.
        assert (b.layers >= b.exits).all() and (b.layers <= config.n_layers).all()
    assert excused <= 2


def test_recompute_equals_posthoc_while_sampling(subset, prompts):
    p, config = subset((1, 3))
    asked = prompts(0, [5, 12, 7])
    kwargs = dict(
        threshold=0.3,
        temperature=[0.0, 0.8, 1.5],
        top_k=[0, 20, 0],
        top_p=[1.0, 0.9, 1.0],
        min_p=[0.0, 0.0, 0.05],
        seed=[1, 2, 3],
    )
    a, b = (
        Generator.make(p, config, e).generate(asked, 40, **kwargs) for e in ("posthoc", "recompute")
    )
    np.testing.assert_array_equal(a.tokens, b.tokens)
    alone = Generator.make(p, config, "recompute").generate(
        asked[1:2], 40, threshold=0.3, temperature=0.8, top_k=20, top_p=0.9, seed=[2]
    )
    assert alone.ids(0) == b.ids(1)  # a draw depends on (seed, position), not on the batch


def test_waiting_tokens_get_exact_keys_and_values(subset, prompts):
    """The state after each step: filled depths, waiting rows, keys and values."""
    p, config = subset((1, 2, 4))
    asked = prompts(5, [6, 11])
    cap, length = 5, 64
    run = {}
    for name in ("posthoc", "recompute"):
        options = EngineOptions(name, cap=cap, buckets=(1, 2))
        g = Generator.make(p, config, options)
        tokens, lengths = g._pad(asked)
        args = (ExitPolicy.make(config, 2, 0.3), Sampling.make(2), jnp.full((2, 1), -1))
        static = dict(config=config, options=options)
        state, _ = prefill(
            g.weights, tokens, lengths, jnp.array([30, 30]), *args, length=length, **static
        )
        run[name] = []
        for _ in range(24):
            state, record = decode(g.weights, state, *args, n=1, **static)
            run[name].append((jax.tree.map(np.asarray, state), record))
    deepest_backlog = 0
    for (a, ra), (b, rb) in zip(run["posthoc"], run["recompute"], strict=True):
        np.testing.assert_array_equal(ra.token, rb.token)
        filled = b.cache.filled
        assert (np.diff(filled, axis=1) <= 0).all()  # never increases with depth
        assert (filled[:, 0] == a.cache.filled[:, 0]).all()
        backlog = filled[:, 0] - filled[:, -1]
        assert (backlog < cap).all() or (np.asarray(rb.layers) == config.n_layers).any()
        deepest_backlog = max(deepest_backlog, backlog.max())
        for e, (kva, kvb) in enumerate(zip(a.cache.segments, b.cache.segments, strict=True)):
            for x, y in zip(
                jax.tree.leaves((kva, a.cache.blocks[e])),
                jax.tree.leaves((kvb, b.cache.blocks[e])),
                strict=True,
            ):
                x, y = (z.reshape(2, config.n_kv_heads, length, config.head_dim) for z in (x, y))
                for i, done in enumerate(filled[:, e]):
                    np.testing.assert_allclose(x[i, :, :done], y[i, :, :done], atol=2e-5)
    assert deepest_backlog >= 3


def test_the_cap_forces_depth_but_not_the_exit(subset, prompts):
    p, config = subset((1,))
    asked = prompts(1, [8])
    for cap in (1, 3):
        g = Generator.make(p, config, EngineOptions("recompute", cap=cap))
        r = g.generate(asked, 25, threshold=0.0)
        assert (r.exits[0, 1:] == 1).all()
        want = [5 if j % cap == 0 else 1 for j in range(1, 25)]
        assert r.layers[0, 1:].tolist() == want


def test_threshold_one_never_exits_even_when_confidence_rounds_to_one(subset):
    p, config = subset((1,))
    sure = p | {"embed": {"tokens": p["embed"]["tokens"] * 1000}}
    g = Generator.make(sure, config, "recompute")
    r = g.generate([[5, 6]], 10, threshold=1.0)
    assert (r.exits == config.n_layers).all()
    r = g.generate([[5, 6]], 10, threshold=0.999)
    assert (r.exits[0, 1:] == 1).all()


def test_thresholds_exits_and_sampling_do_not_recompile(subset, prompts):
    p, config = subset((1, 3))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    g = Generator.make(p, config, "recompute")
    asked = prompts(2, [10, 13])
    g.generate(asked, 12, threshold=0.5)
    assert compiled  # the listener works
    compiled.clear()
    for i in range(20):
        g.generate(
            asked,
            12,
            threshold=i / 19,
            exits=[1, 3][: 1 + i % 2],
            temperature=0.1 * i,
            top_k=i,
            seed=i,
        )
    assert not compiled


def test_a_row_does_not_depend_on_its_batch_mates(subset, prompts):
    p, config = subset((1, 2, 4))
    asked = prompts(7, [3, 14, 9, 6])
    for engine in ("posthoc", "recompute"):
        g = Generator.make(p, config, engine)
        together = g.generate(asked, 25, threshold=0.35)
        oracle = Generator.make(p, config, "posthoc")
        for i, one in enumerate(asked):
            alone = oracle.generate([one], 25, threshold=0.35)
            n = 25
            tied = np.flatnonzero(alone.margins[0] < TIE)
            n = tied[0] if len(tied) else n
            assert alone.ids(0)[:n] == together.ids(i)[:n]


def test_prefill_exit_lets_the_first_token_leave(subset, prompts):
    p, config = subset((1,))
    g = Generator.make(p, config, "recompute")
    asked = prompts(0, [8])
    assert g.generate(asked, 4, threshold=0.0, prefill_exit=True).exits[0].tolist() == [1] * 4
    assert g.generate(asked, 4, threshold=0.0).exits[0].tolist() == [5, 1, 1, 1]


def test_stop_tokens_strings_lengths_and_context(subset, prompts):
    p, config = subset((1, 3))
    g = Generator.make(p, config, "recompute")
    asked = prompts(11, [20, 5])
    text = lambda ids: bytes(i for i in ids if i < 256).decode("latin-1")
    free = g.generate(asked, 40, threshold=0.4)
    assert free.finish == ("length", "length") and (free.lengths == 40).all()

    stop = int(free.tokens[0, 10])
    first = free.ids(0).index(stop)
    r = g.generate(asked, 40, threshold=0.4, stop_tokens=[stop])
    assert r.ids(0) == free.ids(0)[: first + 1] and r.finish[0] == "stop"

    target = text(free.ids(1))[8:11]
    end = text(free.ids(1)).index(target) + 3
    for chunk in (None, 6):
        *_, r = g.stream(
            asked, 40, threshold=0.4, stop_strings=[target], decode_text=text, chunk=chunk
        )
        assert r.ids(1) == free.ids(1)[:end] and r.finish[1] == "stop"
        assert r.ids(0)[:end] == free.ids(0)[:end]

    long = g.generate([asked[0] * 7], 40, threshold=0.4)  # 140 of 160 positions
    assert long.finish == ("context",) and long.lengths[0] == 20
    pieces = list(g.stream(asked, 20, threshold=0.4, chunk=6))
    assert [q.tokens.shape[1] for q in pieces] == [1, 7, 13, 19, 20]
    assert pieces[-1].ids(0) == free.ids(0)[:20]


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(prompts=[]), "prompts"),
        (dict(prompts=[[]]), r"prompts\[0\] = '0 tokens'"),
        (dict(prompts=[[1] * 160]), "context"),
        (dict(prompts=[[1, 300]]), "tokenizer"),
        (dict(threshold=1.5), "threshold"),
        (dict(threshold=float("nan")), "threshold"),
        (dict(threshold=[0.1, 0.2, 0.3]), "one per early exit"),
        (dict(exits=[2]), r"exits = \[2\]"),
        (dict(temperature=-1), "temperature"),
        (dict(top_p=0), "top_p"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(stop_strings=["x"]), "decode_text"),
        (dict(stop_tokens=[900]), "stop_tokens"),
    ],
)
def test_bad_input_is_named(subset, kwargs, message):
    p, config = subset((1, 3))
    g = Generator.make(p, config, "recompute")
    args = dict(prompts=[[1, 2]], max_new_tokens=4) | kwargs
    with pytest.raises(ConfigError, match=message):
        g.generate(**args)


def test_nan_parameters_are_an_error_and_not_a_token(subset):
    p, config = subset((1,))
    broken = p | {"final": {"norm": {"scale": p["final"]["norm"]["scale"] * jnp.nan}}}
    with pytest.raises(FloatingPointError, match="not finite"):
        Generator.make(broken, config, "recompute").generate([[1, 2]], 3, threshold=1.0)


def test_summary_and_colors(subset, prompts):
    p, config = subset((1, 3))
    r = Generator.make(p, config, "recompute").generate(prompts(0, [8]), 30, threshold=0.4)
    text = r.summary()
    assert text.startswith("30 tokens") and all(f"exit   {n}" in text for n in (1, 3, 5))
    plain = lambda ids: bytes(i for i in ids if i < 256).decode("latin-1")
    colored = r.colored(0, plain)
    assert "\x1b[38;5;" in colored
    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain(r.ids(0))
