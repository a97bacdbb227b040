"""Layer dropout, averaged weights, curricula and the loss scale, in the step that uses them."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.common.trees import slice_layers
from eejax.losses import LossObjective, schedules
from eejax.models import layers, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train import optimizer, recipes, state, step

CONFIG = ModelConfig(
    vocab_size=31,
    n_layers=4,
    d_model=16,
    n_heads=2,
    context_length=16,
    head="tied",
    exits=(ExitConfig(1), ExitConfig(2, head="own")),
)
CONSTANT = optimizer.OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant")
GENTLE = optimizer.OptimizerConfig(learning_rate=3e-3, warmup_steps=20, schedule="constant")


def batch_of(n, b=8, t=12):
    """Sequences with something to learn: the next token is mostly the last one plus one."""
    rng = np.random.default_rng(n)
    tokens = (rng.integers(0, 31, (b, 1)) + np.arange(t + 1)) % 31
    noise = rng.random((b, t + 1)) < 0.1
    tokens = np.where(noise, rng.integers(0, 31, (b, t + 1)), tokens).astype(np.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].copy()}


WEIGHTS = schedules.constant((0.3, 0.5))


@functools.cache
def made(config, mesh, weights, settings, **options):
    """(transformation, train step): compiled once for all tests that train alike."""
    tx = optimizer.transformation(settings, params.decays(config))
    rate = optimizer.learning_rate(settings, 100)
    return tx, step.make_train_step(config, tx, rate, weights, mesh, **options)


class Run:
    """A model in training, one batch after the other."""

    def __init__(self, config=CONFIG, mesh=None, weights=WEIGHTS, settings=CONSTANT, **options):
        self.mesh = mesh or make_mesh(MeshConfig())
        tx, self.train = made(config, self.mesh, weights, settings, **options)
        extra = {"ema": "ema" in options, "loss_scale": options.get("loss_scale")}
        self.state = state.create(config, tx, 0, self.mesh, **extra)

    def __call__(self, *batches):
        records = []
        for batch in batches:
            self.state, metrics = self.train(self.state, step.put_batch(batch, self.mesh))
            records.append(jax.device_get(metrics))
        return records


def assert_near(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1e-3, np.abs(y).max()))


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 1000), st.floats(0, 0.99))
def test_layer_dropout_grows_with_depth_and_time(n, steps, rate):
    constant = np.asarray(recipes.layer_dropout(rate, n)(7))
    growing = recipes.layer_dropout(rate, n, growth="exponential", steps=steps)
    for l in range(n):
        depth = math.exp(l * math.log(2) / (n - 1)) - 1 if n > 1 else 0.0
        assert constant[l] == pytest.approx(rate * depth, abs=1e-6)
        for t in {0, steps // 2, steps - 1}:
            time = math.exp(t * math.log(2) / (steps - 1)) - 1 if steps > 1 else 0.0
            assert np.asarray(growing(t))[l] == pytest.approx(rate * depth * time, abs=1e-5)


def test_a_dropped_layer_passes_its_input_on():
    p = params.init(CONFIG, jax.random.key(0))
    tokens = jnp.asarray(batch_of(0)["tokens"])
    keys = jax.random.split(jax.random.key(1), 8)
    rates = jnp.asarray([0.0, 1.0, 0.0, 0.0])
    got = transformer.exit_states(p, CONFIG, tokens, dropout_keys=keys, layer_dropout=rates)
    above = slice_layers(p["layers"], 2, 4)
    without = p | {
        "layers": jax.tree.map(lambda a, b: jnp.concatenate([a[:1], b]), p["layers"], above)
    }
    short = CONFIG.replace(n_layers=3, exits=(ExitConfig(1), ExitConfig(2, head="own")))
    want = transformer.exit_states(without, short, tokens)
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)
    np.testing.assert_allclose(got[2], want[2], atol=1e-5)


def test_layers_are_dropped_at_their_rate_for_each_sample_apart():
    keys = jax.random.split(jax.random.key(3), 4000)
    one, other = (layers.keep_samples(keys, i, jnp.float32(0.3)) for i in (5, 6))
    sigma = math.sqrt(0.3 * 0.7 / 4000)
    assert abs(float(one.mean()) - 0.7) < 4 * sigma
    both = float((one & other).mean())  # layers are drawn apart, too
    assert abs(both - 0.49) < 4 * math.sqrt(0.49 * 0.51 / 4000)


@pytest.mark.slow
def test_layer_dropout_does_not_depend_on_the_mesh():
    drop = recipes.layer_dropout(0.6, 4)
    batches = [batch_of(n) for n in range(2)]
    one = Run(layer_dropout=drop)(*batches)
    mesh = make_mesh(MeshConfig(data=2))
    other = Run(mesh=mesh, layer_dropout=drop, microbatches=2)(*batches)
    without, seeded = Run()(*batches), Run(layer_dropout=drop, seed=1)(*batches)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a["exit_losses"], b["exit_losses"], rtol=1e-5)
        np.testing.assert_allclose(a["exit_grad_norms"], b["exit_grad_norms"], rtol=1e-4)
    assert abs(one[0]["loss"] - without[0]["loss"]) > 1e-4
    assert abs(one[0]["loss"] - seeded[0]["loss"]) > 1e-4


def test_the_average_is_that_of_the_parameters_and_skips_what_they_skip():
    run = Run(ema=0.6)
    averages = jax.device_get(run.state.params)
    for n in range(8):
        before = jax.device_get(run.state.ema)
        batch = batch_of(n)
        if n == 5:
            batch["labels"][0, 0] = 99  # no token: the loss is NaN
        run(batch)
        if n == 5:
            assert_near(run.state.ema, before, 0)
            continue
        decay = min(0.6, (1 + n) / (10 + n))
        new = jax.device_get(run.state.params)
        averages = jax.tree.map(lambda a, p, d=decay: d * a + (1 - d) * p, averages, new)
    assert_near(run.state.ema, averages, 1e-6)


def test_the_loss_scale_halves_and_doubles():
    scale = recipes.LossScale.initial(8.0)
    seen = []
    for finite in (True, True, True, False, True, True, True, False, False):
        scale = scale.after(jnp.asarray(finite), 2)
        seen.append((float(scale.value), int(scale.clean)))
    assert seen == [(8, 1), (16, 0), (16, 1), (8, 0), (8, 1), (16, 0), (16, 1), (8, 0), (4, 0)]
    lowest = recipes.LossScale.initial(recipes.MIN_SCALE).after(jnp.asarray(False), 2)
    assert lowest.value == recipes.MIN_SCALE


@pytest.mark.parametrize("scale", [pytest.param(2.0**-8, marks=pytest.mark.slow), 2.0**20])
def test_a_loss_scale_scales_every_exit_alike(scale):
    """In float32 it must change nothing, whatever the exits' weights."""
    batches = [batch_of(n) for n in range(3)]
    plain, scaled = Run(), Run(loss_scale=scale, microbatches=2, mesh=make_mesh(MeshConfig(data=2)))
    for a, b in zip(plain(*batches), scaled(*batches), strict=True):
        for name in ("loss", "exit_losses", "grad_norm", "exit_grad_norms"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4)
    assert_near(scaled.state.params, plain.state.params, 1e-3)  # Adam near zero moments


