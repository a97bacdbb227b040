"""Routers: what they are trained on against float64, that they learn it, and what is refused."""

from __future__ import annotations

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eejax.calibration import frontier as frontier_module
from eejax.calibration import routers, score
from eejax.calibration import states as states_module
from eejax.calibration.calibration import boundaries_for, calibrate_model, with_exits
from eejax.calibration.quality import auc
from eejax.calibration.routers import RouterOptions, divided, labels, train_routers
from eejax.calibration.states import States, collect
from eejax.checkpoint.language_model import LanguageModel
from eejax.checkpoint.model import abstract_params
from eejax.common.errors import CheckpointError, ConfigError, DataError
from eejax.gates import router
from eejax.inference import Generator
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh

PLAIN = ModelConfig(
    vocab_size=61,
    vocab_multiple=8,
    n_layers=5,
    d_model=32,
    n_heads=4,
    context_length=64,
    head="own",
    temperature=1.4,
    logit_softcap=9.0,
)


@pytest.fixture(scope="module")
def plain():
    """Random parameters whose norms and heads are not those of the start."""
    rng = np.random.default_rng(0)

    def draw(p):
        return np.float32(p.fill + (p.std or 0.2) * 1.5 * rng.standard_normal(p.shape))

    return jax.tree.map(jnp.asarray, params.map_params(draw, params.abstract(PLAIN)))


