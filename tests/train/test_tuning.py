"""EE-Tuning: what is frozen stays, what is tuned improves, no more is read or run than needed."""

import dataclasses
import json
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import config, stop_at, write_text

from eejax.checkpoint.model import load_run
from eejax.common.errors import CheckpointError, ConfigError
from eejax.common.trees import join, size, split
from eejax.data import save_tokenizer, train_bpe
from eejax.data.sources import Document
from eejax.losses import multi_exit_loss
from eejax.losses.objective import LossObjective
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train import base as bases
from eejax.train import base_weights, optimizer, state, step
from eejax.train.config import ExitWeights, Experiment, TuneConfig
from eejax.train.loop import TUNING, fit
from eejax.train.metrics import read_metrics
from eejax.train.runs import open_run
from eejax.train.scope import Scope
from eejax.train.starts import copied_exit

DEPTH = 4
EXITS = (ExitConfig(2, head="own"), ExitConfig(3, head="own", mlp=True))


def base_config(text, head):
    sizes = dict(steps=60, batch_size=8, microbatches=1, log_every=10, eval_batches=20)
    values = config(text, **sizes, eval_every=0, checkpoint_every=0)
    values["model"] |= {"n_layers": DEPTH, "dropout": 0.0, "head": head}
    values["data"]["document_masks"] = False
    values["exit_weights"]["weights"] = [0.3]
    return values


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def base(text, tmp_path_factory):
    """A trained model of 4 layers with an exit after the first."""
    workdir = tmp_path_factory.mktemp("base")
    fit(Experiment.from_dict(base_config(text, "own")), workdir)
    return workdir


def tuned_experiment(base, new=EXITS, boundaries=None, start="copy", mesh=None, **train):
    run = open_run(base)
    exits = {e.boundary: e for e in (*new, *run.model.config.exits)}
    model = run.model.config.replace(exits=tuple(e for _, e in sorted(exits.items())))
    boundaries = boundaries or tuple(e.boundary for e in new)
    settings = dict(steps=40, batch_size=8, log_every=1, eval_every=40, checkpoint_every=15)
    return dataclasses.replace(
        run.experiment,
        model=model,
        exit_weights=ExitWeights((1.0,) * len(boundaries)),
        tune=TuneConfig("exits", boundaries, start),
        train=dataclasses.replace(run.experiment.train, **(settings | {"base": str(base)} | train)),
        mesh=mesh or MeshConfig(),
    )


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("tuned")
    return workdir, fit(tuned_experiment(base), workdir)


def named(tree):
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(k, simple=True, separator="/"): np.asarray(v) for k, v in flat}


def test_what_is_frozen_stays_to_the_bit_and_has_no_optimiser_state(base, tuned):
    workdir, result = tuned
    before, after = (named(load_run(folder).params) for folder in (base, workdir))
    assert before.keys() < after.keys()
    for name, value in before.items():
        assert value.tobytes() == after[name].tobytes(), name
    new = after.keys() - before.keys()
    assert {n.split("/")[1] for n in new} == {"exit_2", "exit_3"}
    assert all(n.startswith("exits/") for n in named(result.state.params))
    moments = [a for a in jax.tree.leaves(result.state.opt_state) if np.ndim(a)]
    assert sum(a.size for a in moments) == 2 * sum(after[n].size for n in new)
    # Neither does the tuning's own checkpoint hold anything of the trunk.
    folder = workdir / TUNING / "40"
    assert not list(folder.glob("*/*layers*")) and not list(folder.glob("*/*embed*"))
    assert list(folder.glob("params/exits.exit_2.head"))


def test_the_result_is_a_run_of_its_own(base, tuned):
    run = open_run(tuned[0])
    assert [e.name for e in run.model.config.exits] == ["exit_1", "exit_2", "exit_3"]
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    old = open_run(base).model
    kept = transformer.exit_states(run.model.params, run.model.config, tokens, which=(0, 3))
    for a, b in zip(kept, transformer.exit_states(old.params, old.config, tokens), strict=True):
        np.testing.assert_array_equal(a, b)
    run.dataset()  # its tokenizer and text are known


def test_tuned_exits_improve_on_held_out_text(tuned):
    """By at least 0.2 nats over the model's own norm and head, with 40 steps."""
    first = read_metrics(tuned[0])[0]
    assert first["step"] == 0  # what the run begins with is evaluated
    before = [first[f"eval/loss/{name}"] for name in ("exit_2", "exit_3")]
    after = tuned[1].evaluation.losses
    assert all(b - a > 0.2 for b, a in zip(before, after, strict=True)), (before, after)
    records = [r for r in read_metrics(tuned[0]) if "loss" in r]
    assert len(records) == 40 and {"loss/exit_2", "loss/exit_3"} < records[0].keys()
    assert "loss/final" not in records[0] and "loss/exit_1" not in records[0]


