"""Which exit a token leaves by, under every gate, beside numpy in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.gates.confidence import GATES, Memory
from eejax.inference.policy import Emission, ExitInput, ExitPolicy, emit_early, emit_final
from eejax.inference.sampling import SamplingParams
from eejax.kernels.head_confidence.api import HeadStatistics
from eejax.models.config import ExitConfig, ModelConfig
from eejax.models.exits import Reader

V, D = 11, 8
CONFIG = ModelConfig(
    vocab_size=V,
    n_layers=6,
    d_model=D,
    n_heads=2,
    context_length=8,
    exits=tuple(ExitConfig(b, router=2) for b in (1, 2, 4, 5)),
)
E = CONFIG.n_exits


def said(logits):
    """What a kernel says of logits that nobody made."""
    p = jax.nn.softmax(logits, -1)
    top = jnp.sort(p, -1)[:, ::-1]
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), -1)
    lse = jax.nn.logsumexp(logits, -1)
    return HeadStatistics(
        jnp.argmax(logits, -1).astype(jnp.int32), top[:, 0], top[:, 1], lse, entropy
    )


@functools.partial(jax.jit, static_argnames=("e", "measure", "kernel"))
def at_exit(
    emission, memory, e, logits, state, policy, sampling, progress, measure=False, kernel=False
):
    everyone = jnp.full(logits.shape[:1], True)
    head = Reader(lambda: logits, (lambda: said(logits)) if kernel else None)
    look = ExitInput(
        e,
        state,
        head,
        everyone,
        jnp.zeros_like(emission.token),
        progress,
        policy,
        sampling,
        lambda x: jax.nn.sigmoid(x[:, 0] + e),
    )
    if e == E:
        return emit_final(emission, look, measure), memory
    return emit_early(emission, memory, look, CONFIG, measure)


def run(policy, logits, states, progress, measure=False, kernel=False):
    """The emission [b] of exits' logits [e, b, v] and states [e, b, d]."""
    b = logits.shape[1]
    emission, memory = Emission.undecided(b), Memory.blank(jnp.zeros((b, D)))
    for e in range(E + 1):
        emission, memory = at_exit(
            emission,
            memory,
            e,
            logits[e],
            states[e],
            policy,
            SamplingParams.make(b),
            jnp.asarray(progress),
            measure,
            kernel,
        )
    return emission


def wanted(gate, thresholds, active, decay, logits, states, progress):
    """(exit, token, confidence) of one request, and the smallest |confidence - threshold|."""
    streak, last, before, near = 0, None, None, np.inf
    for e in range(E):
        if not (active[e] and thresholds[e] < 1):
            before = states[e]
            continue
        p = np.exp(logits[e] - logits[e].max())
        p /= p.sum()
        top = np.sort(p)[::-1]
        token = int(p.argmax())
        streak = streak + 1 if token == last else 1
        last = token
        confidence = {
            "max_probability": top[0],
            "margin": top[0] - top[1],
            "entropy": 1 + (p * np.log(p)).sum() / np.log(V),
            "patience": (streak if streak > 1 else 0) / E,
            "saturation": 0.0
            if before is None
            else max(0.0, before @ states[e] / np.linalg.norm(before) / np.linalg.norm(states[e])),
            "fixed": 1.0,
            "router": 1 / (1 + np.exp(-states[e][0] - e)),
        }[gate]
        before = states[e]
        threshold = thresholds[e]
        if decay is not None:
            threshold = np.clip(0.9 * threshold + 0.1 * np.exp(-decay * progress), 0, 1)
        if gate != "patience":
            near = min(near, abs(confidence - threshold))
        if confidence >= threshold:
            return (e, token, confidence), near
    p = np.exp(logits[E] - logits[E].max())
    return (E, int(p.argmax()), p.max() / p.sum()), near


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_every_request_leaves_by_the_earliest_exit_whose_gate_fires(data, seed):
    b, rng = 5, np.random.default_rng(seed)

    def draw(values, n):
        return data.draw(st.lists(values, min_size=n, max_size=n))

    gates = draw(st.sampled_from(GATES), b)
    thresholds = np.array(
        [draw(st.sampled_from([0.0, 0.2, 0.25, 0.5, 0.75, 0.9, 1.0]), E) for _ in range(b)]
    )
    chosen = [data.draw(st.sets(st.sampled_from([1, 2, 4, 5]))) or {2} for _ in range(b)]
    least = draw(st.integers(0, 4), b)
    decay = data.draw(st.sampled_from([None, 0.0, 1.0, 4.0]))
    policy = ExitPolicy.make(
        CONFIG,
        b,
        thresholds,
        exits=[sorted(c) for c in chosen],
        gate=gates,
        min_exit_layer=least,
        decay=decay,
    )
    # Few distinct tokens on top, so that exits agree now and then.
    logits = rng.standard_normal((E + 1, b, V)) * 2 + 5 * np.eye(V)[rng.integers(0, 2, (E + 1, b))]
    states = rng.standard_normal((E + 1, b, D)) + 1
    progress = rng.random(b).astype(np.float32)

    def single(a):
        return jnp.asarray(a, jnp.float32)

    got = run(
        policy,
        single(logits),
        single(states),
        progress,
        measure=seed % 2 == 0,
        kernel=data.draw(st.booleans()),
    )
    for i in range(b):
        on = [x in chosen[i] and x >= least[i] for x in (1, 2, 4, 5)]
        (exit_, token, confidence), near = wanted(
            gates[i], thresholds[i], on, decay, logits[:, i], states[:, i], float(progress[i])
        )
        if near < 1e-5:
            continue
        assert (int(got.exit[i]), int(got.token[i])) == (exit_, token), gates[i]
        assert abs(float(got.confidence[i]) - confidence) < 1e-5
        p = np.exp(logits[exit_, i] - logits[exit_, i].max())
        assert abs(float(got.logprob[i]) - np.log(p[token] / p.sum())) < 1e-5


