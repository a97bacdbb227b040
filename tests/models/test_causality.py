"""No exit sees the future: gradients of every exit's state with respect to every input position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.models import params, transformer
from eejax.models.config import ExitConfig, ModelConfig

T = 10
# Each kind of window and of positions is in one fast case.
FAST = (("rotary", None), ("learned", 3), ("alibi", (None, 2, 4)))


@pytest.mark.parametrize(
    "position, window",
    [
        pytest.param(p, w, marks=[] if (p, w) in FAST else [pytest.mark.slow])
        for p in ("rotary", "learned", "alibi")
        for w in (None, 3, (None, 2, 4))
    ],
)
def test_gradients_reach_the_past_and_only_the_past(position, window):
    config = ModelConfig(
        vocab_size=T,
        n_layers=3,
        d_model=16,
        n_heads=2,
        context_length=T,
        position=position,
        sliding_window=window,
        exits=(
            ExitConfig(0, norm=False),
            ExitConfig(1, mlp=True),
            ExitConfig(2, block=True),
            ExitConfig(3, mlp=True, block=True, head="own"),
        ),
    )
    p = params.init(config, jax.random.key(0))
    tokens = jnp.arange(T)[None]  # every position has its own row of the embedding

    def states(table):
        changed = p | {"embed": p["embed"] | {"tokens": table}}
        return transformer.exit_states(changed, config, tokens)

    jacobians = jax.jit(jax.jacrev(states))(p["embed"]["tokens"])  # per exit [1, t, d, v, d]
    assert len(jacobians) == 5
    for e, j in enumerate(jacobians):
        size = np.abs(np.asarray(j[0])).max((1, 3))  # [t, position]
        assert (np.triu(size, 1) == 0).all(), f"exit {e} sees the future"
        assert (np.diag(size) > 0).all()
        if e > 0 and window is None:
            assert (size[np.tril_indices(T)] > 0).all(), f"exit {e} misses the past"
    # One layer with a window of 3 sees exactly the last 3 positions.
    if window == 3:
        reach = np.abs(np.asarray(jacobians[1][0])).max((1, 3)) > 0
        rows, cols = np.indices((T, T))
        np.testing.assert_array_equal(reach, (cols <= rows) & (rows - cols < 3))


def test_positions_that_start_again_do_not_open_the_future():
    config = ModelConfig(
        vocab_size=T, n_layers=2, d_model=16, n_heads=2, context_length=T, exits=(ExitConfig(1),)
    )
    p = params.init(config, jax.random.key(0))
    positions = jnp.array([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])

    def states(table):
        changed = p | {"embed": {"tokens": table}}
        return transformer.exit_states(changed, config, jnp.arange(T)[None], positions=positions)

    for j in jax.jit(jax.jacrev(states))(p["embed"]["tokens"]):
        assert (np.triu(np.abs(np.asarray(j[0])).max((1, 3)), 1) == 0).all()


def test_a_frequent_tokens_gradient_is_summed_in_float32():
    config = ModelConfig(
        vocab_size=T, n_layers=1, d_model=16, n_heads=2, context_length=512, dtype="bfloat16"
    )
    p = params.init(config, jax.random.key(0))
    tokens = jnp.full((8, 512), 3)
    weights = jax.random.normal(jax.random.key(1), (16,)) + 3  # every position pulls the same way

    def loss(p, config):
        h = transformer.exit_states(p, config, tokens)[-1].astype(jnp.float32)
        return jnp.sum(h * weights[None, None])

    def grad(c):
        return jax.jit(jax.grad(loss), static_argnums=1)(p, c)["embed"]["tokens"][3]

    half, full = grad(config), grad(config.replace(dtype="float32"))
    # bf16 rounds each contribution by up to 2^-9; a bf16 sum of 4096 would be off by factors.
    assert float(jnp.abs(half - full).max()) < 0.02 * float(jnp.abs(full).max())