def test_exits_learn_from_the_final_one_which_stays(base, tuned, tmp_path):
    experiment = tuned_experiment(base)
    experiment = dataclasses.replace(experiment, loss=LossObjective(distillation=1.0))
    fit(experiment, tmp_path)
    before, plain, taught = (load_run(folder) for folder in (base, tuned[0], tmp_path))
    after = named(taught.params)
    for name, value in named(before.params).items():
        assert value.tobytes() == after[name].tobytes(), name
    assert not list((tmp_path / TUNING / "40").glob("*/*final*"))
    length = experiment.data.length
    text = open_run(base).dataset().split("validation").read(0, 8 * length)

    def apart(model):
        """KL(final || exit) of the tuned exits, in nats, on text of the run."""
        hs = transformer.exit_states(model.params, model.config, text.reshape(-1, length))

        def head(e):
            return exits.head(model.params, model.config, e)

        logps = [jax.nn.log_softmax(exits.logits(head(e), h)) for e, h in enumerate(hs)]
        final = logps[-1]
        return [float(jnp.mean(jnp.sum(jnp.exp(final) * (final - y), -1))) for y in logps[1:3]]

    assert all(a < 0.9 * b for a, b in zip(apart(taught), apart(plain), strict=True))


@pytest.mark.parametrize("head", ["own", pytest.param("tied", marks=pytest.mark.slow)])
def test_a_copy_starts_at_the_logit_lens(base, tmp_path, head):
    """The loss of the model cut off at the boundary, with its own final norm and head, exactly."""
    if head == "tied":
        experiment = tuned_experiment(base)  # a base whose head is tied, of its parameters
        model = experiment.model.replace(exits=(ExitConfig(2, head="tied"),), head="tied")
        whole = params.init(model.replace(exits=()), jax.random.key(1))
        copy = copied_exit(whole, model.replace(exits=()), model.exits[0])
        assert copy.keys() == {"norm"}
        tree = whole | {"exits": {"exit_2": copy}}
    else:
        experiment = tuned_experiment(base, new=EXITS[:1])
        model, mesh = experiment.model, make_mesh(MeshConfig())
        first, frozen, _ = base_weights.load_base(experiment, mesh, tmp_path)
        tree, whole = join(frozen, first), load_run(base).params
    short = model.replace(n_layers=2, exits=())
    lower = jax.tree.map(lambda a: a[:2], whole["layers"])
    cut = {k: v for k, v in whole.items() if k != "exits"} | {"layers": lower, "exits": {}}
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, 257, (2, 4, 16), dtype=np.int32)
    number = [e.name for e in model.exits].index("exit_2")
    one = jnp.ones(1)
    got, _ = multi_exit_loss(tree, model, tokens, labels, one, which=(number,))
    want, _ = multi_exit_loss(cut, short, tokens, labels, one)
    assert got == want


def test_copies_are_of_what_the_exit_has(base):
    model = open_run(base).model
    whole, config = model.params, model.config
    e = ExitConfig(3, head="own", mlp=True, block=True)
    copy = copied_exit(whole, config, e)

    def layer(i):
        return jax.tree.map(lambda a: a[i], whole["layers"])

    def off(tree, name):
        return tree | {name: jnp.zeros_like(tree[name])}

    last = layer(3)
    want = {
        "norm": whole["final"]["norm"],
        "head": whole["final"]["head"],
        "mlp": off(layer(2)["mlp"], "down"),
        "mlp_norm": layer(2)["mlp_norm"],
        "block": last | {"attn": off(last["attn"], "o"), "mlp": off(last["mlp"], "down")},
    }
    assert jax.tree.structure(copy) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(copy), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    declared = params.map_params(lambda p: p.shape, params.exit_(config, e))
    assert jax.tree.map(jnp.shape, copy) == declared


