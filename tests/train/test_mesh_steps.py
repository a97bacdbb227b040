"""Whole training steps on meshes of several axes, against the same steps on one device."""

import functools

import jax
import numpy as np
import pytest

from eejax.common.errors import ConfigError
from eejax.losses import schedules
from eejax.losses.objective import LossObjective
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train import optimizer, state, step

CONFIG = ModelConfig(
    vocab_size=61,
    vocab_multiple=8,
    n_layers=2,
    d_model=16,
    n_heads=4,
    n_kv_heads=1,
    context_length=16,
    dropout=0.1,
    head="tied",
    qkv_bias=True,
    exits=(ExitConfig(1, mlp=True, head="own"),),
)
STEPS = 20
OPTIMIZER = optimizer.OptimizerConfig(learning_rate=1e-2, warmup_steps=3, clip_norm=0.5)
RECIPE = {"ema": 0.9, "microbatches": 1, "remat": "dots"}


def batch_of(n, b=8, t=12):
    rng = np.random.default_rng((1, n))
    tokens = rng.integers(0, CONFIG.vocab_size, (b, t + 1)).astype(np.int32)
    labels = np.where(rng.random((b, t)) < 0.2, -1, tokens[:, 1:]).astype(np.int32)
    return {"tokens": tokens[:, :-1], "labels": labels}


@functools.cache
def made(mesh_config, config, **recipe):
    """(mesh, transformation, train step): compiled once for all tests that train alike."""
    mesh = make_mesh(mesh_config)
    tx = optimizer.transformation(OPTIMIZER, params.decays(config))
    train = step.make_train_step(
        config,
        tx,
        optimizer.learning_rate(OPTIMIZER, STEPS),
        schedules.constant((0.3,)),
        mesh,
        layout=mesh_config,
        clip_norm=OPTIMIZER.clip_norm,
        **recipe,
    )
    return mesh, tx, train


def run(mesh_config, steps=STEPS, config=CONFIG, bad=None, **recipe):
    """(last state, metrics of every step); at step `bad` a label is no token."""
    mesh, tx, train = made(mesh_config, config, **recipe)
    extra = {"ema": recipe["ema"] is not None} if "ema" in recipe else {}
    extra |= {k: recipe[k] for k in ("loss_scale",) if k in recipe}
    now, records = state.create(config, tx, 0, mesh, layout=mesh_config, **extra), []
    for n in range(steps):
        batch = batch_of(n % 4)
        if n == bad:
            batch["labels"][3, 4] = config.vocab_size + 1
        now, metrics = train(now, step.put_batch(batch, mesh))
        records.append(jax.device_get(metrics))
    assert train._cache_size() == 1
    return now, records


def evaluated(mesh_config, now):
    mesh = make_mesh(mesh_config)
    evaluate = step.make_eval_step(CONFIG, mesh, layout=mesh_config)
    return jax.device_get(evaluate(now.params, step.put_batch(batch_of(99), mesh)))


@functools.cache
def one_device():
    now, records = run(MeshConfig(), **RECIPE)
    return now, records, evaluated(MeshConfig(), now)


