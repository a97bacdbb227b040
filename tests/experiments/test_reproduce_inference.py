"""The reproduction of EE-LLM's inference, of a run that took seconds, and how it judges."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import small_runs
from endings import ended
from launchers import functions_of
from matplotlib.image import imread

from eejax import calibration
from eejax.calibration import ExitScores
from eejax.common.errors import ConfigError, DataError
from eejax.experiments import decode_times, step_costs
from eejax.experiments.reproduce import (
    catalogue,
    claims,
    exit_tables,
    inference_findings,
    inference_tasks,
)
from eejax.inference import EngineOptions, Generator
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.train.config import Experiment
from eejax.train.loop import fit
from eejax.train.runs import open_run

inference = functions_of("eejax.experiments.reproduce.inference")
THRESHOLDS = [1.0, 0.6, 0.3]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Three layers with two exits, trained until they are sure of some tokens."""
    folder = tmp_path_factory.mktemp("run")
    small_runs.write_text(folder)
    values = small_runs.config(folder, microbatches=1, eval_every=0, steps=800)
    exits = [{"boundary": 1}, {"boundary": 2}]
    values["model"] |= {"n_layers": 3, "exits": exits, "context_length": 32, "dropout": 0.0}
    values["train"] |= {"checkpoint_every": 800, "log_every": 800}
    values["exit_weights"] = {"weights": [0.5, 0.5]}
    fit(Experiment.from_dict(values), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def model(workdir):
    return open_run(workdir).model


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files of the real ones' form."""
    folder = tmp_path_factory.mktemp("data")

    def write(name, rows):
        return (
            (folder / name).parent.mkdir(),
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows)),
        )

    words = ["exit", "layer", "token", "an-unusually-long-word"]
    write(
        inference.LAMBADA,
        [
            {"context": f"{i} early depth gate loss", "continuation": words[i % 4]}
            for i in range(40)
        ],
    )
    answers = {
        "boolq": {"references": None, "choices": ["no", "yes"], "gold": 1},
        "truthfulqa": {"references": ["the gate"]},
        "nq_open": {"references": ["exit", "an exit"]},
        "summarization": {"references": ["early exit of a token"]},
    }
    write(
        inference.MIXED,
        [
            {"prompt": f"gate é token {i}", "task": task} | answer
            for task, answer in answers.items()
            for i in range(3)
        ],
    )
    return folder


def launch(root, data, *arguments):
    process = subprocess.run(
        [sys.executable, "-P", "-m", "eejax.experiments.reproduce.inference", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"EEJAX_DATA": str(data)},
    )
    return process.returncode, process.stdout, process.stderr


@pytest.fixture(scope="module")
def reproduced(repo_root, workdir, data):
    return launch(
        repo_root,
        data,
        f"--workdir={workdir}",
        "--thresholds=0.3,0.6",
        "--records=30",
        "--tokens=2000",
        "--pairs=2",
        "--prompts=2",
        "--texts=2",
        "--stages=3",
        "--answers=2",
        "--json",
    )


