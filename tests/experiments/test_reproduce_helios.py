"""HELIOS' reproduction: from tables that are made by hand, and end to end at a size for tests."""

from __future__ import annotations

import dataclasses
import json
import types

import numpy as np
import pytest
from launchers import call

from eejax.common.errors import ConfigError, DataError
from eejax.experiments.helios_simulation.traces import ModelTrace, PromptTrace
from eejax.experiments.reproduce import helios_evidence as evidence
from eejax.experiments.reproduce import (
    helios_figures,
    helios_findings,
    helios_models,
    helios_paper,
    helios_shapes,
    helios_training,
)
from eejax.experiments.reproduce import helios_simulated as simulated
from eejax.helios.choices import ModelProfile
from eejax.inference.batch_simulator import StepCosts

NAME = "eejax.experiments.reproduce.helios"
STOPS = {"small": (2, 4, 8), "large": (3, 6, 12)}
PLACES = {
    "Abstract",
    "Section 1",
    *(f"Table {n}" for n in range(1, 6)),
    *(f"Figure {n}" for n in (2, 5, "6a", "6b", 7, 8, 9, "11a", "11b", 12, 13, "13c", 14, 15)),
    *("Figure 16", "Figure 16c", "Figure 17a", "Figure 17b", "Figures 1 and 10, Algorithm 1"),
    *("Figures 3 and 4", "Sections 3.3.1 to 3.4.2", "Section 4.1", "Section 4.3", "Section 5.1"),
    *("Section 5.2", "Section 5.3", "Section 5.4", "Section 5.5", "Section 5.6", "Section 6"),
    *("Section 2.3", "Section 3.4"),
}
"""Everything of the paper that has a number or is drawn."""


def drawn(p=24, new=12):
    """`Measured` of random tokens in two tasks, whose first exits are sure of most."""
    rng = np.random.default_rng(0)
    traces, profiles, costs = {}, {}, {}
    lengths = rng.integers(3, 20, p).astype(np.int32)
    for name, stops in STOPS.items():
        tokens = rng.integers(0, 3, (p, new, 3)).astype(np.int32)
        sure = np.sqrt(rng.random((p, new, 3))).astype(np.float32)
        traces[name] = ModelTrace(stops, (0.5, 0.5), False, lengths, tokens, sure)
        slow = 1.0 if name == "small" else 2.0

        def each(value, slow=slow):
            return (slow * value,) * 3

        profiles[name] = ModelProfile(
            each(1e-3),
            each(1e-2),
            each(1e-2),
            each(1e-5),
            each(1e6),
            each(1e6),
            (0.9, 0.9, 1.0),
            (0.9, 0.9, 1.0),
            heads=each(1e5),
        )
        own = StepCosts(1e-4, (2e-3, 1e-3, 2e-3), (1e-4,) * 3, 0.0, 5e-3, 0.0, (1, 1, 1))
        costs[name] = dataclasses.asdict(own) | {"buckets": (2, 4), "tokens": 16}
    kinds = tuple(("summarization", "gsm8k")[i % 2] for i in range(p))
    along = {("large", "small"): traces["large"], ("small", "large"): traces["small"]}
    judged = {name: (-2.0 * rng.random(p)).tolist() for name in STOPS}
    return helios_models.Measured(PromptTrace(traces, kinds), along, judged, profiles, costs, 1)


@pytest.fixture
def world():
    measured = drawn()
    return simulated.World.make(measured, helios_models.paces(measured), 0.78, 4)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The folder that a run from a recorded trace leaves."""
    folder = tmp_path_factory.mktemp("helios")
    helios_models.save(drawn(), folder / "trace.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "INTERVALS", (5, 10, 200))
        patch.setattr(simulated, "EARLY", (0.9, 0.2))
        patch.setattr(helios_shapes, "CONTEXTS", (512,))
        call(NAME, f"--workdir={folder}")
    return folder


def test_it_leaves_a_finding_for_every_claim(left):
    result = json.loads((left / "results.json").read_text())
    assert {f["place"] for f in result["findings"]} == PLACES
    assert all(f["paper"] == "HELIOS" and f["theirs"] and f["ours"] for f in result["findings"])
    claims = [(f["place"], f["claim"]) for f in result["findings"]]
    assert len(set(claims)) == len(claims)
    for line in result["timelines"].values():
        assert len(line["ttft"]) == len(line["perplexity"]) == 24
    for name in (*helios_figures.TIMELINES, *(f"figure_{n}.png" for n in (6, 7, 8, 9, 15, 17))):
        assert (left / name).stat().st_size > 8_000


def verdicts(result, place):
    """Verdicts of a place's claims, from numbers that may have been changed."""
    lines = {
        name: types.SimpleNamespace(ttft=np.array(line["ttft"]), assessments=line["assessments"])
        for name, line in result["timelines"].items()
    }
    found = helios_findings.findings(result, lines, "a test's")
    return [f["verdict"] for f in found if f["place"] == place]


