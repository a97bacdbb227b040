"""Costs beside cross entropy, against plain autodiff through whole logits."""

from __future__ import annotations

import functools
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from eejax.common.errors import ConfigError
from eejax.losses import cross_entropy
from eejax.losses.cross_entropy import IGNORE, Teacher, exits_cross_entropy
from eejax.losses.multi_exit import multi_exit_loss
from eejax.losses.objective import LossObjective
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.models.exits import Head, HeadOptions
from eejax.sharding.mesh import MeshConfig, make_mesh

EVERYTHING = LossObjective(
    z_loss=0.01, confidence_weighted=True, distillation=0.6, distillation_temperature=2.0
)
OBJECTIVES = {
    "z": LossObjective(z_loss=0.01),
    "confidence": LossObjective(confidence_weighted=True),
    "distillation": LossObjective(distillation=1.0),
    "tempered": LossObjective(distillation=0.4, distillation_temperature=3.0),
    "everything": EVERYTHING,
}


def logits_of(h, table, bias, o: HeadOptions):
    y = h @ table.T + bias[None]
    if o.softcap is not None:
        y = o.softcap * jnp.tanh(y / o.softcap)
    return y[:, : o.vocab_size] / o.temperature


class Costs(NamedTuple):
    """The fields of a `LossObjective`, which may be traced: one program serves all objectives."""

    z_loss: jax.Array
    confidence_weighted: jax.Array
    distillation: jax.Array
    distillation_temperature: jax.Array


def whole(h, table, bias, o, labels, taught, objective):
    """The docstring's formula with all logits at once."""
    y = logits_of(h, table, bias, o)
    t = objective.distillation_temperature
    log_p, counted = jax.nn.log_softmax(y), labels != IGNORE
    nll = -jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
    q, log_p_t = jax.nn.softmax(taught / t), jax.nn.log_softmax(y / t)
    kl = jnp.sum(q * (jax.nn.log_softmax(taught / t) - log_p_t), -1)
    cost = (1 - objective.distillation) * nll + objective.distillation * t**2 * kl
    confidence = jax.lax.stop_gradient(jnp.exp(log_p).max(-1))
    cost = jnp.where(objective.confidence_weighted, cost * confidence, cost)
    cost = cost + objective.z_loss * jnp.square(jax.nn.logsumexp(y, -1))
    return jnp.sum(jnp.where(counted, cost, 0.0))


@functools.partial(jax.jit, static_argnums=3)
def whole_gradients(h, table, bias, o, labels, taught, costs: Costs):
    """`whole` and its gradients for `h`, `table` and `bias`."""
    return jax.value_and_grad(whole, (0, 1, 2))(h, table, bias, o, labels, taught, costs)


def case(seed, n=23, d=6, vocab=11, padding=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    labels = rng.integers(0, vocab, n).astype(np.int32)
    labels[rng.random(n) < 0.2] = IGNORE
    v = vocab + padding
    return draw(n, d), draw(v, d), draw(v), jnp.asarray(labels), draw(n, d), draw(v, d), draw(v)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("softcap, temperature, padding", [(None, 1.0, 0), (3.0, 1.7, 5)])
def test_cost_and_gradients_are_the_formulas(name, softcap, temperature, padding):
    objective, options = OBJECTIVES[name], HeadOptions(11, softcap, temperature)
    check_case(case(3, padding=padding), options, objective)


@settings(max_examples=3)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 23, 40]),
    st.floats(0, 1),
    st.floats(0.3, 5),
    st.booleans(),
    st.floats(0, 0.1),
)
def test_any_objective(seed, n, share, t, confident, z):
    objective = LossObjective(z, confident, share, t)
    check_case(case(seed, n=n), HeadOptions(11, None, 1.3), objective)


