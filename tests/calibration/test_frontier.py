"""The frontier against a plain numpy account of it, and against the oracle's own decisions."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eejax.calibration import (
    SegmentCosts,
    at_threshold,
    emitting_exits,
    fastest,
    score,
    sweep,
)
from eejax.calibration import frontier as frontier_module
from eejax.common.errors import ConfigError, DataError
from eejax.gates import router
from eejax.gates.confidence import GATES, Memory
from eejax.inference import Generator
from eejax.inference.policy import Emission, ExitInput, ExitPolicy, emit_early, emit_final
from eejax.inference.sampling import SamplingParams
from eejax.kernels import call
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.models.exits import Reader

CONFIG = ModelConfig(
    vocab_size=61,
    vocab_multiple=8,
    n_layers=4,
    d_model=32,
    n_heads=4,
    context_length=64,
    exits=(
        ExitConfig(0, head="shared", router=6),
        ExitConfig(2, mlp=True, head="own", temperature=0.8, router=6),
        ExitConfig(3, head="shared", router=6),
    ),
    head="own",
)


@pytest.fixture(scope="module")
def model():
    """A random model with heads large enough that confidences spread over (0, 1)."""

    def grow(path, a):
        return a * 3 if "head" in str(path[-1]) or "router" in str(path) else a

    return jax.tree_util.tree_map_with_path(grow, params.init(CONFIG, jax.random.key(0))), CONFIG


def make_batch(seed, b=3, t=21):
    rng = np.random.default_rng(seed)
    tokens, labels = rng.integers(0, CONFIG.vocab_size, (2, b, t), dtype=np.int32)
    labels[rng.random((b, t)) < 0.2] = -1
    return {"tokens": tokens, "labels": labels}


@pytest.fixture(scope="module")
def scored(model):
    batches = [make_batch(0), make_batch(1)]
    return score(*model, batches), batches


@functools.partial(jax.jit, static_argnames="config")
def logits_and_states(p, config, tokens):
    """(logits, states at the boundary), each [e, b, t, ...]."""
    states = []

    def tap(e, x):
        states.append(x)
        return x

    read = transformer.exit_states(p, config, tokens, tap=tap)
    logits = [exits.logits(exits.head(p, config, e), h) for e, h in enumerate(read)]
    return jnp.stack(logits), jnp.stack(states)


def look(model, batch):
    """(logits, states at the boundary), each [e, n, ...], of a batch's counted positions."""
    counted = batch["labels"] != -1
    found = logits_and_states(*model, batch["tokens"])
    return tuple(np.asarray(a)[:, counted] for a in found)


def routed(p, config, e, x):
    """Confidences [n] by TIDE's formula, in float64."""
    if e == config.n_exits:
        return np.zeros(len(x))
    w = jax.tree.map(np.float64, p["exits"][config.exits[e].name]["router"])
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * w["norm"]["scale"]
    z = h @ w["down"]
    return 1 / (1 + np.exp(-(z / (1 + np.exp(-z))) @ w["up"] - w["up_bias"]))


def plain(model, batches):
    """(tokens, nlls, confidences), each [e, n], in float64 numpy from the exits' states."""
    p, config = model
    out = []
    for batch in batches:
        logits, states = (a.astype(np.float64) for a in look(model, batch))
        label = batch["labels"][batch["labels"] != -1]
        rows = []
        for e, y in enumerate(logits[..., : config.vocab_size]):
            probability = np.exp(y - y.max(-1, keepdims=True))
            probability /= probability.sum(-1, keepdims=True)
            first, second = np.sort(probability, -1)[:, ::-1][:, :2].T
            entropy = -(probability * np.log(probability)).sum(-1)
            before = states[e - 1] if e else np.zeros_like(states[0])
            norms = np.linalg.norm(states[e], axis=-1) * np.linalg.norm(before, axis=-1)
            cosine = (states[e] * before).sum(-1) / np.where(norms > 0, norms, 1)
            gates = {
                "max_probability": first,
                "margin": first - second,
                "entropy": 1 - entropy / np.log(config.vocab_size),
                "saturation": np.maximum(cosine, 0),
                "router": routed(p, config, e, states[e]),
            }
            picked = probability[np.arange(len(y)), label]
            rows.append((y.argmax(-1), -np.log(picked), gates))
        out.append(jax.tree.map(lambda *a: np.stack(a), *rows))
    return jax.tree.map(lambda *a: np.concatenate(a, 1), *out)