def batches(n=12, b=4, t=24, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        tokens, labels = rng.integers(0, PLAIN.vocab_size, (2, b, t), dtype=np.int32)
        labels[rng.random((b, t)) < 0.2] = -1
        yield {"tokens": tokens, "labels": labels}


def test_training_free_exits_are_the_final_norm_and_head(plain):
    p, config = with_exits(plain, PLAIN, (2, 4))
    assert config.head == "shared" and [e.boundary for e in config.exits] == [2, 4]
    assert p["shared_head"] is plain["final"]["head"]  # nothing of a vocabulary's size is copied
    tokens = np.arange(20, dtype=np.int32)[None]
    states = transformer.exit_states(p, config, tokens)
    logits = [exits.logits(exits.head(p, config, e), h) for e, h in enumerate(states)]
    want = transformer.exit_states(plain, PLAIN, tokens)[0]
    np.testing.assert_array_equal(logits[2], exits.logits(exits.head(plain, PLAIN, 0), want))
    for e, depth in enumerate((2, 4)):
        cut = PLAIN.replace(n_layers=depth)
        lower = plain | {"layers": jax.tree.map(lambda a, n=depth: a[:n], plain["layers"])}
        alone = transformer.exit_states(lower, cut, tokens)[0]
        np.testing.assert_allclose(
            logits[e], exits.logits(exits.head(lower, cut, 0), alone), rtol=1e-5, atol=1e-5
        )
    assert with_exits(p, config, (2, 4))[1] == config
    assert boundaries_for(config, 2) == (2, 4) and boundaries_for(config, 4) == (4,)
    with pytest.raises(ConfigError, match=r"every = 5: must leave a boundary in 1..4"):
        boundaries_for(config, 5)


def test_a_head_that_exits_share_stays_beside_the_final_one():
    config = PLAIN.replace(exits=(ExitConfig(2, head="shared"),))
    before = params.init(config, jax.random.key(3))
    p, made = with_exits(before, config, (2, 4))
    assert p["shared_head"] is before["shared_head"] and made.head == "own"
    assert [e.head for e in made.exits] == ["shared", "own"]
    tokens = np.arange(20, dtype=np.int32)[None]

    def logits(p, config):
        states = transformer.exit_states(p, config, tokens)
        return [exits.logits(exits.head(p, config, e), h) for e, h in enumerate(states)]

    old, new = logits(before, config), logits(p, made)
    np.testing.assert_array_equal(new[0], old[0])
    np.testing.assert_array_equal(new[2], old[1])
    np.testing.assert_array_equal(p["exits"]["exit_4"]["head"], before["final"]["head"])


def test_states_are_those_of_the_model_and_kept_parts_are_not_made_again(
    plain, tmp_path, monkeypatch
):
    monkeypatch.setattr(states_module, "PART", 100)
    monkeypatch.setattr(frontier_module, "CHUNK", 32)
    p, config = with_exits(plain, PLAIN, (1, 3))
    given = list(batches())
    found = collect(p, config, given, 10**6, folder=tmp_path)
    counted = np.concatenate([b["labels"].reshape(-1) != -1 for b in given])
    assert found.n == counted.sum()
    reached = [[], [], []]
    logits = [[], [], []]
    for batch in given:

        def tap(e, x):
            return (reached[e].append(np.asarray(x).reshape(-1, 32)), x)[1]

        seen = transformer.exit_states(p, config, batch["tokens"], tap=tap)
        for e, h in enumerate(seen):
            y = np.asarray(exits.logits(exits.head(p, config, e), h), np.float64)
            logits[e].append(y.reshape(-1, y.shape[-1])[:, : config.vocab_size])
    x, y = (np.stack([np.concatenate(a) for a in many])[:, counted] for many in (reached, logits))
    np.testing.assert_allclose(found.boundary, x[:2], rtol=1e-5, atol=1e-5)
    x = x.astype(np.float64)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
    normed = normed * np.asarray(plain["final"]["norm"]["scale"], np.float64)
    unit = normed / np.linalg.norm(normed, axis=-1, keepdims=True)
    np.testing.assert_allclose(found.cosine, (unit[:2] * unit[2]).sum(-1), atol=1e-5)
    logp = y - np.log(np.exp(y).sum(-1, keepdims=True))
    kl = (np.exp(logp[2]) * (logp[2] - logp[:2])).sum(-1)
    np.testing.assert_allclose(found.kl, kl, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(found.tokens, y.argmax(-1))
    label = np.concatenate([b["labels"].reshape(-1) for b in given])[counted]
    np.testing.assert_array_equal(found.labels, label)
    picked = np.take_along_axis(logp, label[None, :, None], 2)[..., 0]
    np.testing.assert_allclose(found.nlls, -picked, rtol=1e-4, atol=1e-4)
    rows = np.repeat(np.arange(48), 24)[counted]
    np.testing.assert_array_equal(found.units, rows)

    # The last part is lost: the others are read, and the model sees but the rest of the text.
    files = sorted(tmp_path.glob("states-*.safetensors"))
    assert len(files) > 3
    files[-1].unlink()
    calls = []
    real = states_module._pass
    monkeypatch.setattr(states_module, "_pass", lambda *a: (calls.append(a), real(*a))[1])
    again = collect(p, config, given, 10**6, folder=tmp_path)
    assert 0 < len(calls) < len(given) / 2
    jax.tree.map(np.testing.assert_array_equal, tuple(found), tuple(again))
    short = collect(p, config, given, 101)
    assert short.n == 101
    np.testing.assert_array_equal(short.tokens, found.tokens[:, :101])
    monkeypatch.setattr(states_module, "max_positions_in_memory", lambda config: 77)
    assert collect(p, config, given, 101).n == 77
    with pytest.raises(DataError, match="no token to calibrate on"):
        collect(p, config, [], 10)


def planted(n=4000, d=16, seed=0, share=0.5) -> tuple[States, ModelConfig, np.ndarray]:
    """States of which exits 0 and 2 tell whether a token is right, and exit 1 does not; and what
    can be known of it at most [e, n]."""
    rng = np.random.default_rng(seed)
    config = ModelConfig(
        vocab_size=7,
        n_layers=4,
        d_model=d,
        n_heads=2,
        context_length=8,
        exits=tuple(ExitConfig(b) for b in (1, 2, 3)),
    )
    x = rng.standard_normal((3, n, d)).astype(np.float32)
    w = rng.standard_normal((3, d))
    z = 8 * (np.einsum("end,ed->en", x, w) / np.linalg.norm(w, axis=-1)[:, None])
    right = rng.random((3, n)) < 1 / (1 + np.exp(-(z - 8 * NormalDist().inv_cdf(1 - share))))
    right[1] = rng.random(n) < share
    tokens = np.where(right, 1, 2).astype(np.int32)
    tokens = np.concatenate([tokens, np.ones((1, n), np.int32)])
    zero = np.zeros((4, n), np.float32)
    cosine = np.where(right, 0.99, 0.9).astype(np.float32)
    kl = np.where(right, 0.05, 0.2).astype(np.float32)
    return States(x, cosine, kl, tokens, zero, tokens[-1], np.arange(n) // 20), config, z


def start(config):
    return {e: {"scale": np.ones(config.d_model, np.float32)} for e in range(config.n_exits)}


def test_routers_learn_what_there_is_to_learn_and_know_how_sure_they_are():
    states, config, z = planted(20_000)
    options = RouterOptions(width=16, epochs=8, batch=256, learning_rate=1e-2)
    found = train_routers(states, config, start(config), options)
    good, none, other = found.qualities
    right = states.tokens[:-1] == states.tokens[-1]
    for e, found_ in ((0, good), (2, other)):
        assert found_.auc > auc(z[e, found.report], right[e, found.report]) - 0.02
    assert abs(none.auc - 0.5) < 0.06
    assert all(q.error < 0.06 for q in found.qualities)
    assert found.losses.shape == (8, 3)
    assert all(q.epoch == found.losses[:, i].argmin() + 1 for i, q in enumerate(found.qualities))
    says = router.confidence(found.routers[0], jnp.asarray(states.boundary[0]), config)
    np.testing.assert_allclose(np.asarray(says)[found.report], found.confidences[0], rtol=1e-5)
    # Windows are whole, and in one part each.
    train, choose, report = divided(states.units, 0)
    assert (train.astype(int) + choose + report == 1).all()
    assert not set(states.units[train]) & set(states.units[report])
    np.testing.assert_array_equal(report, found.report)


def test_rare_positives_are_ranked_and_too_few_are_refused():
    states, config, z = planted(20_000, share=0.05)
    options = RouterOptions(width=16, epochs=8, batch=256, learning_rate=1e-2)
    found = train_routers(states, config, start(config), options)
    best = auc(z[0, found.report], (states.tokens[0] == 1)[found.report])
    assert found.qualities[0].positives < 0.1 and found.qualities[0].auc > best - 0.03
    assert found.qualities[0].error < 0.05
    tokens = states.tokens.copy()
    tokens[1, 50:] = 3  # at most 50 positives are left
    few = states._replace(tokens=tokens)
    found = train_routers(few, config, start(config), RouterOptions(width=16, epochs=1))
    assert sorted(found.routers) == [0, 2]
    assert "but 100 are needed" in found.qualities[1].refused
    assert (found.confidences[1] == 0).all()
    none = states._replace(tokens=np.concatenate([tokens[:3] * 0 + 3, tokens[3:]]))
    with pytest.raises(DataError, match=r"no exit has 100 positive.*1: 0, 2: 0, 3: 0.*weaker"):
        train_routers(none, config, start(config), RouterOptions())


def test_labels_are_agreement_or_convergence():
    states, _, _ = planted(400)
    right = states.tokens[:-1] == 1
    for label in ("top1", "cosine", "kl"):
        np.testing.assert_array_equal(labels(states, RouterOptions(label=label)), right)
    by_exit = labels(states, RouterOptions(label="cosine", bound=(0.98, 0.5, 1.0)))
    assert by_exit[1].all() and not by_exit[2].any()
    np.testing.assert_array_equal(by_exit[0], right[0])
    with pytest.raises(ConfigError, match="must be one, or one for each of 3 exits"):
        labels(states, RouterOptions(label="kl", bound=(0.1, 0.2)))


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(width=0), "width = 0"),
        (dict(label="trust"), "label = 'trust': must be one of"),
        (dict(schedule="linear"), "schedule = 'linear': must be one of"),
        (dict(bound=0.9), "bound = 0.9: must be None with the label 'top1'"),
        (dict(label="cosine", bound=1.5), "bound = 1.5: must be cosines"),
        (dict(label="kl", bound=-0.1), "must be cosines in"),
        (dict(learning_rate=float("nan")), "learning_rate = nan"),
        (dict(epochs=1.5), "epochs = 1.5"),
    ],
)
def test_options_that_cannot_be_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        RouterOptions(**values)


