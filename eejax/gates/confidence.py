"""Exit confidences: pure functions from an exit's state or logits to a number in [0, 1].

A gate reads logits after the exit's own temperature and before any sampling transform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.kernels.head_confidence.api import HeadStatistics


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


def max_probability(logits: jax.Array) -> jax.Array:
    """Return the probability of the most likely token, [...] from float32 logits [..., v]."""
    peak = jnp.max(logits, -1, keepdims=True)
    return 1.0 / jnp.sum(jnp.exp(logits - peak), -1)


def margin(logits: jax.Array) -> jax.Array:
    """Return the difference between the two highest probabilities, [...] from logits [..., v]."""
    peak = jnp.max(logits, -1, keepdims=True)
    top = logits == peak
    second = jnp.max(jnp.where(top, -jnp.inf, logits), -1)
    # If several tokens share the peak, the second highest probability equals it.
    second = jnp.where(jnp.sum(top, -1) > 1, peak[..., 0], second)
    return max_probability(logits) * (1.0 - jnp.exp(second - peak[..., 0]))


def certainty(logits: jax.Array, vocab: int) -> jax.Array:
    """Return 1 - entropy / log(vocab), [...] from logits [..., v], masked where v is padded."""
    y = logits - jnp.max(logits, -1, keepdims=True)
    p = jnp.exp(y)
    total = jnp.sum(p, -1)
    return certain(jnp.log(total) - jnp.sum(p * y, -1) / total, vocab)


def certain(entropy: jax.Array, vocab_size: int) -> jax.Array:
    """Return 1 - entropy / log(vocab_size), [...] from entropies [...] in nats."""
    return jnp.clip(1.0 - entropy / jnp.log(float(max(vocab_size, 2))), 0.0, 1.0)


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the float32 cosine [...] of vectors [..., d]."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)

    def dot(x, y):
        return jnp.sum(x * y, -1)

    return dot(a, b) * lax.rsqrt(jnp.maximum(dot(a, a) * dot(b, b), 1e-30))


def saturation(state: jax.Array, before: jax.Array) -> jax.Array:
    """Return the cosine of states [..., d] and those at the previous exit, 0 if it is negative."""
    return jnp.clip(cosine(state, before), 0.0, 1.0)


class LogitsGate(NamedTuple):
    """Formula of a gate that reads logits, in two forms that agree.

    Attributes:
      of_logits: takes float32 logits [..., v], masked where v is padded, and the number of tokens.
      of_statistics: takes `HeadStatistics` [...] of logits that are not written, and that number.
    """

    of_logits: Callable[[jax.Array, int], jax.Array]
    of_statistics: Callable[[HeadStatistics, int], jax.Array]


LOGITS_GATES = {
    "max_probability": LogitsGate(lambda y, vocab: max_probability(y), lambda s, vocab: s.top),
    "margin": LogitsGate(lambda y, vocab: margin(y), lambda s, vocab: s.top - s.second),
    "entropy": LogitsGate(certainty, lambda s, vocab: certain(s.entropy, vocab)),
}
"""Gates whose confidence follows from the logits of one exit alone; the first is the default."""

GATES = (*LOGITS_GATES, "patience", "saturation", "fixed", "router")
"""Names of the gates. A request has the index of its gate, so that a batch may mix them.

max_probability: probability of the most likely token (EE-LLM, section 5.2).
margin: difference between the two highest probabilities (CALM's softmax response, section 3.5).
entropy: 1 - entropy / log(vocabulary) (BranchyNet's entropy, inverted).
patience: number of consecutive exits that agree on the most likely token, over the number of exits
    (PABEE; Zhou et al. 2020): with threshold 2 / 4, a token of a model with four exits leaves once
    two agree.
saturation: cosine of the states at this and the previous exit (CALM, section 3.5), 0 at the first.
fixed: always 1, so that a token leaves by the first active exit whose threshold is below 1.
router: output of a router network for the state (`gates.router`; TIDE), at exits that have one.
"""

PATIENCE, SATURATION, ROUTER = map(GATES.index, ("patience", "saturation", "router"))


def needs_logits(kind: jax.Array) -> jax.Array:
    """Return [b] bool, whether a gate's confidence is computed from logits."""
    return kind < SATURATION


def of_logits(
    kind: jax.Array, logits: jax.Array, token: jax.Array, memory: Memory, exits: int, vocab: int
) -> tuple[jax.Array, Memory]:
    """Compute confidences [b] of gates that read logits, and the `Memory` after them.

    A gate that no request uses costs nothing.

    Args:
      kind: [b] index of each request's gate.
      logits: [b, v].
      token: [b] the most likely token.
      memory: the memory before this exit.
      exits: number of early exits of the model.
      vocab: number of tokens.
    """
    (_, first), *others = LOGITS_GATES.items()
    confidence = first.of_logits(logits, vocab)
    for name, gate in others:
        of = kind == GATES.index(name)

        def formula(y, gate=gate):
            return gate.of_logits(y, vocab)

        other = lax.cond(jnp.any(of), formula, lambda y: jnp.zeros_like(y[:, 0]), logits)
        confidence = jnp.where(of, other, confidence)
    return _patient(kind, confidence, token, memory, exits)


def of_statistics(
    kind: jax.Array, seen: HeadStatistics, memory: Memory, exits: int, vocab: int
) -> tuple[jax.Array, Memory]:
    """Compute confidences as `of_logits`, from statistics of logits [b, v] that are not written."""
    (_, first), *others = LOGITS_GATES.items()
    confidence = first.of_statistics(seen, vocab)
    for name, gate in others:
        other = gate.of_statistics(seen, vocab)
        confidence = jnp.where(kind == GATES.index(name), other, confidence)
    return _patient(kind, confidence, seen.token, memory, exits)


def _patient(kind, confidence, token, memory, exits) -> tuple[jax.Array, Memory]:
    """Return `confidence`, replaced by patience for the requests with that gate, and the new
    `Memory`."""
    streak = jnp.where(token == memory.token, memory.streak, 0) + 1
    confidence = jnp.where(kind == PATIENCE, patience(streak, exits), confidence)
    return confidence, memory._replace(token=token, streak=streak)


def patience(streak: jax.Array, exits: int) -> jax.Array:
    """Return the confidence of a streak of agreeing exits; a streak of one exit has confidence
    0."""
    return jnp.where(streak > 1, streak, 0).astype(jnp.float32) / max(exits, 1)


def of_state(
    kind: jax.Array,
    state: jax.Array,
    memory: Memory,
    router: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, Memory]:
    """Compute confidences [b] of gates that read no logits, from states [b, d], and the new
    `Memory`.

    `router` is this exit's router network, from states to confidences [b]; without one no token
    leaves by it.
    """
    confidence = jnp.where(kind == SATURATION, saturation(state, memory.state), 1.0)
    by_router, routed = kind == ROUTER, jnp.zeros_like(state[:, 0], jnp.float32)
    if router is not None:
        routed = lax.cond(jnp.any(by_router), router, lambda x: routed, state)
    return jnp.where(by_router, routed, confidence), memory._replace(state=state)


def falling(threshold: jax.Array, decay: jax.Array, progress: jax.Array) -> jax.Array:
    """Return a threshold after a share `progress` of a text: 0.9 threshold + 0.1 exp(-decay
    progress).

    CALM, section 3.3: early errors spoil more of a text. A negative decay leaves it unchanged.
    """
    fallen = jnp.clip(0.9 * threshold + 0.1 * jnp.exp(-decay * progress), 0.0, 1.0)
    return jnp.where(decay < 0, threshold, fallen)