@pytest.mark.parametrize("chunk", [16, 1024])
def test_scores_are_the_exits_own(model, scored, chunk, monkeypatch):
    scores, batches = scored
    if chunk != frontier_module.CHUNK:  # several chunks, the last one not full
        monkeypatch.setattr(frontier_module, "CHUNK", chunk)
        frontier_module._score.clear_cache()
        scores = score(*model, batches)
        frontier_module._score.clear_cache()
    assert_own(scores, model, batches)


def test_scores_by_kernels_are_the_exits_own(model, scored, interpreted):
    with call.implementation("interpreter"):
        scores = score(*model, scored[1])
    assert_own(scores, model, scored[1])


def assert_own(scores, model, batches):
    tokens, nlls, confidences = plain(model, batches)
    np.testing.assert_array_equal(scores.tokens, tokens)
    np.testing.assert_allclose(scores.nlls, nlls, rtol=2e-4, atol=2e-4)
    assert set(scores.confidences) == set(confidences)
    for gate, expected in confidences.items():
        np.testing.assert_allclose(scores.confidences[gate], expected, rtol=2e-4, atol=2e-5)
        # The test is about something.
        assert 0.1 < np.median(expected[:3] if gate == "router" else expected) < 0.9, gate
    assert (scores.confidences["saturation"][0] == 0).all()


def test_logits_that_are_not_finite_have_no_score(model, scored):
    params, config = model
    nan = params | {"final": jax.tree.map(lambda a: a * np.float32("nan"), params["final"])}
    with pytest.raises(FloatingPointError, match="not finite"):
        score(nan, config, scored[1][:1])


def test_positions_know_their_text_and_how_far_it_has_come(model, scored):
    scores, batches = scored
    rows = [row[row != -1] for batch in batches for row in batch["labels"]]
    units = np.concatenate([np.full(len(row), i) for i, row in enumerate(rows)])
    np.testing.assert_array_equal(scores.units, units)
    progress = np.concatenate([np.arange(len(row)) / len(row) for row in rows])
    np.testing.assert_allclose(scores.progress, progress, rtol=1e-6)
    # Three rows each of two texts, one of which goes on in the second batch.
    named = [b | {"units": u} for b, u in zip(batches, ([7, 7, 3], [3, 3, 7]), strict=True)]
    got = score(*model, named)
    want = np.repeat([7, 7, 3, 3, 3, 7], [len(row) for row in rows])
    np.testing.assert_array_equal(got.units, want)
    for unit in (3, 7):
        n = int((want == unit).sum())
        np.testing.assert_allclose(got.progress[want == unit], np.arange(n) / n, rtol=1e-6)
    with pytest.raises(ConfigError, match="units = 'shape"):
        score(*model, [batches[0] | {"units": [1, 2]}])


def test_logits_of_all_tokens_never_exist_at_once(model, monkeypatch):
    monkeypatch.setattr(frontier_module, "CHUNK", 8)
    frontier_module._score.clear_cache()
    text = frontier_module._score.lower(*model, make_batch(0)).as_text()
    frontier_module._score.clear_cache()
    assert "8x64xf32" in text and "3x21x64xf32" not in text and "63x64xf32" not in text


@functools.partial(jax.jit, static_argnames="e")
def at_exit(emission, memory, e, logits, state, policy, progress, p):
    """One exit's turn for every position, as an engine takes it."""
    n = len(progress)
    seen = ExitInput(
        e,
        state,
        Reader(lambda: logits, None),
        jnp.full((n,), True),
        jnp.zeros((n,), jnp.int32),
        progress,
        policy,
        SamplingParams.make(n),
        router.of_exit(p, CONFIG, e),
    )
    if e == CONFIG.n_exits:
        return emit_final(emission, seen, True), memory
    return emit_early(emission, memory, seen, CONFIG, True)


def walk(p, policy, logits, states, progress):
    """What an engine emits, of exits' logits [e, n, v] and states [e, n, d]."""
    emission = Emission.undecided(logits.shape[1])
    memory = Memory.blank(jnp.asarray(states[0]))
    for e in range(4):
        emission, memory = at_exit(
            emission, memory, e, logits[e], states[e], policy, jnp.asarray(progress), p
        )
    return emission


@pytest.fixture(scope="module")
def walked(model):
    """What an engine would see of one batch, its progress, and its scores."""
    batch = make_batch(2, b=4, t=24)
    logits, states = look(model, batch)
    scores = score(*model, [batch])
    rows = [int((row != -1).sum()) for row in batch["labels"]]
    progress = np.concatenate([np.arange(n, dtype=np.float32) / np.float32(n) for n in rows])
    return functools.partial(walk, model[0]), logits, states, progress, scores


