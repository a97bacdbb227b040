"""The Flax module and the core are one model: the same tree, logits and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eejax.interop.flax import EarlyExitTransformer
from eejax.losses import multi_exit_loss
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig

BASE = ModelConfig(
    vocab_size=37,
    vocab_multiple=8,
    n_layers=3,
    d_model=24,
    n_heads=3,
    context_length=16,
    exits=(ExitConfig(1, mlp=True, head="shared"), ExitConfig(2, block=True, head="own")),
    head="tied",
)
CONFIGS = {
    "exits": BASE,
    "none": BASE.replace(exits=(), head="own"),
    "gpt2": BASE.replace(
        norm="layernorm",
        position="learned",
        mlp_gated=False,
        activation="gelu_tanh",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
    ),
    "bfloat16": BASE.replace(dtype="bfloat16"),
}


@pytest.fixture(params=CONFIGS)
def both(request):
    config = CONFIGS[request.param]
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, config.vocab_size)
    module = EarlyExitTransformer(config)
    return config, tokens, module, module.init(jax.random.key(0), tokens)["params"]


def test_the_tree_is_the_cores(both):
    config, _, _, tree = both
    want = params.shapes(config)
    assert jax.tree.structure(tree) == jax.tree.structure(want)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), tree) == jax.tree.map(
        lambda a: (a.shape, a.dtype), want
    )


def test_initial_values_are_the_cores(both):
    config, _, _, tree = both
    want = params.init(config, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, tree, want)


def test_logits_are_the_cores(both):
    config, tokens, module, _ = both
    tree = params.init(config, jax.random.key(3))  # a tree that Flax never saw
    logits = module.apply({"params": tree}, tokens)
    states = transformer.exit_states(tree, config, tokens)
    assert len(logits) == config.n_exits + 1
    for e, (y, h) in enumerate(zip(logits, states, strict=True)):
        head = exits.head(tree, config, e)
        head = head._replace(table=head.table.astype(h.dtype))
        np.testing.assert_array_equal(y, exits.logits(head, h))


@pytest.mark.slow
def test_gradients_are_the_cores(both):
    config, tokens, module, tree = both
    if config.dtype != "float32":
        pytest.skip("the two losses round differently in bfloat16")
    weights = jnp.linspace(0.5, 1.0, config.n_exits + 1)
    labels = jnp.roll(tokens, -1, 1)

    def by_flax(tree):  # the plain cross entropy over whole logits
        logits = module.apply({"params": tree}, tokens)
        each = [
            optax.softmax_cross_entropy_with_integer_labels(y[..., : config.vocab_size], labels)
            for y in logits
        ]
        return sum(w * a.sum() for w, a in zip(weights, each, strict=True))

    def by_core(tree):
        return multi_exit_loss(tree, config, tokens, labels, weights)[0]

    (a, da), (b, db) = (jax.value_and_grad(f)(tree) for f in (by_flax, by_core))
    np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4), da, db)


def test_dropout_needs_its_key_and_only_in_training():
    config = BASE.replace(dropout=0.5)
    tokens = jnp.zeros((2, 5), jnp.int32)
    module = EarlyExitTransformer(config)
    variables = module.init(jax.random.key(0), tokens)

    def run(seed):
        return module.apply(variables, tokens, train=True, rngs={"dropout": jax.random.key(seed)})[
            -1
        ]

    assert not np.allclose(run(0), run(1))
    np.testing.assert_array_equal(run(2), run(2))
    np.testing.assert_array_equal(
        module.apply(variables, tokens)[-1], module.apply(variables, tokens)[-1]
    )
    with pytest.raises(Exception, match="dropout"):
        module.apply(variables, tokens, train=True)