def test_no_more_is_read_than_the_loss_reads(base, tmp_path):
    """Layers above the deepest tuned exit may be gone, and other exits."""
    shutil.copytree(base, tmp_path / "base")
    folder = tmp_path / "base" / "checkpoints" / "60" / "params"
    for leaf in folder.glob("layers.*"):
        for upper in (2, 3):
            (gone,) = leaf.glob(f"{upper}.*")
            gone.unlink()
    for leaf in folder.glob("exits.exit_1.*"):
        next(p for p in leaf.iterdir() if p.name[0] == "0").unlink()
    experiment = tuned_experiment(base, new=EXITS[:1])
    train = dataclasses.replace(experiment.train, base=str(tmp_path / "base"))
    experiment = dataclasses.replace(experiment, train=train)
    mesh = make_mesh(MeshConfig())
    first, frozen, _ = base_weights.load_base(experiment, mesh, tmp_path / "base")
    assert {a.shape[0] for a in jax.tree.leaves(frozen["layers"])} == {2}
    assert frozen.keys() == {"embed", "layers"} and first["exits"].keys() == {"exit_2"}
    with pytest.raises(CheckpointError, match="is missing"):
        base_weights.load_base(tuned_experiment_of(experiment, EXITS), mesh, tmp_path / "base")


def tuned_experiment_of(experiment, new):
    """`experiment` with other new exits."""
    have = [e for e in experiment.model.exits if e.boundary == 1]
    return dataclasses.replace(
        experiment,
        model=experiment.model.replace(exits=(*have, *new)),
        exit_weights=ExitWeights((1.0,) * len(new)),
        tune=dataclasses.replace(experiment.tune, exits=tuple(e.boundary for e in new)),
    )


def test_the_trunk_has_no_backward_pass(base):
    experiment = tuned_experiment(base)
    mesh, model = make_mesh(MeshConfig()), experiment.model
    flops = {}
    for name, scope in (("tuned", Scope.of(experiment)), ("all", Scope(model))):
        decays = params.map_params(lambda p: p.decay, scope.declarations()[0])
        adamw = optimizer.transformation(experiment.optimizer, decays)
        early = sum(e < model.n_exits for e in scope.which)

        def weights(_, n=early):
            return jnp.ones(n)

        train = step.make_train_step(
            model,
            adamw,
            optimizer.learning_rate(experiment.optimizer, 9),
            weights,
            mesh,
            scope=scope,
        )
        tokens = jax.ShapeDtypeStruct((8, 16), np.int32)
        lowered = train.lower(
            state.abstract(model, adamw, mesh, scope), {"tokens": tokens, "labels": tokens}
        )
        flops[name] = lowered.compile().cost_analysis()["flops"]
    assert flops["tuned"] < 0.62 * flops["all"]


def test_a_tuning_goes_on_from_the_checkpoint_it_began_with(base, tuned, tmp_path, monkeypatch):
    """To the same bits: its frozen layers are those it began with, wherever the base is now."""
    shutil.copytree(base, tmp_path / "base")

    def moved(folder="base", **train):
        experiment = tuned_experiment(base)
        train = dataclasses.replace(experiment.train, base=str(tmp_path / folder), **train)
        return dataclasses.replace(experiment, train=train)

    stop_at(monkeypatch, 22)
    assert fit(moved(), tmp_path / "tuned").stopped == signal.SIGTERM
    assert not (tmp_path / "tuned" / "checkpoints").exists()
    monkeypatch.undo()
    steps = tmp_path / "base" / "checkpoints"
    shutil.copytree(steps / "60", steps / "80")  # the base has gone on
    began = bases.remembered(tmp_path / "tuned")
    assert began.step == 60 and began.config == open_run(base).model.config
    (tmp_path / "tuned" / "base.json").rename(tmp_path / "base.json")
    with pytest.raises(CheckpointError, match="tuned/base.json: must say .* and is missing. Put"):
        fit(moved(base_step=60), tmp_path / "tuned")
    (tmp_path / "base.json").rename(tmp_path / "tuned" / "base.json")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    assert fit(moved("elsewhere", base_step=60), tmp_path / "tuned").step == 40
    want, got = (named(load_run(folder).params) for folder in (tuned[0], tmp_path / "tuned"))
    assert want.keys() == got.keys()
    assert all(want[n].tobytes() == got[n].tobytes() for n in want)


FACTS = bases.FixedFields("/a", 6, ModelConfig(23, 2, 16, 2, 16), "bytes-257", "0" * 32)
SAVED = {"base": {"source": "/a", "step": 6, "digest": "0" * 32}}