HOLDS, FAILS, UNJUDGED = "holds", "does not hold", "not at this scale"


def test_a_claim_that_does_not_hold_is_said_to_fail(left):
    def read():
        return json.loads((left / "results.json").read_text())

    def changed(place, change):
        result = read()
        change(result, {row["name"]: row for row in result["simulated"]})
        return verdicts(result, place)

    # Half of a gain of 1.48 and 2.13 over the models alone is enough.
    alone = {"small only": 100.0, "large only": 80.0}
    for served, verdict in ((126.0, HOLDS), (123.0, FAILS)):

        def change(_, rows, served=served):
            return [
                rows[name].update(throughput=value)
                for name, value in (alone | {"HELIOS, throughput": served}).items()
            ]

        assert changed("Figure 13", change) == [verdict]
    for saved, verdict in ((0.225, HOLDS), (0.3, FAILS)):

        def change(result, _, saved=saved):
            return result["table_4"][1].update(saved=saved)

        assert changed("Table 4", change) == [HOLDS, verdict, HOLDS]
    # Thresholds are fitted to the share of a model alone, which shows nothing.
    for place in ("Figure 7", "Figure 11a"):
        assert verdicts(read(), place) == [UNJUDGED]
    assert verdicts(read(), "Table 5")[:2] == [UNJUDGED, UNJUDGED]
    # More by first exits than in the paper is no fault, fewer are.
    for exits, verdict in (((0.75, 0.0, 0.05), HOLDS), ((0.4, 0.05, 0.35), FAILS)):

        def change(_, rows, exits=exits):
            return rows["HELIOS, energy"].update(exits={"small": exits, "large": (0.2, 0.0, 0.0)})

        assert changed("Table 5", change)[-1] == verdict
    # Of tokens that take all layers, those that leave the other model early by any exit count.
    for last, verdict in (((0.1, 0.5, 0.4), HOLDS), ((0.4, 0.0, 0.6), FAILS)):

        def change(result, _, last=last):
            return [row.update(last=last) for row in result["figure_9"]]

        assert changed("Figure 9", change) == [verdict]
    for answered, verdict in ((24, HOLDS), (23, FAILS)):

        def change(result, rows, answered=answered):
            return (
                rows["HELIOS, throughput"].update(answered=answered),
                result["timelines"]["HELIOS, throughput"].update(ttft=[0.1] * 24, assessments=[0]),
                result["timelines"]["small only"].update(ttft=[0.1] * 24),
            )

        assert changed("Section 3.4", change) == [verdict]

    def change(result, _):
        return [row.update(unchanged=[0.9] * 10) for row in result["figure_8"]]

    assert changed("Figure 8", change) == [HOLDS]

    def change(result, _):
        return result["table_2"][0].update(layers=25)

    assert changed("Table 2", change) == [FAILS, HOLDS]

    def change(result, _):
        return result["defaults"].update(interval=100)

    assert changed("Sections 3.3.1 to 3.4.2", change) == [FAILS]

    def paper_row(_, rows):
        return rows["HELIOS, energy"].update(
            exits={"small": [0.743, 0.018, 0.079], "large": [0.153, 0.001, 0.006]}
        )

    assert changed("Table 5", paper_row)[-1] == HOLDS
    assert verdicts(read(), "Figure 5") == [UNJUDGED]


def test_table_5_has_every_token_once_and_a_model_alone_its_own(world):
    rows, lines = simulated.compared(world)
    assert {"small only", "large only", *helios_paper.TABLE_5} <= {r["name"] for r in rows}
    for row in rows:
        shares = {m: sum(own) for m, own in row["exits"].items()}
        assert sum(shares.values()) == pytest.approx(1)
    alone = simulated.of(rows, "large only")
    assert alone["exits"]["small"] == [0, 0, 0] and alone["partly_loaded"] == 0
    # What leaves by each exit is the trace's own, and so is its perplexity.
    model = world.trace.models["large"]
    exits, _ = model.leaves(world.thresholds["large"])
    shares = (exits[..., None] == np.arange(3)).mean((0, 1))
    np.testing.assert_allclose(alone["exits"]["large"], shares)
    chosen = np.take_along_axis(model.confidences, exits[..., None], -1)
    assert alone["perplexity"] == pytest.approx(np.exp(-np.log(chosen.astype(float)).mean()))
    without = simulated.of(rows, "large, no early exits")
    assert without["exits"]["large"] == [0, 0, 1] and without["agreement"] == 1
    assert without["operations"] > alone["operations"]
    # By the paper's own formulas (Table 3).
    line = lines["large only"]
    tokens = world.trace.new
    assert alone["printed_latency"] == pytest.approx(
        np.mean((line.ttft + 1 / line.throughput) * tokens)
    )
    assert alone["latency"] == pytest.approx(
        np.mean(line.ttft + (tokens - 1) / line.throughput), rel=1e-6
    )


