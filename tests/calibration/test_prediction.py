"""Predicted speeds against a simulator of single texts, hand counts and float64 logits."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_model import exit_logits

from eejax.calibration import calibrate, prediction, score, with_exits
from eejax.calibration.frontier import ExitScores
from eejax.calibration.prediction import DecodingTimes, GatePoint
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig

CONFIG = ModelConfig(
    vocab_size=11,
    n_layers=6,
    d_model=8,
    n_heads=2,
    context_length=32,
    exits=(ExitConfig(1), ExitConfig(2, vocabulary=5), ExitConfig(4)),
)
TIMES = DecodingTimes(
    layer=2.0,
    heads=(0.5, 0.25, 0.75, 1.0),
    step=3.0,
    rows=((1, 1.0), (2, 1.25), (4, 1.5), (16, 3.0)),
    early_step=(0.4, 0.2),
)


def random_scores(seed: int, lengths=(9, 20, 3), config=CONFIG) -> ExitScores:
    rng = np.random.default_rng(seed)
    n, e = sum(lengths), config.n_exits + 1
    tokens = rng.integers(0, 3, (e, n))
    gates = ("max_probability", "margin", "entropy", "saturation")
    return ExitScores(
        config,
        rng.integers(0, config.vocab_size, n),
        np.repeat(np.arange(len(lengths)) * 7, lengths),
        tokens,
        rng.uniform(0.1, 4, (e, n)).astype(np.float32),
        {name: rng.uniform(0, 1, (e, n)).astype(np.float32) for name in gates},
    )


def seconds_of(trace, every: bool, cap: int = 16) -> np.ndarray:
    return prediction.recompute_seconds(
        trace,
        CONFIG,
        (TIMES.layer,) * 6,
        TIMES.heads,
        factor=TIMES.factor,
        step=TIMES.step,
        every_head=every,
        cap=cap,
    )


def followed(exits, every: bool, cap: int) -> list[float]:
    """Seconds of a text's tokens, by lists of the tokens that wait below each segment."""
    waiting: list[list[int]] = [[] for _ in CONFIG.segments]
    found = []
    for t, exit_ in enumerate(exits):
        for queue in waiting:
            queue.append(t)
        reaches = CONFIG.n_exits if len(waiting[-1]) >= cap else exit_
        seconds = 3.0 + sum(TIMES.heads[e] for e in range(exit_ + 1) if every or e == exit_)
        for (begin, end), queue in list(zip(CONFIG.segments, waiting, strict=True))[: reaches + 1]:
            factor = next((f for w, f in TIMES.rows if w >= len(queue)), 3.0)
            seconds += (end - begin) * 2.0 * factor
            queue.clear()
        found.append(seconds)
    return found


@given(seed=st.integers(0, 10_000), cap=st.integers(1, 20), every=st.booleans())
@settings(max_examples=40)
def test_seconds_are_those_of_a_simulator_that_follows_one_text(seed, cap, every):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 25, 3)
    trace = np.full((3, lengths.max()), -1)
    for row, n in zip(trace, lengths, strict=True):
        row[:n] = rng.integers(0, CONFIG.n_exits + 1, n)
    got = seconds_of(trace, every, cap)
    for seconds, row, n in zip(got, trace, lengths, strict=True):
        np.testing.assert_allclose(seconds[:n], followed(row[:n], every, cap))
        assert not seconds[n:].any()


def test_speed_of_one_exit_counted_by_hand():
    """Twenty tokens leave after 2 of 6 layers; the sixteenth takes all waiting rows along."""
    scores = random_scores(0, lengths=(20,))
    point = prediction.gate_point(scores, TIMES, "max_probability", [2], 0.0)
    # 20 x (2 layers + head + step with an exit), and 4 layers of 16 rows once.
    seconds = 20 * (2 * 2.0 + 0.25 + 3.0 + 0.4) + 4 * 2.0 * 3.0
    full = 20 * (6 * 2.0 + 1.0 + 3.0)
    assert point.speed == pytest.approx(full / seconds)
    assert point.exits == (2,) and point.depth == 2
    assert point.agreement == np.mean(scores.tokens[1] == scores.tokens[3])
    assert TIMES.full(6) == 16 and TIMES.without_early_heads().heads == (0, 0, 0, 1.0)