def test_float16_recovers_from_overflows_and_follows_float32():
    config = CONFIG.replace(dtype="float16")
    run = Run(config, settings=GENTLE, loss_scale=2.0**14, loss_scale_interval=10)
    reference = Run(settings=GENTLE)
    losses, wanted, skipped = [], [], []
    for n in range(70):
        if n in (25, 45):  # as if the gradients had grown a lot
            forced = recipes.LossScale.initial(2.0**24)

            def place(a, b):
                return jax.device_put(a, b.sharding)

            forced = jax.tree.map(place, forced, run.state.loss_scale)
            run.state = run.state.replace(loss_scale=forced)
        before = jax.device_get((run.state.params, run.state.opt_state))
        batch = batch_of(n)
        [got] = run(batch)
        if not got["finite"]:
            skipped.append(n)
            assert_near((run.state.params, run.state.opt_state), before, 0)
            batch["labels"][:] = -1  # the reference skips this step, too
        [want] = reference(batch)
        if got["finite"]:
            losses.append(got["exit_losses"])
            wanted.append(want["exit_losses"])
    assert {25, 45} <= set(skipped) and 2 < len(skipped) < 25
    assert int(run.state.skipped) == len(skipped)
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(run.state.params))
    losses, wanted = np.array(losses), np.array(wanted)
    assert (wanted[-1] < 0.95 * wanted[0]).all(), "there is something to follow"
    # Rounding of 2^-11 in every operation, fed through 50 steps of Adam. In bf16, which has an
    # eighth of its precision, it is 4.7e-3; observed in float16: 2e-4, however XLA compiles it.
    assert np.sqrt(np.mean((losses / wanted - 1) ** 2)) < 4.7e-3 / 8