def test_margins_tell_how_near_another_outcome_was():
    logits = np.zeros((E + 1, 1, V), np.float32)
    logits[:, :, 3], logits[:, :, 4] = 2.0, 1.5
    p = float(np.exp(2) / (np.exp(2) + np.exp(1.5) + V - 2))
    states = jnp.ones((E + 1, 1, D))
    make = functools.partial(ExitPolicy.make, CONFIG, 1)

    def margin(policy):
        return float(run(policy, jnp.asarray(logits), states, [0.0], True).margin[0])

    assert margin(make([p + 0.01, p + 0.2, 1.0, 1.0])) == pytest.approx(0.01, abs=1e-6)
    assert margin(make([p - 0.02, 0.0, 0.0, 0.0])) == pytest.approx(0.02, abs=1e-6)
    assert margin(make(1.0)) == pytest.approx(0.5, abs=1e-6)
    assert margin(make(0.5, gate="patience")) == pytest.approx(0.5, abs=1e-6)
    assert margin(make(0.9999, gate="saturation")) == pytest.approx(1e-4, abs=1e-6)


def test_logits_are_made_only_for_who_reads_them():
    """Gates without logits cost no head until one fires."""
    made = []

    def count(e):
        jax.debug.callback(lambda: made.append(e))
        return jnp.zeros((1, V))

    @jax.jit
    def both(policy):
        emission, memory = Emission.undecided(1), Memory.blank(jnp.zeros((1, D)))
        for e in range(E):
            look = ExitInput(
                e,
                jnp.ones((1, D)),
                Reader(lambda e=e: count(e), None),
                jnp.array([True]),
                jnp.array([0]),
                jnp.zeros(1),
                policy,
                SamplingParams.make(1),
            )
            emission, memory = emit_early(emission, memory, look, CONFIG)
        return emission

    for gate, threshold, heads in (
        ("saturation", 0.5, [1]),
        ("fixed", [1.0, 1.0, 0.3, 0.0], [2]),
        ("entropy", [1.0, 0.9, 1.0, 0.9], [1, 3]),
        ("max_probability", 1.0, []),
    ):
        made.clear()
        jax.block_until_ready(both(ExitPolicy.make(CONFIG, 1, threshold, gate=gate)))
        jax.effects_barrier()
        assert sorted(made) == heads, gate


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(gate="trust"), "gate = 'trust': must be one of"),
        (dict(gate=["margin"]), "must be one name, or 2, one per request"),
        (dict(min_exit_layer=-1), "min_exit_layer = -1: must be a number of layers in 0.."),
        (
            dict(min_exit_layer=CONFIG.n_layers + 1),
            "min_exit_layer = .*: must be a number of layers in 0..",
        ),
        (dict(decay=float("inf")), "decay = inf: must be finite"),
        (dict(decay=[1.0, 2.0, 3.0]), "decay = .*must be one number, or 2"),
        (dict(exits=[[1], [3]]), r"exits = \[3\]: must be among"),
        (dict(exits=[[1], [2], [4]]), "must be boundaries, or 2 lists"),
        (dict(exits=np.array([[1], [2], [4]])), "must be boundaries, or 2 lists"),
        (dict(threshold=1.5), "threshold = 1.5: must lie in"),
        (dict(threshold=[0.5, 0.5]), "threshold = .*one per early exit"),
        (dict(threshold=True), "threshold = True: must be one number"),
        (dict(threshold=[[0.5], [0.5, 1.0]]), "threshold = .*must be one number"),
        (dict(drafts=[[1], [2, 3]]), "drafts = .*must be a number of tokens"),
        (dict(prefill_exit="no"), "prefill_exit = 'no': must be True or False"),
        (dict(prefill_exit=[True] * 3), "prefill_exit = .*2 of them"),
    ],
)
def test_rules_out_of_range_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        ExitPolicy.make(CONFIG, 2, **values)