def test_a_gate_that_never_fires_reads_every_head_of_its_exits():
    """As engines do, whose threshold below 1 is open: each token reads both early heads."""
    scores = random_scores(1)
    scores.confidences["margin"][:] = 0.25
    point = prediction.gate_point(scores, TIMES, "margin", [1, 4], 0.5)
    assert point.agreement == 1 and point.depth == 6
    assert point.speed == pytest.approx(16 / (16 + 0.5 + 0.75 + 0.4 + 0.2))


def test_points_of_a_gate_are_all_exits_and_each_alone():
    scores = random_scores(2)
    points = prediction.gate_points(scores, TIMES, "entropy")
    assert {p.exits for p in points} == {(1, 2, 4), (1,), (2,), (4,)}
    for p in points:
        kept = [e for e, x in enumerate(CONFIG.exits) if x.boundary in p.exits]
        fires = scores.confidences["entropy"][kept] >= np.float32(p.threshold)
        number = np.where(fires.any(0), np.array(kept)[fires.argmax(0)], 3)
        emitted = np.take_along_axis(scores.tokens, number[None], 0)[0]
        assert p.agreement == pytest.approx(np.mean(emitted == scores.tokens[3]))
        assert p.depth == pytest.approx(np.mean(np.array([1, 2, 4, 6])[number]))
        assert 0 <= p.threshold < 1
    patient = prediction.gate_points(scores, TIMES, "patience")
    assert [p.threshold for p in patient] == [1.5 / 3, 2.5 / 3]
    first = scores.tokens[0] == scores.tokens[1]
    second = ~first & (scores.tokens[1] == scores.tokens[2])
    depth = np.where(first, 2, np.where(second, 4, 6)).mean()
    assert patient[0].depth == pytest.approx(depth)
    alone = prediction.select(scores, [4])
    assert prediction.gate_points(alone, DecodingTimes(1.0, (1.0, 1.0)), "patience") == ()


def test_routers_read_one_head_and_leave_where_they_are():
    exits = tuple(dataclasses.replace(e, router=4 * (e.boundary != 2)) for e in CONFIG.exits)
    scores = random_scores(3, config=CONFIG.replace(exits=exits))
    said = np.random.default_rng(0).uniform(0, 1, scores.tokens.shape).astype(np.float32)
    scores = dataclasses.replace(scores, confidences={**scores.confidences, "router": said})
    assert prediction.gates_of(scores.config)[-1] == "router"
    assert "router" not in prediction.gates_of(CONFIG)
    points = prediction.gate_points(scores, TIMES, "router")
    assert {p.exits for p in points} == {(1, 4), (1,), (4,)}
    never = prediction.gate_point(scores, TIMES, "router", [1, 4], 1 - 1e-7)
    assert never.speed == pytest.approx(16 / (16 + 0.4 + 0.2))  # no head but the last


def test_oracle_leaves_by_the_first_exit_that_is_right():
    scores = random_scores(4)
    got = prediction.oracle_depth(scores, TIMES)
    depths, exits = [], []
    for column in scores.tokens.T:
        exits.append(next(e for e in range(4) if column[e] == column[3]))
        depths.append((1, 2, 4, 6)[exits[-1]])
    assert got.depth == pytest.approx(np.mean(depths))
    assert got.layers_speed == pytest.approx(6 / np.mean(depths))
    seconds, begin = 0.0, 0
    for n in (9, 20, 3):
        trace = np.array([exits[begin : begin + n]])
        seconds += seconds_of(trace, False).sum()
        begin += n
    assert got.speed == pytest.approx(16 * 32 / seconds)


def test_scores_of_some_exits_and_positions():
    scores = random_scores(5)
    mask = scores.units == 7
    part = prediction.select(scores, [1, 4], mask)
    np.testing.assert_array_equal(part.tokens, scores.tokens[[0, 2, 3]][:, 9:29])
    np.testing.assert_array_equal(part.labels, scores.labels[9:29])
    assert part.config.exit_boundaries == (1, 4, 6) and "saturation" not in part.confidences
    rows = prediction.by_unit(scores, np.arange(32))
    np.testing.assert_array_equal(rows[2], [29, 30, 31, *[-1] * 17])
    np.testing.assert_array_equal(rows[1], np.arange(9, 29))