def check_case(inputs, options, objective):
    h, table, bias, labels, h_final, table_final, bias_final = inputs
    taught = logits_of(h_final, table_final, bias_final, HeadOptions(11, None, 0.8))

    def ours(h, table, bias, h_final, table_final):
        teacher = Teacher(h_final, Head(table_final, bias_final, HeadOptions(11, None, 0.8)))
        return exits_cross_entropy(
            [h],
            [Head(table, bias, options)],
            labels,
            jnp.full((1,), 0.7),
            objectives=[objective],
            teacher=teacher,
        )[0]

    with mock.patch.multiple(cross_entropy, MIN_CHUNK=4, CHUNK_LOGITS=4):  # several chunks
        given = (h, table, bias, h_final, table_final)
        got, grads = jax.jit(jax.value_and_grad(ours, (0, 1, 2, 3, 4)))(*given)
        plain = jax.jit(ours)(*given)  # the path without a gradient
    costs = Costs(*(jnp.asarray(getattr(objective, name)) for name in Costs._fields))
    results = whole_gradients(h, table, bias, options, labels, taught, costs)
    want, wanted = jax.tree.map(lambda a: 0.7 * a, results)
    # Sums of a few hundred float32 terms, relative to the largest; observed 2e-6.
    scale = 1e-5 * max(1.0, abs(float(want)))
    assert abs(got - want) < scale and abs(plain - want) < scale
    for a, b in zip(grads[:3], wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1.0, np.abs(b).max()))
    assert not np.any(grads[3]) and not np.any(grads[4]), "the teacher is held constant"


def test_a_vocabulary_split_over_devices_gives_the_same():
    h, table, bias, labels, h_final, table_final, bias_final = case(5, vocab=11, padding=5)
    options, taught = HeadOptions(11, 4.0, 1.2), HeadOptions(11)
    mesh = make_mesh(MeshConfig(model=4))

    def loss(h, table, bias, h_final, table_final, bias_final, axis=None):
        teacher = Teacher(h_final, Head(table_final, bias_final, taught))
        return exits_cross_entropy(
            [h],
            [Head(table, bias, options)],
            labels,
            jnp.ones(1),
            objectives=[EVERYTHING],
            teacher=teacher,
            axis=axis,
        )[0]

    inputs = (h, table, bias, h_final, table_final, bias_final)
    want = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*inputs)
    rows = P("model")
    sharded = jax.shard_map(
        lambda *a: loss(*a, axis="model"),
        mesh=mesh,
        in_specs=(P(), rows, rows, P(), rows, rows),
        out_specs=P(),
    )
    got = jax.jit(jax.value_and_grad(sharded, (0, 1, 2)))(*inputs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, np.abs(b).max()))


CONFIG = ModelConfig(
    vocab_size=29,
    n_layers=3,
    d_model=12,
    n_heads=2,
    context_length=10,
    d_ff=16,
    head="tied",
    exits=(ExitConfig(1), ExitConfig(2, mlp=True, head="own")),
)
WEIGHTS = jnp.asarray([0.3, 0.5, 1.0])


def model_case():
    tokens = jax.random.randint(jax.random.key(0), (3, 8), 0, 29)
    return params.init(CONFIG, jax.random.key(1)), tokens, jnp.roll(tokens, -1, 1)


def test_the_multi_exit_loss_distils_from_its_final_exit_and_leaves_that_alone():
    p, tokens, labels = model_case()

    def ours(p):
        return multi_exit_loss(p, CONFIG, tokens, labels, WEIGHTS, objective=EVERYTHING)[0]

    def theirs(p):
        hs = transformer.exit_states(p, CONFIG, tokens)
        heads = [exits.head(p, CONFIG, e) for e in range(3)]
        flat = [h.reshape(-1, 12) for h in hs]
        zero = jnp.zeros(29)
        taught = jax.lax.stop_gradient(logits_of(flat[2], heads[2].table, zero, heads[2].options))
        total = 0.0
        for e in range(3):
            objective = EVERYTHING if e < 2 else LossObjective(z_loss=EVERYTHING.z_loss)
            total += WEIGHTS[e] * whole(
                flat[e],
                heads[e].table,
                zero,
                heads[e].options,
                labels.reshape(-1),
                taught,
                objective,
            )
        return total

    got, want = jax.jit(jax.value_and_grad(ours))(p), jax.jit(jax.value_and_grad(theirs))(p)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())

    @jax.jit
    def reported(p):
        batch = (p, CONFIG, tokens, labels, WEIGHTS)
        return multi_exit_loss(*batch, objective=EVERYTHING)[1], multi_exit_loss(*batch)[1]

    sums, plain = reported(p)
    np.testing.assert_allclose(sums.sums, plain.sums, rtol=1e-6)  # cross entropy is reported


