"""What a request may ask of its tokens beside sampling: penalties, biases, alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from eejax.common.errors import require, require_array, require_count
from eejax.models.layers import NEGATIVE

BIASES = 300  # tokens that a request may bias
LIKELY = 20  # most alternatives of a token that are told


class Likely(NamedTuple):
    """The most likely tokens [..., LIKELY] int32 in order, and their natural log-probabilities."""

    token: jax.Array
    logprob: jax.Array

    @classmethod
    def blank(cls, *shape: int) -> Likely:
        return cls(jnp.full((*shape, LIKELY), -1, jnp.int32), jnp.zeros((*shape, LIKELY)))


@struct.dataclass
class Shaping:
    """Per-request settings as traced arrays [b]: changing one never recompiles.

    presence, frequency: taken off the logits of tokens that were generated before, once, and for
    each time (OpenAI's penalties). repetition: logits of tokens of prompt or text are divided by
    it where they are positive and multiplied by it where not (Keskar et al. 2019, section 4.1); 1
    is off. least: no stop token comes before so many tokens. tokens, biases [b, BIASES]: what is
    added to whose logits; token -1 is none. likely: how many of the most likely tokens are told.

    Gates and log-probabilities are of logits as they are without.
    """

    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    least: jax.Array
    tokens: jax.Array
    biases: jax.Array
    likely: jax.Array

    @classmethod
    def make(
        cls,
        vocab_size: int,
        presence: float = 0.0,
        frequency: float = 0.0,
        repetition: float = 1.0,
        least: int = 0,
        biases: Mapping[int, float] | None = None,
        likely: int = 0,
    ) -> Shaping:
        """Of one request. Raises ConfigError for what is out of range."""
        number = lambda name, value, ok, allowed: require(
            _is_number(name, value, allowed) and ok(value), name, value, allowed
        )
        for name, value in (("presence", presence), ("frequency", frequency)):
            number(name, value, lambda a: -100 <= a <= 100, "must be a number in [-100, 100]")
        number("repetition", repetition, lambda a: 0 < a <= 100, "must be a number in (0, 100]")
        require_count("least", least, least=0)
        require_count("likely", likely, least=0)
        require(likely <= LIKELY, "likely", likely, f"must be at most {LIKELY}")
        biases = dict(biases or {})
        require(len(biases) <= BIASES, "biases", len(biases), f"must be of at most {BIASES} tokens")
        ids, values = np.full((1, BIASES), -1, np.int32), np.zeros((1, BIASES), np.float32)
        for i, (token, value) in enumerate(biases.items()):
            known = isinstance(token, int) and 0 <= token < vocab_size
            require(known, "biases", token, f"must be of token ids in 0..{vocab_size - 1}")
            allowed = "must be a number in [-100, 100]"
            number(f"biases[{token}]", value, lambda a: -100 <= a <= 100, allowed)
            ids[0, i], values[0, i] = token, value
        one = lambda a, dtype: np.full((1,), a, dtype)
        least = min(least, np.iinfo(np.int32).max)
        return cls(
            *(one(a, np.float32) for a in (presence, frequency, repetition)),
            one(least, np.int32), ids, values, one(likely, np.int32),
        )  # fmt: skip

    @classmethod
    def blank(cls, rows: int) -> Shaping:
        """Of requests that ask for nothing."""
        return jax.tree.map(lambda a: np.repeat(a, rows, 0), cls.make(1))

    @property
    def changes(self) -> jax.Array:
        """[b] whether tokens may be others than without."""
        penalties = (self.presence != 0) | (self.frequency != 0) | (self.repetition != 1)
        return penalties | (self.least > 0) | (self.tokens >= 0).any(-1)

    @property
    def needs_logits(self) -> jax.Array:
        """[b] who is served by nothing less than the logits."""
        return self.changes | (self.likely > 0)


def _is_number(name: str, value, allowed: str) -> bool:
    a = require_array(name, value, allowed)
    return a.shape == () and a.dtype.kind in "iuf" and bool(np.isfinite(a))


def shaped(
    logits: jax.Array,
    shaping: Shaping,
    text: jax.Array,
    start: jax.Array,
    length: jax.Array,
    stops: jax.Array,
) -> jax.Array:
    """Logits [b, v] of the token behind the first `length` [b] of text [b, s], whose first `start`
    [b] are the prompt; stops [b, n]: token ids that end the request, -1 where there is none."""
    b, v = logits.shape
    row, index = jnp.arange(b)[:, None], jnp.arange(text.shape[1])[None]
    there = index < length[:, None]
    at = lambda which: jnp.where(which, text, v)
    own = jnp.zeros((b, v)).at[row, at(there & (index >= start[:, None]))].add(1.0, mode="drop")
    seen = jnp.zeros((b, v), bool).at[row, at(there)].set(True, mode="drop")
    times = shaping.repetition[:, None]
    y = jnp.where(seen, jnp.where(logits > 0, logits / times, logits * times), logits)
    once = jnp.minimum(own, 1.0)
    y = y - shaping.presence[:, None] * once - shaping.frequency[:, None] * own
    behind = lambda ids: jnp.where(ids >= 0, ids, v)
    y = y.at[row, behind(shaping.tokens)].add(shaping.biases, mode="drop")
    early = (length - start < shaping.least)[:, None]
    y = y.at[row, jnp.where(early, behind(stops), v)].set(NEGATIVE, mode="drop")
    return jnp.where(logits > NEGATIVE, y, logits)  # what pads the vocabulary stays what it is


def most_likely(logits: jax.Array) -> Likely:
    """Of logits [b, v]; where there are fewer tokens than `LIKELY`, -1 behind them."""
    k = min(LIKELY, logits.shape[-1])
    top, token = lax.top_k(logits, k)
    logprob = top - jax.nn.logsumexp(logits, -1, keepdims=True)
    token = jnp.where(top > NEGATIVE, token, -1).astype(jnp.int32)
    pad = lambda a, value: jnp.pad(a, ((0, 0), (0, LIKELY - k)), constant_values=value)
    return Likely(pad(token, -1), pad(jnp.where(token >= 0, logprob, 0.0), 0.0))