def test_small_updates_are_kept_by_float32_parameters():
    """A thousandth of a step of bf16 each: in bf16 parameters nothing would ever move."""
    settings = optimizer.OptimizerConfig(
        learning_rate=1e-5, warmup_steps=0, schedule="constant", weight_decay=0.0
    )
    config = CONFIG.replace(dtype="bfloat16")
    tx = optimizer.transformation(settings, params.decays(config))
    mesh = make_mesh(MeshConfig())
    train = step.make_train_step(
        config, tx, optimizer.learning_rate(settings, 10), schedules.constant((0.3, 0.5)), mesh
    )
    now = state.create(config, tx, 0, mesh)
    first = jax.device_get(now.params)["final"]["norm"]["scale"]
    for n in range(10):
        now, _ = train(now, step.put_batch(batch_of(n), mesh))
    moved = np.abs(np.asarray(now.params["final"]["norm"]["scale"]) - first)
    assert 1e-5 < moved.max() < 2e-4  # a scale of 1 in bf16 moves by 4e-3 or not at all


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(0, 300), st.integers(1, 12))
def test_curricula_by_their_rule(n, t, rotation):
    every = np.asarray(schedules.curriculum("none", n)(t))
    assert every.tolist() == [1] * n
    rotation = min(n, rotation)
    turns = schedules.curriculum("rotating", n, rotation=rotation)
    at = np.asarray(turns(t))
    assert at.tolist() == [float((e - t) % rotation == 0) for e in range(n)]
    total = sum(np.asarray(turns(t + i)) for i in range(rotation))
    assert total.tolist() == [1] * n, "each exit has its turn once in a rotation"
    gradual = np.asarray(schedules.curriculum("gradual", n, steps=300)(t))
    on = min(n, math.floor(t / (300 / (2 * (n + 1))) + 1e-4))
    assert gradual.tolist() == [0.0] * (n - on) + [1.0] * on
    if t >= 150:
        assert gradual.all()


def test_a_rotating_curriculum_in_the_step_needs_one_program():
    turns = schedules.curriculum("rotating", 2)

    def weights(t):
        return WEIGHTS(t) * turns(t)

    run = Run(weights=weights, sparse=True)
    first, second = run(batch_of(0), batch_of(1))
    assert run.train._cache_size() == 1
    assert (first["exit_weights"][1], second["exit_weights"][0]) == (0, 0)
    assert first["exit_losses"][1] == 0 and second["exit_losses"][0] == 0
    assert first["exit_grad_norms"][1] == 0 and first["exit_grad_norms"][0] > 0
    # What has no turn is not touched: the second exit's own head only decays.
    start = params.init(CONFIG, jax.random.key(0))["exits"]["exit_2"]["head"]
    alone = Run(weights=weights, sparse=True)
    alone(batch_of(0))
    decayed = start * (1 - CONSTANT.learning_rate * CONSTANT.weight_decay)
    np.testing.assert_allclose(
        alone.state.params["exits"]["exit_2"]["head"], decayed, rtol=1e-5, atol=1e-7
    )


def test_distillation_teaches_the_exits_and_not_the_final_one():
    objective = LossObjective(distillation=1.0, distillation_temperature=2.0)
    batches = [batch_of(n) for n in range(30)]
    plain, taught = Run(), Run(objective=objective)
    a, b = plain(*batches)[-1], taught(*batches)[-1]
    assert b["exit_losses"][0] < 0.8 * math.log(31), "an exit learns labels from its teacher alone"
    assert b["exit_losses"][-1] == pytest.approx(a["exit_losses"][-1], rel=0.1)


@pytest.mark.parametrize(
    "make, field",
    [
        (lambda: recipes.layer_dropout(1.0, 3), "layer_dropout"),
        (lambda: recipes.layer_dropout(0.1, 3, growth="linear"), "layer_dropout_growth"),
        (lambda: schedules.curriculum("random", 3), "curriculum"),
        (lambda: schedules.curriculum("rotating", 3, rotation=4), "rotation"),
    ],
)
def test_bad_settings_are_named(make, field):
    with pytest.raises(ConfigError, match=f"^{field} = "):
        make()
