"""The page and the figures of a grade, on a small run and a folder, and every verdict."""

import html
import json
import re

import jax
import numpy as np
import pytest
from endings import ended
from reference_model import exit_logits

import eejax
from eejax.calibration.drafting import DraftPrediction
from eejax.calibration.frontier import ExitScores
from eejax.calibration.prediction import DecodingTimes, DepthScore, GatePoint
from eejax.checkpoint.language_model import LanguageModel
from eejax.common.errors import ConfigError, DataError
from eejax.data.tokenizers import ByteTokenizer
from eejax.experiments import grade_page, grade_times, grade_verdict, grading, held_out
from eejax.experiments.grade_times import LOOKUP, MeasuredSpeed
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.train.runs import open_run

COMMAND = "eejax.experiments.grade"
SECTIONS = [
    "The model",
    "Exits by depth",
    "Gates",
    "Drafts",
    "Measured",
    "Guarantee",
    "Recipe",
]


@pytest.fixture(scope="module")
def graded(small_run, tmp_path_factory):
    """(what the command printed about the small run, its result, its page)."""
    out = tmp_path_factory.mktemp("grade")
    done = ended(COMMAND, small_run, f"--out={out}", "--tokens=2000", "--pairs=2", "--json")
    assert done.status == 0, done.err
    result = json.loads((out / "grade.json").read_text())
    assert result == json.loads(done.out.splitlines()[-1])
    return done.out, result, (out / "grade.html").read_text()


def test_figures_of_a_run_are_those_of_float64_logits(graded, small_run):
    _, result, _ = graded
    run = open_run(small_run)
    config = run.model.config
    batches = list(held_out.batches(run, 2000))
    same, nll, count = np.zeros(3), np.zeros(3), 0
    for batch in batches:
        for row in range(len(batch["tokens"])):
            tokens, labels = batch["tokens"][row], batch["labels"][row]
            logits = exit_logits(
                run.model.params,
                config,
                tokens,
                positions=batch["positions"][row],
                segments=batch["segment_ids"][row],
            )
            said = np.stack([y.argmax(-1) for y in logits])[:, labels >= 0]
            same += (said == said[-1]).sum(1)
            logp = [y - np.log(np.exp(y).sum(-1, keepdims=True)) for y in logits]
            kept = np.flatnonzero(labels >= 0)
            nll -= [y[kept, labels[kept]].sum() for y in logp]
            count += len(kept)
    assert [d["boundary"] for d in result["depths"]] == [1, 2, 3]
    assert not any(d["added"] for d in result["depths"])
    got = np.array([[d["agreement"], d["loss"]] for d in result["depths"]])
    np.testing.assert_allclose(got[:, 0], same / count, atol=2e-3)  # near ties
    np.testing.assert_allclose(got[:, 1], nll / count, rtol=1e-3)
    assert result["text"]["tokens"] == sum(int((b["labels"] >= 0).sum()) for b in batches)


def test_a_result_has_every_part(graded):
    said, result, _ = graded
    model = result["model"]
    assert (model["layers"], model["width"], model["own_exits"]) == (3, 16, [1, 2])
    assert model["own_vocabularies"] == [257, 257]
    assert f"exit after layer 2: {1e3 * result['times']['heads'][1]:.3g} ms for 257 tokens" in said
    assert 3 * model["layer_share"] + model["head_share"] == pytest.approx(1)
    times = result["times"]
    assert times["layer"] > 0 and len(times["heads"]) == 3 and times["rows"][0] == [1, 1.0]
    assert set(result["frontiers"]) == {"max_probability", "margin", "entropy", "patience"}
    assert set(result["choices"]) == set(result["frontiers"])
    for points in result["frontiers"].values():
        agreement = [p["agreement"] for p in points]
        assert points and agreement == sorted(agreement, reverse=True)
    # The exits of the run stand beside the logit lens at the same depth.
    drafts = [(d["boundary"], d["tuned"]) for d in result["drafts"]]
    assert drafts == [(1, True), (1, False), (2, True), (2, False)]
    acceptance = {d["boundary"]: d["acceptance"] for d in result["drafts"] if d["tuned"]}
    assert acceptance == {d["boundary"]: d["agreement"] for d in result["depths"][:-1]}
    assert 1 <= result["oracle"]["depth"] <= 3
    for m in result["measured"]:
        assert m["low"] <= m["speed"] <= m["high"] and m["pairs"] == 2
        if m["predicted"]:
            assert m["of_predicted"] == pytest.approx(m["speed"] / m["predicted"])
        if m["way"] != "gate":
            assert m["same_tokens"] == 1
    assert result["verdict"]["sentence"] in said and result["recipe"]["python"] in said


