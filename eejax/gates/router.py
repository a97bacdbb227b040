"""The router network, which predicts from a hidden state whether a token may leave at a boundary.

    confidence = sigmoid(w_up . silu(W_down norm(x)) + bias)

This is TIDE's gate, with a bias. The norm is of the model's kind and has its own weights, so a
router reads only the state at the boundary, and an exit's norm and head are not computed to decide.
Calibration trains routers through the same function that engines call.
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
    """Compute float32 log-odds [...] that a token may leave, from states x [..., d] at the
    boundary.

    p are a router's parameters (`models.params.router`), cast to x's dtype as in engines; products
    are accumulated in float32.
    """
    return reference.logit(layers.norm_options(config), x, *_weights(p))


def confidence(p: Tree, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Compute the float32 probability [...] that a token may leave, from states x [..., d]."""
    rows = x.reshape(-1, x.shape[-1])
    never = jnp.ones(len(rows), jnp.float32)  # engines apply their own thresholds
    routed = norm_router(rows, *_weights(p), never, options=layers.norm_options(config))
    return routed.confidence.reshape(x.shape[:-1])


def _weights(
    p: Tree,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array, jax.Array]:
    norm = p["norm"]
    return norm["scale"], norm.get("bias"), p["down"], p["up"], p["up_bias"]


def of_exit(params: Tree, config: ModelConfig, e: int) -> Callable[[jax.Array], jax.Array] | None:
    """Return `confidence` of exit e's router as a function of states alone, or None without a
    router."""
    if e == config.n_exits or not config.exits[e].router:
        return None
    p = exits.exit_params(params, config, e)["router"]
    return lambda x: confidence(p, x, config)
