"""The declaration of parameters, and what derives from it."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.common.trees import path_name
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig

SMALL = ModelConfig(
    vocab_size=100,
    n_layers=2,
    d_model=64,
    n_heads=4,
    context_length=64,
    head="tied",
    norm="layernorm",
    position="learned",
    mlp_gated=False,
    d_ff=128,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    exits=(ExitConfig(1),),
)


def test_init_matches_the_declaration_and_its_scales():
    declared, p = params.abstract(SMALL), params.init(SMALL, jax.random.key(0))
    leaves = jax.tree.leaves(declared, is_leaf=lambda x: isinstance(x, params.Param))
    assert len(leaves) == len(jax.tree.leaves(p)) == len(jax.tree.leaves(params.shapes(SMALL)))
    for d, a in zip(leaves, jax.tree.leaves(p), strict=True):
        assert d.shape == a.shape and a.dtype == jnp.float32 and len(d.axes) == len(d.shape)
        if d.std is None:
            assert (a == d.fill).all() and not d.decay
        else:
            assert abs(float(a.std()) / d.std - 1) < 0.1
            assert abs(float(a.mean())) < 4 * d.std / a.size**0.5
    values = [np.asarray(a).ravel()[:8] for a in jax.tree.leaves(p) if float(a.std()) > 0]
    assert len({v.tobytes() for v in values}) == len(values)  # no two leaves share their draw


def test_adding_an_exit_changes_no_other_parameter():
    before = params.init(SMALL, jax.random.key(3))
    more = SMALL.replace(exits=(ExitConfig(0, head="own"), *SMALL.exits, ExitConfig(2, mlp=True)))
    after = params.init(more, jax.random.key(3))
    for name in ("embed", "layers", "final"):
        jax.tree.map(np.testing.assert_array_equal, before[name], after[name])
    jax.tree.map(np.testing.assert_array_equal, before["exits"]["exit_1"], after["exits"]["exit_1"])


def test_gpt2_small_has_gpt2_smalls_parameters():
    config = ModelConfig(
        vocab_size=50257,
        n_layers=12,
        d_model=768,
        n_heads=12,
        context_length=1024,
        norm="layernorm",
        position="learned",
        mlp_gated=False,
        activation="gelu_tanh",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head="tied",
    )
    assert params.count(config) == 124_439_808  # transformers' GPT2LMHeadModel("gpt2")
    llama = ModelConfig(
        vocab_size=32000, n_layers=32, d_model=4096, n_heads=32, d_ff=11008, context_length=4096
    )
    assert params.count(llama) == 6_738_415_616  # Llama-2-7B


def test_decay_spares_norms_biases_and_positions():
    flags = jax.tree_util.tree_leaves_with_path(params.decays(SMALL))
    for path, decays in flags:
        name = jax.tree_util.keystr(path)
        spared = any(s in name for s in ("bias", "norm", "positions"))
        assert decays is not spared, name


def test_dropout_and_initial_values_never_share_a_key():
    """The training step folds its number (int32) into the seed's key, then the sample's; initial
    values fold a number that no step has, then the leaf's. Compared where they come closest: a
    step whose number is a leaf's tag, and the last step there can be."""
    seed = jax.random.key(5)
    drawn = []
    real = jax.random.normal

    def spy(key, *args):
        drawn.append(jax.random.key_data(key).tobytes())
        return real(key, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "normal", spy)
        params.init(SMALL, seed)
    assert len(set(drawn)) == len(drawn) > 5
    paths = jax.tree_util.tree_leaves_with_path(params.shapes(SMALL))
    tags = [zlib.crc32(path_name(path).encode()) for path, _ in paths]
    assert len(set(tags)) == len(tags)
    steps = [tag % 2**31 for tag in tags] + [*range(20), 2**31 - 1]
    assert params.INIT > max(steps)
    for step in steps:
        key = jax.random.fold_in(seed, step)
        for sample in (None, 0, 1, *(t % 2**31 for t in tags)):
            used = key if sample is None else jax.random.fold_in(key, sample)
            assert jax.random.key_data(used).tobytes() not in drawn


def test_a_layernorm_may_have_no_bias():
    tree = params.abstract(SMALL.replace(norm_bias=False))
    names = {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(params.shapes(SMALL))
    } - {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(params.map_params(lambda p: 0, tree))
    }
    assert len(names) == 4 and all("norm']['bias']" in n for n in names)  # two, final, exit