def test_tides_recipe_is_adam_at_one_rate():
    recipe = RouterOptions(schedule="constant", weight_decay=0.0)
    steps = 20
    tree = {
        "down": jnp.ones((4, 8)),
        "up": jnp.ones(8),
        "norm": jnp.ones(4),
        "up_bias": jnp.ones(()),
    }
    ours, adam = routers._optimizer(recipe, steps), optax.adam(recipe.learning_rate)
    states_of = [ours.init(tree), adam.init(tree)]
    for step in range(1, steps + 1):
        slope = jax.tree.map(lambda a, step=step: step * jnp.sin(a + step), tree)
        with jax.numpy_dtype_promotion("standard"):
            moves = [o.update(slope, s, tree) for o, s in zip((ours, adam), states_of, strict=True)]
        states_of = [state for _, state in moves]
        jax.tree.map(np.testing.assert_allclose, moves[0][0], moves[1][0])


def test_a_killed_training_goes_on_where_it_was(tmp_path):
    states, config, _ = planted()
    options = RouterOptions(width=8, epochs=5, batch=256)
    whole = train_routers(states, config, start(config), options)

    class Killed(Exception):
        pass

    def die(epoch, loss):
        if epoch == 3:
            raise Killed

    with pytest.raises(Killed):
        train_routers(states, config, start(config), options, folder=tmp_path, watch=die)
    seen = []
    again = train_routers(
        states,
        config,
        start(config),
        options,
        folder=tmp_path,
        watch=lambda epoch, loss: seen.append(epoch),
    )
    assert seen == [4, 5]
    jax.tree.map(np.testing.assert_array_equal, again.routers, whole.routers)
    np.testing.assert_array_equal(again.losses, whole.losses)
    file = next(tmp_path.iterdir())
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(Exception, match="cut off"):
        train_routers(states, config, start(config), options, folder=tmp_path)


