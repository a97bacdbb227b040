"""Runs that begin with the weights of a trained model: what they take, refuse and remember."""

from __future__ import annotations

import json
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs

from eejax.checkpoint.files import only_user
from eejax.checkpoint.hf import save_pretrained
from eejax.checkpoint.model import load_run
from eejax.common.errors import CheckpointError, ConfigError, DataError
from eejax.configs import layerskip
from eejax.data import ByteTokenizer, load_tokenizer, save_tokenizer
from eejax.losses import multi_exit_loss
from eejax.models.config import ExitConfig, ModelConfig
from eejax.train import base as bases
from eejax.train import inputs
from eejax.train.config import Experiment, default_config
from eejax.train.loop import fit
from eejax.train.metrics import read_metrics
from eejax.train.runs import open_run
from eejax.train.scope import Scope
from eejax.train.starts import copied_exit


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    small_runs.write_text(folder)
    return folder


@pytest.fixture(scope="module")
def base(text, tmp_path_factory):
    """A model of 2 layers whose head is its own, with an exit after the first."""
    workdir = tmp_path_factory.mktemp("base")
    values = small_runs.config(text, eval_every=0, checkpoint_every=0, microbatches=1)
    values["model"] |= {"head": "own", "temperature": 1.3}
    fit(Experiment.from_dict(values), workdir)
    return workdir


def configuration(text, base, **train):
    """As a file of configs/ that names no model."""
    config = default_config()
    values = small_runs.config(text, microbatches=1, steps=6, eval_every=3, checkpoint_every=2)
    config.train.update(values["train"] | {"base": str(base)} | train)
    config.data.update(values["data"])
    config.optimizer.update(values["optimizer"])
    config.exit_weights.weights = (0.5,)
    return config


def named(tree):
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(k, simple=True, separator="/"): np.asarray(v) for k, v in flat}


def loss_on(model, batches):
    """Mean cross entropy of every exit, by the loss alone."""

    @jax.jit
    def sums(batch):
        rest = {k: batch[k] for k in ("positions", "segment_ids") if k in batch}
        ones = jnp.ones(model.config.n_exits + 1)
        tokens, labels = batch["tokens"], batch["labels"]
        return multi_exit_loss(model.params, model.config, tokens, labels, ones, **rest)[1]

    found = [sums(batch) for batch in batches]
    count = sum(int(one.num_tokens) for one in found)
    return sum(np.asarray(one.sums, np.float64) for one in found) / count


@pytest.fixture(scope="module")
def trained(text, base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    experiment = bases.with_base(configuration(text, base), workdir)
    return workdir, experiment, fit(experiment, workdir)


def test_it_begins_with_the_base_s_loss_and_trains_all_of_it(base, trained):
    workdir, experiment, _ = trained
    model = load_run(base)
    assert experiment.model == model.config
    first, *_, last = (r for r in read_metrics(workdir) if "eval/loss/final" in r)
    assert first["step"] == 0 and last["step"] == 6
    dataset = open_run(workdir).dataset()
    ((_, batches),) = inputs.held_out(
        experiment.data, dataset, experiment.train.batch_size, experiment.train.eval_batches
    )
    want = loss_on(model, batches)
    got = [first[f"eval/loss/{name}"] for name in ("exit_1", "final")]
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert last["eval/loss/final"] < first["eval/loss/final"]
    before, after = named(model.params), named(load_run(workdir).params)
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)


def test_it_resumes_bitwise_and_needs_its_base_no_more(text, base, trained, tmp_path, monkeypatch):
    shutil.copytree(base, tmp_path / "base")

    def run(path="base"):
        return fit(
            bases.with_base(configuration(text, tmp_path / path), tmp_path / "run"),
            tmp_path / "run",
        )

    small_runs.stop_at(monkeypatch, 3)
    assert run().stopped == signal.SIGTERM
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "base")
    assert run("run/../base").step == 6  # the same path, written otherwise
    want, got = (named(load_run(folder).params) for folder in (trained[0], tmp_path / "run"))
    assert all(want[n].tobytes() == got[n].tobytes() for n in want)
    facts = bases.remembered(tmp_path / "run")
    assert facts.digest == bases.remembered(trained[0]).digest
    saved = load_run(tmp_path / "run").metadata["base"]
    assert saved == {"source": str(tmp_path / "base"), "step": 14, "digest": facts.digest}
    other = configuration(text, base)
    with pytest.raises(CheckpointError, match="train.base: .*/base' in the checkpoint"):
        fit(bases.with_base(other, tmp_path / "run"), tmp_path / "run")


