"""Memory of a training step: the state against real arrays, the estimate against XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from eejax.common.errors import ConfigError
from eejax.losses import LossObjective, multi_exit_loss
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.pipeline.config import PipelineConfig
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train import memory, optimizer, state
from eejax.train.config import DataConfig, ExitWeights, Experiment, TrainConfig, TuneConfig


def experiment(
    remat="dots",
    layers=4,
    b=4,
    t=128,
    microbatches=1,
    data=1,
    distillation=0.0,
    exit_tokens=1.0,
    **model,
):
    config = dict(
        vocab_size=512,
        n_layers=layers,
        d_model=64,
        n_heads=4,
        context_length=2048,
        mlp_gated=False,
        activation="gelu_tanh",
        head="tied",
        exits=(ExitConfig(1),),
    )
    return Experiment(
        model=ModelConfig(**config | model),
        data=DataConfig(length=t),
        train=TrainConfig(batch_size=b, microbatches=microbatches, remat=remat),
        exit_weights=ExitWeights((0.5,) * len((config | model)["exits"])),
        loss=LossObjective(distillation=distillation, exit_tokens=exit_tokens),
        mesh=MeshConfig(data=data),
    )


def on_first_device(tree):
    """Bytes of the shards that lie on the first device."""
    first = jax.devices()[0]
    shards = [s for a in jax.tree.leaves(tree) for s in a.addressable_shards if s.device == first]
    return sum(s.data.nbytes for s in shards)


@pytest.mark.parametrize(
    "norm, data",
    [
        ("layernorm", 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("rmsnorm", 1), ("rmsnorm", 4), ("layernorm", 1))
        ),
    ],
)
def test_the_state_is_counted_to_the_byte(norm, data):
    e = experiment(data=data, norm=norm, exits=(ExitConfig(1, mlp=True), ExitConfig(2, head="own")))
    tx = optimizer.transformation(e.optimizer, params.decays(e.model))
    real = state.create(e.model, tx, 0, make_mesh(e.mesh))
    got = memory.training_memory(e)
    assert got.params == on_first_device(real.params)
    assert got.optimizer == on_first_device(real.opt_state)
    assert got.state == on_first_device(real)


def test_what_is_frozen_is_held_and_has_no_gradient_and_no_moments():
    full = experiment(exits=(ExitConfig(1), ExitConfig(2)))
    tuned = Experiment(
        model=full.model,
        data=full.data,
        train=dataclasses.replace(full.train, base="elsewhere"),
        exit_weights=ExitWeights((1.0,)),
        tune=TuneConfig("exits", (2,)),
    )
    got, whole = memory.training_memory(tuned), memory.training_memory(full)
    d, f = 64, 256
    assert got.params == got.gradients == 4 * d  # the exit's norm
    layer = 4 * d * d + 2 * d * f + 2 * d
    assert got.other == pytest.approx(4 * (512 * d + 2 * layer), abs=16)  # two layers of four
    assert got.activations < whole.activations / 2  # no backward pass through the trunk


@functools.cache
def compared(remat, **case):
    """(experiment, our estimate, XLA's figures)."""
    e = experiment(remat, **case)
    return e, memory.training_memory(e), memory.compiled_memory(memory.compile_step(e))


# Depth, batch, microbatches, width, vocabulary, length and devices each move the figure by a
# multiple of what is allowed.
CASES = [
    ("dots", dict(layers=8)),
    *[
        pytest.param(remat, dict(layers=n), marks=pytest.mark.slow)
        for remat, n in (("none", 8), ("full", 8), ("none", 2), ("dots", 2), ("full", 2))
    ],
    ("full", dict(layers=8, b=16, microbatches=2)),
    pytest.param("dots", dict(d_model=256, microbatches=4), marks=pytest.mark.slow),
    ("dots", dict(vocab_size=8192, t=64, b=16, data=2)),
    pytest.param("dots", dict(t=512), marks=pytest.mark.slow),
    ("dots", dict(vocab_size=8192, t=64, b=16, distillation=0.5)),
    ("dots", dict(vocab_size=8192, t=64, b=16, exit_tokens=0.25)),
    pytest.param(
        "dots", dict(vocab_size=8192, t=256, b=8, distillation=0.5), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("remat, case", CASES, ids=str)
def test_the_estimate_is_near_what_xla_says(remat, case):
    e, got, xla = compared(remat, **case)
    # More rather than less: XLA makes cheap elementwise values of a layer anew, which are counted.
    assert xla.temporary / 1.4 < got.temporary < 1.5 * xla.temporary
    assert xla.arguments - got.state == 2 * 4 * (e.train.batch_size // e.mesh.data) * e.data.length
    assert xla.aliased == got.state  # the new state is written over the old one
    assert xla.outputs == pytest.approx(got.state, abs=1024)  # and there are some metrics
    assert xla.total == pytest.approx(got.state + xla.temporary, rel=0.05)


@pytest.mark.parametrize(
    "remat", ["dots", *(pytest.param(r, marks=pytest.mark.slow) for r in ("none", "full"))]
)
def test_another_layer_costs_what_xla_says_it_costs(remat):
    """Alone: a slope that is wrong by a layer's worth would hide in a whole."""
    (_, few, xla_few), (_, many, xla_many) = compared(remat, layers=2), compared(remat, layers=8)
    ratio = (many.temporary - few.temporary) / (xla_many.temporary - xla_few.temporary)
    assert ratio == pytest.approx(1, abs=0.1)


def test_activations_of_full_rematerialisation_are_the_inputs_of_layers():
    def grow(**k):
        return memory.training_memory(experiment("full", **k)).activations

    state_bytes = 4 * 128 * 64 * 4  # [b, t, d] in float32
    assert grow(layers=9) - grow(layers=8) == pytest.approx(state_bytes, abs=8)  # and its index
    assert grow(layers=8, b=8) - grow(layers=8) > 8 * state_bytes


def test_bfloat16_keeps_copies_of_matrices_and_half_the_activations():
    single = memory.training_memory(experiment("full"))
    half = memory.training_memory(experiment("full", dtype="bfloat16", microbatches=2))
    assert single.weights == 0 and single.gradients == single.params
    d, f, layers = 64, 256, 4
    matrices = layers * (4 * d * d + 2 * d * f)
    assert half.weights == 2 * matrices
    # The float32 sum, and those under way: matrices in bfloat16, the embedding as well, norms not.
    norms = (2 * layers + 2) * d
    assert half.gradients == single.params + 2 * matrices + 2 * 512 * d + 4 * norms
    assert single.params == 4 * (matrices + 512 * d + norms)


def test_the_chunk_of_logits_is_the_one_the_loss_takes():
    """Found in the program of the loss itself: its largest array with the vocabulary's size."""
    v, b, t = 8192, 4, 512
    e = experiment(b=b, t=t, vocab_size=v)
    tokens, w = jax.ShapeDtypeStruct((b, t), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.float32)

    def loss(p, x, w):
        return multi_exit_loss(p, e.model, x, x, w)[0]

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params.shapes(e.model), tokens, w)
    sizes, todo = [], [jaxpr.jaxpr]
    while todo:
        for eqn in todo.pop().eqns:
            inner = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
            todo += [getattr(x, "jaxpr", x) for x in inner if hasattr(x, "eqns")]
            shapes = [a.aval.shape for a in eqn.outvars]
            sizes += [s[0] for s in shapes if len(s) == 2 and s[1] == v and s[0] != 64]
    assert memory.training_memory(e).logits == 2 * 4 * max(sizes) * v


def test_nothing_is_allocated_and_no_device_is_needed():
    before = sum(a.nbytes for a in jax.live_arrays())
    e = experiment(layers=48, d_model=4096, n_heads=32, data=64, b=64, dtype="bfloat16")
    assert memory.training_memory(e).total > 9e10
    assert sum(a.nbytes for a in jax.live_arrays()) - before < 1e6


def test_what_training_would_refuse_is_refused():
    with pytest.raises(ConfigError, match=r"train.batch_size = 4: must be a multiple"):
        memory.training_memory(experiment(data=3))

    def on(pipe, e):
        return dataclasses.replace(e, mesh=MeshConfig(pipe=pipe))

    with pytest.raises(ConfigError, match="mesh.pipe = 5: must be at most the 4 layers"):
        memory.training_memory(on(5, experiment()))
    with pytest.raises(ConfigError, match="needs 64 devices"):
        memory.compile_step(experiment(data=64, b=64))


def test_exits_tuned_on_stages_keep_nothing_of_a_microbatch():
    """Whatever is set for schedules, there is none: nothing goes backward."""
    full = experiment(microbatches=2)
    tuned = dataclasses.replace(
        full,
        mesh=MeshConfig(pipe=2),
        pipeline=PipelineConfig(schedule="gpipe"),
        model=full.model.replace(exits=(ExitConfig(2),)),
        exit_weights=ExitWeights((1.0,)),
        train=dataclasses.replace(full.train, base="elsewhere"),
        tune=TuneConfig("exits"),
    )
    got = memory.training_memory(tuned)
    assert got.activations == 0 and got.params == 4 * 64  # a norm's scale