@pytest.mark.parametrize("read_again", [True, False])
@pytest.mark.parametrize(
    "saved, kept, message",
    [
        (SAVED, FACTS, None),
        (SAVED, None, "base.json: must say .*'/a'.* and is missing"),
        (SAVED, FACTS._replace(source="/b"), "base.json: must say .*'/a'.* and says .*'/b'"),
        (SAVED, FACTS._replace(step=7), "base.json: must say .*6.* and says .*7"),
        (SAVED, FACTS._replace(digest="1" * 32), "base.json: must say"),
        ({"base": None}, None, "base.json: must say .*None, and is missing"),
        ({}, FACTS, "base.json: must say .*None, and says .*'/a'"),
    ],
)
def test_a_run_resumes_with_the_base_of_its_checkpoints(tmp_path, saved, kept, message, read_again):
    if kept is not None:
        bases.remember(tmp_path, kept)

    def check(found):
        return base_weights.same_base(tmp_path, saved, found)

    if message is None:
        check(FACTS if read_again else None)
        with pytest.raises(CheckpointError, match="are not those that the run in .* began with"):
            check(FACTS._replace(digest="2" * 32))
        return
    with pytest.raises(CheckpointError, match=message):
        check(FACTS if read_again else None)


@pytest.mark.slow
def test_more_devices_give_the_same_exits(base, tuned, tmp_path):
    fit(tuned_experiment(base, mesh=MeshConfig(data=4)), tmp_path)
    want, got = (named(load_run(folder).params) for folder in (tuned[0], tmp_path))
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=2e-4)


def test_an_exit_of_the_base_goes_on_from_where_it_is(base, tmp_path):
    run = open_run(base)
    experiment = tuned_experiment(base, new=(), boundaries=(1,), steps=1)
    first, *_ = base_weights.load_base(experiment, make_mesh(MeshConfig()), tmp_path)
    for name, value in named(first).items():
        np.testing.assert_array_equal(value, named(run.model.params)[name])


NEW = (ExitConfig(0, head="own", mlp=True), ExitConfig(2), ExitConfig(DEPTH, block=True))
CASES = ((NEW[:1], 0.0), (NEW, 0.0), (NEW[:2], 0.5))  # which of them, and how far they are taught


@pytest.mark.parametrize(
    "head, cases",
    [
        ("shared", (CASES[0], (NEW, 0.5))),
        *(pytest.param(head, CASES, marks=pytest.mark.slow) for head in ("tied", "shared")),
    ],
    ids=["shared", "tied-all", "shared-all"],
)
def test_any_exit_on_any_base(tmp_path, text, head, cases):
    """A base without exits, heads that lie elsewhere; at 0 there is no layer below."""
    values = base_config(text, head)
    values["train"]["steps"] = 2
    values["model"] |= {"exits": (), "residual": "parallel_one_norm"}
    values["exit_weights"]["weights"] = ()
    fit(Experiment.from_dict(values), tmp_path / "base")
    for chosen, taught in cases:
        chosen = [dataclasses.replace(e, head=head) if e == NEW[1] else e for e in chosen]
        experiment = tuned_experiment(tmp_path / "base", new=chosen, steps=2, eval_every=0)
        experiment = dataclasses.replace(experiment, loss=LossObjective(distillation=taught))
        workdir = tmp_path / f"tuned{len(chosen)}"
        first, frozen, _ = base_weights.load_base(experiment, make_mesh(MeshConfig()), workdir)
        whole = load_run(tmp_path / "base").params
        own = first["exits"]["exit_0"]
        table = whole["embed"]["tokens"] if head == "tied" else whole["shared_head"]
        np.testing.assert_array_equal(own["head"], table)
        lowest = jax.tree.map(lambda a: a[0], whole["layers"])
        np.testing.assert_array_equal(own["mlp"]["up"], lowest["mlp"]["up"])
        np.testing.assert_array_equal(own["mlp_norm"]["scale"], lowest["attn_norm"]["scale"])
        depth = DEPTH if taught else max(e.boundary for e in chosen)
        assert {a.shape[0] for a in jax.tree.leaves(frozen["layers"])} == {depth}
        assert fit(experiment, workdir).step == 2
        tuned = load_run(workdir)
        assert tuned.config == experiment.model
        declared = params.map_params(lambda p: p.shape, params.abstract(tuned.config))
        assert jax.tree.map(jnp.shape, tuned.params) == declared


def test_the_base_and_other_runs_are_not_written_over(base, tmp_path):
    with pytest.raises(ConfigError, match="must differ from train.base"):
        fit(tuned_experiment(base), base)
    shutil.copytree(base, tmp_path / "other")
    before = {p: p.read_bytes() for p in (tmp_path / "other").rglob("*.json*")}
    with pytest.raises(CheckpointError, match="other/checkpoints are of another run"):
        fit(tuned_experiment(base), tmp_path / "other")
    assert all(p.read_bytes() == content for p, content in before.items())


