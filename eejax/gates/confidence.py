"""Exit confidences: pure functions from what an exit sees to a number in [0, 1].

A gate sees logits after the exit's own temperature and before any sampling transform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.kernels.head_confidence.api import Confidence

GATES = ("max_probability", "margin", "entropy", "patience", "saturation", "fixed", "router")
"""Names of the gates. A request's is a number here, so that a batch may mix them.

max_probability: probability of the most likely token (EE-LLM, section 5.2).
margin: that less the second most likely one's (CALM's softmax response, section 3.5).
entropy: 1 - entropy / log(vocabulary) (as BranchyNet's, turned round).
patience: exits in a row that agree on the most likely token, over the model's exits (PABEE; Zhou
    et al. 2020): a threshold of 2 / 4 leaves a model of four exits once two agree.
saturation: cosine of the states at this and the exit before (CALM, section 3.5), 0 at the first.
fixed: always 1, so that a token leaves by the first active exit whose threshold is below 1.
router: what a router network says of the state (`gates.router`; TIDE), at exits that have one.
"""

MAX_PROBABILITY, MARGIN, ENTROPY, PATIENCE, SATURATION, FIXED, ROUTER = range(len(GATES))


class Memory(NamedTuple):
    """State that gates carry from one exit of a token to the next.

    Attributes:
      token: [b] int32, the most likely token at the exit before, -1 at the first exit.
      streak: [b] int32, consecutive exits that found it most likely.
      state: [b, d], the state at the exit before, zeros at the first exit.
    """

    token: jax.Array
    streak: jax.Array
    state: jax.Array

    @classmethod
    def blank(cls, like: jax.Array) -> Memory:
        """Return the memory of tokens that have seen no exit; like: a state [b, d]."""
        zero = jnp.zeros_like(like[:, 0], jnp.int32)
        return cls(zero - 1, zero, jnp.zeros_like(like))


def needs_logits(kind: jax.Array) -> jax.Array:
    """[b] whether a gate's confidence is made of logits."""
    return kind < SATURATION


def max_probability(logits: jax.Array) -> jax.Array:
    """Probability of the most likely token, [...] from float32 logits [..., v]."""
    peak = jnp.max(logits, -1, keepdims=True)
    return 1.0 / jnp.sum(jnp.exp(logits - peak), -1)


def margin(logits: jax.Array) -> jax.Array:
    """Probability of the most likely token less that of the second, [...] from [..., v]."""
    peak = jnp.max(logits, -1, keepdims=True)
    top = logits == peak
    second = jnp.max(jnp.where(top, -jnp.inf, logits), -1)
    # A peak that several tokens share is its own second.
    second = jnp.where(jnp.sum(top, -1) > 1, peak[..., 0], second)
    return max_probability(logits) * (1.0 - jnp.exp(second - peak[..., 0]))


def certainty(logits: jax.Array, vocab_size: int) -> jax.Array:
    """1 - entropy / log(vocab_size), [...] from logits [..., v], masked where v is padded."""
    y = logits - jnp.max(logits, -1, keepdims=True)
    p = jnp.exp(y)
    total = jnp.sum(p, -1)
    return certain(jnp.log(total) - jnp.sum(p * y, -1) / total, vocab_size)


def certain(entropy: jax.Array, vocab_size: int) -> jax.Array:
    """1 - entropy [...] in nats / log(vocab_size)."""
    return jnp.clip(1.0 - entropy / jnp.log(float(max(vocab_size, 2))), 0.0, 1.0)


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """float32 cosine [...] of vectors [..., d]."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)

    def dot(x, y):
        return jnp.sum(x * y, -1)

    return dot(a, b) * lax.rsqrt(jnp.maximum(dot(a, a) * dot(b, b), 1e-30))


def saturation(state: jax.Array, before: jax.Array) -> jax.Array:
    """Cosine of states [..., d] and those at the exit before, 0 where it is negative."""
    return jnp.clip(cosine(state, before), 0.0, 1.0)


def of_logits(
    kind: jax.Array, logits: jax.Array, token: jax.Array, memory: Memory, exits: int, vocab: int
) -> tuple[jax.Array, Memory]:
    """Confidences [b] by gates `kind` [b] that read logits [b, v], and the `Memory` after.

    token [b]: the most likely one; exits: early ones of the model. A gate that nobody uses costs
    nothing.
    """
    confidence = max_probability(logits)
    for k, gate in ((MARGIN, margin), (ENTROPY, lambda y: certainty(y, vocab))):
        of = kind == k
        other = lax.cond(jnp.any(of), gate, lambda y: jnp.zeros_like(y[:, 0]), logits)
        confidence = jnp.where(of, other, confidence)
    return _patient(kind, confidence, token, memory, exits)


def of_statistics(
    kind: jax.Array, seen: Confidence, memory: Memory, exits: int, vocab: int
) -> tuple[jax.Array, Memory]:
    """Return confidences as `of_logits`, from statistics of logits [b, v] that are not written."""
    confidence = jnp.where(kind == MARGIN, seen.top - seen.second, seen.top)
    confidence = jnp.where(kind == ENTROPY, certain(seen.entropy, vocab), confidence)
    return _patient(kind, confidence, seen.token, memory, exits)


def _patient(kind, confidence, token, memory, exits) -> tuple[jax.Array, Memory]:
    """`confidence`, that by patience where it is asked for, and the `Memory` after `token`."""
    streak = jnp.where(token == memory.token, memory.streak, 0) + 1
    confidence = jnp.where(kind == PATIENCE, patience(streak, exits), confidence)
    return confidence, memory._replace(token=token, streak=streak)


def patience(streak: jax.Array, exits: int) -> jax.Array:
    """A streak of agreeing exits as a confidence; one exit alone agrees with nobody."""
    return jnp.where(streak > 1, streak, 0).astype(jnp.float32) / max(exits, 1)


def of_state(
    kind: jax.Array,
    state: jax.Array,
    memory: Memory,
    router: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, Memory]:
    """Confidences [b] by gates `kind` that read no logits, of states [b, d], and the `Memory`.

    router: what this exit's router network makes [b] of states; without one nobody leaves by it.
    """
    confidence = jnp.where(kind == SATURATION, saturation(state, memory.state), 1.0)
    by_router, routed = kind == ROUTER, jnp.zeros_like(state[:, 0], jnp.float32)
    if router is not None:
        routed = lax.cond(jnp.any(by_router), router, lambda x: routed, state)
    return jnp.where(by_router, routed, confidence), memory._replace(state=state)


def falling(threshold: jax.Array, decay: jax.Array, progress: jax.Array) -> jax.Array:
    """A threshold after a share `progress` of a text: 0.9 threshold + 0.1 exp(-decay progress).

    CALM, section 3.3: early errors spoil more of a text. A negative decay leaves it as it is.
    """
    fallen = jnp.clip(0.9 * threshold + 0.1 * jnp.exp(-decay * progress), 0.0, 1.0)
    return jnp.where(decay < 0, threshold, fallen)
