"""Answers that the whole model looks at again, and what is known of disagreement from a few."""

from __future__ import annotations

import math
import re
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from adding import add
from controlled import telemetry
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.checkpoint.model import load_run
from eejax.common.errors import ConfigError
from eejax.helios import dispatch, verifier
from eejax.helios.choices import ControllerOptions, stricter
from eejax.helios.controller import Controller
from eejax.helios.disagreement_bound import AnswerAudit, DisagreementBound, upper_bound
from eejax.helios.fleet import Fleet
from eejax.helios.objectives import ServiceObjective
from eejax.helios.pool import FleetMember
from eejax.helios.profiles import measure
from eejax.helios.repository import Repository
from eejax.helios.verifier import AnswerVerifier
from eejax.inference import scoring
from eejax.inference.options import EngineOptions
from eejax.inference.weights import prepare


def test_a_verdict_is_the_whole_models_however_little_is_loaded(small_run):
    model = load_run(small_run)
    p, config = model.params, model.config
    whole = prepare(p, config)
    whole_model = AnswerVerifier(p, config)
    text = model.tokenizer.encode("import os, def main(argv): return None\n").tolist()
    want = scoring.score(whole, config, text)
    for depth in range(1, config.n_exits + 2):
        found = whole_model.judge(prepare(p, config, depth), text[:11], text[11:])
        np.testing.assert_allclose(found.logprob, want.logprob[10:], atol=1e-5)
        np.testing.assert_array_equal(found.same, want.top[10:])
    with pytest.raises(ConfigError, match="must have at least one token"):
        whole_model.judge(whole, [], [1, 2])


def test_an_answer_is_read_in_chunks_of_any_length(small_run):
    model = load_run(small_run)
    whole, config = prepare(model.params, model.config), model.config
    x, tokens = np.zeros((1, 97, config.d_model), np.float32), np.zeros((1, 97), np.int32)
    read = str(jax.make_jaxpr(partial(verifier._read, config=config))(whole.params, x, tokens))
    assert [*map(int, re.findall(r"length=(\d+)", read))] == [1]


def test_only_audits_outside_of_evaluations_count_towards_their_share_of_the_time():
    now = [0.0]

    def judge(job):
        now[0] += 10.0
        return AnswerAudit(np.ones(3, bool), np.zeros(3))

    pool = SimpleNamespace(parts={"m": SimpleNamespace(depth=1)}, judge=judge)
    controller = mock.Mock(decisions=[])
    controller.level.return_value = 0
    profiles = {"m": mock.Mock(**{"quality_at.return_value": 1.0, "perplexity_at.return_value": 1})}
    made = dispatch.Dispatcher(controller, pool, profiles, share=0.1, clock=lambda: now[0])
    for evaluated in (True, False):
        job = SimpleNamespace(
            model="m", evaluated=evaluated, strictness=(1, 0), telemetry=telemetry(), exits=[0]
        )
        made.to_audit.append(job)
        made.audit_next()
        assert made._may_audit() == evaluated


def test_an_audit_is_of_the_last_answers():
    audit = DisagreementBound(window=4)
    assert audit.count == 0 and audit.share == 0.0
    assert (audit.low, audit.high, audit.had_been(0.1)) == (0.0, 1.0, 1.0)
    assert np.isnan(audit.perplexity)
    half = AnswerAudit(np.array([True, False]), np.log([0.5, 0.125]))
    for _ in range(9):
        audit = audit.with_answer(half)
    assert audit.count == 4 and audit.share == 0.5
    assert 0 < audit.low < 0.5 < audit.high
    # The bound of what would have been seen, and never of more than was.
    assert audit.had_been(0.1) == upper_bound([0.1] * 4, 0.05) < audit.high
    assert audit.had_been(0.5) == audit.had_been(0.9) == audit.high
    assert audit.perplexity == pytest.approx(4.0)  # two bits a token
    for _ in range(4):
        audit = audit.with_answer(AnswerAudit(np.array([True] * 3), np.zeros(3)))
    assert audit.share == 0.0 and audit.perplexity == pytest.approx(1.0)
    assert audit.had_been(0.1) == audit.high
    nothing = AnswerAudit(np.zeros(0, bool), np.zeros(0))
    assert audit.with_answer(nothing) == audit  # an answer of no tokens says nothing


@pytest.mark.parametrize("mean", [0.02, pytest.param(0.1, marks=pytest.mark.slow), 0.4])
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


def looked_at(shares) -> DisagreementBound:
    audit = DisagreementBound()
    for share in shares:
        audit = audit.with_answer(AnswerAudit(np.arange(1000) >= 1000 * share, np.zeros(1000)))
    return audit


SHARES = st.floats(0, 1).map(lambda x: round(x, 3))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(SHARES, st.integers(1, 20)), min_size=1, max_size=3))
def test_what_was_seen_lies_between_the_bounds(blocks):
    """Also of answers that are of one share for a while, and of another one then."""
    audit = looked_at([share for share, n in blocks for _ in range(n)])
    assert 0 <= audit.low <= audit.share <= audit.high <= 1
    assert audit.low < audit.high


