import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eejax.common.errors import ConfigError
from eejax.losses import schedules
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train import optimizer, state, step

CONFIG = ModelConfig(
    vocab_size=37,
    n_layers=3,
    d_model=16,
    n_heads=2,
    context_length=16,
    norm="layernorm",
    qkv_bias=True,
    mlp_bias=True,
    mlp_gated=False,
    activation="gelu",
    head="tied",
    exits=(ExitConfig(1, mlp=True), ExitConfig(2, head="own")),
)
STEPS = 20
OPTIMIZER = optimizer.OptimizerConfig(learning_rate=1e-2, warmup_steps=3, clip_norm=0.5)
WEIGHTS = schedules.linear((0.1, 0.2), (0.5, 0.3), 10)


def batch_of(n, seed=0, b=8, t=12, config=CONFIG):
    """Batches with ignored labels, unevenly spread over the samples."""
    rng = np.random.default_rng((seed, n))
    tokens = rng.integers(0, config.vocab_size, (b, t + 1)).astype(np.int32)
    labels = tokens[:, 1:].copy()
    labels[rng.random((b, t)) < np.linspace(0, 0.6, b)[:, None]] = -1
    return {"tokens": tokens[:, :-1], "labels": labels}


@functools.cache
def made(config, mesh, **options):
    """(transformation, train step): compiled once for all tests that train alike."""
    tx = optimizer.transformation(OPTIMIZER, params.decays(config))
    rate = optimizer.learning_rate(OPTIMIZER, STEPS)
    options = {"clip_norm": OPTIMIZER.clip_norm} | options
    return tx, step.make_train_step(config, tx, rate, WEIGHTS, mesh, **options)


def setup(config=CONFIG, mesh=None, **options):
    mesh = mesh or make_mesh(MeshConfig())
    tx, train = made(config, mesh, **{"microbatches": 1} | options)
    return mesh, train, state.create(config, tx, 0, mesh)


def run(batches, config=CONFIG, mesh=None, **options):
    mesh, train, now = setup(config, mesh, **options)
    records = []
    for batch in batches:
        now, metrics = train(now, step.put_batch(batch, mesh))
        records.append(jax.device_get(metrics))
    return now, records


@functools.cache
def initial():
    return jax.device_get(jax.jit(lambda: params.init(CONFIG, jax.random.key(0)))())


def reference(batches):
    """The same training written with autodiff of the mean loss and optax's own adamw and clip."""
    value = initial()
    tx = optax.chain(
        optax.clip_by_global_norm(OPTIMIZER.clip_norm),
        optax.adamw(
            optimizer.learning_rate(OPTIMIZER, STEPS),
            b1=0.9,
            b2=0.95,
            eps=1e-8,
            weight_decay=OPTIMIZER.weight_decay,
            mask=params.decays(CONFIG),
        ),
    )
    opt = jax.jit(tx.init)(value)
    update = jax.jit(tx.update)

    def loss(value, batch, weights):
        hs = transformer.exit_states(value, CONFIG, batch["tokens"])
        counted = (batch["labels"] >= 0).astype(np.float32)
        means = []
        for e, h in enumerate(hs):
            logp = jax.nn.log_softmax(exits.logits(exits.head(value, CONFIG, e), h))
            picked = jnp.take_along_axis(logp, jnp.maximum(batch["labels"], 0)[..., None], -1)
            means.append(-jnp.sum(picked[..., 0] * counted) / counted.sum())
        means = jnp.stack(means)
        return jnp.sum(means * weights), means

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    records = []
    for n, batch in enumerate(batches):
        done = min(1.0, n / 10)
        weights = np.array([0.1 + 0.4 * done, 0.2 + 0.1 * done, 1.0], np.float32)
        (total, means), grads = gradient(value, batch, weights)
        with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic
            updates, opt = update(grads, opt, value)
        value = optax.apply_updates(value, updates)
        records.append((total, means, optax.tree.norm(grads)))
    return value, records


def test_steps_equal_autodiff_of_the_mean_loss_and_optax():
    batches = [batch_of(n) for n in range(6)]
    now, records = run(batches)
    want, want_records = reference(batches)
    for got, (total, means, norm) in zip(records, want_records, strict=True):
        # Two programs of float32 arithmetic, six Adam steps at a rate of 1e-2.
        np.testing.assert_allclose(got["loss"], total, rtol=1e-5)
        np.testing.assert_allclose(got["exit_losses"], means, rtol=1e-5)
        np.testing.assert_allclose(got["grad_norm"], norm, rtol=1e-4)
    # A ratio of moments near zero amplifies rounding: compared with the distance travelled.
    start = initial()
    for a, b, c in zip(*map(jax.tree.leaves, (now.params, want, start)), strict=True):
        assert np.abs(a - b).max() <= 2e-3 * max(1e-2, np.abs(b - c).max())
    assert int(now.step) == 6 and int(now.skipped) == 0
    assert [r["tokens"] for r in records] == [(b["labels"] >= 0).sum() for b in batches]


SPLITS = ((1, 4), (4, 1))


@pytest.mark.parametrize(
    "data, microbatches", [(2, 2), *(pytest.param(*c, marks=pytest.mark.slow) for c in SPLITS)]
)
def test_parts_and_devices_do_not_change_the_result(data, microbatches):
    batches = [batch_of(n) for n in range(5)]
    _, want = run(batches)
    now, got = run(batches, mesh=make_mesh(MeshConfig(data=data)), microbatches=microbatches)
    for a, b in zip(got, want, strict=True):
        # The sums are the same, in another order.
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
        np.testing.assert_allclose(a["exit_losses"], b["exit_losses"], rtol=1e-5)
        np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-4)
    for leaf in jax.tree.leaves(now.params):
        shards = [np.asarray(s.data) for s in leaf.addressable_shards]
        assert all((shards[0] == s).all() for s in shards), "replicas drifted apart"


