"""Exit confidences: pure functions from an exit's logits to a number in [0, 1].

A gate sees logits after the exit's own temperature and before any sampling transform.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def max_probability(logits: jax.Array) -> jax.Array:
    """Probability of the most likely token, [...] from float32 logits [..., v].

    The gate of EE-LLM (section 4) and CALM's softmax response.
    """
    peak = jnp.max(logits, -1, keepdims=True)
    return 1.0 / jnp.sum(jnp.exp(logits - peak), -1)


def fires(confidence: jax.Array, threshold: jax.Array, active: jax.Array) -> jax.Array:
    """Whether a token leaves: confidence >= threshold at an active exit.

    Threshold 1 never fires, by definition: a float32 confidence can round to 1.
    """
    return active & (threshold < 1) & (confidence >= threshold)
