"""Quality of models on one scale: benchmark scores, a judge, agreement with the best model."""

from __future__ import annotations

import dataclasses
import json
import math
import types

import numpy as np
import pytest
from controlled import World, profile
from hypothesis import given, settings
from hypothesis import strategies as st
from launchers import call

from eejax.common.errors import ConfigError, DataError
from eejax.experiments.benchmark_scores import read_scores
from eejax.helios import decisions, prospects, quality
from eejax.helios.choices import ModelDepth
from eejax.helios.disagreement_bound import AnswerAudit
from eejax.helios.dispatch import Dispatcher
from eejax.helios.interfaces import AnswerCosts, FleetRequest
from eejax.helios.objectives import ServiceObjective
from eejax.helios.quality import BenchmarkScore, JudgedAnswer, QualitySource
from eejax.helios.repository import Repository

SHARES = (0.6, 0.2, 0.1, 0.1)
STOPS = {"small": (2, 4, 6, 8), "large": (3, 6, 9, 12)}


def scores(**whole: float) -> list[BenchmarkScore]:
    return [BenchmarkScore(name, 0, "sums", "exact_match", value) for name, value in whole.items()]


def world(objective: str, **limits: float) -> World:
    """A small model, and one of twice its seconds whose answers are better."""
    profiles = {"small": profile(), "large": profile(2.0)}
    profiles = quality.with_benchmarks(profiles, STOPS, scores(small=0.5, large=0.8))
    made = World(
        profiles, dict.fromkeys(profiles, SHARES), ServiceObjective.of(objective, **limits)
    )
    for _ in range(12):
        made.prompt()
    return made


@pytest.mark.parametrize(
    "objective, limits, model",
    [
        ("accuracy", {}, "large"),
        ("throughput", {}, "small"),
        ("goodput", dict(accuracy=0.4, ttft_p99=1.0), "small"),
        ("goodput", dict(accuracy=0.7, ttft_p99=1.0), "large"),
        # Neither keeps it: the nearest one serves.
        ("goodput", dict(accuracy=0.95, ttft_p99=1.0), "large"),
    ],
)
def test_an_objective_serves_the_model_that_is_best_by_it(objective, limits, model):
    assert world(objective, **limits).served[-1].model == model


def test_a_limit_on_quality_decides_how_deep_the_model_serves():
    """Of the large model 0.8 times the agreement of a depth, of those that keep the limit the
    fastest."""
    depths = []
    for least in (0.6, 0.7, 0.76, 0.79):
        made = world("throughput", accuracy=least)
        serves = made.served[-1]
        told = prospects.expected_of(made.controller.state, serves)[0]
        depths.append(serves.depth)
        assert serves.model == "large" and told.accuracy >= least
        if serves.depth > 1:
            less = ModelDepth("large", serves.depth - 1)
            less = prospects.expected_of(made.controller.state, less)[0]
            assert less.accuracy < least
    assert depths == sorted(depths) and len({*depths}) > 2


def test_perplexity_chooses_the_model_of_the_lowest():
    """And a limit on it the fastest that keeps it."""
    own = {"small": ((0.5, 9.0), (1.0, 6.0)), "large": ((0.5, 6.0), (1.0, 3.0))}
    profiles = {
        name: dataclasses.replace(profile(scale), perplexity=own[name])
        for name, scale in (("small", 1.0), ("large", 2.0))
    }
    for objective, want in (
        (ServiceObjective.of("perplexity"), ModelDepth("large", 4)),
        (ServiceObjective.of("throughput", perplexity=10.0), ModelDepth("small", 1)),
        (ServiceObjective.of("throughput", perplexity=3.5), ModelDepth("large", 2)),
    ):
        made = World(profiles, dict.fromkeys(profiles, SHARES), objective)
        for _ in range(12):
            made.prompt()
        assert made.served[-1] == want
    with pytest.raises(ConfigError, match="limits.perplexity = 0.5: must be at least 1"):
        ServiceObjective.of("throughput", perplexity=0.5)