@pytest.mark.parametrize("before, after, most", [(0.0, 1.0, 40), (0.0, 0.5, 40), (0.6, 0.1, 40)])
def test_a_change_is_seen(before, after, most):
    """What was before it does not count any more, though there were a hundred of it."""
    rng = np.random.default_rng(2)

    def noisy(mean):
        return np.clip(mean + 0.1 * rng.uniform(-1, 1), 0, 1)

    audit = looked_at([noisy(before) for _ in range(100)])
    assert audit.count == 100 and audit.low <= before + 0.05 <= audit.high + 0.05
    for _ in range(most):
        verdict = AnswerAudit(np.arange(1000) >= 1000 * noisy(after), np.zeros(1000))
        audit = audit.with_answer(verdict)
    assert audit.count <= most + 8
    assert audit.share == pytest.approx(after, abs=0.15)
    assert audit.low > before if after > before else audit.high < before


def test_without_a_change_nothing_is_forgotten():
    rng = np.random.default_rng(3)
    kept = [looked_at(rng.beta(2, 18, 60)).count for _ in range(20)]
    assert sum(count == 60 for count in kept) >= 18


def test_values_that_are_no_shares():
    for wrong in ([1.5], [-0.1], [float("nan")]):
        with pytest.raises(ConfigError, match="values"):
            upper_bound(wrong, 0.1)


def measured(member, texts):
    tokens = np.array([t[:9] for t in texts[:8]], np.int32)
    batches = [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}]
    return measure(member, texts[:4], batches, slots=2, context=96, new=8)


@pytest.mark.slow
def test_who_leaves_in_the_middle_has_answered(small_run):
    """At a stop string requests are aborted: what they had is evaluated, and audited."""
    model = load_run(small_run)
    member = FleetMember(
        model.params,
        model.config,
        dict(threshold=0.5),
        EngineOptions(cap=4, drafts=0, buckets=(8,)),
    )
    texts = [model.tokenizer.encode(f"def f{i}(self, a)").tolist() for i in range(12)]
    controller = Controller(
        {"m": measured(member, texts)},
        ServiceObjective.of("throughput"),
        Repository(),
        ControllerOptions(prompts=2, interval=10**6, tokens=16),
        clock=lambda: 0.0,
    )
    fleet = Fleet({"m": member}, controller, slots=2, context=96, steps=1, audits=1.0)
    told = {add(fleet, text, 40): 0 for text in texts}
    ends = []
    while not fleet.idle:
        for number, tokens, finish in fleet.step():
            told[number] += len(tokens)
            ends += [finish] if finish else []
            if told[number] >= 8 and not finish:
                fleet.abort(number)
    assert ends == ["aborted"] * 12 and max(told.values()) < 40
    assert not controller.state.plan and controller.state.serving == "m"
    (row,) = controller.repository.history("m")
    assert row.prompts == 2 and 16 <= row.tokens < 80
    assert sum(audit.count for audit in fleet.dispatcher.audits.values()) > 0


@pytest.mark.slow
def test_a_fleet_becomes_stricter_until_the_limit_on_disagreement_holds(small_run, monkeypatch):
    """Its first exit says too often what the whole model would not."""
    # Audits of so small a model take most of the time.
    monkeypatch.setattr(dispatch, "AUDIT_SHARE", math.inf)
    model = load_run(small_run)
    options = EngineOptions(cap=4, drafts=0, buckets=(8,))
    member = FleetMember(model.params, model.config, dict(threshold=0.0), options)
    texts = [model.tokenizer.encode(f"def f{i}(self, a)").tolist() for i in range(90)]
    profiles = {"m": measured(member, texts)}
    controller = Controller(
        profiles,
        ServiceObjective.of("throughput", accuracy=0.999),
        Repository(),
        ControllerOptions(prompts=2, interval=10**6, tokens=16),
        clock=lambda: 0.0,
    )
    fleet = Fleet({"m": member}, controller, slots=2, context=96, audits=1.0)
    for text in texts:
        add(fleet, text, 16)
    outputs = fleet.run()
    for text in texts[:8]:
        add(fleet, text, 16)
    outputs += fleet.run()
    kinds = [d.kind for d in controller.decisions]
    assert kinds[:3] == ["serve", "evaluate", "serve"] and {*kinds[3:]} == {"tighten"}
    assert controller.current.depth == model.config.n_exits + 1
    assert controller.level("m") >= 1 and stricter(0.0, controller.level("m")) >= 0.5
    assert sum(o.finish == "length" for o in outputs) == len(texts) + 8
    # It is not certain any more that the limit is missed.
    audit = fleet.dispatcher.audit(controller.current)
    assert audit.count > 0 and audit.low <= 0.001 and audit.share < 0.1
