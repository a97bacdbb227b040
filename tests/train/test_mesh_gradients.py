"""Every mesh gives the losses and gradients of one device, whatever the model and the recipe."""

import dataclasses
import functools

import drawn_configs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.trees import split
from eejax.losses.objective import CROSS_ENTROPY, LossObjective
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train.scope import Scope
from eejax.train.state import TrainState
from eejax.train.step import gradient_sums

MESHES = [
    MeshConfig(1, 1, 2),
    MeshConfig(2, 1, 2),
    MeshConfig(1, 1, 4),
    MeshConfig(2, 1, 4),
    MeshConfig(1, 1, 2, sequence=True),
    MeshConfig(2, 1, 4, sequence=True),
    MeshConfig(4, shard_params=True),
    MeshConfig(2, 1, 2, sequence=True, shard_params=True),
]
# Query heads, KV heads: as many of both, groups, fewer KV heads than shards, a single one.
HEADS = {
    1: drawn_configs.HEADS,
    2: ((2, 1), (4, 2), (2, 2), (6, 2)),
    4: ((4, 4), (8, 4), (8, 2), (4, 1)),
}
DISTILLED = LossObjective(
    z_loss=0.01, confidence_weighted=True, distillation=0.6, distillation_temperature=2.0
)


def show(mesh):
    """'2x1x4 sequence': a mesh's sizes and what is on that is off by default."""
    off = dataclasses.asdict(MeshConfig(*mesh.shape))
    changed = [k for k, v in dataclasses.asdict(mesh).items() if v != off[k]]
    return " ".join(["x".join(map(str, mesh.shape)), *changed])


ROWS = 4


def batch_of(config, b=ROWS, t=12, documents=False):
    """Tokens with labels ignored unevenly over the samples, and documents that end in a row."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, config.vocab_size, (b, t + 1)).astype(np.int32)
    labels = tokens[:, 1:].copy()
    labels[rng.random((b, t)) < np.linspace(0, 0.6, b)[:, None]] = -1
    batch = {"tokens": tokens[:, :-1], "labels": labels}
    if documents:
        ids = np.cumsum(rng.random((b, t)) < 0.3, 1).astype(np.int32)
        first = np.concatenate([np.ones((b, 1), bool), ids[:, 1:] != ids[:, :-1]], 1)
        begin = np.maximum.accumulate(np.where(first, np.arange(t), 0), 1)
        batch |= {"segment_ids": ids, "positions": (np.arange(t) - begin).astype(np.int32)}
    return batch


@functools.lru_cache(maxsize=2)
def values(config):
    """Parameters away from where they start: biases are not 0, norm scales not 1."""
    rng = np.random.default_rng(3)

    def noisy(a):
        return a + 0.05 * rng.standard_normal(a.shape, np.float32)

    return jax.tree.map(noisy, jax.device_get(params.init(config, jax.random.key(0))))


def sums_of(mesh, config, *, tuned=None, documents=False, rates=None, scale=1.0, **options):
    """`BatchSums` on the host, of one batch on `mesh`, in step number 5."""
    taught = tuned is not None and bool(options.get("objective", CROSS_ENTROPY).distillation)
    scope = Scope(config, tuned, taught)
    trained, frozen = values(config), {}
    if tuned:
        reads, _ = split(trained, scope.reads)
        trained, frozen = split(reads, scope.trains)
    state = TrainState(jnp.int32(5), trained, (), jnp.int32(0), scope.cut(frozen))
    weights = scale * jnp.linspace(0.4, 1.0, len(scope.which))
    if rates is not None:
        rates = jnp.linspace(0.1, rates, config.n_layers)
    options = {"microbatches": 1, "remat": "none", "objective": CROSS_ENTROPY} | options
    gradients = gradient_sums(scope, make_mesh(mesh), mesh, seed=0, sparse=False, **options)
    batch = batch_of(config, documents=documents)
    return jax.device_get(jax.jit(gradients)(state, weights, rates, batch))


def compare(got, want):
    """Sums of float32 terms in another order; observed 3e-6 of a leaf's largest entry."""
    np.testing.assert_allclose(got.total, want.total, rtol=1e-5)
    np.testing.assert_allclose(got.exits.sums, want.exits.sums, rtol=1e-5)
    np.testing.assert_allclose(got.squares, want.squares, rtol=2e-5)
    assert got.exits.num_tokens == want.exits.num_tokens > 0
    wanted = jax.tree_util.tree_leaves_with_path(want.grads)
    largest = max(np.abs(w).max() for _, w in wanted)
    for (path, w), g in zip(wanted, jax.tree.leaves(got.grads), strict=True):
        # A key bias without rotary positions shifts all scores alike: its gradient is the rounding
        # of a sum that is 0, and has no scale of its own.
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        scale = largest if name.endswith("k_bias") else np.abs(w).max()
        assert np.abs(g - w).max() <= 1e-5 * scale, (name, np.abs(g - w).max() / scale)