@pytest.mark.slow
def test_it_leaves_what_it_promises(reproduced, workdir):
    code, out, err = reproduced
    results = json.loads((workdir / "inference" / "results.json").read_text())
    assert code == (0 if all(c["holds"] for c in results["claims"]) else 1), err
    tables = {k: results.pop(k) for k in ("table3", "table4")}
    assert json.loads(out.splitlines()[-1]) == results
    for name in ("fig8.png", "fig8_tasks.png", "fig10.png"):
        assert imread(workdir / "inference" / name).std() > 0.02
    page = (workdir / "inference" / "tables.html").read_text()
    assert "threshold 1" in page and "exit after 2" in page
    assert [row["threshold"] for row in results["thresholds"]] == THRESHOLDS
    assert results["records"] == 23  # 7 of 30 are too long for their window
    for row in results["thresholds"]:
        low, high = row["speed"]["low"], row["speed"]["high"]
        assert 0 < low <= row["speed"]["ratio"] <= high
        line = f"{row['perplexity']:.3f}  {row['agreement']:9.1%}"
        assert line in out
    first = results["thresholds"][0]
    assert first["layers"] == 3 and first["agreement"] == 1.0
    assert first["simulated"] == pytest.approx({"recompute": 1.0, "pipelined": 1.0})
    assert first["accuracy"] == results["full"]["accuracy"]
    # Layers that are equal, and rows that are no faster than one.
    assert len(set(results["costs"]["layers"])) == 1 and len(results["costs"]["exits"]) == 3
    factors = list(results["costs"]["rows"].values())
    assert factors[0] == 1.0 and factors == sorted(factors)
    # The stages were there: the real engine was compared, three thresholds of two texts each.
    check = results["pipelined_engine"]
    assert check["tokens"] == 3 * 2 * (1 + results["new_tokens"]) and check["others"] == 0
    verdicts = [line for line in out.splitlines() if line.startswith(("holds", "FAILS"))]
    assert len(verdicts) == len(results["claims"]) == 6 and "not checked" not in out
    for text in tables["table3"]:
        assert [t["threshold"] for t in text["texts"]] == THRESHOLDS[::2]
        for t in text["texts"]:
            assert len(t["pieces"]) == len(t["exits"]) == len(t["confidences"]) == 15
            assert set(t["boundaries"]) <= ({3} if t["threshold"] == 1 else {1, 2, 3})
    assert np.shape(tables["table4"]["predicted"]) == (3, 15)
    assert list(results["tasks"]) == ["boolq", "truthfulqa", "nq_open", "summarization"]
    for rows in results["tasks"].values():
        assert [row["threshold"] for row in rows] == THRESHOLDS
        assert rows[0]["speed"]["pipelined"] == pytest.approx(1.0)
    for rows in (*results["tasks"].values(), results["thresholds"]):
        assert rows[0]["early"] == 0 and all(0 <= row["early"] <= 1 for row in rows)
    assert results["thresholds"][-1]["early"] > 0
    collection = catalogue.collect(map(claims.Finding.from_dict, results["findings"]))
    assert not collection.unknown
    spoken = {e.claim.key for e in collection.entries["EE-LLM"] if e.findings}
    assert spoken == {
        "figure-8",
        "figure-8-order",
        "threshold-1",
        "figure-10",
        "similar-methods",
        "same-output",
        "table-3",
        "table-4",
    }


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--stages=4"], "--stages = 4: must be at most the model's 3 layers"),
        (["--workdir=absent"], "absent"),
    ],
)
def test_what_cannot_be_is_refused(small_run, data, monkeypatch, arguments, message):
    monkeypatch.setenv("EEJAX_DATA", str(data))
    code, _, err = ended(inference.__name__, f"--workdir={small_run}", *arguments)
    assert code == 1 and err.startswith("error: ") and message in err
    assert "Traceback" not in err and err.count("\n") == 1


@pytest.mark.parametrize("text", ["0.5,1.5", "-0.1", "nan", "1", "low", ""])
def test_thresholds_that_cannot_be_are_named(text):
    with pytest.raises(ConfigError, match=f"--thresholds = '{text}': must"):
        inference.thresholds_of(text.split(","))
    assert inference.thresholds_of(["0.2", "0.9", "0.2"]) == [1.0, 0.9, 0.2]


def test_missing_data_are_named(monkeypatch, tmp_path):
    monkeypatch.delenv("EEJAX_DATA", raising=False)
    with pytest.raises(DataError, match="EEJAX_DATA is not set"):
        inference.data_folder()
    monkeypatch.setenv("EEJAX_DATA", str(tmp_path))
    with pytest.raises(DataError, match=inference.LAMBADA):
        list(inference.lambada(inference.data_folder()))


def scores_of(n_units=40, seed=0):
    """Random scores of two early exits, texts of unequal length."""
    rng = np.random.default_rng(seed)
    units = np.repeat(np.arange(n_units) * 3, rng.integers(1, 9, n_units))
    config = ModelConfig(
        vocab_size=7,
        n_layers=4,
        d_model=8,
        n_heads=2,
        context_length=8,
        exits=(ExitConfig(1), ExitConfig(2)),
    )
    n = len(units)
    return ExitScores(
        config,
        np.zeros(n, int),
        units,
        rng.integers(0, 3, (3, n)),
        rng.random((3, n)),
        {"max_probability": rng.random((3, n), np.float32)},
    )