def model_of(params, config) -> LanguageModel:
    """Return a model that needs no tokenizer here."""
    return LanguageModel(config, params, None)


def test_a_model_gets_routers_and_is_what_it_was(plain, tmp_path):
    before = jax.tree.map(np.array, plain)
    options = RouterOptions(width=8, epochs=3, batch=128, min_positives=5)
    made = calibrate_model(
        model_of(plain, PLAIN), batches(30), options, every=2, tokens=2000, folder=tmp_path / "c"
    )
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, plain))
    for name in ("embed", "layers"):
        assert made.params[name] is plain[name]
    kept = [q.boundary for q in made.calibration.qualities if not q.refused]
    assert [e.boundary for e in made.config.exits] == kept and kept
    assert all(e.router == 8 for e in made.config.exits)
    shapes = jax.tree.map(lambda a: a.shape, made.params)
    assert shapes == jax.tree.map(lambda a: a.shape, params.shapes(made.config))
    # What the finished model says of the windows held out is what was judged.
    again = score(made.params, made.config, list(batches(30)))
    assert (
        made.calibration.states.boundary is None
    )  # nobody needs them any more, and they are large
    n, held_out = made.calibration.states.n, made.calibration.routers.report
    assert held_out.sum() > 100 and len(again) > n

    def pick(a):
        return a[..., :n][..., held_out]

    np.testing.assert_array_equal(pick(again.tokens), made.calibration.scores.tokens)
    np.testing.assert_array_equal(pick(again.labels), made.calibration.scores.labels)
    np.testing.assert_array_equal(pick(again.units), made.calibration.scores.units)
    np.testing.assert_allclose(pick(again.nlls), made.calibration.scores.nlls, rtol=1e-5)
    said = made.calibration.scores.confidences["router"]
    np.testing.assert_allclose(pick(again.confidences["router"]), said, rtol=1e-4, atol=1e-6)
    changed = plain | {"embed": {"tokens": plain["embed"]["tokens"] * 2}}
    with pytest.raises(ConfigError, match="about.parameters = "):
        calibrate_model(
            model_of(changed, PLAIN),
            batches(30),
            options,
            every=2,
            tokens=2000,
            folder=tmp_path / "c",
        )
    other = RouterOptions(width=4, epochs=3, batch=128, min_positives=5)
    with pytest.raises(ConfigError, match="options.width = 4, there 8"):
        calibrate_model(
            model_of(plain, PLAIN), batches(30), other, every=2, tokens=2000, folder=tmp_path / "c"
        )
    with pytest.raises(ConfigError, match="gate = 'router': no exit of this model has a router"):
        Generator.make(plain, PLAIN.replace(exits=()), "posthoc").generate([[1]], 2, gate="router")