FIXED = {
    "llama": dict(
        qk_norm="full",
        head="own",
        exits=(ExitConfig(0, norm=False), ExitConfig(2, mlp=True, head="own")),
    ),
    "alibi": dict(
        position="alibi",
        norm="layernorm",
        mlp_gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head="tied",
        head_bias=True,
        n_kv_heads=2,
        qk_norm="full",
        exits=(ExitConfig(1, block=True, head_rank=5),),
    ),
    "shared": dict(
        residual="parallel",
        head="shared",
        logit_softcap=5.0,
        position="learned",
        n_kv_heads=1,
        qkv_bias=True,
        qk_norm="head",
        norm_placement="pre",
        exits=(ExitConfig(1, head="shared", mlp=True, temperature=1.7, mlp_width=8, head_rank=5),),
    ),
}


def fixed(name, **changes):
    base = dict(
        vocab_size=37,
        vocab_multiple=8,
        n_layers=3,
        d_model=32,
        n_heads=8,
        n_kv_heads=4,
        d_ff=48,
        context_length=16,
    )
    return ModelConfig(**base | FIXED[name] | changes)


@functools.cache
def one_device(name):
    return sums_of(MeshConfig(), fixed(name))


# These meshes cut all that the others cut, and more.
WIDEST = (MeshConfig(2, 1, 4), *MESHES[5:])


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(m, marks=() if m in WIDEST else pytest.mark.slow) for m in MESHES],
    ids=show,
)
def test_every_gradient_is_that_of_one_device(mesh):
    compare(sums_of(mesh, fixed("llama")), one_device("llama"))


# Whatever else a model has, where all ways of cutting it meet; drawn cases go through the others.
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MESHES[5], MESHES[7]], ids=show)
@pytest.mark.parametrize("name", ["alibi", "shared"])
def test_every_gradient_of_other_models(name, mesh):
    compare(sums_of(mesh, fixed(name)), one_device(name))


@st.composite
def cases(draw):
    """(mesh, config, how the batch is taken)."""
    mesh = draw(st.sampled_from(MESHES))
    config = draw(drawn_configs.configs(HEADS[mesh.model], vocab_multiples=(8,)))

    def maybe(*values):
        return draw(st.sampled_from(values))

    objectives = (CROSS_ENTROPY, LossObjective(z_loss=0.02), DISTILLED)
    return (
        mesh,
        config.replace(dropout=maybe(0.0, 0.2)),
        {
            "documents": maybe(False, True),
            "rates": maybe(None, 0.5),
            "microbatches": maybe(*(n for n in (1, 2) if ROWS % (n * mesh.data) == 0)),
            "remat": maybe("none", "dots", "full"),
            "objective": maybe(*objectives),
        },
    )


def check(case):
    mesh, config, how = case
    compare(sums_of(mesh, config, **how), sums_of(MeshConfig(), config, **how))


@settings(max_examples=1)
@given(cases())
def test_any_model_and_recipe(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=30)
@given(cases())
def test_any_model_and_recipe_widely(case):
    check(case)


TUNED = (ExitConfig(1, mlp=True, head="own"), ExitConfig(2, block=True))


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(CROSS_ENTROPY, id="plain", marks=pytest.mark.slow),
        pytest.param(DISTILLED, id="distilled"),
    ],
)
@pytest.mark.parametrize("mesh", MESHES[-1:], ids=show)
def test_exits_that_are_tuned_alone(mesh, objective):
    config = fixed("alibi", exits=TUNED)
    how = {"tuned": tuple(e.name for e in TUNED), "microbatches": 2, "objective": objective}
    compare(sums_of(mesh, config, **how), sums_of(MeshConfig(), config, **how))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MESHES[1], MESHES[-1]], ids=show)
def test_bfloat16_is_no_worse_than_on_one_device(mesh):
    config, exact = fixed("llama", dtype="bfloat16"), jax.tree.leaves(one_device("llama").grads)

    def error(mesh):
        got = jax.tree.leaves(sums_of(mesh, config).grads)

        def squares(arrays):
            return sum(np.sum(np.square(a)) for a in arrays)

        apart = [a - b for a, b in zip(got, exact, strict=True)]
        return np.sqrt(squares(apart) / squares(exact))

    # Rounding errors of about 3 %, which do not fall on the same places.
    assert error(mesh) < 1.3 * error(MeshConfig()) < 0.06