SPREAD = MeshConfig(4, 1, 2, sequence=True, shard_params=True)
TWENTY = [
    SPREAD,
    pytest.param(MeshConfig(4, 1, 2), marks=pytest.mark.slow),
    pytest.param(MeshConfig(8), marks=pytest.mark.slow),
    pytest.param(MeshConfig(1, 1, 4, sequence=True), marks=pytest.mark.slow),
    pytest.param(MeshConfig(4, 1, 2, shard_optimizer=False), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mesh", TWENTY, ids=str)
def test_twenty_steps_are_those_of_one_device(mesh):
    now, records = run(mesh, **RECIPE)
    sums = evaluated(mesh, now)
    want, wanted, wanted_sums = one_device()
    for n, (a, b) in enumerate(zip(records, wanted, strict=True)):
        # Rounding that Adam steps at a rate of 1e-2 carry on, in norms sooner than in losses.
        for name in ("loss", "exit_losses"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, err_msg=name)
        for name in ("grad_norm", "exit_grad_norms"):
            np.testing.assert_allclose(a[name], b[name], rtol=min(1e-5 * 2**n, 1e-2), err_msg=name)
    assert records[-1]["loss"] < 0.96 * records[0]["loss"]
    np.testing.assert_allclose(sums.sums, wanted_sums.sums, rtol=1e-4)
    assert sums.num_tokens == wanted_sums.num_tokens
    start = params.init(CONFIG, jax.random.key(0))
    trees = jax.device_get((now.params, want.params, now.ema, want.ema, start))
    for a, b, a_ema, b_ema, c in zip(*map(jax.tree.leaves, trees), strict=True):
        # A ratio of moments near zero amplifies rounding: compared with the distance travelled.
        travelled = max(1e-2, np.abs(b - c).max())
        assert np.abs(a - b).max() <= 1e-2 * travelled
        assert np.abs(a_ema - b_ema).max() <= 1e-2 * travelled
    assert_replicas_agree(now)


def assert_replicas_agree(tree):
    """Devices that hold the same part of a leaf hold the same values."""
    for leaf in jax.tree.leaves(tree):
        by_index = {}
        for shard in leaf.addressable_shards:
            same = by_index.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(same, shard.data)


@pytest.mark.parametrize(
    "mesh",
    [
        SPREAD,
        pytest.param(MeshConfig(2, 1, 2), marks=pytest.mark.slow),
        pytest.param(MeshConfig(1, 1, 4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_that_is_not_finite_is_skipped_on_every_device(mesh):
    now, records = run(mesh, steps=3, bad=1, **RECIPE)
    _, want = run(MeshConfig(), steps=3, bad=1, **RECIPE)
    assert [r["finite"] for r in records] == [True, False, True] and int(now.skipped) == 1
    np.testing.assert_allclose(records[2]["loss"], want[2]["loss"], rtol=1e-5)
    assert_replicas_agree(now)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(jax.device_get(now.params)))


def test_one_loss_scale_on_all_devices():
    config = CONFIG.replace(dtype="float16", dropout=0.0)
    # The scale is one of a data shard's mean loss: as many of these, so the same overflows.
    _, got = run(MeshConfig(model=2), steps=8, config=config, loss_scale=2.0**20)
    _, want = run(MeshConfig(), steps=8, config=config, loss_scale=2.0**20)
    for a, b in zip(got, want, strict=True):
        # Shards' products are rounded to 11 bits before they are added.
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=2e-3)
        assert a["finite"] == b["finite"] and a["loss_scale"] == b["loss_scale"]
    # A scale this large overflows at first, and is halved.
    assert not got[0]["finite"] and got[-1]["finite"] and got[-1]["loss_scale"] < 2.0**20


def test_what_does_not_divide_is_refused_by_name():
    wide = ModelConfig(
        vocab_size=61, n_layers=1, d_model=24, n_heads=6, n_kv_heads=3, d_ff=32, context_length=8
    )
    mesh = make_mesh(MeshConfig(model=4))
    for config, message in [
        (wide, "embed/tokens: dimension 'v' of size 61 does not divide by mesh.model = 4"),
        (wide.replace(vocab_multiple=8), "attn/k: dimension 'k' of size 3 does not divide"),
        (wide.replace(vocab_multiple=8, n_kv_heads=2), "attn/o: dimension 'n' of size 6"),
        (
            wide.replace(vocab_multiple=8, n_kv_heads=4, n_heads=8, head_dim=4, d_ff=30),
            "mlp/down: dimension 'f' of size 30",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            step.make_eval_step(config, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(data=2, model=2)], ids=str)
def test_the_tokens_of_exits_are_drawn_alike_whatever_the_mesh(mesh):
    recipe = dict(microbatches=2, remat="dots", objective=LossObjective(exit_tokens=0.25))
    (_, ours), (_, theirs) = (run(m, steps=2, **recipe) for m in (mesh, MeshConfig()))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a["exit_losses"], b["exit_losses"], rtol=1e-4)
        np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-3)