def test_the_fastest_point_and_the_envelope_against_all_pairs():
    rng = np.random.default_rng(0)
    points = [
        GatePoint("margin", (1,), 0.5, *(float(x) for x in rng.uniform(0.8, 1.3, 3).round(2)))
        for _ in range(60)
    ]
    points = [dataclasses.replace(p, agreement=min(p.agreement, 1.0)) for p in points]
    best = prediction.fastest_point(points, 0.95)
    assert best.agreement >= 0.95 and best.speed == max(
        p.speed for p in points if p.agreement >= 0.95
    )
    assert prediction.fastest_point([dataclasses.replace(best, speed=1.0)], 0.9) is None

    def beaten(p):
        return any(
            (q.agreement, q.speed) != (p.agreement, p.speed)
            and q.agreement >= p.agreement
            and q.speed >= p.speed
            for q in points
        )

    kept = {(p.agreement, p.speed) for p in prediction.envelope(points)}
    assert kept == {(p.agreement, p.speed) for p in points if not beaten(p)}


def test_a_guarantee_is_that_of_its_candidates_on_other_text():
    config = CONFIG.replace(exits=CONFIG.exits[:1])
    times = DecodingTimes(1.0, (0.1, 0.1))
    rng = np.random.default_rng(0)
    n, windows = 40 * 200, 200
    said = rng.uniform(0, 1, n).astype(np.float32)
    # Right above 0.3 and wrong below it.
    tokens = np.stack([np.where(said > 0.3, 1, 0), np.ones(n, int)])
    scores = ExitScores(
        config,
        np.zeros(n, int),
        np.repeat(np.arange(windows), 40),
        tokens,
        np.ones((2, n), np.float32),
        {"max_probability": np.stack([said, said])},
    )
    first, second = scores.units < 100, scores.units >= 100
    parts = [prediction.select(scores, positions=p) for p in (first, second)]
    point = prediction.gate_point(parts[0], times, "max_probability", [1], 0.5)
    found = prediction.gate_guarantee(*parts, times, point)
    assert found.units == 100 and found.point.agreement >= 0.95
    candidates = np.floor(np.quantile(said[first], prediction.QUANTILES) * 1e5) / 1e5
    want = calibrate(parts[1], 0.05, 0.1, sorted({*candidates.tolist()})[::-1])
    assert 0.2 < found.point.threshold == want.threshold < 0.5
    few = prediction.select(parts[1], positions=parts[1].units < 102)
    found = prediction.gate_guarantee(parts[0], few, times, point)
    assert found.point is None and found.units == 2


def test_agreement_and_loss_by_depth_are_those_of_float64_logits():
    config = CONFIG.replace(n_layers=3, exits=(), head="own", context_length=12)
    weights = params.init(config, jax.random.key(0))
    weights = jax.tree.map(lambda a: a * 3, weights)
    whole, has = with_exits(weights, config, (1, 2))
    rng = np.random.default_rng(0)
    text = rng.integers(0, 11, (6, 13))
    batch = {"tokens": text[:, :-1].astype(np.int32), "labels": text[:, 1:].astype(np.int32)}
    got = prediction.depth_scores(score(whole, has, [batch]), own=[2])
    logits = np.stack([np.stack(exit_logits(whole, has, row[:-1])) for row in text], 1)
    said = logits.argmax(-1)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(logp, text[None, :, 1:, None].repeat(3, 0), -1)[..., 0]
    for e, (found, boundary, added) in enumerate(
        zip(got, (1, 2, 3), (True, False, False), strict=True)
    ):
        assert (found.boundary, found.added) == (boundary, added)
        assert found.agreement == pytest.approx(np.mean(said[e] == said[-1]))
        assert found.loss == pytest.approx(nll[e].mean(), rel=1e-4)
    assert 0 < got[0].agreement < 1


def test_exits_that_do_not_know_all_tokens_have_no_loss():
    found = prediction.depth_scores(random_scores(6))
    assert [d.loss is None for d in found] == [False, True, False, False]
    assert found[-1].agreement == 1 and found[-1].boundary == 6