def test_scores_are_those_of_a_loop_over_positions():
    text, spoken, threshold = scores_of(), scores_of(30, 1), 0.6
    nlls = {}
    for name, scores in (("text", text), ("spoken", spoken)):
        for t in (threshold, 1.0):
            sums = {}
            for i, unit in enumerate(scores.units):
                sure = scores.confidences["max_probability"][:, i]
                e = next((e for e in (0, 1) if t < 1 and sure[e] >= t), 2)
                sums.setdefault(int(unit), []).append(scores.nlls[e, i])
            nlls[name, t] = sums
    row = inference.teacher_forced(text, spoken, threshold)
    words = {t: np.array([sum(v) for v in nlls["spoken", t].values()]) for t in (threshold, 1.0)}
    assert row["word_loss"] == pytest.approx(words[threshold].mean())

    def flat(t):
        return np.concatenate(list(nlls["text", t].values())).mean()

    assert row["perplexity"] == pytest.approx(np.exp(flat(threshold)))
    more = row["more_than_full"]
    assert more["word_loss"]["score"] == pytest.approx((words[threshold] - words[1.0]).mean())
    assert more["perplexity"]["score"] == pytest.approx(np.exp(flat(threshold) - flat(1.0)) - 1)
    full = inference.full_scores(text, spoken)
    assert full["word_loss"]["score"] == pytest.approx(words[1.0].mean())
    assert full["perplexity"]["score"] == pytest.approx(np.exp(flat(1.0)))
    assert full["perplexity"]["low"] < np.exp(flat(1.0)) < full["perplexity"]["high"]
    same = inference.teacher_forced(text, spoken, 1.0)["more_than_full"]
    assert all(set(x.values()) == {0.0} for x in same.values())


@pytest.mark.slow
def test_last_words_that_are_completed_are_counted(model):
    """Words that the model itself writes, every third of them spoiled; and the same from a
    teacher-forced pass: all tokens of the word are what their exits find most likely."""
    threshold, n = 0.3, 5
    text = b"token gate exit loss head state early depth layer"
    prompts = [list(text[i : i + 3 + i % 7]) for i in range(21)]
    generator = Generator.make(model.params, model.config, "posthoc")
    written = [
        generator.generate([p], n, threshold=threshold, prefill_exit=True).ids(0) for p in prompts
    ]
    records = []
    for i, (prompt, ids) in enumerate(zip(prompts, written, strict=True)):
        target = ids[: 1 + i % n]
        records.append((prompt, [*target[:-1], 200] if i % 3 == 0 else target))
    few = EngineOptions("recompute", cap=1)  # row counts to compile
    got = inference.completed(model, records, few, threshold)
    assert got["score"] == pytest.approx(14 / 21)
    scores = calibration.score(model.params, model.config, inference.word_batches(records))
    number = calibration.emitting_exits(scores, threshold)
    right = scores.tokens[number, np.arange(len(scores))] == scores.labels
    assert len(scores) == sum(len(t) for _, t in records) and len(set(number)) > 1
    assert sum(right[scores.units == u].all() for u in np.unique(scores.units)) == 14


def test_records_are_cut_from_the_left_and_fit_their_window(model):
    words = [("abcdefgh", " xyz"), ("ab", " xyz"), ("abc", " toolong"), ("", " xyz")]
    records = inference.encoded(words, model.tokenizer, 8)
    text = [tuple(bytes(part).decode() for part in record) for record in records]
    assert text == [("efgh", " xyz"), ("ab", " xyz")]
    (batch,) = inference.word_batches(records)
    assert bytes(batch["tokens"][0].tolist()) == b"efgh xy"
    assert [chr(c) if c >= 0 else "-" for c in batch["labels"][0]] == [*"---", *" xyz"]
    assert [chr(c) if c >= 0 else "-" for c in batch["labels"][1]] == [*"-", *" xyz", *"--"]
    with pytest.raises(DataError, match="fewer than 2"):
        inference.encoded(words[1:3], model.tokenizer, 5)