def test_the_page_stands_alone(graded):
    _, result, page = graded
    assert re.findall("<h2>(.*)</h2>", page) == SECTIONS
    assert html.escape(result["verdict"]["sentence"]) in page
    sources = re.findall(r"""(?:src|href|url|@import)\s*[=(]\s*["']?([^"'\s>)]*)""", page)
    assert len(sources) == 3 and all(s.startswith("data:image/png;base64,iVBOR") for s in sources)
    times = result["times"]
    for part, seconds in zip(
        ("one exit", "each further exit", "an exit that may draft"),
        (*times["early_step"], times["draft_step"]),
        strict=True,
    ):
        cells = "".join(f"<td>{c}</td>" for c in (grade_page.NONE, grade_page.ms(seconds)))
        assert f"the engine's work for {part}</td>{cells}" in html.unescape(page)
    assert "<script" not in page and "//" not in re.sub(r"base64,[^\"]*", "", page)
    for tag in ("table", "tr", "td", "pre", "h2", "p"):
        assert page.count(f"<{tag}>") + page.count(f"<{tag} ") == page.count(f"</{tag}>"), tag


def test_a_folder_without_exits_gets_some_and_needs_a_tokenizer(tmp_path):
    config = ModelConfig(
        vocab_size=257, n_layers=2, d_model=16, n_heads=2, context_length=48, exits=()
    )
    model = eejax.LanguageModel(config, params.init(config, jax.random.key(0)), ByteTokenizer())
    model.save(tmp_path / "model")
    (tmp_path / "a <b>.txt").write_text("early exits of a model. " * 60)
    text = f"--text={tmp_path / 'a <b>.txt'}"
    flags = ("--tokens=800", "--length=32", "--every=1", "--pairs=1", f"--out={tmp_path / 'out'}")
    done = ended(COMMAND, tmp_path / "model", text, *flags)
    assert done.status == 0, done.err
    result = json.loads((tmp_path / "out" / "grade.json").read_text())
    assert [(d["boundary"], d["added"]) for d in result["depths"]] == [(1, True), (2, False)]
    assert [d["tuned"] for d in result["drafts"]] == [False]
    assert "a &lt;b&gt;.txt" in (tmp_path / "out" / "grade.html").read_text()
    (tmp_path / "b.txt").write_text("other text to learn from. " * 400)
    tuned = f"--tune={tmp_path / 'b.txt'}"
    done = ended(COMMAND, tmp_path / "model", text, tuned, *flags)
    assert done.status == 0, done.err
    result = json.loads((tmp_path / "out" / "grade.json").read_text())
    assert [(d["boundary"], d["added"]) for d in result["depths"]] == [(1, False), (2, False)]
    # The exit stands beside the head that it began as.
    assert [d["tuned"] for d in result["drafts"]] == [True, False]
    assert f'eejax.load("{tmp_path / "out" / "model"}")' in result["recipe"]["python"]
    saved = eejax.load(tmp_path / "out" / "model")
    assert [e.boundary for e in saved.config.exits] == [1] and saved.config.exits[0].mlp
    assert not (tmp_path / "out" / "states").exists()
    absent = ended(COMMAND, tmp_path / "model", text, "--tune=none.txt", "--every=1", "--out=new")
    assert absent.status == 1 and "none.txt does not exist: check the path" in absent.err
    again = ended(COMMAND, tmp_path / "model", text, tuned, *flags)
    assert again.status == 1 and f"remove {tmp_path / 'out' / 'model'}, or name" in again.err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), r"MODEL = '': must be one model: .*"),
        (("a", "b"), r"MODEL = 'a b': must be one model"),
        (("{folder}",), r"{folder}.*config\.json"),
        (("{run}", "--text={folder}/none.txt"), r"none\.txt does not exist: check the path"),
        (("{run}", "--text={folder}/short.txt"), r"--text: has 1 windows .* at least 2"),
        (("{run}", "--every=3"), r"--every = 3: must leave a boundary in 1\.\.2"),
        (
            ("{run}", "--text={folder}/long.txt", "--tune={folder}/long.txt"),
            r"--tune = .*other text",
        ),
        (("{run}", "--tune={folder}/long.txt"), r"--tune = .*: needs a depth without an exit"),
        (("{run}", "--tokenizer=bytes"), r"--tokenizer = 'bytes': must be None.*Leave it out"),
    ],
)
def test_an_error_names_the_field_and_the_fix(arguments, message, small_run, tmp_path):
    (tmp_path / "short.txt").write_text("early")
    (tmp_path / "long.txt").write_text("a long text " * 400)
    given = [a.format(folder=tmp_path, run=small_run) for a in arguments]
    done = ended(COMMAND, *given, f"--out={tmp_path / 'out'}", "--tokens=500")
    (line,) = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert done.status == 1 and re.search(message.format(folder=tmp_path), line), line
    assert not (tmp_path / "out").exists()