@pytest.mark.slow
def test_dropout_depends_on_the_sample_and_the_step_not_on_the_mesh():
    config = CONFIG.replace(dropout=0.3)
    batches = [batch_of(0)] * 2
    _, one = run(batches, config)
    _, other = run(batches, config, make_mesh(MeshConfig(data=2)), microbatches=2)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a["exit_losses"], b["exit_losses"], rtol=1e-5)
    _, seeded = run(batches, config, seed=1)
    _, without = run(batches)
    assert abs(one[0]["loss"] - seeded[0]["loss"]) > 1e-3
    assert abs(one[0]["loss"] - without[0]["loss"]) > 1e-3


@pytest.mark.parametrize("remat", ["full", pytest.param("dots", marks=pytest.mark.slow)])
def test_remat_gives_the_same_gradients(remat):
    batches = [batch_of(n) for n in range(3)]
    _, want = run(batches)
    _, got = run(batches, remat=remat)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
        np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-4)


@pytest.mark.parametrize("data, microbatches", [(1, 1), (2, 2)])
def test_a_step_without_a_counted_token_is_skipped_and_counted(data, microbatches):
    mesh = make_mesh(MeshConfig(data=data))
    mesh, train, now = setup(mesh=mesh, microbatches=microbatches)
    before = jax.device_get(now)
    empty = batch_of(0) | {"labels": np.full_like(batch_of(0)["labels"], -1)}
    now, metrics = train(now, step.put_batch(empty, mesh))
    after = jax.device_get(now)
    assert not metrics["finite"] and (int(metrics["tokens"]), int(now.skipped)) == (0, 1)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(jax.device_get(metrics)))
    for a, b in zip(*map(jax.tree.leaves, (before.params, after.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*map(jax.tree.leaves, (before.opt_state, after.opt_state)), strict=True):
        np.testing.assert_array_equal(a, b)
    now, metrics = train(now, step.put_batch(batch_of(1), mesh))
    assert metrics["finite"] and int(now.step) == 2 and int(now.skipped) == 1


@pytest.mark.parametrize("data, microbatches", [(1, 1), (2, 2)])
def test_a_step_that_is_not_finite_is_skipped_and_counted(data, microbatches):
    mesh = make_mesh(MeshConfig(data=data))
    mesh, train, now = setup(mesh=mesh, microbatches=microbatches)
    now, _ = train(now, step.put_batch(batch_of(0), mesh))
    good = jax.device_get(now)
    bad = batch_of(1)
    bad["labels"][3, 4] = CONFIG.vocab_size + 1  # no token: its loss is NaN
    now, metrics = train(now, step.put_batch(bad, mesh))
    assert not metrics["finite"] and int(now.skipped) == int(metrics["skipped"]) == 1
    assert int(now.step) == 2
    for a, b in zip(*map(jax.tree.leaves, (now.params, good.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*map(jax.tree.leaves, (now.opt_state, good.opt_state)), strict=True):
        np.testing.assert_array_equal(a, b)
    now, metrics = train(now, step.put_batch(batch_of(2), mesh))
    assert metrics["finite"] and int(metrics["skipped"]) == 1
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(jax.device_get(now.params)))


def test_a_batch_without_any_counted_token_is_skipped():
    mesh, train, now = setup()
    empty = batch_of(0)
    empty["labels"][:] = -1
    now, metrics = train(now, step.put_batch(empty, mesh))
    assert int(now.skipped) == 1 and int(metrics["tokens"]) == 0


def test_norms_and_biases_do_not_decay():
    settings = optimizer.OptimizerConfig(weight_decay=0.5)
    value = initial()
    tx = optimizer.transformation(settings, params.decays(CONFIG))
    zero = jax.tree.map(np.zeros_like, value)
    updates, _ = jax.jit(lambda zero, value: tx.update(zero, tx.init(value), value))(zero, value)
    flat = jax.tree_util.tree_flatten_with_path(updates)[0]
    for (path, update), leaf in zip(flat, jax.tree.leaves(value), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        plain = "norm" in name or "bias" in name
        np.testing.assert_allclose(update, np.asarray(leaf) * (0.0 if plain else 0.5))


def test_one_compilation_for_all_steps():
    mesh, train, now = setup(config=CONFIG.replace(dropout=0.1))
    for n in range(4):
        now, _ = train(now, step.put_batch(batch_of(n), mesh))
    assert train._cache_size() == 1


def test_evaluation_sums_what_training_means():
    batch = batch_of(3)
    sums = []
    for n in (1, 2):
        mesh, train, now = setup(mesh=make_mesh(MeshConfig(data=n)), microbatches=n)
        arrays = step.put_batch(batch, mesh)
        sums.append(jax.device_get(step.make_eval_step(CONFIG, mesh)(now.params, arrays)))
        _, metrics = train(now, arrays)
        np.testing.assert_allclose(
            sums[-1].sums / sums[-1].num_tokens, metrics["exit_losses"], rtol=1e-5
        )
    assert sums[0].num_tokens == sums[1].num_tokens == (batch["labels"] >= 0).sum()
    np.testing.assert_allclose(sums[0].sums, sums[1].sums, rtol=1e-5)


def test_a_batch_that_does_not_divide_is_refused():
    mesh = make_mesh(MeshConfig(data=4))
    with pytest.raises(ConfigError, match="must be a multiple of mesh.data"):
        step.put_batch(batch_of(0, b=6), mesh)
    _, train, now = setup()
    with pytest.raises(ConfigError, match="1 x 3 = 3. The nearest is 9"):
        setup(microbatches=3)[1](now, batch_of(0))