def test_real_last_words_are_read(eejax_data, model):
    words = list(inference.lambada(eejax_data))
    assert len(words) > 1000 and all(w.startswith(" ") and len(w) > 1 for _, w in words)
    records = inference.encoded(words[:50], model.tokenizer, 64)
    assert all(len(p) + len(t) == 64 for p, t in records) and len(records) == 50
    got = model.tokenizer.decode(records[0][0] + records[0][1])
    assert (words[0][0] + words[0][1]).endswith(got[1:])  # a character may be cut in two
    spoken = calibration.score(
        model.params,
        model.config,
        inference.word_batches(inference.encoded(words[:20], model.tokenizer, 16)),
    )
    row = inference.teacher_forced(spoken, spoken, 0.3)
    assert 0 < row["word_loss"] < 100


def test_exits_of_every_kind_can_be_timed():
    exits = (ExitConfig(0, block=True), ExitConfig(1, mlp=True), ExitConfig(2, norm=False))
    config = ModelConfig(
        vocab_size=7, n_layers=3, d_model=8, n_heads=2, context_length=8, exits=exits
    )
    times, factors = step_costs.of_layers(params.init(config, jax.random.key(0)), config, (1, 2))
    assert len(times.layers) == 3 and len(times.exits) == 4 and min(times.exits) > 0
    assert times.layers == (times.layers[0],) * 3 and times.layers[0] > 0
    assert factors[1] == 1.0 <= factors[2]


def results_of(model, prompts, thresholds, n):
    generator = Generator.make(model.params, model.config, "recompute")
    return [[generator.generate([p], n, threshold=t) for p in prompts] for t in thresholds]


def test_answers_are_scored_by_the_metrics_of_the_paper():
    """Cases worked by hand: articles and case do not count, ROUGE-L takes the longest common
    subsequence."""
    metrics = inference_tasks.metrics()
    assert metrics["EM"]("The Yes", "yes") == 1 and metrics["EM"]("yes no", "yes") == 0
    assert metrics["F1"]("bobby scott", "Bobby Russell Scott") == pytest.approx(0.8)
    # Of 5 and 3 words 2 are common in order: precision 2 / 3, recall 2 / 5.
    assert metrics["ROUGE-L"]("early late token", "early exit of a token") == pytest.approx(0.5)


def test_shares_of_a_layer_worked_by_hand(monkeypatch):
    config = ModelConfig(
        vocab_size=7, n_layers=4, d_model=8, n_heads=2, context_length=8, exits=(ExitConfig(1),)
    )
    monkeypatch.setattr(inference_findings, "LAUNCHES", (0.01,))
    monkeypatch.setattr(inference_findings, "HOP", 0.0)
    found = inference_findings.tensor_parallel({1.0: [[1]], 0.5: [[0, 0]]}, config, 4)
    # 32 layers' weights and the table of an exit, each read once.
    layers = 32 * 24 * 4096**2 / inference_findings.BANDWIDTH
    head = 2 * 4096 * 32_000 / inference_findings.BANDWIDTH
    full = layers + 32 * 0.01 + head
    sums = inference_findings.ALL_REDUCE
    shared = layers / 4 + 32 * (0.01 + 2 * sums)
    rows = found["0.01"]
    assert rows[0]["recompute"] == rows[0]["pipelined"] == pytest.approx(1.0)
    assert rows[0]["recompute_tp"] == pytest.approx(full / (shared + head / 4 + sums))
    one = (layers + 32 * 0.01) / 4 + head
    assert rows[1]["pipelined"] == rows[1]["recompute"] == pytest.approx(full / one)