def test_a_run_remembers_where_its_base_lies(text, base, tmp_path, monkeypatch):
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    shutil.copytree(base, there / "base")
    elsewhere.mkdir()

    def run(source, folder, steps):
        monkeypatch.chdir(folder)
        config = configuration(text, source, steps=steps, checkpoint_every=1)
        config.optimizer.schedule = "constant"
        config.data.validation_fraction = 0.0
        return fit(bases.with_base(config, tmp_path / "run"), tmp_path / "run")

    run("base", there, 1)
    run("../there/base", elsewhere, 2)
    shutil.rmtree(there / "base")
    run("base", there, 3)
    assert run(str(there / "base"), elsewhere, 4).step == 4
    metadata = load_run(tmp_path / "run").metadata
    assert metadata["experiment"]["train"]["base"] == str(there / "base")
    with pytest.raises(CheckpointError, match="train.base = 'base'"):
        run("base", elsewhere, 5)  # no folder here, and no name


def test_exits_are_added_and_a_head_becomes_shared(text, base, tmp_path):
    config = configuration(text, base, steps=1, checkpoint_every=0)
    config.model.exits = (
        {"boundary": 0, "head": "shared", "mlp": True, "head_rank": 3},
        {"boundary": 2, "head": "own"},
    )
    config.exit_weights.weights = (0.5, 0.5, 0.5)
    experiment = bases.with_base(config, tmp_path)
    old = load_run(base)
    assert experiment.model.exits == (
        ExitConfig(0, mlp=True, head="shared", temperature=1.3, head_rank=3),  # the model's
        *old.config.exits,
        ExitConfig(2, head="own", temperature=1.3),
    )
    assert (old.config.head, experiment.model.head) == ("own", "shared")
    fit(experiment, tmp_path)
    first = read_metrics(tmp_path)[0]
    # The exit behind all layers is the final one, and the lens at 0 that of the embedding.
    assert first["eval/loss/exit_2"] == pytest.approx(first["eval/loss/final"], abs=1e-5)
    new = load_run(tmp_path)
    assert "head" not in new.params["final"] and "shared_head" in new.params


def test_a_head_that_exits_of_the_base_share_is_kept(text, tmp_path):
    values = small_runs.config(text, eval_every=0, checkpoint_every=0, microbatches=1, steps=2)
    values["model"] |= {"head": "own", "exits": [{"boundary": 1, "head": "shared"}]}
    fit(Experiment.from_dict(values), tmp_path / "base")
    config = configuration(text, tmp_path / "base", steps=1, eval_every=0)
    config.optimizer.learning_rate = 1e-30  # which moves nothing
    experiment = bases.with_base(config, tmp_path / "run")
    old = load_run(tmp_path / "base")
    assert experiment.model == old.config and old.config.head == "own"
    fit(experiment, tmp_path / "run")
    new = load_run(tmp_path / "run")
    for name in ("shared_head", "final/head"):
        np.testing.assert_array_equal(named(new.params)[name], named(old.params)[name])
    assert not np.array_equal(old.params["shared_head"], old.params["final"]["head"])


def test_a_pretrained_model_is_a_base(text, base, tmp_path):
    """Its vocabulary is padded for the mesh; its folder has no tokenizer of its own."""
    run = load_run(base)
    model = run.config.replace(exits=(), temperature=1.0, dropout=0.0)
    tree = {k: v for k, v in run.params.items() if k != "exits"} | {"exits": {}}
    save_pretrained(tmp_path / "hf", model, tree, generation={"temperature": 0.5})
    config = configuration(text, tmp_path / "hf", steps=1)
    config.exit_weights.weights = ()
    config.model.vocab_multiple = 2
    config.mesh.model = 2
    experiment = bases.with_base(config, tmp_path / "run", {"model.vocab_multiple": 2})
    assert experiment.model == model.replace(vocab_multiple=2)
    assert experiment.data.tokenizer == inputs.BASE
    fit(experiment, tmp_path / "run")
    one = configuration(text, tmp_path / "hf", steps=1)
    one.exit_weights.weights = ()
    fit(bases.with_base(one, tmp_path / "one"), tmp_path / "one")
    for a, b in zip(read_metrics(tmp_path / "run"), read_metrics(tmp_path / "one"), strict=True):
        for name in (k for k in b if k.startswith(("loss", "eval/loss"))):
            assert a[name] == pytest.approx(b[name], rel=1e-5), name
    # Its generation_config.json comes along, here and into what is made of the run.
    made = configuration(text, tmp_path / "one", steps=1)
    made.exit_weights.weights = ()
    fit(bases.with_base(made, tmp_path / "two"), tmp_path / "two")
    for folder in ("one", "two"):
        assert load_run(tmp_path / folder).generation == {"temperature": 0.5}


