"""Cross entropy of an exit beside the likeliest tokens of its teacher.

Exits that learn from the final exit (Hinton et al. 2015) need its distribution. Where the states of
a frozen model are kept, its logits are too large to be kept with them: its likeliest tokens are
enough.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eejax.common.trees import map_chunks
from eejax.models.exits import Head, HeadOptions, logits

CHUNK_LOGITS = 2**23
"""Logits that exist at a time (32 MiB of float32)."""


class SoftTargets(NamedTuple):
    """Distributions that n tokens should have, of which k tokens have all the probability.

    Attributes:
      rows: [n, k] int32, rows of the head's table.
      probabilities: [n, k] float32, which sum to 1 over k; 0 where a row does not count.
      weights: [n] float32, the weight of each token's cost.
    """

    rows: jax.Array
    probabilities: jax.Array
    weights: jax.Array


def soft_cross_entropy(h: jax.Array, head: Head, targets: SoftTargets) -> jax.Array:
    """Sum weight * -sum_k q_k log p_k over tokens, p by `head` and q by `targets`, in nats.

    Differentiable once, in h alone: the head is held constant. The forward pass turns the logits of
    some tokens at a time into the gradient of their states, so that the head is multiplied with
    twice and no logits are kept.

    Args:
      h: [n, d], in the dtype of computation.
      head: of the table and bias on one device.
      targets: the targets.

    Returns:
      float32 [].
    """
    return _cost(head.options, h, head.table, head.bias, targets)


def _chunk(head: Head, gradient: bool, rows):
    """Return the costs [m] of some tokens, and the gradient [m, d] of their sum."""
    h, targets = rows
    y, back = jax.vjp(partial(logits, head), h)
    lse = jax.nn.logsumexp(y, -1)
    q = targets.probabilities
    cost = lse - jnp.sum(jnp.take_along_axis(y, targets.rows, 1) * q, -1)
    cost = cost * targets.weights
    if not gradient:
        return cost, None
    p = jnp.exp(y - lse[:, None])
    own = jnp.arange(len(h))[:, None]
    return cost, back(p.at[own, targets.rows].add(-q) * targets.weights[:, None])[0]


def _run(options: HeadOptions, h, table, bias, targets, gradient: bool):
    head = Head(table.astype(h.dtype), bias, options)
    size = max(1, CHUNK_LOGITS // table.shape[0])
    costs, gradients = map_chunks(partial(_chunk, head, gradient), (h, targets), size)
    return jnp.sum(costs), gradients


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cost(options: HeadOptions, h, table, bias, targets):
    return _run(options, h, table, bias, targets, False)[0]


def _forward(options: HeadOptions, h, table, bias, targets):
    total, gradient = _run(options, h, table, bias, targets, True)
    return total, (gradient, jax.tree.map(jnp.zeros_like, (table, bias, targets)))


def _backward(options: HeadOptions, saved, cotangent):
    gradient, (table, bias, targets) = saved
    dh = (gradient.astype(jnp.float32) * cotangent).astype(gradient.dtype)
    return dh, table, bias, targets._replace(rows=None)


_cost.defvjp(_forward, _backward)