def test_a_prompts_depth_is_what_was_loaded_when_its_first_token_came(world):
    from eejax.experiments.helios_simulation import policies
    from eejax.helios.choices import ModelDepth

    script = [ModelDepth("small", 1), ModelDepth("small", 3), ModelDepth("large", 2)]
    run = world.run(lambda clock: policies.ScriptedPolicy(script, 8, clock=clock))
    depths = simulated.served_depths(run, world.profiles)
    pairs = [*zip(run.models, depths, strict=True)]
    assert pairs[0] == ("small", 1) and pairs[-1] == ("large", 2)
    assert [*dict.fromkeys(pairs)] == [("small", 1), ("small", 3), ("large", 2)]
    by_depth = np.zeros(3)
    for i, (name, depth) in enumerate(pairs):
        model = world.trace.models[name]
        if name == "small":
            exits = model.leaves(world.thresholds[name], depth)[0][i]
            by_depth += np.bincount(exits, minlength=3)
    # A prompt that is under way while layers come has tokens of both depths.
    assert abs(by_depth - run.exits["small"]).max() <= world.trace.new


def test_prompts_come_task_after_task():
    trace = drawn().trace
    order = simulated.task_order(trace)
    kinds = trace.ordered(order).kinds
    assert kinds == ("summarization",) * 12 + ("gsm8k",) * 12
    assert order[:3] == [0, 2, 4]


def made() -> PromptTrace:
    """Two prompts of two tokens."""
    sure = np.array([[[0.9, 1.0], [0.2, 0.5]], [[0.1, 0.8], [0.6, 1.0]]], np.float32)
    tokens = np.array([[[1, 1], [2, 3]], [[4, 4], [5, 6]]], np.int32)
    model = ModelTrace((1, 2), (0.5,), True, np.array([1, 1], np.int32), tokens, sure)
    return PromptTrace({"small": model}, ("a", "b"))


def test_evidence_worked_by_hand():
    trace = made()
    limits, small = {"small": 0.5}, trace.models["small"]
    rows = evidence.exit_shares(trace, limits)
    assert [(r["task"], r["shares"], r["agreement"]) for r in rows] == [
        ("all", [0.5, 0.5], 0.75),
        ("a", [0.5, 0.5], 1.0),
        ("b", [0.5, 0.5], 0.5),
    ]
    rows = {r["task"]: r for r in evidence.unchanged(trace)}
    at = evidence.LIMITS.index
    assert rows["all"]["unchanged"][at(0.1)] is None or rows["all"]["below"][at(0.1)] > 0
    # Below 0.3 are the tokens of 0.2, which changes, and of 0.1, which stays.
    assert rows["all"]["unchanged"][at(0.3)] == 0.5 and rows["all"]["below"][at(0.3)] == 0.5
    assert rows["all"]["unchanged"][-1] == 0.5 and rows["all"]["below"][-1] == 1.0
    assert rows["a"]["unchanged"][at(0.3)] == 0.0 and rows["b"]["unchanged"][at(0.3)] == 1.0
    # Another model that reads along is sure of the first token of each.
    sure = np.array([[[0.9, 1.0], [0.2, 1.0]], [[0.8, 1.0], [0.3, 1.0]]], np.float32)
    other = ModelTrace((3, 4), (0.5,), True, small.prompts, small.tokens, sure)
    along = {("large", "small"): other}
    (row,) = evidence.complementary(trace, along, limits | {"large": 0.5})
    assert row["writer_early"] == 0.5 and row["either"] == 0.75
    assert row["past_first"] == [0.5, 0.5] and row["first"] == [0.5, 0.5]
    assert row["last"] == row["past_first"]
    # Of three exits, the middle one is past the first, too: leaves are 0, 1 and 0, 2.
    sure = np.array([[[0.9, 1, 1], [0.2, 0.9, 1]], [[0.8, 1, 1], [0.2, 0.3, 1]]], np.float32)
    tokens = np.repeat(small.tokens[..., -1:], 3, -1)
    three = ModelTrace((2, 3, 4), (0.5, 0.7), True, small.prompts, tokens, sure)
    models = {"small": three, "large": other}
    (row,) = evidence.complementary(
        dataclasses.replace(trace, models=models), along, limits | {"large": 0.25}
    )
    assert row["writer_early"] == 0.75 and row["past_first"] == [0.5, 0.5]
    # The last token of the second text alone takes all three: 0.3, by the other's first exit.
    assert row["last"] == [1.0, 0.0]
    for share, leave in ((0.25, 1), (0.5, 2), (1.0, 4)):
        threshold = evidence.threshold_for(small, share)
        assert (small.leaves(threshold)[0] == 0).sum() == leave
    # Tokens leave with 0.9 and 0.5, and with 0.8 and 0.6.
    each = evidence.perplexities(small, small.leaves(0.5)[0])
    np.testing.assert_allclose(each, [(0.9 * 0.5) ** -0.5, (0.8 * 0.6) ** -0.5], rtol=1e-6)
    assert evidence.mean_perplexity(each) == pytest.approx((0.9 * 0.5 * 0.8 * 0.6) ** -0.25)