def test_an_evaluation_corrects_quality_and_perplexity():
    """Table 1 of HELIOS: the order of two models after an evaluation is another than before it."""
    own = {"small": ((1.0, 1.91),), "large": ((1.0, 1.68),)}
    profiles = {
        name: dataclasses.replace(profile(), perplexity=own[name], sure=(1.0,) * 4) for name in own
    }
    after = dict(small=1.47, large=1.49)
    before = Repository.of(profiles)
    goal = ServiceObjective.of("perplexity")
    assert before.candidates([*own], goal) == ["large", "small"]
    made = World(profiles, dict.fromkeys(own, SHARES), goal, before)
    c = made.controller
    for name in ("large", "small"):
        c.model_loaded(c.wanted)
        assert c.wanted == ModelDepth(name, 4)
        for _ in range(5):
            c.prompt_arrived()
            told = profiles[name].serving(SHARES, 4)
            told = dataclasses.replace(told, perplexity=after[name])
            c.prompt_answered(name, told, [0] * 60 + [1] * 20 + [2] * 10 + [3] * 10)
    assert c.wanted.model == "small"
    assert prospects.expected_of(c.state, c.wanted)[0].perplexity == pytest.approx(1.47)
    # The ceiling of what answers are compared with is not corrected, only what is below it.
    made = world("accuracy")
    told = prospects.expected_of(made.controller.state, ModelDepth("large", 4))[0]
    assert told.accuracy == pytest.approx(0.8)


@given(
    points=st.dictionaries(st.floats(0.01, 0.99), st.floats(0, 1), max_size=4),
    whole=st.floats(0, 1),
    agreement=st.floats(0, 1),
)
def test_quality_between_measured_points(points, whole, agreement):
    """It lies between its neighbours', is exact at the points, and of nothing in proportion."""
    pairs = quality.curve(points | {1.0: whole})
    found = dataclasses.replace(profile(), quality=pairs)
    known = dict([(0.0, 0.0), *pairs])
    low = max(a for a in known if a <= agreement)
    high = min(a for a in known if a >= agreement)
    bounds = sorted((known[low], known[high]))
    assert bounds[0] - 1e-12 <= found.quality_at(agreement) <= bounds[1] + 1e-12
    for at, value in pairs:
        assert found.quality_at(at) == pytest.approx(value, abs=1e-9)
    plain = dataclasses.replace(profile(), quality=((1.0, whole),))
    assert plain.quality_at(agreement) == pytest.approx(whole * agreement, abs=1e-9)


def test_scores_at_exits_are_points_of_their_own():
    rows = [
        *scores(small=0.5, large=0.8),
        BenchmarkScore("small", 2, "sums", "exact_match", 0.1),
        BenchmarkScore("small", 5, "sums", "exact_match", 0.9),  # of no exit that it has
        BenchmarkScore("small", 0, "lines", "word_perplexity", 8.0),
        BenchmarkScore("large", 0, "lines", "word_perplexity", 4.0),
        BenchmarkScore("large", 3, "lines", "word_perplexity", 9.0),
    ]
    made = quality.with_benchmarks({n: profile() for n in STOPS}, STOPS, rows)
    first = profile().agrees[0]
    assert made["small"].quality == ((first, 0.1), (1.0, 0.5)) and made["small"].ceiling == 0.5
    assert made["large"].quality == ((1.0, 0.8),)
    perplexity = made["large"].perplexity_at
    assert (perplexity(1.0), perplexity(first)) == (pytest.approx(4.0), pytest.approx(9.0))
    assert perplexity((1 + first) / 2) == pytest.approx(6.0)  # the geometric mean
    assert made["small"].perplexity_at(0.3) == pytest.approx(8.0)


def test_the_mean_is_over_tasks_that_all_models_have():
    rows = [
        *scores(small=0.5, large=0.7),
        BenchmarkScore("small", 0, "sums", "acc", 0.0),  # the exact match stands for the task
        BenchmarkScore("small", 0, "facts", "acc", 0.3),
        BenchmarkScore("large", 0, "facts", "acc", 0.9),
        BenchmarkScore("small", 0, "own", "acc", 1.0),
    ]
    profiles = {name: profile() for name in STOPS}

    def of(*tasks):
        return quality.with_benchmarks(profiles, STOPS, rows, tasks)["small"].ceiling

    assert of() == pytest.approx(0.4) and of("sums") == 0.5 and of("facts") == 0.3
    with pytest.raises(ConfigError, match=r"quality = \['own'\]: must be tasks that all .*facts"):
        of("own")
    with pytest.raises(ConfigError, match="has no score of large.*eejax repository --repo"):
        quality.with_benchmarks(profiles, STOPS, scores(small=0.5))