@pytest.mark.parametrize("part", ["trunk", "heads"])
def test_a_part_is_trained_and_the_rest_stays_to_the_bit(text, base, tmp_path, part):
    config = configuration(text, base, steps=2, eval_every=0)
    config.data.validation_fraction = 0.0
    config.tune.part = part
    experiment = bases.with_base(config, tmp_path)
    fit(experiment, tmp_path)
    before, after = (named(load_run(folder).params) for folder in (base, tmp_path))
    moved = {name for name in before if (before[name] != after[name]).any()}
    trunk = {name for name in before if name.startswith(("embed/", "layers/"))}
    assert moved == (trunk if part == "trunk" else before.keys() - trunk)


def answers(folder) -> str:
    """A source of prompts and completions."""
    rows = [{"prompt": f"exit {i}: ", "completion": f"layer {i % 7}"} for i in range(60)]
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"completion:{path}"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["all", "trunk", "heads"])
def test_any_mesh_trains_a_base_alike(text, base, tmp_path, part):
    found = {}
    for name, mesh in {"one": {}, "many": {"data": 2, "pipe": 2, "model": 2}}.items():
        config = configuration(text, base, batch_size=8, microbatches=2, eval_every=0)
        config.model.vocab_multiple = 2  # cut by two shards, which the base's 257 is not
        config.mesh.update(mesh)
        config.tune.part = part
        if part == "all":  # tokens that are not predicted, on stages
            config.data.source = answers(tmp_path)
        experiment = bases.with_base(config, tmp_path / name)
        fit(experiment, tmp_path / name)
        found[name] = read_metrics(tmp_path / name), named(load_run(tmp_path / name).params)
    for a, b in zip(found["many"][0], found["one"][0], strict=True):
        for key in (k for k in b if k.startswith(("loss", "eval/loss", "grad_norm"))):
            assert a[key] == pytest.approx(b[key], rel=1e-4), (a["step"], key)
    before = named(load_run(base).params)
    scope = Scope(load_run(tmp_path / "many").config, part=part)
    moves = {} if scope.moved is None else named(scope.moved)
    for name, value in found["many"][1].items():
        rows = before[name].shape[0]
        if not np.any(moves.get(name, 1)):
            assert value[:rows].tobytes() == before[name].tobytes(), name
        else:
            assert (value[:rows] != before[name]).any(), name


@pytest.mark.parametrize(
    "change, given, message",
    [
        ({"d_model": 32}, (), r"model.d_model = 32: must be the base's, 16 \(train.base"),
        ({"norm": "rmsnorm"}, {"model.position"}, None),
        ({"position": "rotary"}, {"model.position"}, None),
        ({"norm_eps": 1e-6}, (), "model.norm_eps = 1e-06: must be the base's, 1e-05"),
        ({"temperature": 1.0}, {"model.temperature"}, "model.temperature = 1.0.*base's, 1.3"),
        ({"exits": ({"boundary": 1, "mlp": True},)}, (), "model.exits = .*at that boundary"),
        ({"exits": ({"boundary": 9},)}, (), r"must lie in 0..2"),
        ({"exits": ({"bondary": 1},)}, (), "ExitConfig.bondary = 1: no such field"),
        ({"dtype": "bfloat16", "dropout": 0.0}, {"model.dropout"}, None),
    ],
)
def test_what_contradicts_the_base_is_named(text, base, change, given, message):
    config = configuration(text, base)
    config.model.update(change)
    if message is None:
        model = bases.with_base(config, overrides=given).model
        assert {k: getattr(model, k) for k in change} == change
        return
    with pytest.raises(ConfigError, match=message):
        bases.with_base(config, overrides=given)


def test_a_base_gives_a_configuration_what_it_leaves_out(text, base, tmp_path):
    config = configuration(text, base)
    config.exit_weights.weights = ()
    assert bases.with_base(config).exit_weights.weights == (1.0,)