THRESHOLD = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 1 / 3, 2 / 3, 1.0]))
COSTS = SegmentCosts((0.0, 2.0, 1.5, 1.0), (0.3, 0.7, 0.4, 0.5))


@settings(max_examples=60, deadline=None)
@example(gate="saturation", threshold=0.0, active={0}, min_exit_layer=0, decay=None)
@given(
    gate=st.sampled_from(GATES),
    threshold=st.one_of(THRESHOLD, st.lists(THRESHOLD, min_size=3, max_size=3)),
    active=st.sets(st.sampled_from([0, 2, 3])),
    min_exit_layer=st.integers(0, 4),
    decay=st.sampled_from([None, 0.0, 2.0, 9.0]),
)
def test_point_is_the_engines_rule_applied_token_by_token(
    walked, gate, threshold, active, min_exit_layer, decay
):
    walk, logits, states, progress, scores = walked
    n, stops = len(scores), [0, 2, 3, 4]
    rules = dict(gate=gate, min_exit_layer=min_exit_layer, decay=decay)
    policy = ExitPolicy.make(
        CONFIG, n, np.broadcast_to(np.float32(threshold), (n, 3)), exits=sorted(active), **rules
    )
    emission = walk(policy, logits, states, progress)
    number = emitting_exits(scores, threshold, sorted(active), **rules)
    clear = np.asarray(emission.margin) > 1e-5  # else two roundings may decide differently
    # Saturation is 0 at the first exit, without rounding: where that is its threshold, all leave.
    first = np.broadcast_to(np.float32(threshold), (3,))[0]
    if gate == "saturation" and first == 0 and 0 in active and min_exit_layer == 0:
        clear = np.full_like(clear, True)
    assert clear.sum() > 0.9 * n
    np.testing.assert_array_equal(number[clear], np.asarray(emission.exit)[clear])
    token = np.take_along_axis(scores.tokens, number[None], 0)[0]
    np.testing.assert_array_equal(token[clear], np.asarray(emission.token)[clear])

    limits, seconds = np.broadcast_to(np.float32(threshold), (3,)), 0.0
    for left in number:
        for e in range(left + 1):
            seconds += COSTS.segments[e]
            asked = e == 3 or (stops[e] in active and stops[e] >= min_exit_layer and limits[e] < 1)
            if e == left or (asked and gate not in ("saturation", "fixed", "router")):
                seconds += COSTS.heads[e]
    point = at_threshold(scores, threshold, sorted(active), costs=COSTS, **rules)
    assert point.seconds == pytest.approx(seconds / n)
    assert point.agreement == pytest.approx(np.mean(token == scores.tokens[3]))
    assert point.depth == pytest.approx(np.mean([stops[e] for e in number]))
    assert point.nll == pytest.approx(np.mean([scores.nlls[e, i] for i, e in enumerate(number)]))
    assert point.shares == pytest.approx([np.mean(number == e) for e in range(4)])
    assert point.perplexity == pytest.approx(np.exp(point.nll))
    assert point.bits_per_byte(4.0) == pytest.approx(point.nll / np.log(2) / 4)


@pytest.mark.parametrize("threshold", [0.0, 1 / 3, 2 / 3, 0.99])
def test_patience_asks_the_active_exits_alone(model, scored, threshold):
    """Every way in which four exits can agree, under every subset of the three early ones."""
    tokens = np.array(list(itertools.product((0, 1), repeat=4))).T  # [e, n]
    logits, n = 5 * np.eye(CONFIG.vocab_size, dtype=np.float32)[tokens], tokens.shape[1]
    zero = np.zeros((4, n), np.float32)
    scores = dataclasses.replace(
        scored[0], tokens=tokens, nlls=zero, confidences={}, labels=tokens[0], units=tokens[0]
    )
    for active in itertools.chain.from_iterable(
        itertools.combinations((0, 2, 3), k) for k in range(4)
    ):
        limits = np.full((n, 3), threshold, np.float32)
        policy = ExitPolicy.make(CONFIG, n, limits, exits=active, gate="patience")
        emission = walk(model[0], policy, logits, np.zeros((4, n, 32), np.float32), zero[0])
        got = emitting_exits(scores, threshold, active, gate="patience")
        np.testing.assert_array_equal(got, np.asarray(emission.exit))