TIMES = DecodingTimes(1.0, (6.0, 6.0), 0.0)
SURE = np.linspace(0.0, 0.99, 200, dtype=np.float32)


def scored(share: float) -> ExitScores:
    """One exit after 1 of 4 layers, which is right where it is sure: for this share of tokens."""
    config = ModelConfig(
        vocab_size=8, n_layers=4, d_model=8, n_heads=1, context_length=8, exits=(ExitConfig(1),)
    )
    tokens = np.stack([SURE >= 1 - share, np.ones(200, bool)]).astype(int)
    confidences = {g: np.stack([SURE, SURE]) for g in ("max_probability", "margin", "entropy")}
    return ExitScores(
        config, np.zeros(200), np.repeat([0, 1], 100), tokens, np.ones((2, 200)), confidences
    )


DEPTHS = (DepthScore(1, True, 0.7, 2.0), DepthScore(4, False, 1.0, 1.0))
GATE = GatePoint("margin", (1,), 0.5, 0.96, 2.0, 1.4)
DRAFT = DraftPrediction(1, False, 0.7, 2, 1.3, 1.2, 1.1)


def speed(way, middle, low, predicted=1.2):
    return MeasuredSpeed(way, predicted, middle, low, middle + 0.1, 1.0, 8, 1.0, 0.7, 3.0)


@pytest.mark.parametrize(
    "measured, gate, way, reason, words",
    [
        (
            [speed("drafts", 1.3, 1.2)],
            None,
            "drafts",
            "",
            "layer 1 decode the same text 1.30 times",
        ),
        ([speed("gate", 1.5, 1.4)], GATE, "gate", "", "margin at threshold 0.5 decode 1.50 times"),
        ([speed("gate", 1.5, 1.4), speed("drafts", 1.3, 1.2)], GATE, "gate", "", ", and "),
        # What the text drafts itself is no merit of an exit.
        ([speed(LOOKUP, 2, 1.9, None)], None, LOOKUP, "heads", "itself do .2.00 times"),
        ([speed(LOOKUP, 1, 0.9, None)], None, None, "heads", "6.0 layers .the model has 4"),
        ([speed("drafts", 1.1, 0.9)], None, None, "measured", r"should decode 1.20 .* took 1.10"),
        ([], None, None, "heads", "heads that cost nothing"),
    ],
)
def test_verdicts(measured, gate, way, reason, words):
    found = grade_verdict.judge(scored(0.6), TIMES, DEPTHS, gate, DRAFT, measured)
    assert (found.way, found.reason, found.pays) == (way, reason, not reason)
    assert re.search(words, found.sentence) and found.sentence.endswith(".")
    assert found.sentence.startswith(
        "Early exit pays on this device: "
        if found.pays
        else "Early exit does not pay on this device: "
    )


def test_a_threshold_that_lost_its_agreement_does_not_pay():
    lost = GatePoint("margin", (1,), 0.5, 0.94, 2.0, 1.4)
    found = grade_verdict.judge(scored(0.6), TIMES, DEPTHS, lost, DRAFT, [speed("gate", 1.5, 1.4)])
    assert not found.pays


def test_exits_that_disagree_are_the_reason_where_heads_are_not():
    found = grade_verdict.judge(scored(0.0), TIMES, DEPTHS, None, DRAFT, [])
    assert found.reason == "agreement" and "after 1 of 4 layers" in found.sentence
    assert "70% of the text" in found.sentence


def test_work_of_the_engine_is_the_reason_where_heads_and_agreement_are_not():
    slow = DecodingTimes(1.0, (0.5, 0.5), 0.0, early_step=(3.0, 0.0))
    found = grade_verdict.judge(scored(0.985), slow, DEPTHS, None, DRAFT, [])
    assert found.reason == "engine" and "3.0 layers more beside its head" in found.sentence
    free = DecodingTimes(1.0, (0.5, 0.5), 0.0)
    assert grade_verdict.judge(scored(0.985), free, DEPTHS, None, DRAFT, []).reason == "heads"


