"""Answers that the whole model looks at again, and what is known of disagreement from a few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.checkpoint.model import load_model
from eejax.common.errors import ConfigError
from eejax.inference import scoring
from eejax.inference import state as s
from eejax.inference.batched_state import BatchOptions
from eejax.serving.auditor import Auditor
from eejax.serving.audits import Audit, Verdict, upper_bound
from eejax.serving.choices import stricter
from eejax.serving.controller import Controller, ControllerOptions
from eejax.serving.fleet import Fleet, Member
from eejax.serving.objectives import Objective
from eejax.serving.profiles import measure
from eejax.serving.repository import Repository


def test_a_verdict_is_the_whole_models_however_little_is_loaded(small_run):
    model = load_model(small_run)
    p, config = model.params, model.config
    whole = s.prepare(p, config)
    auditor = Auditor(p, config)
    text = model.tokenizer.encode("import os, def main(argv): return None\n").tolist()
    want = scoring.score(whole, config, text)
    for depth in range(1, config.n_exits + 2):
        found = auditor.judge(s.prepare(p, config, depth), text[:11], text[11:])
        np.testing.assert_allclose(found.logprob, want.logprob[10:], atol=1e-5)
        np.testing.assert_array_equal(found.same, want.top[10:])
    with pytest.raises(ConfigError, match="must have one token at least"):
        auditor.judge(whole, [], [1, 2])


def test_an_audit_is_of_the_last_answers():
    audit = Audit(window=4)
    assert audit.count == 0 and audit.share == 0.0
    assert (audit.low, audit.high, audit.best) == (0.0, 1.0, 1.0)
    assert np.isnan(audit.perplexity)
    half = Verdict(np.array([True, False]), np.log([0.5, 0.125]))
    for _ in range(9):
        audit.add(half)
    assert audit.count == 4 and audit.share == 0.5
    assert 0 < audit.low < 0.5 < audit.high and audit.best < audit.high
    assert audit.perplexity == pytest.approx(4.0)  # two bits a token
    for _ in range(4):
        audit.add(Verdict(np.array([True] * 3), np.zeros(3)))
    assert audit.share == 0.0 and audit.perplexity == pytest.approx(1.0)
    audit.add(Verdict(np.zeros(0, bool), np.zeros(0)))  # an answer of no tokens says nothing
    assert audit.count == 4


@pytest.mark.parametrize("mean", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("coin", [True, False])
def test_a_bound_holds_at_all_times_at_once(mean, coin):
    """Of 400 sequences no more than 10 %, and what chance adds, are ever above their bound."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(400):
        x = rng.binomial(1, mean, 40) if coin else rng.beta(2, 2 / mean - 2, 40)
        wrong += any(upper_bound(x[:n], 0.1) < mean for n in range(1, 41, 3))
    assert wrong <= 400 * 0.1 + 3 * np.sqrt(400 * 0.1 * 0.9)


def test_a_bound_gets_close():
    rng = np.random.default_rng(1)
    x = rng.beta(2, 38, 400)  # a mean of 0.05
    assert upper_bound(x[:30], 0.05) < 0.2 and upper_bound(x[:100], 0.05) < 0.1
    assert 0.05 < upper_bound(x, 0.05) < 0.07


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.sampled_from([0.01, 0.05, 0.3]))
def test_bounds_are_above_the_mean_of_what_was_seen(values, delta):
    bound = upper_bound(values, delta)
    assert 0 < bound <= 1 and bound >= np.mean(values) - 1e-3


def test_values_that_are_no_shares():
    for wrong in ([1.5], [-0.1], [float("nan")]):
        with pytest.raises(ConfigError, match="values"):
            upper_bound(wrong, 0.1)


def test_a_fleet_becomes_stricter_until_the_limit_on_disagreement_holds(small_run):
    """Its first exit says too often what the whole model would not."""
    model = load_model(small_run)
    options = BatchOptions(cap=4, drafts=0, buckets=(8,))
    member = Member(model.params, model.config, dict(threshold=0.0), options)
    texts = [model.tokenizer.encode(f"def f{i}(self, a)").tolist() for i in range(90)]
    tokens = np.array([t[:9] for t in texts[:8]], np.int32)
    profiles = {"m": measure(
        member, texts[:4], [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}],
        slots=4, context=96, new=8,
    )}  # fmt: skip
    controller = Controller(
        profiles, Objective.of("throughput", accuracy=0.999), Repository(),
        ControllerOptions(prompts=2, interval=10**6, tokens=16), clock=lambda: 0.0,
    )  # fmt: skip
    fleet = Fleet({"m": member}, controller, slots=4, context=96, audits=1.0)
    for text in texts:
        fleet.submit(text, 16)
    outputs = fleet.run()
    for text in texts[:8]:
        fleet.submit(text, 16)
    outputs += fleet.run()
    kinds = [d.kind for d in controller.decisions]
    assert kinds[:2] == ["evaluate", "serve"] and {*kinds[2:]} == {"tighten"}
    assert controller.current.depth == model.config.n_exits + 1
    assert controller.level("m") >= 1 and stricter(0.0, controller.level("m")) >= 0.5
    assert sum(o.finish == "length" for o in outputs) == len(texts) + 8
    # It is not certain any more that the limit is missed.
    audit = fleet.audit(controller.current)
    assert audit.count > 0 and audit.low <= 0.001 and audit.share < 0.1
