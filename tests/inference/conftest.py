"""A small model trained on real text: the standard library's own prose."""

import functools
import pickle
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shared

from eejax.losses.multi_exit import multi_exit_loss
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig

CONFIG = ModelConfig(
    vocab_size=257,
    vocab_multiple=8,
    n_layers=5,
    d_model=64,
    n_heads=4,
    n_kv_heads=2,
    context_length=160,
    qk_norm="head",
    sliding_window=(None, 24, None, None, 40),
    head="tied",
    exits=(
        ExitConfig(0, norm=False, router=4),
        ExitConfig(1, router=4),
        ExitConfig(2, block=True, router=4),
        ExitConfig(3, mlp=True, head="own", temperature=0.9, router=4, mlp_width=12),
        ExitConfig(4, router=4, head_rank=24),
        ExitConfig(5, norm=False, head="own"),
    ),
)


def text_tokens() -> np.ndarray:
    text = "\n".join(v for _, v in sorted(pydoc_data.topics.topics.items()))
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """(params, config) with exits at every boundary 0..5, about 2.7 nats a byte."""
    folder = shared.folder_once(tmp_path_factory, "trained", train)
    return jax.tree.map(jnp.asarray, pickle.loads((folder / "params").read_bytes())), CONFIG


def train(folder):
    tokens = text_tokens()
    rng = np.random.default_rng(0)
    p = params.init(CONFIG, jax.random.key(0))
    optimizer = optax.adam(optax.linear_schedule(6e-3, 5e-4, 120))
    weights = jnp.full((CONFIG.n_exits + 1,), 0.5).at[-1].set(1.0)

    # It runs long enough for some optimisation to pay.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})
    def update(p, opt, x):
        def loss(p):
            total, sums = multi_exit_loss(p, CONFIG, x[:, :-1], x[:, 1:], weights)
            count = sums.num_tokens.astype(jnp.float32)
            return total / count, sums.sums / count

        grads, losses = jax.grad(loss, has_aux=True)(p)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32
            updates, opt = optimizer.update(grads, opt, p)
        return optax.apply_updates(p, updates), opt, losses

    opt = optimizer.init(p)
    for _ in range(120):
        starts = rng.integers(0, len(tokens) - 65, 8)
        p, opt, losses = update(p, opt, jnp.array([tokens[s : s + 65] for s in starts]))
    assert float(losses[-1]) < 2.9 < float(losses[0]) + 0.6  # it learned something, deep more
    (folder / "params").write_bytes(pickle.dumps(jax.device_get(p)))


def with_exits(trained, boundaries):
    """The trained model with only the exits at `boundaries`."""
    p, config = trained
    config = config.replace(exits=tuple(e for e in config.exits if e.boundary in boundaries))
    keep = {e.name for e in config.exits}
    return p | {"exits": {k: v for k, v in p["exits"].items() if k in keep}}, config


@pytest.fixture(scope="session")
def subset(trained):
    return lambda boundaries: with_exits(trained, boundaries)


@pytest.fixture(scope="session")
def prompts():
    """Prompts of real text: prompts(seed, lengths)."""
    tokens = text_tokens()

    def draw(seed, lengths):
        rng = np.random.default_rng(seed)
        return [
            tokens[s : s + n].tolist() for n in lengths if (s := rng.integers(len(tokens) - n)) >= 0
        ]

    return draw