def test_models_are_compared_by_one_metric():
    """The first one that all of them have, at every depth; a task without one is refused."""

    def score(model, metric, value, layers=0):
        return BenchmarkScore(model, layers, "sums", metric, value)

    rows = [
        score("small", "exact_match", 0.9),
        score("small", "acc", 0.3),
        score("small", "f1", 0.2),
        score("small", "exact_match", 0.8, layers=2),
        score("small", "acc", 0.1, layers=2),
        score("large", "acc", 0.6),
        score("large", "f1", 0.1),
    ]
    profiles = {name: profile() for name in STOPS}
    made = quality.with_benchmarks(profiles, STOPS, rows)
    assert (made["small"].ceiling, made["large"].ceiling) == (0.3, 0.6)
    assert made["small"].quality == ((profile().agrees[0], 0.1), (1.0, 0.3))
    told = "quality: task = 'sums': must have a metric that all .*small has f1; large has acc"
    with pytest.raises(ConfigError, match=told):
        quality.with_benchmarks(profiles, STOPS, [rows[2], rows[5]])
    # Perplexities of words and of bytes are not compared either: there is none then.
    other = [score("small", "word_perplexity", 9.0), score("large", "byte_perplexity", 2.0)]
    made = quality.with_benchmarks(profiles, STOPS, [*rows, *other])
    assert made["large"].perplexity == ((1.0, 1.0),)


def test_a_benchmark_is_of_all_tokens_by_one_exit():
    """Confident tokens agree more often than all tokens do, and they are not asked alone."""
    found = profile(n=2, sure=(0.9, 1.0), agrees=(0.6, 1.0), quality=((1.0, 0.5),))
    by_depth = found.benchmark()
    assert by_depth[1].accuracy == pytest.approx(0.5 * 0.6) and by_depth[2].accuracy == 0.5
    assert found.serving((1.0, 0.0), 1).accuracy == pytest.approx(0.5 * 0.9)


def test_tokens_below_their_threshold_are_not_expected_to_be_sure():
    """A part of a model, whose last exit takes all that is left."""
    known = profile(n=3, sure=(0.9, 0.9, 1.0), unsure=(0.3, 0.6, 1.0))
    pool = types.SimpleNamespace(parts={"m": types.SimpleNamespace(depth=2)})
    made = Dispatcher(None, pool, {"m": known}, share=0.0, clock=lambda: 2.0)
    job = FleetRequest(order=(0, 0), came=0.0, model="m", began=0.5, first=1.0)
    job.exits, job.below = [0, 1, 1, 1], [False, False, True, True]
    told = made._telemetry(job, AnswerCosts(beside=0))
    assert told.accuracy == pytest.approx((0.9 + 0.9 + 0.6 + 0.6) / 4)


def test_answers_that_a_model_judged():
    def verdict(same, p):
        return AnswerAudit(np.arange(10) < 10 * same, np.full(10, math.log(p)))

    answers = [
        JudgedAnswer(0.6, verdict(0.5, 0.25)),
        JudgedAnswer(0.6, verdict(0.7, 0.25)),
        JudgedAnswer(1.0, verdict(0.9, 0.5)),
    ]
    made = quality.with_verdicts(profile(), answers)
    assert made.quality == ((0.6, pytest.approx(0.6)), (1.0, 0.9)) and made.ceiling == 1.0
    assert made.perplexity == ((0.6, pytest.approx(4.0)), (1.0, pytest.approx(2.0)))
    other = dataclasses.replace(profile(), perplexity=((1.0, 1.5),))
    ratios, least = quality.with_ratios({"a": made, "b": other})
    assert least == 1.5 and ratios["b"].quality == ((1.0, 1.0),)
    assert ratios["a"].quality == ((0.6, pytest.approx(0.375)), (1.0, pytest.approx(0.75)))
    assert quality.relative_to(1.5, verdict(1.0, 0.5)) == pytest.approx(0.75)
    assert quality.relative_to(1.5, verdict(1.0, 0.9)) == 1.0