@pytest.mark.parametrize("which", [pytest.param((0,), marks=pytest.mark.slow), (0, 1)])
def test_a_final_exit_that_has_no_loss_teaches_all_the_same(which):
    """As if it had the weight 0."""
    p, tokens, labels = model_case()
    n = len(which)

    def alone(p):
        return multi_exit_loss(
            p, CONFIG, tokens, labels, WEIGHTS[:n], objective=EVERYTHING, which=which
        )

    def among(p):
        weights = jnp.append(WEIGHTS[:n], jnp.zeros(3 - n))
        return multi_exit_loss(p, CONFIG, tokens, labels, weights, objective=EVERYTHING)

    (got, sums), grads = jax.jit(jax.value_and_grad(alone, has_aux=True))(p)
    (want, all_sums), wanted = jax.jit(jax.value_and_grad(among, has_aux=True))(p)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(sums.sums, all_sums.sums[:n], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-3))


@pytest.mark.parametrize(
    "objective", [pytest.param(LossObjective(), marks=pytest.mark.slow), EVERYTHING]
)
def test_an_exit_with_no_weight_is_left_out(objective):
    p, tokens, labels = model_case()
    weights = jnp.asarray([0.0, 0.5, 1.0])

    def run(sparse):
        def loss(p, w):
            return multi_exit_loss(p, CONFIG, tokens, labels, w, sparse=sparse, objective=objective)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(p, weights)

    ((a, sums), got), ((b, full), want) = run(True), run(False)
    np.testing.assert_allclose(a, b, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6 * max(1e-3, np.abs(y).max()))
    assert sums.sums[0] == 0 and full.sums[0] > 0
    np.testing.assert_allclose(sums.sums[1:], full.sums[1:], rtol=1e-6)


def test_probes_measure_what_each_exit_sends_into_the_trunk():
    p, tokens, labels = model_case()

    def loss(probes, shift=None):
        return multi_exit_loss(p, CONFIG, tokens, labels, WEIGHTS, probes=probes)[0]

    got = jax.jit(jax.grad(loss))(jnp.zeros(3))

    def shifted(shifts):
        """The same loss with something added to the state that each exit alone reads."""
        context = transformer.layers.make_context(CONFIG, jnp.arange(8)[None])
        x = transformer.embed(p, CONFIG, tokens, jnp.arange(8)[None])
        at = transformer.run_to_boundaries(p["layers"], x, CONFIG, context, CONFIG.exit_boundaries)
        total = 0.0
        for e, x in enumerate(at):
            h = exits.state(p, CONFIG, e, x + shifts[e], context)
            head = exits.head(p, CONFIG, e)
            total += WEIGHTS[e] * cross_entropy.linear_cross_entropy(h, head, labels)
        return total

    wanted = jax.jit(jax.grad(shifted))([jnp.zeros((3, 8, 12))] * 3)
    np.testing.assert_allclose(got, [jnp.sum(jnp.square(g)) for g in wanted], rtol=1e-4)


@pytest.mark.parametrize(
    "field, value",
    [
        ("z_loss", -1.0),
        ("distillation", 1.5),
        ("distillation_temperature", 0.0),
        ("confidence_weighted", 1),
        ("z_loss", True),
    ],
)
def test_settings_out_of_range(field, value):
    with pytest.raises(ConfigError, match=f"LossObjective.{field} = {value}"):
        LossObjective(**{field: value})


def test_distilling_needs_a_teacher():
    h, table, bias, labels, *_ = case(0)
    with pytest.raises(ConfigError, match="teacher"):
        exits_cross_entropy(
            [h],
            [Head(table, bias, HeadOptions(11))],
            labels,
            jnp.ones(1),
            objectives=[EVERYTHING],
        )