@pytest.mark.slow
def test_texts_that_differ_are_told_from_near_ties(model, monkeypatch):
    prompts, n = [list(b"exit")], 12
    ((first,),) = results_of(model, prompts, [1.0], n)
    change = copy.deepcopy(first)
    for name in ("tokens", "exits"):
        object.__setattr__(change, name, getattr(change, name).copy())
    change.tokens[0, 4:] += 1
    got = decode_times.compared(model, 3, prompts, [[change]], [1.0])
    assert got == {"tokens": n, "differ": n - 4, "near_ties": 0, "others": 1}
    # A threshold that is just what the exit is sure of: rounding decides.
    sure = float(results_of(model, prompts, [0.0], n)[0][0].confidences[0, 1])
    tie = results_of(model, prompts, [sure], n)[0][0]
    changed = copy.deepcopy(tie)
    object.__setattr__(changed, "exits", changed.exits.copy())
    changed.exits[0, 1] += 1
    got = decode_times.compared(model, 3, prompts, [[changed]], [sure])
    assert got["near_ties"] == 1 and got["others"] == 0 and got["differ"] >= 1
    # A tie that all decided alike excuses nothing that comes later.
    oracle = Generator.make(model.params, model.config, "posthoc")
    margins = oracle.generate(prompts, n, threshold=1.0).margins[0]
    tied = int(margins[:-1].argmin())
    clear = tied + 1 + int(margins[tied + 1 :].argmax())
    monkeypatch.setattr(decode_times, "TIE", (margins[tied] + margins[clear]) / 2)
    for at, ties in ((tied, 1), (clear, 0)):
        later = copy.deepcopy(first)
        object.__setattr__(later, "tokens", later.tokens.copy())
        later.tokens[0, at:] += 1
        got = decode_times.compared(model, 3, prompts, [[later]], [1.0])
        assert (got["near_ties"], got["others"]) == (ties, 1 - ties)


def test_tables_are_what_the_engines_say(model):
    prompts = [list(b"exit"), list(b"a gate")]
    table = exit_tables.texts_of(model, prompts, [1.0, 0.3])
    full = Generator.make(model.params, model.config, "full")
    for prompt, text in zip(prompts, table, strict=True):
        one, low = text["texts"]
        assert one["ids"] == full.generate([prompt], 15).ids(0)
        assert set(one["boundaries"]) == {3} and min(low["boundaries"]) < 3
        for t in text["texts"]:
            assert t["boundaries"] == [(1, 2, 3)[e] for e in t["exits"]]
    four = exit_tables.exits_of(model, prompts[0])
    tokens = np.array([prompts[0] + four["ids"]], np.int32)
    # By the model itself, one exit after the other.
    scores = calibration.score(
        model.params, model.config, [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}]
    )
    np.testing.assert_array_equal(four["predicted"], scores.tokens[:, len(prompts[0]) - 1 :])
    assert four["predicted"][-1] == four["ids"]
    for e, row in enumerate(exit_tables.agreeing(four)):
        same = [a == b for a, b in zip(four["predicted"][e], four["ids"], strict=True)]
        sure = [c for c, s in zip(four["confidences"][e], same, strict=True) if s]
        assert row["agreement"] == pytest.approx(sum(same) / len(same))
        assert row["agreeing"] == (pytest.approx(sum(sure) / len(sure)) if sure else None)


def test_predicted_tokens_keep_the_space_before_them():
    """A tokenizer like SentencePiece: the first token of a text loses its space."""
    words = {1: " a", 2: " gate", 3: "s"}

    class Tokenizer:
        def decode(self, ids):
            return "".join(words[i] for i in ids).removeprefix(" ")

    got = exit_tables.pieces_in_place(Tokenizer(), [1, 2, 3], 1, [2, 3])
    assert got == [" gate", "s"]


def test_pieces_make_up_the_text(model):
    prompt, ids = "ab é".encode()[:-1], "éxü".encode()
    pieces = exit_tables.pieces_of(model.tokenizer, list(prompt), [0xA9, *ids])
    assert pieces == ["é", "", "é", "x", "", "ü"]
    assert exit_tables.pieces_of(model.tokenizer, [97], [98, 0xC3]) == ["b", "\ufffd"]
