"""The executor beside autodiff of the whole loss on one device: losses and every gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from pipelines import T, batch_of, compare, placed

from eejax.common.errors import ConfigError
from eejax.experiments.reproduce import pipeline_oracle as oracle
from eejax.losses import LossObjective
from eejax.losses.multi_exit import multi_exit_loss
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.pipeline import forward, runner, schedule
from eejax.pipeline.layout import StageLayout
from eejax.pipeline.partition import BALANCED, EVEN, partition
from eejax.pipeline.stage import Pipeline
from eejax.sharding.mesh import MeshConfig, make_mesh

X = ExitConfig
CONFIG = ModelConfig(
    vocab_size=24,
    n_layers=4,
    d_model=16,
    n_heads=4,
    n_kv_heads=2,
    d_ff=24,
    context_length=T,
    head="tied",
    exits=(X(1), X(2)),
)


def built(config, mesh_config, *, layers=EVEN, placement="later", **options):
    mesh = make_mesh(mesh_config)
    layout = StageLayout(partition(config, mesh_config.pipe, layers, placement))
    return Pipeline(layout, mesh, mesh_config, **options)


def tabled(pipeline: Pipeline, microbatches: int, name: str = "1f1b", exits: str = "mixed"):
    p = pipeline.stage_layout.partition
    table = schedule.GENERATORS[name](
        p.stages,
        microbatches,
        exit_stages=p.input_exit_stages,
        exits=exits,
        recompute=pipeline.remat == "full",
    )
    table.check()
    return table


def check(config, mesh_config, microbatches, *, name="1f1b", exits="mixed", **options):
    pipeline = built(config, mesh_config, **options)
    layout, mesh = pipeline.stage_layout, pipeline.mesh
    value = params.init(config, jax.random.key(1))
    batch = batch_of(config, 2 * mesh_config.data * microbatches)
    weights = jnp.linspace(0.3, 1.0, config.n_exits + 1)
    run = jax.jit(runner.gradients(pipeline, tabled(pipeline, microbatches, name, exits)))
    got = run(placed(layout, value, mesh), {}, weights, None, batch, jnp.zeros((), jnp.int32))

    def loss(value, probes):
        return multi_exit_loss(
            value,
            config,
            batch["tokens"],
            batch["labels"],
            weights,
            probes=probes,
            objective=pipeline.objective,
        )

    probes = jnp.zeros_like(weights)
    want = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(value, probes)
    (total, sums), (grads, squares) = want
    np.testing.assert_allclose(got.total, total, rtol=1e-5)
    np.testing.assert_allclose(got.exits.sums, sums.sums, rtol=1e-5)
    np.testing.assert_allclose(got.squares, squares, rtol=1e-4)
    assert int(got.exits.num_tokens) == int(sums.num_tokens)
    compare(layout.from_stages(jax.device_get(got.grads)), grads)


EXITS = {
    "none": (),
    "boundary 0": (X(0),),
    "middle": (X(2, head="own"),),
    "several": (
        X(1, head_rank=3),
        X(2, head="own", norm=False, head_rank=3),
        X(3, mlp=True, temperature=2.0, mlp_width=8),
    ),
    "last stage": (X(3, head="shared"), X(4, head="own")),
    "blocks": (X(0, head="shared"), X(1, block=True), X(3, mlp=True, block=True, head="own")),
}
MESHES = [
    MeshConfig(data=d, pipe=p, model=m, sequence=s)
    for d, p, m, s in (
        (1, 1, 1, False),
        (1, 2, 1, False),
        (2, 2, 2, False),
        (1, 4, 2, True),
        (2, 4, 2, False),
        (4, 2, 1, False),
        (1, 2, 4, True),
        (1, 4, 1, False),
        (2, 4, 1, False),
        (1, 3, 1, False),
        (2, 2, 4, True),
    )
]
MODELS = {
    "llama": CONFIG,
    "gpt": CONFIG.replace(
        n_kv_heads=4,
        norm="layernorm",
        position="learned",
        mlp_gated=False,
        activation="gelu",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        embedding_norm=True,
    ),
    "multi-query": CONFIG.replace(n_kv_heads=1, qk_norm="full", norm_placement="pre_post"),
    "windows": CONFIG.replace(sliding_window=(None, 3, None, 2), residual="parallel"),
}
cases = dict(
    model=st.sampled_from(sorted(MODELS)),
    head=st.sampled_from(("tied", "shared", "own")),
    layout=st.sampled_from(sorted(EXITS)),
    mesh=st.sampled_from(MESHES),
    microbatches=st.integers(1, 12),
    name=st.sampled_from(("1f1b", "gpipe")),
    exits=st.sampled_from(schedule.EXIT_POLICIES),
    remat=st.sampled_from(("none", "dots", "full")),
    layers=st.sampled_from((EVEN, BALANCED, "first")),
    placement=st.sampled_from(("later", "earlier")),
    objective=st.sampled_from(
        (
            LossObjective(),
            LossObjective(z_loss=1e-2, confidence_weighted=True),
            LossObjective(distillation=0.6, distillation_temperature=2.0),
        )
    ),
)


def run_case(model, head, layout, mesh, microbatches, layers, **rest):
    assume(microbatches <= 3 * mesh.pipe)
    assume(not (rest["objective"].distillation and rest["exits"] != "deferred"))
    config = MODELS[model].replace(head=head, exits=EXITS[layout])
    if layers == "first":  # as uneven as it can be
        layers = (config.n_layers - mesh.pipe + 1,) + (1,) * (mesh.pipe - 1)
    check(config, mesh, microbatches, layers=layers, **rest)


PLAIN = dict(
    name="1f1b",
    exits="mixed",
    remat="none",
    layers=EVEN,
    placement="later",
    objective=LossObjective(),
)

DISTILLED = {"exits": "deferred", "objective": LossObjective(distillation=0.6)}


@settings(phases=[Phase.explicit])  # what is drawn takes a program each: a slow test
@given(**cases)
@example(
    model="gpt",
    head="own",
    layout="several",
    mesh=MeshConfig(data=2, pipe=2, model=2),
    microbatches=5,
    **PLAIN,
)
@example(
    model="windows",
    head="tied",
    layout="last stage",
    mesh=MeshConfig(pipe=3),
    microbatches=7,
    **PLAIN | {"remat": "dots", "exits": "aligned"},
)
def test_gradients_equal_autodiff_of_the_whole_loss(**case):
    run_case(**case)


@pytest.mark.slow
@settings(max_examples=80)
@given(**cases)
@example(
    model="llama",
    head="shared",
    layout="blocks",
    mesh=MeshConfig(pipe=4, model=2),
    microbatches=3,
    **PLAIN | {"remat": "full", "placement": "earlier"},
)
@example(
    model="gpt",
    head="own",
    layout="blocks",
    mesh=MeshConfig(pipe=2, model=2, sequence=True),
    microbatches=3,
    **PLAIN | DISTILLED | {"name": "gpipe"},
)
@example(
    model="llama",
    head="tied",
    layout="last stage",
    mesh=MeshConfig(data=2, pipe=3),
    microbatches=4,
    **PLAIN | DISTILLED | {"remat": "full"},
)
def test_many_gradients_equal_autodiff_of_the_whole_loss(**case):
    run_case(**case)
    jax.clear_caches()


@pytest.mark.parametrize(
    "cut", [(1, 2, 1), *(pytest.param(c, marks=pytest.mark.slow) for c in ((4,), (2, 2)))]
)
def test_the_auxiliary_losses_of_stages_are_the_gradient_of_the_whole_loss(cut):
    config = CONFIG.replace(exits=EXITS["blocks"], head="shared")
    batch = batch_of(config, 3)
    value, weights = params.init(config, jax.random.key(1)), jnp.array([0.5, 0.3, 0.8, 1.0])

    def loss(v):
        return multi_exit_loss(v, config, batch["tokens"], batch["labels"], weights)[0]

    want, want_grads = jax.jit(jax.value_and_grad(loss))(value)
    total, grads = jax.jit(oracle.gradients, static_argnums=0)(
        partition(config, len(cut), cut), value, batch["tokens"], batch["labels"], weights
    )
    np.testing.assert_allclose(total, want, rtol=1e-6)
    compare(grads, want_grads)


@pytest.mark.parametrize("remat", ["dots", pytest.param("none", marks=pytest.mark.slow)])
def test_a_bfloat16_model_adds_up_its_gradients_in_float32(remat):
    """Over many microbatches a sum in bfloat16 stops growing: each addend would be rounded off."""
    config = CONFIG.replace(dtype="bfloat16")
    value = params.init(config, jax.random.key(1))
    pipeline = built(config, MeshConfig(pipe=2), remat=remat)
    one = batch_of(config, 2)
    many = {k: np.tile(v, (48, 1)) for k, v in one.items()}

    def run(batch, n):
        return jax.jit(runner.gradients(pipeline, tabled(pipeline, n)))(
            placed(pipeline.stage_layout, value, pipeline.mesh),
            {},
            jnp.ones(3),
            None,
            batch,
            jnp.zeros((), jnp.int32),
        )

    small, large = run(one, 1).grads, run(many, 48).grads
    compare(large, jax.tree.map(lambda g: 48 * g, small), 1e-4)


@pytest.mark.parametrize("layers", [(1, 3), pytest.param(EVEN, marks=pytest.mark.slow)])
def test_evaluation_of_every_exit(layers):
    config = CONFIG.replace(exits=EXITS["blocks"], head="shared", dropout=0.5)
    mesh = MeshConfig(data=2, pipe=2, model=2)
    pipeline = built(config, mesh, layers=layers, objective=LossObjective(z_loss=1.0))
    value = params.init(config, jax.random.key(1))
    batch = batch_of(config, 12)
    got = jax.jit(forward.evaluation(pipeline, 3))(
        placed(pipeline.stage_layout, value, pipeline.mesh), batch
    )

    @jax.jit
    def whole(value):
        return multi_exit_loss(value, config, batch["tokens"], batch["labels"], jnp.ones(4))[1]

    want = whole(value)
    np.testing.assert_allclose(got.sums, want.sums, rtol=1e-5)
    assert int(got.num_tokens) == int(want.num_tokens)


def test_what_cannot_be_pipelined_is_refused():
    with pytest.raises(ConfigError, match="mesh.pipe = 5.*at most the 4 layers"):
        built(CONFIG, MeshConfig(pipe=5))
    with pytest.raises(ConfigError, match="must add up to the 4 layers"):
        built(CONFIG, MeshConfig(pipe=2), layers=(2, 3))
