"""Three lines of Python: load, calibrate, generate."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import eejax
from eejax.calibration import with_exits
from eejax.checkpoint.language_model import LanguageModel, tokenizer_of
from eejax.common.errors import CheckpointError, ConfigError, DataError
from eejax.data import train_bpe
from eejax.data.tokenizers import ByteTokenizer
from eejax.inference import EngineOptions, generate
from eejax.inference.scoring import score
from eejax.inference.weights import prepare
from eejax.interop.api import drafting_generator
from eejax.models import params
from eejax.models.config import ModelConfig
from eejax.tuning import states, tuning


def test_three_lines(eejax_data, tmp_path):
    before = dir(eejax)
    assert {"load", "calibrate", "generate"} <= set(before)
    text = tmp_path / "earlier.txt"
    whole = (eejax_data / "tinyshakespeare" / "train.txt").read_bytes()
    text.write_bytes(whole[:60_000])
    model = eejax.load(eejax_data / "models" / "tinylm", tokenizer="bytes")
    assert model.config.exits == () and "params" not in repr(model)
    with pytest.raises(ConfigError, match="agreement = 0.9: requires a model that calibrate"):
        eejax.generate(model, "ROMEO:", 4, agreement=0.9)
    made = eejax.calibrate(model, str(text), every=3, tokens=20_000, epochs=2, width=16)
    assert [e.boundary for e in made.config.exits] == [3, 6, 9] and model.config.exits == ()
    assert all(q.auc > 0.6 for q in made.calibration.qualities)
    plain, result = eejax.generate(model, "ROMEO:", 24)
    few = EngineOptions(cap=4, buckets=(1,))  # row counts, each of which is compiled
    assert set(result.exits[0, :24].tolist()) == {0} and len(plain) > 10
    early, result = eejax.generate(made, "ROMEO:", 24, agreement=0.8, engine=few)
    assert result.boundaries[0, 1:24].min() < 12
    never, _ = eejax.generate(made, "ROMEO:", 24, gate="router", threshold=1.0, engine=few)
    assert never == plain
    # Out and in again, with its routers.
    made.save(tmp_path / "out")
    again = eejax.load(tmp_path / "out")
    assert again.config.exits == made.config.exits
    thresholds = list(made.calibration.point(0.8).threshold)
    same, _ = eejax.generate(again, "ROMEO:", 24, gate="router", threshold=thresholds, engine=few)
    assert same == early
    np.testing.assert_array_equal(
        again.params["exits"]["exit_6"]["router"]["down"],
        made.params["exits"]["exit_6"]["router"]["down"],
    )
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = eejax.lode
    with pytest.raises(ConfigError, match="agreement = 0.8: says which threshold are taken"):
        eejax.generate(made, "ROMEO:", 4, agreement=0.8, threshold=0.5)


def test_a_second_text_compiles_and_prepares_nothing(small_run, compiled, monkeypatch):
    model = eejax.load(small_run)
    text, result = model.generate("def f(", 8)
    before, prepared = len(compiled), []
    monkeypatch.setattr(generate, "prepare", lambda *args: prepared.append(args))
    again, same = model.generate("def f(", 8)
    assert again == text and same.ids(0) == result.ids(0) != []
    assert before > 0 and len(compiled) == before and not prepared
    with pytest.raises(AttributeError, match="NoneType"):  # another engine is prepared by itself
        model.generate("def f(", 8, engine="full")
    assert len(prepared) == 1
    assert dataclasses.replace(model).cache == {} and len(model.cache) == 2


def test_a_run_has_its_own_tokenizer_and_dtype(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name, value in (("tokenizer", "bytes"), ("dtype", "bfloat16")):
        with pytest.raises(ConfigError, match=f"{name} = '{value}': must be None: .* is a run"):
            eejax.load(tmp_path, **{name: value})


def test_every_token_that_ends_a_text_is_known(tmp_path):
    bpe = train_bpe(["some text to train on"], 300)
    bpe.save(tmp_path / "own")
    folder = tmp_path / "own"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [bpe.eos_id, 7]}))
    found = tokenizer_of(folder, {"eos_token_id": 5}, 300)
    assert found.eos_id == bpe.eos_id and set(found.end_ids) == {bpe.eos_id, 5, 7}
    assert tokenizer_of(folder, {"eos_token_id": 70_000}, 300).end_ids == (bpe.eos_id, 7)
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match=r"end with token \d+, those of .*other with 9 "):
        tokenizer_of(tmp_path / "other", {"eos_token_id": 9}, 300, str(folder))
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config.json: cannot be read"):
        tokenizer_of(folder, {}, 300)


def test_a_grade_is_the_mean_loss_of_every_exit(small_run, tmp_path):
    """Beside the probabilities that scoring gives each token of a text of one window."""
    model = eejax.load(small_run)
    text = "def f(x):\n    return x + 1\n"
    (tmp_path / "a.txt").write_text(text)
    found = model.grade(str(tmp_path / "a.txt"), length=64)
    ids = [*model.tokenizer.encode(text).tolist(), model.tokenizer.end_ids[0]]
    assert found.names == ("exit_1", "exit_2", "final") and found.tokens == len(ids) - 1
    assert found.nbytes == len(text.encode()) - 1  # of the labels, the first byte is none
    for e, loss in enumerate(found.losses):
        one = score(prepare(model.params, model.config), model.config, ids, exit=e)
        assert loss == pytest.approx(-float(np.mean(np.asarray(one.logprob))), rel=1e-4)
    assert len(model.cache) == 1 and model.grade(str(tmp_path / "a.txt"), length=64) == found
    with pytest.raises(ConfigError, match="tokens = 0"):
        model.grade(str(tmp_path / "a.txt"), tokens=0)
    (tmp_path / "none.txt").write_text("")
    with pytest.raises(DataError):
        model.grade(str(tmp_path / "none.txt"))


def test_paths_are_text_and_wrong_arguments_are_named(small_run, tmp_path):
    model, text = eejax.load(small_run), tmp_path / "a.txt"
    text.write_text("def f(x):\n    return x + 1\n")
    assert model.grade(text, length=64) == model.grade([str(text)], length=64)
    calls = model.grade, model.calibrate, lambda text: model.tune(text, [0])
    for wrong in (None, 5, b"a.txt", [text, 1]):
        for call in calls[: 2 if wrong is None else 3]:  # `tune` then lets the model write
            with pytest.raises(ConfigError, match="^text = .*: must be files, globs"):
                call(wrong)
    for wrong in ([], 3, "34", [True], [3], [-1], [1.0]):
        with pytest.raises(ConfigError, match="^exits = .*: must be a list of numbers of layers"):
            model.tune(text, wrong)
    for wrong, field in ((dict(kind="mpl"), "kind"), (dict(passes=0), "TuningOptions.passes")):
        with pytest.raises(ConfigError, match=f"^{field} = "):
            model.tune(text, [0], **wrong)
    with pytest.raises(TypeError, match="steps"):
        model.tune(text, [0], steps=3)
    with pytest.raises(ConfigError, match=r"^folder = .*a\.txt'?: must be a folder"):
        model.tune(text, [0], folder=text, tokens=64, length=16)
    for wrong in (1, [True], [1.0], []):
        with pytest.raises(ConfigError, match=r"^boundaries = .*: must be in 0\.\."):
            model.calibrate(text, boundaries=wrong)
    with pytest.raises(ConfigError, match="^every = 0: must be an integer"):
        model.calibrate(text, every=0)
    with pytest.raises(ConfigError, match="^path = None: must be the path"):
        eejax.load(None)
    for wrong in (True, "0.9", [0.9]):
        calibrated = dataclasses.replace(model, calibration=object())
        with pytest.raises(ConfigError, match="^agreement = .*: must be a number in"):
            calibrated.generate("a", agreement=wrong)


@pytest.mark.parametrize("own_exits", [True, False])
def test_drafts_of_any_model_write_the_full_models_text(small_run, own_exits):
    model = eejax.load(small_run)
    if not own_exits:
        params = model.params | {"exits": {}}
        model = dataclasses.replace(model, config=model.config.replace(exits=()), params=params)
    on = dict(stop_token_ids=())
    full, _ = model.generate("class A:", 40, engine="full", **on)
    text, result = model.generate("class A:", 40, draft_exit=2, **on)
    assert text == full and result.drafted.any()
    assert result.boundaries[result.boundaries >= 0].min() == model.config.n_layers
    kept = len(model.cache)
    assert model.generate("class B:", 40, draft_exit=2, **on)[0] and len(model.cache) == kept
    # By the lowest exit, as none is known; of a model without exits, from the text alone.
    text, result = model.generate("class A:", 40, engine="speculative", **on)
    assert text == full and (own_exits or 0 < result.accepted.sum())
    made = [(o.draft_exit, o.max_drafts) for o in model.cache if getattr(o, "lookup", 0)]
    assert made == [(2, 4), (1, 4) if own_exits else (None, 0)]
    with pytest.raises(ConfigError, match="draft_exit = 3: must be a number of layers in 0..2"):
        model.generate("class A:", draft_exit=3)
    for other in (dict(threshold=0.5), dict(engine="full"), dict(agreement=0.9)):
        with pytest.raises(ConfigError, match="draft_exit = 2: must be None beside"):
            model.generate("class A:", draft_exit=2, **other)


def test_the_exit_that_promises_most_drafts(small_run):
    model = eejax.load(small_run)

    def chosen(*shares):
        exits = zip(model.config.exits, shares, strict=True)
        exits = tuple(dataclasses.replace(e, acceptance=share) for e, share in exits)
        one = dataclasses.replace(model, config=model.config.replace(exits=exits))
        options = drafting_generator(one).options
        return options.draft_exit, options.max_drafts

    assert chosen(0.99, 0.5) == (1, 4) and chosen(0.1, 0.99) == (2, 4)
    assert chosen(0.1, 0.1) == (None, 0)


def test_a_threshold_without_exits_is_told(small_run):
    model = eejax.load(small_run)
    params = model.params | {"exits": {}}
    model = dataclasses.replace(model, config=model.config.replace(exits=()), params=params)
    with pytest.warns(UserWarning, match="threshold: this model has no early exits"):
        model.generate("class A:", 4, threshold=0.5)


@pytest.mark.parametrize("kind", ["norm", "adapter", "mlp", "block"])
def test_tuned_exits_learn_and_the_rest_stays(small_run, tmp_path, kind):
    model = eejax.load(small_run)
    (tmp_path / "a.txt").write_text("def f(x):\n    return x + 1\n" * 200)
    text, lines = str(tmp_path / "a.txt"), []
    size = dict(tokens=2000, length=32, passes=3, vocabulary=0)
    made = model.tune(text, [0, 2], kind=kind, watch=lines.append, **size)
    assert made.source == model.source and made.calibration is None and len(lines) == 4
    assert made.config.exit_boundaries == (0, *model.config.exit_boundaries)
    own = made.params["exits"]["exit_0"]
    width = {"adapter": 8, "mlp": model.config.d_ff}.get(kind)  # the model is 16 wide
    assert (own["mlp"]["up"].shape[1] if "mlp" in own else None) == width
    for before, after in zip(made.tuning.before, made.tuning.after, strict=True):
        assert after.loss < before.loss - 0.01 and after.agreement >= before.agreement
    losses, base = (m.grade(text, tokens=2000).losses for m in (made, model))
    assert (losses[1], losses[3]) == (base[0], base[2]) and losses[2] != base[1]
    own = jax.tree.leaves(model.params["layers"])
    assert all(a is b for a, b in zip(own, jax.tree.leaves(made.params["layers"]), strict=True))


def test_mlps_of_new_exits_are_as_wide_as_those_of_others(small_run, tmp_path):
    model = eejax.load(small_run)
    bare = model.config.replace(exits=())
    model = dataclasses.replace(model, config=bare, params=model.params | {"exits": {}})
    (tmp_path / "a.txt").write_text("def f(x):\n    return x + 1\n" * 50)
    size = dict(tokens=500, length=16, passes=1, vocabulary=0, watch=lambda line: None)
    text = str(tmp_path / "a.txt")
    made = model.tune(text, [1], kind="adapter", **size)
    for kind, width in (("mlp", 8), ("adapter", 8), ("norm", 0)):
        both = made.tune(text, [1, 2], kind=kind, **size).config.exits
        assert [(e.mlp, e.mlp_width) for e in both] == [(True, 8), (kind != "norm", width)]
    wide = model.tune(text, [1], **size)
    refused = f"kind = 'adapter': is an MLP of width 8, and must be .* .{bare.d_ff}.. Choose 'mlp'"
    for source in (text, None):  # before the model writes its own text
        with pytest.raises(ConfigError, match=refused):
            wide.tune(source, [2], kind="adapter", **size)


def test_heads_of_new_exits_read_as_many_dimensions_as_asked(small_run, tmp_path):
    model, text = eejax.load(small_run), dataclasses.__file__
    size = dict(tokens=2000, length=32, passes=2, vocabulary=0, watch=lambda line: None)
    made = model.tune(text, [0, 2], kind="norm", head_rank=4, **size)
    assert [e.head_rank for e in made.config.exits] == [4, 0, 0]  # the others were there
    assert made.tuning.after[0].loss < made.tuning.before[0].loss
    own = made.params["exits"]["exit_0"]["low_rank"]
    assert {k: v.shape for k, v in own.items()} == {"down": (16, 4), "up": (4, 16)}
    start, _ = with_exits(model.params, model.config, [0], head_rank=4)
    for name, matrix in start["exits"]["exit_0"]["low_rank"].items():  # both are trained
        assert np.abs(own[name] - matrix).max() > 1e-3
    drafted = made.generate("def f(", 12, draft_exit=0, stop_token_ids=())
    assert drafted[0] == model.generate("def f(", 12, stop_token_ids=())[0]
    made.save(tmp_path / "saved")
    again = eejax.load(tmp_path / "saved")
    assert again.config.exits == made.config.exits
    np.testing.assert_array_equal(again.params["exits"]["exit_0"]["low_rank"]["up"], own["up"])
    for wrong in (-1, 16, True, 0.5):
        with pytest.raises(ConfigError, match=f"^head_rank = {wrong}: must be a number of dimens"):
            model.tune(text, [0], head_rank=wrong, **size)
    with pytest.raises(ConfigError, match=r"^head_rank = 5: .*; the model's exits have 4\.$"):
        made.tune(text, [1], head_rank=5, **size)


def test_the_first_projection_is_the_best_one_for_the_rows_that_are_known(small_run, monkeypatch):
    model, seen = eejax.load(small_run), []

    def train(params, config, *rest, **more):
        seen.append((params, config))
        return real(params, config, *rest, **more)

    real = tuning.train_exits
    monkeypatch.setattr(tuning, "train_exits", train)
    size = dict(tokens=500, length=32, passes=1, watch=lambda line: None)
    model.tune(dataclasses.__file__, [0], kind="norm", head_rank=4, vocabulary=40, **size)
    [(params, config)] = seen
    assert (config.exits[0].vocabulary, config.exits[0].head) == (40, "tied")
    table = np.asarray(params["embed"]["tokens"], np.float64)
    wanted, whole = (np.linalg.svd(a)[2][:4] for a in (table[:40], table))
    down, up = (params["exits"]["exit_0"]["low_rank"][name] for name in ("down", "up"))
    np.testing.assert_allclose(down @ up, wanted.T @ wanted, atol=1e-4)
    assert np.abs(wanted.T @ wanted - whole.T @ whole).max() > 0.01


def test_new_exits_know_what_the_text_needs(small_run, tmp_path, monkeypatch):
    """This model finds the end of a document likely, which is the last of 257 tokens."""
    monkeypatch.setattr(tuning, "KNOWN_SHARE", 0.6)
    model, lines = eejax.load(small_run), []
    text, size = dataclasses.__file__, dict(tokens=2000, length=32, passes=1)
    made = model.tune(text, [0, 2], watch=lines.append, **size)
    assert [e.vocabulary for e in made.config.exits] == [128, 0, 0]  # the others were there
    assert "new exits know 128 of 257 tokens, which are " in "\n".join(lines)
    assert made.tuning.after[0].loss < made.tuning.before[0].loss
    assert made.grade(text, tokens=500).names == ("exit_1", "exit_2", "final")
    drafted = made.generate("def f(", 12, draft_exit=0, stop_token_ids=())
    assert drafted[0] == model.generate("def f(", 12, stop_token_ids=())[0]
    assert drafted[1].drafted.sum() > 0
    made.save(tmp_path / "saved")
    assert eejax.load(tmp_path / "saved").config.exits == made.config.exits
    for wrong in (-1, 258, True, 0.5):
        with pytest.raises(ConfigError, match=f"^vocabulary = {wrong}: must be a number of tokens"):
            model.tune(text, [0], vocabulary=wrong, **size)


def test_tuned_exits_are_saved_with_the_model(small_run, tmp_path):
    model = eejax.load(small_run)
    (tmp_path / "a.txt").write_text("def f(x):\n    return x + 1\n" * 50)
    made = model.tune(str(tmp_path / "a.txt"), [1], tokens=500, length=16, passes=1)
    made.save(tmp_path / "saved")
    again = eejax.load(tmp_path / "saved")
    assert again.config.exits == made.config.exits
    trees = (jax.tree.leaves(m.params["exits"]) for m in (made, again))
    assert all(np.array_equal(a, b) for a, b in zip(*trees, strict=True))


def test_a_model_of_no_family_of_hugging_face_is_tuned(tmp_path):
    """A plain MLP and learned positions fit none together; its other settings come along."""
    config = ModelConfig(
        vocab_size=257,
        n_layers=2,
        d_model=16,
        n_heads=2,
        context_length=32,
        d_ff=24,
        mlp_gated=False,
        dtype="bfloat16",
    )
    facts = {"family": "llama", "generation": {"temperature": 0.6}}
    weights = params.init(config, jax.random.key(0))
    model = LanguageModel(config, weights, ByteTokenizer(), metadata={"pretrained": facts})
    (tmp_path / "a.txt").write_text("def f(x):\n    return x + 1\n" * 50)
    text, size = str(tmp_path / "a.txt"), dict(passes=1, tokens=320, length=16)
    with pytest.raises(ConfigError):
        model.save(tmp_path / "none")
    made = model.tune(text, [1], **size)
    assert made.config.exit_boundaries == (1, 2) and made.config.dtype == "bfloat16"
    assert made.generation == facts["generation"]
    same = model.tune(eejax.data.source(text), [1], **size)
    assert same.tuning == made.tuning


def test_a_tuning_that_is_interrupted_goes_on(small_run, tmp_path, monkeypatch):
    model, folder = eejax.load(small_run), tmp_path / "states"
    (tmp_path / "a.txt").write_text("def f(x):\n    return x + 1\n" * 200)
    text, size = str(tmp_path / "a.txt"), dict(tokens=2000, length=32, passes=2, folder=folder)
    whole = model.tune(text, [0], **(size | dict(folder=tmp_path / "other")))

    def stop(line):
        if "pass 1" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.tune(text, [0], watch=stop, **size)
    computed = []
    monkeypatch.setattr(states, "_pass", lambda *a: computed.append(a))
    assert model.tune(text, [0], **size).tuning == whole.tuning and not computed
    with pytest.raises(ConfigError, match="holds a tuning of other settings: boundaries"):
        model.tune(text, [1], **size)
    with pytest.raises(ConfigError, match="holds a tuning of other settings: predictions"):
        model.tune(text, [0], predictions=4, **size)
    # Its parameters are those of the other dtype, rounded, but not its states.
    with pytest.raises(ConfigError, match="holds a tuning of other settings: .*dtype"):
        half = model.config.replace(dtype="bfloat16")
        LanguageModel(half, model.params, model.tokenizer).tune(text, [0], **size)
