"""No exit sees the future: gradients of every exit's state with respect to every input position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.models import params, transformer
from eejax.models.config import ExitConfig, ModelConfig

T = 10


@pytest.mark.parametrize("window", [None, 3, (None, 2, 4)])
@pytest.mark.parametrize("position", ["rotary", "learned", "alibi"])
def test_gradients_reach_the_past_and_only_the_past(position, window):
    config = ModelConfig(
        vocab_size=T, n_layers=3, d_model=16, n_heads=2, context_length=T, position=position,
        sliding_window=window,
        exits=(
            ExitConfig(0, norm=False),
            ExitConfig(1, mlp=True),
            ExitConfig(2, block=True),
            ExitConfig(3, mlp=True, block=True, head="own"),
        ),
    )  # fmt: skip
    p = params.init(config, jax.random.key(0))
    tokens = jnp.arange(T)[None]  # every position has its own row of the embedding

    def states(table):
        changed = p | {"embed": p["embed"] | {"tokens": table}}
        return transformer.exit_states(changed, config, tokens)

    jacobians = jax.jacrev(states)(p["embed"]["tokens"])  # per exit [1, t, d, v, d]
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