# As `eejax score-tasks --json` prints it, and as lm-eval 0.4.13 writes its results.
SCORED = {
    "model": "runs/small",
    "layers": 8,
    "gate": "max_probability",
    "rows": [
        {"name": "exit 2", "depth": 2.0, "tasks": {"sums": {"exact_match": 0.2, "sample_len": 9}}},
        {
            "name": "exit 8",
            "depth": 8.0,
            "tasks": {
                "sums": {"exact_match": 0.5, "exact_match_stderr": 0.1},
                "lines": {"perplexity": 7.5},
            },
        },
        {"name": "threshold 0.9", "depth": 5.0, "tasks": {"sums": {"exact_match": 0.4}}},
    ],
}
LM_EVAL = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.31,
            "exact_match,flexible-extract": 0.4,
            "exact_match_stderr,strict-match": 0.01,
        },
        "arc_easy": {"alias": "arc_easy", "acc,none": 0.6, "acc_norm,none": 0.55},
        "xsum": {"alias": "xsum", "rougeL,none": 21.5},
        "wikitext": {"alias": "wikitext", "word_perplexity,none": 12.5, "byte_perplexity,none": 2},
    },
    "higher_is_better": {"gsm8k": {"exact_match": True}},
    "n-shot": {"gsm8k": 5},
}


def test_results_are_imported_with_one_command(tmp_path, capsys):
    files = {name: tmp_path / f"{name}.json" for name in STOPS}
    files["small"].write_text("exit 2 (1 of 3) ...\n| a table |\n" + json.dumps(SCORED) + "\n")
    files["large"].write_text(json.dumps(LM_EVAL, indent=2))
    path = tmp_path / "models.db"
    flags = [f"--scores={name}={file}" for name, file in files.items()]
    call("eejax.experiments.repository", f"--repository={path}", *flags)
    assert "small: 3 scores of 2 tasks from" in capsys.readouterr().out
    assert Repository(path).scores() == [
        BenchmarkScore("large", 0, "arc_easy", "acc", 0.6),
        BenchmarkScore("large", 0, "arc_easy", "acc_norm", 0.55),
        BenchmarkScore("large", 0, "gsm8k", "exact_match", 0.31),
        BenchmarkScore("large", 0, "wikitext", "byte_perplexity", 2.0),
        BenchmarkScore("large", 0, "wikitext", "word_perplexity", 12.5),
        BenchmarkScore("large", 0, "xsum", "rougeL", 0.215),
        BenchmarkScore("small", 0, "lines", "perplexity", 7.5),
        BenchmarkScore("small", 0, "sums", "exact_match", 0.5),
        BenchmarkScore("small", 2, "sums", "exact_match", 0.2),
    ]
    call("eejax.experiments.repository", f"--repository={path}")
    shown = capsys.readouterr().out
    assert "gsm8k" in shown and "no evaluations" in shown


