"""Penalties, biases and alternatives, beside a plain numpy account of the text so far."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest
from adding import add
from hypothesis import given, settings
from hypothesis import strategies as st
from near_ties import TIE

from eejax.common.errors import ConfigError
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.logits_params import (
    MAX_TOP_LOGPROBS,
    LogitsParams,
    compute_top_logprobs,
    process_logits,
)
from eejax.inference.options import EngineOptions
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import SamplingParams, sample
from eejax.inference.scheduler import Scheduler
from eejax.kernels import call
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.models.layers import NEGATIVE

V, CONTEXT, NEW = 61, 48, 12
CONFIG = ModelConfig(
    vocab_size=V,
    vocab_multiple=8,
    n_layers=3,
    d_model=32,
    n_heads=2,
    context_length=CONTEXT,
    head="own",
    exits=(ExitConfig(1, head="own"), ExitConfig(2, head="own")),
)
STOPS = [0, 1]


def by_hand(logits, asks: dict, prompt: list[int], text: list[int], stops) -> np.ndarray:
    """Logits [v] of one token, as `LogitsParams` says they become."""
    y = np.array(logits, np.float64)
    for token in {*prompt, *text}:
        times = asks.get("repetition", 1.0)
        y[token] = y[token] / times if y[token] > 0 else y[token] * times
    for token in {*text}:
        y[token] -= asks.get("presence", 0.0) + asks.get("frequency", 0.0) * text.count(token)
    for token, bias in asks.get("biases", {}).items():
        y[token] += bias
    if len(text) < asks.get("min_tokens", 0):
        y[[s for s in stops if s >= 0]] = NEGATIVE
    return y


WISHES = st.fixed_dictionaries(
    {},
    optional=dict(
        presence=st.floats(-2, 2, width=16),
        frequency=st.floats(-2, 2, width=16),
        repetition=st.floats(0.5, 2, width=16),
        min_tokens=st.integers(0, 12),
        biases=st.dictionaries(st.integers(0, V - 1), st.floats(-9, 9, width=16), max_size=5),
        top_logprobs=st.integers(0, MAX_TOP_LOGPROBS),
    ),
)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_logits_are_shaped_as_by_hand(data):
    rows, rng = 3, np.random.default_rng(data.draw(st.integers(0, 999)))
    wishes = [data.draw(WISHES) for _ in range(rows)]
    lengths = [data.draw(st.integers(1, 16)) for _ in range(rows)]
    starts = [data.draw(st.integers(1, n)) for n in lengths]
    logits = rng.normal(0, 3, (rows, V + 3)).astype(np.float32)
    logits[:, V:] = NEGATIVE
    text, stops = rng.integers(0, V, (rows, 20)), rng.integers(-1, V, (rows, 4))
    logits_params = jax.tree.map(
        lambda *a: np.concatenate(a), *(LogitsParams.make(V, **wish) for wish in wishes)
    )

    def ints(a):
        return np.array(a, np.int32)

    got = np.asarray(
        process_logits(logits, logits_params, *map(ints, (text, starts, lengths, stops)))
    )
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        prompt, own = text[i, :start].tolist(), text[i, start:length].tolist()
        want = by_hand(logits[i, :V], wishes[i], prompt, own, stops[i])
        np.testing.assert_allclose(got[i, :V], want, rtol=1e-5, atol=1e-5)
    assert (got[:, V:] == NEGATIVE).all()


@pytest.mark.parametrize("capability", [None, 90])
def test_the_most_likely_come_in_order_with_their_probabilities(capability):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (4, V + 3)).astype(np.float32)
    logits[:, V:] = NEGATIVE
    logits[1, 5:V] = NEGATIVE  # five tokens are left
    with call.compute_capability(capability) if capability else contextlib.nullcontext():
        got = compute_top_logprobs(logits)
    for i in range(4):
        order = np.argsort(-logits[i], kind="stable")[:MAX_TOP_LOGPROBS]
        there = logits[i, order] > NEGATIVE
        logprob = logits[i] - np.log(np.exp(logits[i].astype(np.float64)).sum())
        assert np.asarray(got.token[i]).tolist() == np.where(there, order, -1).tolist()
        want = np.where(there, logprob[order], 0.0)
        np.testing.assert_allclose(got.logprob[i], want, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def model():
    def grow(path, a):
        return a * 6.0 if "head" in jax.tree_util.keystr(path) else a

    return jax.tree_util.tree_map_with_path(grow, params.init(CONFIG, jax.random.key(5)))


def engine_of(model, **options):
    options = EngineOptions(cap=2, buckets=(8,), chunk=16, drafts=2, **options)
    return EarlyExitEngine.make(model, CONFIG, options, slots=3, context=CONTEXT)


@pytest.fixture(scope="module")
def engine(model):
    return engine_of(model, logits_params=True)


ASKED = [
    dict(frequency=1.5),
    dict(presence=2.0, top_logprobs=3),
    dict(),
    dict(repetition=1.6, biases={7: 3.0, 9: -50.0}),
    dict(min_tokens=10),
    dict(top_logprobs=MAX_TOP_LOGPROBS),
    dict(frequency=-2.0, top_logprobs=1),
]
SAMPLED = {3: dict(temperature=0.8, seed=4), 6: dict(temperature=1.2, top_k=9, seed=7)}
PROMPTS = [np.random.default_rng(i).integers(8, V, 3 + i).tolist() for i in range(len(ASKED))]


def run(engine, asked, preempt=lambda step: None, threshold=(0.8, 0.7)):
    """(texts, how they ended), through a scheduler; preempt(step): who is put back then."""
    scheduler, texts, ends = Scheduler(engine, steps=1), {}, {}
    for i, wish in enumerate(asked):
        policy = ExitPolicy.make(CONFIG, 1, threshold, drafts=2)
        sampling = SamplingParams.make(1, **SAMPLED.get(i, {}))
        logits_params = LogitsParams.make(V, **wish) if wish else None
        number = add(
            scheduler,
            PROMPTS[i],
            NEW,
            policy=policy,
            sampling=sampling,
            stop_token_ids=STOPS,
            logits_params=logits_params,
        )
        texts[number] = []
    for step in range(999):
        if scheduler.idle:
            break
        if preempt(step) is not None:
            scheduler.preempt(preempt(step))
        for number, tokens, finish in scheduler.step():
            texts[number] += tokens
            if finish:
                ends[number] = finish
    assert set(ends) == set(texts)
    return [*texts.values()], [*ends.values()]


@pytest.fixture(scope="module")
def texts(engine):
    return run(engine, ASKED)[0]


def read(model, tokens: list[int]) -> np.ndarray:
    """Logits [e, t, v] of every exit behind every token."""
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(tokens)] = tokens
    states = transformer.exit_states(model, CONFIG, padded)
    logits = [exits.logits(exits.head(model, CONFIG, e), h)[0] for e, h in enumerate(states)]
    return np.stack([np.asarray(y)[: len(tokens), :V] for y in logits])


def test_every_token_is_what_its_exit_makes_of_the_text_before(model, texts):
    compared = 0
    for i, (prompt, text, wish) in enumerate(zip(PROMPTS, texts, ASKED, strict=True)):
        ids = [t.id for t in text]
        logits = read(model, prompt + ids)
        for n, token in enumerate(text):
            at = len(prompt) - 1 + n
            raw = logits[token.exit, at].astype(np.float64)
            logprob = raw - np.log(np.exp(raw - raw.max()).sum()) - raw.max()
            assert token.logprob == pytest.approx(logprob[token.id], abs=2e-4)
            assert len(token.top_logprobs) == wish.get("top_logprobs", 0)
            for (id_, said), rank in zip(token.top_logprobs, np.argsort(-raw), strict=False):
                assert said == pytest.approx(logprob[rank], abs=2e-4)
                assert id_ == rank or abs(logprob[id_] - logprob[rank]) < TIE
            want = by_hand(raw, wish, prompt, ids[:n], STOPS)
            if i in SAMPLED:
                row = np.concatenate([want, np.full(3, NEGATIVE)]).astype(np.float32)[None]
                sampling = SamplingParams.make(1, **SAMPLED[i])
                best = int(sample(row, sampling, np.array([at + 1], np.int32))[0])
            else:
                best, second = np.argsort(-want)[:2]
                if want[best] - want[second] < TIE:
                    continue
            assert token.id == best
            compared += 1
    assert compared > 60
    assert {t.exit for text in texts for t in text} == {0, 1, 2}
    # What was asked for made a difference.
    assert len({t.id for t in texts[0]}) > len({t.id for t in texts[6]})
    assert all(t.id not in STOPS for t in texts[4][:9])


def test_who_asks_for_nothing_gets_what_an_engine_without_gives(model, texts):
    plain, _ = run(engine_of(model), [{}] * len(ASKED))
    for i in (2, 5):
        assert [t[:2] for t in plain[i]] == [t[:2] for t in texts[i]]


def test_who_is_put_back_goes_on_with_its_penalties(engine, texts):
    got, _ = run(engine, ASKED, preempt=lambda step: step % 3 if step > 3 else None)
    assert [[t.id for t in text] for text in got] == [[t.id for t in text] for text in texts]


@pytest.mark.parametrize(
    "wish, said",
    [
        (dict(presence=101), r"presence = 101: must be a number in \[-100, 100\]"),
        (dict(frequency=float("nan")), "frequency = nan"),
        (dict(repetition=0), r"repetition = 0: must be a number in \[0.01, 100\]"),
        (dict(min_tokens=-1), "min_tokens = -1: must be an integer of at least 0"),
        (dict(top_logprobs=21), "top_logprobs = 21: must be at most 20"),
        (dict(biases={V: 1.0}), rf"biases = {V}: must be of token ids in 0..{V - 1}"),
        (dict(biases={3: "a"}), r"biases\[3\] = 'a'"),
        (dict(biases=dict.fromkeys(range(301), 1.0)), "biases = 301: must be of at most 300"),
    ],
)
def test_what_is_out_of_range_is_named(wish, said):
    with pytest.raises(ConfigError, match=said):
        LogitsParams.make(1000 if len(wish.get("biases", {})) > 300 else V, **wish)


def test_engines_that_take_no_shaping_say_so(model):
    for engine in (engine_of(model), EarlyExitEngine.make(model, CONFIG, slots=2)):
        scheduler = Scheduler(engine)
        with pytest.raises(ConfigError, match="logits_params = 'LogitsParams': must be None with"):
            add(scheduler, [9], 3, logits_params=LogitsParams.make(V, presence=1.0))