def test_threshold_one_is_the_full_model(scored):
    scores, _ = scored
    point = at_threshold(scores, 1.0)
    assert (point.agreement, point.depth, point.shares) == (1.0, 4.0, (0.0, 0.0, 0.0, 1.0))
    assert point.nll == pytest.approx(scores.nlls[-1].mean())
    assert point.seconds is None
    for gate in GATES:
        same = at_threshold(scores, 1.0, gate=gate, costs=COSTS)
        assert same.shares == point.shares
        assert same.seconds == pytest.approx(COSTS.full) == pytest.approx(5.0)


def test_depth_falls_with_the_threshold_and_the_fastest_point_keeps_its_promise(scored):
    points = sweep(scored[0], np.linspace(0, 1, 11))
    depths = [p.depth for p in points]
    assert depths == sorted(depths) and depths[0] == 0 and depths[-1] == 4
    best = fastest(points, 0.5)
    assert best.agreement >= 0.5
    assert all(p.depth >= best.depth for p in points if p.agreement >= 0.5)
    assert fastest(points[:1], 1.0) is None
    # Where time is known it decides: an exit whose head costs as much as all layers is no gain.
    dear = SegmentCosts((1.0, 1.0, 1.0, 1.0), (9.0, 9.0, 9.0, 0.1))
    timed = sweep(scored[0], np.linspace(0, 1, 11), costs=dear)
    assert fastest(timed, 0.0).threshold == 1.0 and fastest(points, 0.0).threshold == 0.0


@pytest.fixture(scope="module")
def oracle(model):
    return Generator.make(*model, "posthoc")


@pytest.mark.parametrize(
    "gate, threshold, rules",
    [
        ("max_probability", 0.3, {}),
        ("max_probability", (0.8, 0.5, 0.2), {}),
        ("max_probability", 0.4, dict(decay=3.0)),
        ("margin", 0.15, {}),
        ("entropy", 0.5, dict(min_exit_layer=2)),
        ("patience", 2 / 3, {}),
        ("saturation", 0.75, dict(exits=[0, 3])),
        ("fixed", (1.0, 1.0, 0.0), {}),
    ],
)
def test_decisions_are_the_oracles(model, oracle, gate, threshold, rules):
    """What `posthoc` generates, fed back in, leaves by the same exits with the same tokens."""
    p, config = model
    prompts = [list(range(1, 9)), [40, 3, 17]]
    new, rules = 24, rules | {"gate": gate}
    result = oracle.generate(prompts, new, threshold=threshold, prefill_exit=True, **rules)
    seen, compared = set(), 0
    for i, prompt in enumerate(prompts):
        ids = prompt + result.ids(i)
        labels = np.full(len(ids) - 1, -1, np.int32)
        labels[len(prompt) - 1 :] = ids[len(prompt) :]
        batch = {"tokens": np.array([ids[:-1]], np.int32), "labels": labels[None]}
        scores = score(p, config, [batch])
        number = emitting_exits(scores, threshold, **rules)
        for j in range(new):
            if result.margins[i, j] < 1e-4:
                continue
            assert number[j] == result.exits[i, j]
            assert scores.tokens[number[j], j] == result.tokens[i, j]
            if gate in scores.confidences:
                # The final exit has no gate: what it reports is its token's probability.
                by = "max_probability" if number[j] == config.n_exits else gate
                np.testing.assert_allclose(
                    scores.confidences[by][number[j], j], result.confidences[i, j], rtol=1e-3
                )
            compared += 1
        seen |= set(number.tolist())
    assert compared > 40 and len(seen) >= (1 if gate == "fixed" else 2)


def test_refusals(model, scored):
    scores, _ = scored
    with pytest.raises(DataError, match="no labelled position"):
        score(*model, [{"tokens": np.zeros((1, 4), np.int32), "labels": np.full((1, 4), -1)}])
    with pytest.raises(ConfigError, match="threshold"):
        at_threshold(scores, 1.5)
    with pytest.raises(ConfigError, match="exits"):
        at_threshold(scores, 0.5, [1])
    with pytest.raises(ConfigError, match="agreement"):
        fastest([], 95)
    with pytest.raises(ConfigError, match="gate = 'trust'"):
        at_threshold(scores, 0.5, gate="trust")
    with pytest.raises(ConfigError, match="min_exit_layer"):
        sweep(scores, [0.5], min_exit_layer=-1)
    with pytest.raises(ConfigError, match="costs.segments = .*each of the model's 4 segments"):
        at_threshold(scores, 0.5, costs=SegmentCosts([1.0], [1.0]))
    with pytest.raises(ConfigError, match="heads = .*one for each of the segments"):
        SegmentCosts([1.0, 2.0], [1.0])
    for bad in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="segments = .*finite and at least 0"):
            SegmentCosts([bad], [1.0])