@pytest.mark.parametrize(
    "text, said",
    [
        ("no JSON", "is not JSON. Give the output of score_tasks --json or of lm_eval"),
        ("[1]", 'must have "rows" .* or "results"'),
        ('{"rows": [{"name": "exit 2"}]}', 'must have "rows" .*KeyError'),
        ("[" * 100_000, "is not JSON"),
        ('{"results": {"a": {"acc,none": 1.5}}}', r"a acc: value = 1.5: must be .* in \[0, 1\]"),
        ('{"results": {"a": {"acc": %s}}}' % ("9" * 400), r"a acc: value = inf: .* in \[0, 1\]"),
        ('{"results": {"a": {"rougeL": %s}}}' % ("9" * 400), "a rougeL: value = inf: "),
        ('{"results": {"a": {"acc": NaN}}}', "a acc: value = nan: "),
        ('{"results": {"a": {"perplexity": Infinity}}}', r"a perplexity: .* in \[1, inf\)"),
        ('{"results": {"": {"acc": 0.5}}}', " acc: task = '': must be a nonempty string"),
        ('{"results": {"\\ud800": {"acc": 0.5}}}', ".* acc: task = .*: must be a nonempty"),
        (
            '{"rows": [{"name": "exit -1", "tasks": {"a": {"acc": 0}}}], "layers": 2}',
            "a acc: layers",
        ),
        (
            '{"rows": [{"name": "exit %s", "tasks": {"a": {"acc": 0}}}], "layers": 2}' % 2**70,
            ".*layers = 1180591620717411303424: must be less than",
        ),
        ('{"results": {"sums": {"bleu,none": 1.5}}}', "has no score of the whole model; it must"),
    ],
)
def test_results_that_are_none(tmp_path, text, said):
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(DataError, match=f"results.json: {said}"):
        read_scores(file, "small")


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=3),
    st.sampled_from(["acc", "acc,none", "rougeL", "perplexity"]),
    st.one_of(st.floats(), st.integers(), st.sampled_from([10**400, -(10**400), True, None, "x"])),
    st.sampled_from([None, -1, 0, 1, 2, 3, 2**31, 2**70]),
)
def test_scores_that_are_read_can_be_kept_and_used(tmp_path_factory, task, metric, value, boundary):
    """Whatever a file holds is refused when it is imported, and not by the next server."""
    tasks = {task: {metric: value}, "sums": {"acc": 0.5}}
    rows = [dict(name=f"exit {b}", tasks=tasks) for b in (2, boundary) if b is not None]
    file = tmp_path_factory.getbasetemp() / "results.json"
    for content in ({"results": tasks}, {"rows": rows, "layers": 2}):
        file.write_text(json.dumps(content))
        try:
            found = read_scores(file, "small")
        except DataError as error:
            assert str(error).startswith(f"{file}: ")
            continue
        repository = Repository()
        repository.import_scores(found)
        repository.check()
        assert repository.scores()
        repository.close()


def test_sources_of_quality():
    for text in ("best", "best:small", "judge:runs/judge", "benchmark", "benchmark:sums,facts"):
        assert str(QualitySource.parse(text)) == text
    assert QualitySource.parse("benchmark:sums,facts").names == ("sums", "facts")
    for wrong, said in (
        ("worst", "quality = 'worst': must be one of 'best', 'judge', 'benchmark'"),
        ("judge", "quality = 'judge': must name one model. As in judge:runs/judge"),
        ("best:", "quality = 'best:': must have a name after the colon"),
    ):
        with pytest.raises(ConfigError, match=said):
            QualitySource.parse(wrong)


def test_answers_that_nobody_judged_leave_the_measured_quality():
    """As those with a temperature: of an evaluation all of whose prompts have one."""
    shares = (0.25, 0.25, 0.25, 0.25)
    own = dataclasses.replace(profile(), perplexity=((0.5, 3.0), (1.0, 2.0)))
    made = World({"m": own}, {"m": shares}, ServiceObjective.of("accuracy"))
    c, exits = made.controller, [0] * 25 + [1] * 25 + [2] * 25 + [3] * 25

    assert c.state.plan
    said = own.serving(shares, 4)
    worse = dict(accuracy=said.accuracy - 0.1, perplexity=said.perplexity * 1.5)
    c.model_loaded(c.wanted)
    for _ in range(5):
        c.prompt_arrived()
        c.prompt_answered("m", dataclasses.replace(said, **worse), exits)
    before = c.state.expected.shortfall["m"], c.state.expected.perplexity["m"]
    assert before[0] > 1.5 and before[1] == pytest.approx(1.5)
    c.apply(decisions.evaluate, "for the test")
    c.model_loaded(c.wanted)
    told = own.serving(shares, c.current.depth)
    for _ in range(5):
        c.prompt_arrived()
        c.prompt_answered("m", told, exits, judged=False)
    after = c.state.expected.shortfall["m"], c.state.expected.perplexity["m"]
    assert after == before
    # After a restart it is known from the evaluations alone.
    (row,) = c.repository.history("m")
    short = before[0] * (own.ceiling - told.accuracy)
    assert row.telemetry.accuracy == pytest.approx(own.ceiling - short)
    assert row.telemetry.perplexity == pytest.approx(before[1] * told.perplexity)