def test_another_tokenizer_in_the_workdir_is_refused(base, tmp_path):
    other = ["a few words", "to train other merges on, and a few more words"]
    documents = [Document(str(i), text) for i, text in enumerate(other)]
    save_tokenizer(train_bpe(documents, 257), tmp_path / "tokenizer")
    with pytest.raises(CheckpointError, match="Put that tokenizer back"):
        fit(tuned_experiment(base), tmp_path)


def test_random_exits_are_those_of_the_seed(base, tmp_path):
    experiment = tuned_experiment(base, start="random")
    first, *_ = base_weights.load_base(experiment, make_mesh(MeshConfig()), tmp_path)
    fresh = params.init(experiment.model, jax.random.key(experiment.train.seed))
    for name, value in named(first).items():
        # Compiled and not: the last bit may differ.
        np.testing.assert_allclose(value, named(fresh)[name], rtol=1e-6)


def test_a_scope_parts_the_parameters(base):
    experiment = tuned_experiment(base)
    scope = Scope.of(experiment)
    trained, frozen = scope.declarations()

    def shapes(tree):
        return params.map_params(lambda p: jax.ShapeDtypeStruct(p.shape, "f4"), tree)

    assert scope.which == (1, 2) and scope.depth == 3
    assert size(shapes(trained)) + size(shapes(frozen)) == size(shapes(scope.parameters()))
    whole = Scope(experiment.model)
    assert whole.parameters() == params.abstract(experiment.model)
    assert whole.which == (0, 1, 2, 3) and whole.depth == DEPTH


def test_split_and_join_are_inverse():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    for chosen in (lambda n: n == "a/c/d", lambda n: n.startswith("a"), lambda n: False):
        parts = split(tree, chosen)
        assert join(*parts) == tree == join(*parts[::-1])
    assert split(tree, lambda n: n == "a/b") == ({"a": {"b": 1}}, {"a": {"c": {"d": 2}}, "e": 3})


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(train=dict(base="/nowhere")), "train.base = '/nowhere'.*no such folder"),
        (dict(train=dict(base=None)), "tune.part = 'exits': must be 'all' where no train.base"),
        (dict(train=dict(base_step=7)), "has no checkpoint of step 7, only 60"),
        (dict(tune=dict(exits=(2,))), "one weight for each of the 1 tuned exits"),
        (dict(tune=dict(exits=(2, 4))), r"tune.exits = 4: must be the boundary"),
        (dict(tune=dict(exits=(3, 2))), r"must be ascending"),
        (dict(tune=dict(exits=(2, 2))), r"each boundary once"),
        (dict(tune=dict(exits=())), "one weight for each of the 3 tuned exits"),
        (dict(tune=dict(part="all")), "must be empty with tune.part = 'all'"),
        (dict(tune=dict(part="tail")), "TuneConfig.part = 'tail'"),
        (dict(tune=dict(start="zero")), "TuneConfig.start = 'zero'"),
        (dict(model=dict(d_model=32, d_ff=64, head_dim=8)), "d_model: 16 in the base, 32 wanted"),
        (dict(loss=LossObjective(distillation=1.0), mesh=MeshConfig(pipe=2)), "on several stages"),
        (dict(exit=dict(router=8)), r"tune.exits = \(2, 3\): must leave exits with a router"),
        (dict(exit=dict(head="shared")), "the base has no shared head"),
        (dict(exit=dict(head="tied", norm=False)), "must be an exit with parameters of its own"),
    ],
)
def test_bad_input_is_named(base, tmp_path, change, message):
    def make():
        experiment = tuned_experiment(base)
        model = experiment.model.replace(**change.get("model", {}))
        if "exit" in change:
            exits = [
                dataclasses.replace(e, **change["exit"]) if e.boundary == 2 else e
                for e in model.exits
            ]
            model = model.replace(exits=tuple(exits))

        def changed(name):
            return dataclasses.replace(getattr(experiment, name), **change.get(name, {}))

        rest = {k: change[k] for k in ("loss", "mesh") if k in change}
        tune, train = changed("tune"), changed("train")
        return dataclasses.replace(experiment, model=model, tune=tune, train=train, **rest)

    with pytest.raises((ConfigError, CheckpointError), match=message):
        fit(make(), tmp_path)


def test_experiments_survive_json(base):
    experiment = tuned_experiment(base)
    assert Experiment.from_dict(json.loads(json.dumps(experiment.to_dict()))) == experiment