def test_weights_must_count_the_base_s_exits_too(text, base):
    config = configuration(text, base)
    config.model.exits = ({"boundary": 2},)
    told = r"the base's, after layers \(1,\), and the configuration's, after layers \(2,\)\. Set "
    with pytest.raises(ConfigError, match=rf"= \(0.5,\): must have .* 2 early exits: {told}"):
        bases.with_base(config)
    config.exit_weights.weights = (0.0, 0.5)
    assert bases.with_base(config).exit_weights.weights == (0.0, 0.5)
    config.exit_weights.weights = (0.5,)
    config.tune.update(part="exits", exits=(2,))
    assert bases.with_base(config).tuned == (2,)


@pytest.mark.parametrize("layers, head", [(12, "shared"), (7, "tied")])
def test_layerskip_s_recipe_is_of_any_pretrained_model(tmp_path, layers, head):
    """Its weights are those of LayerSkip's section 4.1, relative to the last layer's; what the
    model is, its config.json says: weights are not read for it."""
    settings = dict(
        model_type="llama",
        vocab_size=256,
        hidden_size=16,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=head == "tied",
        eos_token_id=2,
    )
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = layerskip.get_config(f"{layers}" + (",tied" if head == "tied" else ""))
    config.train.base = str(tmp_path)
    experiment = bases.with_base(config)
    model = experiment.model
    assert (model.n_layers, model.head) == (layers, head)
    assert [e.boundary for e in model.exits] == list(range(2, layers, 2))
    assert {e.head for e in model.exits} == {head}

    def scale(layer):
        return 0.2 * sum(range(layer + 1))

    last = layers - 1 + 0.2 * sum(range(layers - 1))
    want = [scale(e.boundary - 1) / last for e in model.exits]
    np.testing.assert_allclose(experiment.exit_weights.weights, want, rtol=1e-12)
    assert experiment.train.layer_dropout == 0.1 and experiment.exit_weights.sparse
    other = layerskip.get_config(f"{layers + 1},{head}")
    other.train.base = str(tmp_path)
    with pytest.raises(ConfigError, match=f"model.n_layers = {layers + 1}: must be the base's"):
        bases.with_base(other)


def test_another_tokenizer_than_the_base_s_is_refused(text, base, tmp_path):
    config = configuration(text, base)
    config.data.tokenizer = "bpe"
    with pytest.raises(DataError, match="data.tokenizer = 'bpe': must be the base's, bytes-257"):
        bases.with_base(config)
    config.data.tokenizer = "bytes"
    assert bases.with_base(config, overrides={"data.tokenizer"}).data.tokenizer == inputs.BASE
    with pytest.raises(ConfigError, match="must differ from train.base"):
        bases.with_base(config, base)