def test_what_exits_add_is_timed_beside_the_full_model(monkeypatch):
    """Seconds of the runs are given: those of layers and heads first, then of four engines."""
    config = ModelConfig(
        vocab_size=257,
        n_layers=4,
        d_model=16,
        n_heads=2,
        context_length=48,
        exits=(ExitConfig(1, mlp=True), ExitConfig(2, block=True), ExitConfig(3)),
    )
    tree = params.init(config, jax.random.key(0))
    model = LanguageModel(config, tree, ByteTokenizer())
    new, engines = 8, np.array([10.0, 12.0, 11.5, 16.0])

    def interleave(runs, rounds, clock, *, before):
        parts = len(runs) - len(engines)
        return np.tile(np.r_[np.full(parts, 1e-3), engines * new][:, None], (1, rounds))

    monkeypatch.setattr("eejax.analysis.interleave", interleave)
    found = grade_times.measure_times(model, [[1, 2, 3, 4]], new)
    assert found.early_step == (pytest.approx(2.0), pytest.approx((16 - 12) / 2))
    assert found.draft_step == pytest.approx(1.5)
    assert found.full(4) == pytest.approx(10.0)
    bare, exits = grade_times.without_own_layers(model)
    declared = params.shapes(config.replace(exits=exits))
    assert jax.tree.structure(bare) == jax.tree.structure(declared)


PATIENCE = GatePoint("patience", (1, 2), 0.75, 1.0, 2.0, 1.1)


@pytest.mark.parametrize(
    "way, own, point, python, command",
    [
        ("drafts", [1, 2], GATE, "prompt, draft_exit=1)", "--engine=speculative --draft_exit=1"),
        ("drafts", [], GATE, "prompt, draft_exit=1)", None),
        (LOOKUP, [], GATE, 'prompt, engine="speculative")', None),
        ("gate", [1, 2], GATE, "0.5, exits=[1])", "--gate=margin --threshold=0.5 --exits=1"),
        ("gate", [], GATE, "with_exits(", None),
        ("gate", [1, 2], PATIENCE, "exits=[1, 2])", "--gate=patience --threshold=0.75"),
        ("gate", [1, 2, 3], PATIENCE, "with_exits(", None),  # of three exits it would be another
        (None, [1, 2], GATE, 'engine="full")', "--engine=full"),
    ],
)
def test_recipes(way, own, point, python, command):
    verdict = grade_verdict.GradeVerdict(way is not None, way, "", "")
    found = grade_verdict.recipe("runs/a", own, True, verdict, point, DRAFT, "bytes")
    assert python in found.python and 'eejax.load("runs/a", tokenizer="bytes")' in found.python
    assert (found.command is None) == (command is None)
    if command is not None:
        assert found.command.startswith("eejax generate --workdir=runs/a ")
        assert command in found.command
    assert grade_verdict.recipe("a", own, False, verdict, point, DRAFT).command is None


def test_lines_of_a_recipe_run(small_run):
    """Also with exits that replace those of the model: they alone emit tokens."""
    verdict = grade_verdict.GradeVerdict(True, "gate", "", "")
    found = grade_verdict.recipe(str(small_run), [], True, verdict, GATE, DRAFT)
    names = {"prompt": "exit layer"}
    exec(found.python.replace("prompt, ", "prompt, 8, "), names)
    assert len(names["result"].ids(0)) == 8
    assert set(names["result"].boundaries[0, 1:].tolist()) <= {1, 3}


def test_a_model_without_room_for_exits_and_text_without_windows():
    config = ModelConfig(vocab_size=8, n_layers=4, d_model=8, n_heads=1, context_length=8)
    model = eejax.LanguageModel(config, params.init(config, jax.random.key(0)), ByteTokenizer())
    with pytest.raises(ConfigError, match="every = 4: must leave a boundary in 1..3"):
        grading.with_every(model, 4)
    assert [e.boundary for e in grading.with_every(model, None).config.exits] == [1, 2, 3]
    batch = {"tokens": np.zeros((2, 4), int), "labels": np.array([[1, 2, -1, -1], [-1] * 4])}
    with pytest.raises(DataError, match="has 1 windows"):
        grading.check_text([batch])
    assert grading.check_text([batch, batch]) == 4


def test_prompts_begin_windows_that_check():
    tokens = np.arange(10 * 12).reshape(10, 12)
    labels = tokens + 1
    labels[8, 3:] = -1
    batches = [{"tokens": tokens, "labels": labels}]
    prompts = grading.prompts_of(batches, 24)
    assert len(prompts) == 4 and all(len(p) == 12 for p in prompts)
    assert [p[0] // 12 for p in prompts] == [5, 6, 7, 9]
    assert all(len(p) == 5 for p in grading.prompts_of(batches, 10))


def test_numbers_of_the_page():
    assert grade_page.share(None) == grade_page.times(None) == "–"
    assert grade_page.ms(0.0123456) == "12.3 ms" and grade_page.times(1.256) == "1.26 ×"
    assert "<td>&lt;a&gt;</td>" in grade_page.table(["x"], [["<a>"]])
