"""How often tokens that left early are not the whole model's, of a share that is looked at again.

A text that was answered goes through the whole model once, as it stands: of each of its tokens that
says whether the whole model would have gone on with it, and how likely it found it. Segments that
are not loaded are brought one at a time and freed again, so that an audit needs room for one.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eejax.common.errors import require, require_count
from eejax.common.trees import Tree
from eejax.inference import scoring
from eejax.inference import state as s
from eejax.inference.policy import log_probability
from eejax.inference.sampling import argmax
from eejax.inference.state import Weights
from eejax.models import transformer
from eejax.models.cache import init_cache, run_segment, unstack_segments
from eejax.models.config import ModelConfig


class Verdict(NamedTuple):
    """Of a text's tokens behind its prompt [n]: whether the whole model goes on with each, and its
    natural log-probability of them."""

    same: np.ndarray
    logprob: np.ndarray


class Auditor:
    """The whole of a model, of which `loaded` has the first segments."""

    def __init__(self, host: Tree, config: ModelConfig):
        """host: the training tree, in host memory."""
        self._host, self.config = s.for_compute(host, config.dtype), config

    def judge(self, loaded: Weights, prompt: Sequence[int], tokens: Sequence[int]) -> Verdict:
        """Of a text; one program is compiled for each segment and power of two of tokens."""
        require(len(prompt) > 0, "prompt", prompt, "must have one token at least")
        config, n = self.config, self.config.n_exits + 1
        text = [*prompt, *tokens]
        width = next(n for n in scoring.lengths(config.context_length + 1) if n >= len(text))
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(text)] = text
        params = loaded.params
        if len(loaded.segments) < n:
            whole = s.outside(self._host, config, n)
            params = params | jax.device_put({k: whole[k] for k in ("exits", "final")})
        x = _embedded(params, padded, config=config)
        for e in range(n):
            if e < len(loaded.segments):
                layers = loaded.segments[e]
            else:
                (layers,) = jax.device_put(
                    unstack_segments(self._host, config, e + 1, loaded.axes, first=e)
                )
            x, h = _through(params, layers, x, config=config, e=e)
        logprob, same = _read(Weights((), params, loaded.axes), h, padded, config=config)
        own = slice(len(prompt) - 1, len(text) - 1)
        return Verdict(np.asarray(same)[own], np.asarray(logprob)[own])


@partial(jax.jit, static_argnames="config")
def _embedded(params, tokens, *, config):
    return transformer.embed(params, config, tokens, jnp.arange(tokens.shape[1])[None])


@partial(jax.jit, static_argnames=("config", "e"))
def _through(params, layers, x, *, config, e):
    # What is behind an early exit's block is not looked at.
    exits = tuple(dataclasses.replace(one, block=False) for one in config.exits)
    config = config.replace(exits=exits)
    cache = init_cache(config, 1, x.shape[1], e + 1)
    x, h, _, _ = run_segment(
        params, layers, config, e, x, jnp.zeros((1,), jnp.int32), cache.segments[e],
        cache.blocks[e],
    )  # fmt: skip
    return x, h


@partial(jax.jit, static_argnames="config")
def _read(weights, h, tokens, *, config):
    labels = jnp.append(tokens[0, 1:], 0)
    chunk = math.gcd(scoring.CHUNK, len(labels))

    def one(rows):
        h, label = rows
        logits = s.reader(weights, config, config.n_exits, h).logits()
        return log_probability(logits, label), argmax(logits) == label

    cut = lambda a: a.reshape(-1, chunk, *a.shape[1:])
    found = jax.lax.map(one, (cut(h[0]), cut(labels)))
    return jax.tree.map(lambda a: a.reshape(-1), found)


class Audit:
    """What audits of a model said lately: of the last `window` answers.

    Each answer counts as one, by the share of its tokens that are not the whole model's. low, high:
    between which that share lies of answers like these, each with `confidence`, whenever it is
    looked at, for as long as the window does not slide; of a window that does, at any one time.
    best: what `high` would be, had there been none.
    """

    def __init__(self, window: int = 400, confidence: float = 0.95):
        require_count("window", window)
        require(0 < confidence < 1, "confidence", confidence, "must lie strictly between 0 and 1")
        self.confidence = confidence
        self._shares: collections.deque[float] = collections.deque(maxlen=window)
        self._logprobs: collections.deque[tuple[float, int]] = collections.deque(maxlen=window)
        self.low, self.high, self.best = 0.0, 1.0, 1.0

    def add(self, verdict: Verdict) -> None:
        if len(verdict.same):
            self._shares.append(1.0 - float(np.mean(verdict.same)))
            self._logprobs.append((float(np.sum(verdict.logprob)), len(verdict.logprob)))
            delta = 1 - self.confidence
            self.low = 1.0 - upper_bound([1.0 - share for share in self._shares], delta)
            self.high = upper_bound(self._shares, delta)
            self.best = upper_bound([0.0] * self.count, delta)

    @property
    def count(self) -> int:
        return len(self._shares)

    @property
    def share(self) -> float:
        """Disagreement with the whole model, mean over answers; 0 of none."""
        return float(np.mean(self._shares)) if self._shares else 0.0

    @property
    def perplexity(self) -> float:
        """Of the answers, by the whole model; NaN of none."""
        tokens = sum(n for _, n in self._logprobs)
        return math.exp(-sum(p for p, _ in self._logprobs) / tokens) if tokens else math.nan


def upper_bound(values: Sequence[float], delta: float, grid: int = 1000) -> float:
    """Above the mean of what `values` in [0, 1] are drawn from, but for a share `delta` of all
    sequences, however often it is asked as they come; 1 of none.

    By betting against each mean (Waudby-Smith and Ramdas, "Estimating means of bounded random
    variables by betting", 2024, section 4.2): a capital of product(1 + bet (mean - value)), with
    bets that know the values before alone, passes 1 / delta with a probability of at most delta if
    it is the mean, or less than that.
    """
    x = np.asarray(values, np.float64)
    if not x.size:
        return 1.0
    require(bool(np.all((x >= 0) & (x <= 1))), "values", values, "must lie in [0, 1]")
    t = np.arange(1, len(x) + 1)
    mean = (0.5 + np.cumsum(x)) / (t + 1)
    spread = (0.25 + np.cumsum((x - mean) ** 2)) / (t + 1)
    known = np.append(0.25, spread[:-1])  # before each
    bets = np.sqrt(2 * math.log(1 / delta) / (known * t * np.log(1 + t)))
    means = np.linspace(0, 1, grid + 1)[:-1]
    most = 0.75 / (1 - means)  # so that no value takes more than three quarters of what is there
    stakes = np.minimum(bets[:, None], most)
    capital = np.max(np.cumsum(np.log1p(stakes * (means - x[:, None])), axis=0), axis=0)
    possible = np.flatnonzero(capital < math.log(1 / delta))
    return float(means[possible[-1]] + 1 / grid) if len(possible) else float(1 / grid)