def test_a_resumed_calibration_holds_what_the_first_one_held(plain, tmp_path, monkeypatch):
    """Otherwise windows would be divided anew, some that were trained on among those reported."""
    options = RouterOptions(width=8, epochs=3, batch=128, min_positives=5)

    def run(folder, watch=None):
        return calibrate_model(
            model_of(plain, PLAIN),
            batches(30),
            options,
            every=2,
            tokens=2000,
            folder=folder,
            watch=watch,
        )

    def fit(n):
        return monkeypatch.setattr(states_module, "max_positions_in_memory", lambda config: n)

    said = []

    def die(text):
        said.append(text)
        if text.startswith("epoch 1"):
            raise KeyboardInterrupt

    fit(1100)
    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", die)
    assert any(text.startswith("the first 1100 of 2000 tokens: no more fit") for text in said)
    fit(1900)
    again = run(tmp_path / "killed")
    assert again.calibration.states.n == whole.calibration.states.n == 1100
    np.testing.assert_array_equal(
        again.calibration.routers.report, whole.calibration.routers.report
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        again.calibration.routers.routers,
        whole.calibration.routers.routers,
    )
    assert run(tmp_path / "new").calibration.states.n == 1900
    for content in ("", "{}", "[1]"):
        (tmp_path / "new" / "held.json").write_text(content)
        with pytest.raises(CheckpointError, match="held.json: cannot be read .*: remove "):
            run(tmp_path / "new")
    (tmp_path / "new" / "calibration.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="calibration.json: cannot be read .*: remove "):
        run(tmp_path / "new")


def test_parameters_may_be_spread_over_devices(plain):
    """As `load_run(mesh=...)` gives them: matrices and vocabulary cut in two."""
    mesh = make_mesh(MeshConfig(model=2))
    cut = jax.tree.map(
        lambda a, like: jax.device_put(a, like.sharding), plain, abstract_params(PLAIN, mesh)
    )
    assert len(cut["layers"]["mlp"]["up"].sharding.device_set) == 2
    assert not cut["final"]["head"].sharding.is_fully_replicated
    options = RouterOptions(width=8, epochs=1, batch=128, min_positives=5)
    found, want = (
        calibrate_model(model_of(p, PLAIN), batches(15), options, every=2, tokens=1000)
        for p in (cut, plain)
    )
    np.testing.assert_array_equal(found.calibration.states.tokens, want.calibration.states.tokens)

    # Sums of two halves are rounded otherwise.
    def near(a, b):
        return np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)

    for name in ("cosine", "kl", "nlls"):
        near(getattr(found.calibration.states, name), getattr(want.calibration.states, name))
    jax.tree.map(near, found.calibration.routers.routers, want.calibration.routers.routers)


def test_exits_of_the_model_keep_their_parameters_and_others_stay_out(plain):
    p, config = with_exits(plain, PLAIN, (1, 2, 3))
    options = RouterOptions(width=8, epochs=1, batch=128, min_positives=1)
    made = calibrate_model(
        model_of(p, config), batches(30), options, boundaries=(1, 3), tokens=2000
    )
    assert [(e.boundary, e.router) for e in made.config.exits] == [(1, 8), (2, 0), (3, 8)]
    for name in ("exit_1", "exit_2", "exit_3"):
        assert made.params["exits"][name]["norm"] is p["exits"][name]["norm"]
    point = made.calibration.point(0.5)
    assert made.calibration.thresholds(point) == (point.threshold[0], 1.0, point.threshold[1])
    # A second calibration leaves the first one's routers where it is not asked for others.
    twice = calibrate_model(made, batches(30), options, boundaries=(2,), tokens=2000)
    assert [e.router for e in twice.config.exits] == [8, 8, 8]
    assert twice.params["exits"]["exit_1"] is made.params["exits"]["exit_1"]
    shapes = jax.tree.map(lambda a: a.shape, twice.params)
    assert shapes == jax.tree.map(lambda a: a.shape, params.shapes(twice.config))
    # Before anything is done.
    with pytest.raises(ConfigError, match=r"width = 4: must be 8, .* at boundaries 1, 3\. All"):
        calibrate_model(made, None, RouterOptions(width=4), boundaries=(2,), tokens=2000)
    for wrong in ((5,), (-1,), ()):
        with pytest.raises(ConfigError, match="boundaries = .*must be in 0..4"):
            calibrate_model(model_of(p, config), batches(), options, boundaries=wrong)
    with pytest.raises(DataError, match="has 4 windows, and 10 are needed"):
        calibrate_model(model_of(p, config), batches(1), options, tokens=2000)
