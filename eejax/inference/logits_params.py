"""Logits processing of a request: penalties, biases and the most likely alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from eejax.common.errors import require, require_array, require_count
from eejax.kernels import call
from eejax.models.layers import NEGATIVE

MAX_LOGIT_BIASES = 300  # tokens that a request may bias
MAX_TOP_LOGPROBS = 20  # reported alternatives of a token
TOP_K_KERNEL = 16  # largest k of XLA's own kernel on a GPU (`topk_specializer.cc`)


class TopLogprobs(NamedTuple):
    """The most likely tokens, in order.

    Attributes:
      token: [..., MAX_TOP_LOGPROBS] int32, -1 beyond the vocabulary.
      logprob: [..., MAX_TOP_LOGPROBS] float32, natural log-probabilities.
    """

    token: jax.Array
    logprob: jax.Array

    @classmethod
    def blank(cls, *shape: int) -> TopLogprobs:
        return cls(
            jnp.full((*shape, MAX_TOP_LOGPROBS), -1, jnp.int32),
            jnp.zeros((*shape, MAX_TOP_LOGPROBS)),
        )


class LogitsParams(struct.PyTreeNode):
    """Logits processing of each request, as traced arrays: changing one compiles nothing.

    Gates and reported log-probabilities use the unprocessed logits.

    Attributes:
      presence: [b] float32, subtracted once from the logits of tokens that were generated before.
      frequency: [b] float32, subtracted once for each occurrence (as OpenAI's penalties).
      repetition: [b] float32, divides positive logits of tokens in the prompt or text and
        multiplies negative ones (Keskar et al. 2019, section 4.1). 1 is off.
      min_tokens: [b] int32, no stop token is emitted before this many tokens.
      tokens: [b, MAX_LOGIT_BIASES] int32, tokens with a bias, padded with -1.
      biases: [b, MAX_LOGIT_BIASES] float32, added to their logits.
      top_logprobs: [b] int32, number of most likely tokens to report.
    """

    presence: jax.Array | np.ndarray
    frequency: jax.Array | np.ndarray
    repetition: jax.Array | np.ndarray
    min_tokens: jax.Array | np.ndarray
    tokens: jax.Array | np.ndarray
    biases: jax.Array | np.ndarray
    top_logprobs: jax.Array | np.ndarray

    @classmethod
    def make(
        cls,
        vocab_size: int,
        presence: float = 0.0,
        frequency: float = 0.0,
        repetition: float = 1.0,
        min_tokens: int = 0,
        biases: Mapping[int, float] | None = None,
        top_logprobs: int = 0,
    ) -> LogitsParams:
        """Check the settings of one request. Raises ConfigError for a value out of range."""

        def number(name, value, ok, allowed):
            return require(_is_number(name, value, allowed) and ok(value), name, value, allowed)

        for name, value in (("presence", presence), ("frequency", frequency)):
            number(name, value, lambda a: -100 <= a <= 100, "must be a number in [-100, 100]")
        allowed = "must be a number in [0.01, 100]"
        number("repetition", repetition, lambda a: 0.01 <= a <= 100, allowed)
        require_count("min_tokens", min_tokens, minimum=0)
        require_count("top_logprobs", top_logprobs, minimum=0)
        require(
            top_logprobs <= MAX_TOP_LOGPROBS,
            "top_logprobs",
            top_logprobs,
            f"must be at most {MAX_TOP_LOGPROBS}",
        )
        biases = dict(biases or {})
        require(
            len(biases) <= MAX_LOGIT_BIASES,
            "biases",
            len(biases),
            f"must be of at most {MAX_LOGIT_BIASES} tokens",
        )
        ids, values = (
            np.full((1, MAX_LOGIT_BIASES), -1, np.int32),
            np.zeros((1, MAX_LOGIT_BIASES), np.float32),
        )
        for i, (token, value) in enumerate(biases.items()):
            known = isinstance(token, int) and 0 <= token < vocab_size
            require(known, "biases", token, f"must be of token ids in 0..{vocab_size - 1}")
            allowed = "must be a number in [-100, 100]"
            number(f"biases[{token}]", value, lambda a: -100 <= a <= 100, allowed)
            ids[0, i], values[0, i] = token, value

        def one(a, dtype):
            return np.full((1,), a, dtype)

        min_tokens = min(min_tokens, np.iinfo(np.int32).max)
        return cls(
            one(presence, np.float32),
            one(frequency, np.float32),
            one(repetition, np.float32),
            one(min_tokens, np.int32),
            ids,
            values,
            one(top_logprobs, np.int32),
        )

    @classmethod
    def blank(cls, rows: int) -> LogitsParams:
        """Return settings of `rows` requests that leave logits as they are."""
        return jax.tree.map(lambda a: np.repeat(a, rows, 0), cls.make(1))

    @property
    def changes(self) -> jax.Array:
        """Return [b] bool, whether the settings may change the sampled token."""
        penalties = (self.presence != 0) | (self.frequency != 0) | (self.repetition != 1)
        return penalties | (self.min_tokens > 0) | (self.tokens >= 0).any(-1)

    @property
    def needs_logits(self) -> jax.Array:
        """Return [b] bool, whether the request needs logits, not just statistics of them."""
        return self.changes | (self.top_logprobs > 0)


def _is_number(name: str, value, allowed: str) -> bool:
    a = require_array(name, value, allowed)
    return a.shape == () and a.dtype.kind in "iuf" and bool(np.isfinite(a))


def process_logits(
    logits: jax.Array,
    logits_params: LogitsParams,
    text: jax.Array,
    start: jax.Array,
    length: jax.Array,
    stop_token_ids: jax.Array,
) -> jax.Array:
    """Apply penalties, biases and the minimum length to logits [b, v].

    Args:
      text: [b, s] int32, prompt and generated tokens.
      start: [b] int32, tokens of the prompt.
      length: [b] int32, tokens of prompt and text; the logits predict the token behind them.
      stop_token_ids: [b, n] int32, token ids that end the request, padded with -1.
    """
    b, v = logits.shape
    row, index = jnp.arange(b)[:, None], jnp.arange(text.shape[1])[None]
    there = index < length[:, None]

    def at(which):
        return jnp.where(which, text, v)

    own = jnp.zeros((b, v)).at[row, at(there & (index >= start[:, None]))].add(1.0, mode="drop")
    seen = jnp.zeros((b, v), bool).at[row, at(there)].set(True, mode="drop")
    times = logits_params.repetition[:, None]
    y = jnp.where(seen, jnp.where(logits > 0, logits / times, logits * times), logits)
    once = jnp.minimum(own, 1.0)
    y = y - logits_params.presence[:, None] * once - logits_params.frequency[:, None] * own

    def behind(ids):
        return jnp.where(ids >= 0, ids, v)

    y = y.at[row, behind(logits_params.tokens)].add(logits_params.biases, mode="drop")
    early = (length - start < logits_params.min_tokens)[:, None]
    y = y.at[row, jnp.where(early, behind(stop_token_ids), v)].set(NEGATIVE, mode="drop")
    return jnp.where(logits > NEGATIVE, y, logits)  # padding of the vocabulary stays masked


def _top_k(y: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return `lax.top_k` of y [b, v], values and indices [b, k]; rows have k values above -inf.

    XLA's kernel for GPUs finds at most `TOP_K_KERNEL` of them. For more it sorts all of y, maybe by
    CUB, whose call no CUDA graph can hold: then the host would run the whole decoding loop.
    """
    if not call.for_gpu():
        return lax.top_k(y, k)
    y, parts, row = jnp.asarray(y), [], jnp.arange(len(y))[:, None]
    for first in range(0, k, TOP_K_KERNEL):
        parts.append(lax.top_k(y, min(TOP_K_KERNEL, k - first)))
        y = y.at[row, parts[-1][1]].set(-jnp.inf)
    values, places = zip(*parts, strict=True)
    return jnp.concatenate(values, -1), jnp.concatenate(places, -1)


def compute_top_logprobs(logits: jax.Array) -> TopLogprobs:
    """Return the most likely tokens of logits [b, v], padded with token -1."""
    k = min(MAX_TOP_LOGPROBS, logits.shape[-1])
    top, token = _top_k(logits, k)
    logprob = top - jax.nn.logsumexp(logits, -1, keepdims=True)
    token = jnp.where(top > NEGATIVE, token, -1).astype(jnp.int32)

    def pad(a, value):
        return jnp.pad(a, ((0, 0), (0, MAX_TOP_LOGPROBS - k)), constant_values=value)

    return TopLogprobs(pad(token, -1), pad(jnp.where(token >= 0, logprob, 0.0), 0.0))
