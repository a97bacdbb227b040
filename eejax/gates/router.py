"""The router network: whether a token may leave at a boundary, from its hidden state alone.

    confidence = sigmoid(w_up . silu(W_down norm(x)) + bias)

TIDE's gate, with a bias. The norm is of the model's kind and has weights of its own, so that a
router reads the state at the boundary and nothing else: neither an exit's norm nor its head need
to be computed to decide. Calibration trains routers through the very function that engines call.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from eejax.common.trees import Tree
from eejax.kernels.norm_router import reference
from eejax.kernels.norm_router.api import norm_router
from eejax.models import exits, layers
from eejax.models.config import ModelConfig


def logit(p: Tree, x: jax.Array, config: ModelConfig) -> jax.Array:
    """float32 log-odds [...] that a token may leave, from states x [..., d] at the boundary.

    p: a router's parameters (`models.params.router`), taken in x's dtype, as engines have them;
    products are accumulated in float32.
    """
    return reference.logit(layers.norm_options(config), x, *_weights(p))


def confidence(p: Tree, x: jax.Array, config: ModelConfig) -> jax.Array:
    """float32 probability [...] that a token may leave, from states x [..., d]."""
    rows = x.reshape(-1, x.shape[-1])
    never = jnp.ones(len(rows), jnp.float32)  # engines have thresholds of their own
    routed = norm_router(rows, *_weights(p), never, options=layers.norm_options(config))
    return routed.confidence.reshape(x.shape[:-1])


def _weights(
    p: Tree,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array, jax.Array]:
    norm = p["norm"]
    return norm["scale"], norm.get("bias"), p["down"], p["up"], p["up_bias"]


def of_exit(params: Tree, config: ModelConfig, e: int) -> Callable[[jax.Array], jax.Array] | None:
    """`confidence` as a function of states alone, by exit e's router; None where it has none."""
    if e == config.n_exits or not config.exits[e].router:
        return None
    p = exits.exit_params(params, config, e)["router"]
    return lambda x: confidence(p, x, config)