def test_figure_6_is_of_published_sizes():
    rows = helios_shapes.figure_6()
    assert helios_shapes.savings_at(rows, 16) == pytest.approx({"Llama-7B": 0.5, "Llama-13B": 0.6})
    whole = {r["model"]: r["gigabytes"] for r in rows}
    # 6,738,415,616 and 13,015,864,320 parameters as published, in two bytes each.
    assert whole == pytest.approx({"Llama-7B": 13.4768, "Llama-13B": 26.0317}, rel=1e-3)
    # Two operations for every weight but the embeddings.
    flops = [r["gigaflops"] for r in rows if r["layer"] == r["layers"]]
    np.testing.assert_allclose(flops, [2 * 6.607, 2 * 12.852], rtol=1e-3)


def test_table_1_sees_where_evaluation_names_another_model():
    def row(before, after, task):
        return {
            "measure": "own",
            "before": dict(zip("ab", before, strict=True)),
            "after": dict(zip("ab", after, strict=True)),
            "task_mean": dict(zip("ab", task, strict=True)),
        }

    rows = [row((2, 1), (1, 2), (1, 3)), row((2, 1), (3, 2), (3, 1)), row((2, 1), (1, 2), (2, 1))]
    assert evidence.choices(rows, "own") == {
        "tasks": 3,
        "differ": 2,
        "before_right": 2,
        "after_right": 2,
    }
    measured = drawn()
    limits = {"small": 0.5, "large": 0.5}
    rows = evidence.table_1(measured.trace, measured.judged, limits)
    assert [(r["measure"], r["task"]) for r in rows] == [
        (m, t) for m in ("own", "judge") for t in ("summarization", "gsm8k")
    ]
    judged = np.array(measured.judged["small"])
    assert rows[2]["before"]["small"] == pytest.approx(np.exp(-judged.mean()))
    assert rows[3]["after"]["small"] == pytest.approx(np.exp(-judged[1::2][:5].mean()))


def test_a_draft_brings_what_is_accepted_and_one_more():
    assert evidence._rounds([True] * 6, 2) == 2
    assert evidence._rounds([False] * 6, 2) == 6
    assert evidence._rounds([True, False, True, True, True], 3) == 2
    found = evidence.speculative(
        drawn().trace, drawn().along, drawn().profiles, {"small": 0.5, "large": 0.5}, "none such"
    )
    assert found["task"] == "all" and found["draft"] in evidence.DRAFTS
    # A draft of one token costs one of the small model and two of the large one.
    assert found["ratio"] > 0 and 0 < found["accepted"] < 1


def test_the_models_are_trained_as_in_section_4_1(tmp_path):
    for name, stops in STOPS.items():
        e = helios_training.experiment(name, tmp_path, 0.25)
        assert e.model.exit_boundaries == stops and e.exit_weights.weights == (1.0, 1.0)
    full = helios_training.experiment("judge", tmp_path, 1.0)
    assert full.model.exits == () and full.train.steps == 1300
    with pytest.raises(ConfigError, match="--train = 0: must be a share"):
        helios_training.train(tmp_path, 0)


def test_what_is_missing_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv("EEJAX_DATA", raising=False)
    with pytest.raises(SystemExit):
        call(NAME, f"--workdir={tmp_path}")
    with pytest.raises(ConfigError, match="EEJAX_DATA: must name the folder of mixed_prompts"):
        helios_models.prompts(None, 100, None)
    made().save(tmp_path / "trace.npz")
    with pytest.raises(DataError, match="trace.npz.json: cannot be read"):
        helios_models.load(tmp_path / "trace.npz")


@pytest.mark.slow
def test_it_trains_records_and_goes_on_from_what_is_there(eejax_data, tmp_path, capsys):
    arguments = [f"--workdir={tmp_path}", "--tiny", "--new=8", "--prompts=12", "--calls=20"]
    call(NAME, *arguments, "--json")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {f["place"] for f in result["findings"]} == PLACES
    again = helios_models.load(tmp_path / "trace.npz")
    assert {m: t.exit_boundaries for m, t in again.trace.models.items()} == STOPS
    assert len(again.judged["small"]) == len(again.trace) == 12
    kept = (tmp_path / "trace.npz").read_bytes()
    call(NAME, *arguments, "--json")
    assert (tmp_path / "trace.npz").read_bytes() == kept
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
