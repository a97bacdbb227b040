"""The frontier against a plain numpy account of it, and against the oracle's own decisions."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.calibration import at_threshold, emitting_exits, fastest, score, sweep
from eejax.calibration import frontier as frontier_module
from eejax.common.errors import ConfigError, DataError
from eejax.inference import Generator
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig

CONFIG = ModelConfig(
    vocab_size=61,
    vocab_multiple=8,
    n_layers=4,
    d_model=32,
    n_heads=4,
    context_length=64,
    exits=(
        ExitConfig(0, head="shared"),
        ExitConfig(2, mlp=True, head="own", temperature=0.8),
        ExitConfig(3, head="shared"),
    ),
    head="own",
)


@pytest.fixture(scope="module")
def model():
    """A random model with heads large enough that confidences spread over (0, 1)."""
    grow = lambda path, a: a * 3 if "head" in str(path[-1]) else a
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


def plain(model, batches):
    """(tokens, confidences, nlls), each [e, n], in float64 numpy from the exits' states."""
    p, config = model
    out = []
    for batch in batches:
        counted = batch["labels"] != -1
        rows = []
        for e, h in enumerate(transformer.exit_states(p, config, batch["tokens"])):
            y = np.asarray(exits.logits(exits.head(p, config, e), h), np.float64)[counted]
            y = y[:, : config.vocab_size]
            probability = np.exp(y - y.max(-1, keepdims=True))
            probability /= probability.sum(-1, keepdims=True)
            label = probability[np.arange(len(y)), batch["labels"][counted]]
            rows.append((y.argmax(-1), probability.max(-1), -np.log(label)))
        out.append([np.stack(a) for a in zip(*rows, strict=True)])
    return [np.concatenate(a, 1) for a in zip(*out, strict=True)]


@pytest.mark.parametrize("chunk", [16, 1024])
def test_scores_are_the_exits_own(model, scored, chunk, monkeypatch):
    scores, batches = scored
    if chunk != frontier_module.CHUNK:  # several chunks, the last one not full
        monkeypatch.setattr(frontier_module, "CHUNK", chunk)
        frontier_module._score.clear_cache()
        scores = score(*model, batches)
        frontier_module._score.clear_cache()
    tokens, confidences, nlls = plain(model, batches)
    np.testing.assert_array_equal(scores.tokens, tokens)
    np.testing.assert_allclose(scores.confidences, confidences, rtol=2e-4)
    np.testing.assert_allclose(scores.nlls, nlls, rtol=2e-4, atol=2e-4)
    assert 0.2 < np.median(confidences) < 0.8  # the test is about something


def test_logits_of_all_tokens_never_exist_at_once(model, monkeypatch):
    monkeypatch.setattr(frontier_module, "CHUNK", 8)
    frontier_module._score.clear_cache()
    text = frontier_module._score.lower(*model, make_batch(0)).as_text()
    frontier_module._score.clear_cache()
    assert "8x64xf32" in text and "3x21x64xf32" not in text and "63x64xf32" not in text


@settings(max_examples=30)
@given(
    st.one_of(st.floats(0, 1), st.lists(st.floats(0, 1), min_size=3, max_size=3)),
    st.sets(st.sampled_from([0, 2, 3])),
)
def test_point_is_the_rule_applied_token_by_token(scored, threshold, active):
    scores, _ = scored
    limits = np.broadcast_to(np.asarray(threshold, np.float32), (3,))
    stops, chosen = [0, 2, 3, 4], []
    for i in range(len(scores)):
        for e in range(4):
            if e == 3 or (
                stops[e] in active and limits[e] < 1 and scores.confidences[e, i] >= limits[e]
            ):
                chosen.append(e)
                break
    point = at_threshold(scores, threshold, sorted(active))
    n = len(chosen)
    assert emitting_exits(scores, threshold, sorted(active)).tolist() == chosen
    agree = sum(scores.tokens[e, i] == scores.tokens[3, i] for i, e in enumerate(chosen))
    assert point.agreement == pytest.approx(agree / n)
    assert point.depth == pytest.approx(sum(stops[e] for e in chosen) / n)
    assert point.nll == pytest.approx(np.mean([scores.nlls[e, i] for i, e in enumerate(chosen)]))
    assert point.shares == pytest.approx([chosen.count(e) / n for e in range(4)])
    assert point.perplexity == pytest.approx(np.exp(point.nll))
    assert point.bits_per_byte(4.0) == pytest.approx(point.nll / np.log(2) / 4)


def test_threshold_one_is_the_full_model(scored):
    scores, _ = scored
    point = at_threshold(scores, 1.0)
    assert (point.agreement, point.depth, point.shares) == (1.0, 4.0, (0.0, 0.0, 0.0, 1.0))
    assert point.nll == pytest.approx(scores.nlls[-1].mean())


def test_depth_falls_with_the_threshold_and_the_fastest_point_keeps_its_promise(scored):
    points = sweep(scored[0], np.linspace(0, 1, 11))
    depths = [p.depth for p in points]
    assert depths == sorted(depths) and depths[0] == 0 and depths[-1] == 4
    best = fastest(points, 0.5)
    assert best.agreement >= 0.5
    assert all(p.depth >= best.depth for p in points if p.agreement >= 0.5)
    assert fastest(points[:1], 1.0) is None


@pytest.mark.parametrize("threshold", [0.3, (0.8, 0.5, 0.2)])
def test_decisions_are_the_oracles(model, threshold):
    """What `posthoc` generates, fed back in, leaves by the same exits with the same tokens."""
    p, config = model
    prompts = [list(range(1, 9)), [40, 3, 17]]
    new = 24
    result = Generator.make(p, config, "posthoc").generate(
        prompts, new, threshold=threshold, prefill_exit=True
    )
    seen, compared = set(), 0
    for i, prompt in enumerate(prompts):
        ids = prompt + result.ids(i)
        labels = np.full(len(ids) - 1, -1, np.int32)
        labels[len(prompt) - 1 :] = ids[len(prompt) :]
        batch = {"tokens": np.array([ids[:-1]], np.int32), "labels": labels[None]}
        scores = score(p, config, [batch])
        number = emitting_exits(scores, threshold)
        for j in range(new):
            if result.margins[i, j] < 1e-4:
                continue
            assert number[j] == result.exits[i, j]
            assert scores.tokens[number[j], j] == result.tokens[i, j]
            np.testing.assert_allclose(
                scores.confidences[number[j], j], result.confidences[i, j], rtol=1e-3
            )
            compared += 1
        seen |= set(number.tolist())
    assert compared > 40 and len(seen) >= 2


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
