"""A text that was answered, looked at again by the whole of a model.

It goes through the whole model once, as it stands: of each of its tokens that says whether the
whole model would have gone on with it, and how likely it found it. Segments that are not loaded are
brought one at a time and freed again, so that an audit needs room for one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from eejax.common.errors import require
from eejax.common.trees import Tree
from eejax.inference import scoring
from eejax.inference import state as s
from eejax.inference.policy import log_probability
from eejax.inference.sampling import argmax
from eejax.inference.state import Weights
from eejax.models import transformer
from eejax.models.cache import init_cache, run_segment, unstack_segments
from eejax.models.config import ModelConfig
from eejax.serving.audits import Verdict


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