@pytest.mark.parametrize("run", [True, False])
def test_the_tokenizer_of_a_run_is_left_as_it_is(tmp_path, run):
    folder = tmp_path / "tokenizer"
    save_tokenizer(ByteTokenizer(), folder)
    (folder / "kept").touch()
    (tmp_path / "checkpoints").mkdir()  # empty after a kill before the first checkpoint
    if run:
        (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    other = ByteTokenizer()
    other.chat = "{{ messages }}"
    bases._keep(other, tmp_path)
    assert (folder / "kept").exists() == run


def test_a_run_in_use_keeps_its_chat_template(text, base, tmp_path):
    save_tokenizer(ByteTokenizer(), tmp_path / "tokenizer")
    other = ByteTokenizer()
    other.chat = "{{ messages }}"
    save_tokenizer(other, tmp_path / "other")
    config = configuration(text, base)
    config.data.tokenizer = str(tmp_path / "other")
    with only_user(tmp_path), pytest.raises(ConfigError, match="is in use by process"):
        bases.with_base(config, tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer").chat is None
    bases.with_base(config, tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer").chat == other.chat


@pytest.mark.parametrize("run", [True, False])
def test_facts_count_where_there_is_a_checkpoint(text, base, trained, tmp_path, run):
    facts = bases.remembered(trained[0])
    other = facts._replace(config=facts.config.replace(temperature=9.0))
    bases.remember(tmp_path, other)  # of an attempt with what the base was then
    save_tokenizer(ByteTokenizer(), tmp_path / "tokenizer")
    (tmp_path / "checkpoints" / ("2" if run else "2.orbax-checkpoint-tmp")).mkdir(parents=True)
    found = bases.with_base(configuration(text, base), tmp_path).model
    assert found == (other.config if run else load_run(base).config)
    assert bases.base_model(str(base), workdir=tmp_path) == found


def test_a_run_resumes_with_the_tokenizer_and_template_it_began_with(text, base, trained, tmp_path):
    bases.remember(tmp_path, bases.remembered(trained[0]))
    (tmp_path / "checkpoints" / "6").mkdir(parents=True)
    mine, other = ByteTokenizer(), ByteTokenizer()
    mine.chat, other.chat = "{{ messages }}", "{{ messages[0] }}"
    save_tokenizer(mine, tmp_path / "tokenizer")
    save_tokenizer(other, tmp_path / "other")
    config = configuration(text, base)
    for chosen in ("bytes", str(tmp_path / "tokenizer"), str(tmp_path / "deleted")):
        config.data.tokenizer = chosen
        assert bases.with_base(config, tmp_path).data.tokenizer == inputs.BASE
    config.data.tokenizer = str(tmp_path / "other")
    with pytest.raises(DataError) as caught:
        bases.with_base(config, tmp_path)
    for part in (f"data.tokenizer = '{tmp_path}/other'", mine.chat, other.chat, "Leave the field"):
        assert part in str(caught.value)
    config.data.tokenizer = "bpe"
    with pytest.raises(DataError, match="data.tokenizer = 'bpe': must be the base's, bytes-257"):
        bases.with_base(config, tmp_path)
    config.data.tokenizer = "bytes"
    bases.remember(tmp_path, bases.remembered(trained[0])._replace(tokenizer="bytes-300"))
    with pytest.raises(CheckpointError, match="is bytes-257.*with bytes-300. Put that tokenizer"):
        bases.with_base(config, tmp_path)


@pytest.mark.parametrize("spec", ["bpe", "base"])
def test_a_base_without_a_tokenizer_needs_the_one_it_was_trained_with(base, tmp_path, spec):
    model = load_run(base)
    folder = tmp_path / "base"
    save_pretrained(folder, model.config, model.params)
    config = default_config()
    config.train.base, config.data.tokenizer = str(folder), spec
    message = f"data.tokenizer = '{spec}': must name the tokenizer that train.base = '{folder}' was"
    with pytest.raises(DataError, match=message):
        bases.with_base(config)


@pytest.mark.parametrize("tune", [{"part": "trunk"}, {"part": "all"}])
def test_exits_with_routers_are_not_trained(base, tune):
    model = load_run(base).config.to_dict()
    model["exits"][0]["router"] = 8
    values = {"model": model, "tune": tune, "exit_weights": {"weights": [1.0]}}
    with pytest.raises(ConfigError, match="must leave exits with a router as they are"):
        Experiment.from_dict(values | {"train": {"base": str(base)}})


def test_a_low_rank_head_is_a_part_of_the_heads():
    config = ModelConfig(23, 2, 16, 2, 16, exits=(ExitConfig(1, head_rank=4),))
    for part in ("trunk", "heads"):
        moved = Scope(config, part=part).moved["exits"]["exit_1"]["low_rank"]
        assert {k: float(v) for k, v in moved.items()} == dict.fromkeys(
            ("down", "up"), float(part == "heads")
        )


def test_a_part_without_parameters_is_refused():
    config = ModelConfig(23, 2, 16, 2, 16, head="tied", final_norm=False)
    with pytest.raises(
        ConfigError, match="tune.part = 'heads': must be a part that has parameters"
    ):
        Scope(config, part="heads")
    assert copied_exit({"final": {}}, config, ExitConfig(1)) == {}


def test_answers_alone_are_learned_on_any_recipe(text, base, tmp_path):
    """Prompts are read and count nothing: the loss is the mean over the answers' tokens."""
    config = configuration(text, base, steps=2, layer_dropout=0.1)
    config.data.source = answers(tmp_path)
    experiment = bases.with_base(config, tmp_path / "run")
    fit(experiment, tmp_path / "run")
    dataset = open_run(tmp_path / "run").dataset()
    parts = inputs.held_out(experiment.data, dataset, 4, experiment.train.eval_batches)
    want = loss_on(load_run(base), parts[0][1])
    first, one, *_ = read_metrics(tmp_path / "run")
    np.testing.assert_allclose(
        [first["eval/loss/exit_1"], first["eval/loss/final"]], want, atol=1e-5
    )
    assert 0 < one["tokens"] < 4 * 16 * 0.6
