"""Scoring of existing texts with a model: one pass, without decoding."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from eejax.common.errors import require
from eejax.common.lengths import padded_length
from eejax.common.trees import map_chunks
from eejax.inference import sharded
from eejax.inference.logits_params import TopLogprobs, compute_top_logprobs
from eejax.inference.policy import log_probability
from eejax.inference.request import check_prompts
from eejax.inference.sampling import argmax
from eejax.inference.segment import SegmentRunner
from eejax.inference.weights import Weights
from eejax.models.cache import init_cache
from eejax.models.config import ModelConfig

CHUNK = 128  # positions whose logits exist at a time


class TextScores(NamedTuple):
    """Scores of a text's tokens given those before them, [t - 1]; the first token has none.

    Attributes:
      logprob: natural log-probability.
      top: whether the token is the most likely one.
      top_logprobs: the most likely tokens, if they were requested.
    """

    logprob: jax.Array | np.ndarray
    top: jax.Array | np.ndarray
    top_logprobs: TopLogprobs | None


def score(
    weights: Weights,
    config: ModelConfig,
    tokens: list[int],
    *,
    exit: int | None = None,
    top_logprobs: bool = False,
) -> TextScores:
    """Score a text of at least two tokens with an exit, by default the last one that is loaded.

    One program is compiled for each power of two of tokens. `weights` are those of an engine.

    Raises:
      ConfigError: for unknown tokens, more tokens than the model's context, or an unknown exit.
    """
    e = weights.last if exit is None else exit
    require(0 <= e <= weights.last, "exit", exit, f"must be in 0..{weights.last}")
    # A text may fill the context: nothing follows it.
    check_prompts([tokens], config, config.context_length + 1)
    require(len(tokens) > 1, "tokens", f"{len(tokens)} tokens", "must be at least two")
    width = padded_length(len(tokens), config.context_length)
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(tokens)] = tokens
    found = _score(weights, padded, config=config, e=e, top_logprobs=top_logprobs)
    return jax.tree.map(lambda a: np.asarray(a)[: len(tokens) - 1], found)


@partial(jax.jit, static_argnames=("config", "e", "top_logprobs"))
def _score(weights, tokens, *, config, e, top_logprobs) -> TextScores:
    run = partial(_pass, config=config, e=e, top_logprobs=top_logprobs)
    if weights.mesh is None:
        return run(weights, tokens)
    specs = sharded.weights(config, len(weights.segments), weights.mesh)
    return sharded.shard(run, weights.mesh, (specs, P()), P())(weights, tokens)


def _pass(weights, tokens, *, config, e, top_logprobs) -> TextScores:
    t = tokens.shape[1]
    runner = SegmentRunner(weights, config)
    x = runner.embed(tokens, jnp.arange(t)[None])
    cache = init_cache(config, 1, t, len(weights.segments), weights.axes)
    start = jnp.zeros((1,), jnp.int32)
    h = x
    for i in range(e + 1):
        x, h, _, _ = runner.run(i, x, start, cache.segments[i], cache.blocks[i])

    return score_states(runner, e, h[0], tokens[0], top_logprobs)


def score_states(
    runner: SegmentRunner, e: int, h: jax.Array, tokens: jax.Array, top_logprobs: bool = False
) -> TextScores:
    """Score the tokens of a text from the states of an exit.

    Args:
      runner: runner of the model.
      e: number of the exit.
      h: [t, d] states of the exit.
      tokens: [t] the text.
      top_logprobs: whether the most likely tokens are requested.

    Returns:
      Scores of all rows, [t]; the last row has no token to score, and its scores mean nothing.
    """

    def one(rows):
        h, label = rows
        logits = runner.reader(e, h).logits()
        top = compute_top_logprobs(logits) if top_logprobs else None
        return TextScores(log_probability(logits, label), argmax(logits) == label, top)

    return map_chunks(one, (h, jnp.append(tokens[1:], 0)), CHUNK)
