"""Scoring of existing texts with a model, without decoding."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from eejax.common.errors import require
from eejax.common.indexing import chunk_start, put_slice, take_slice
from eejax.common.trees import map_chunks
from eejax.inference import sharded
from eejax.inference.logits_params import TopLogprobs, compute_top_logprobs
from eejax.inference.options import CHUNKS
from eejax.inference.policy import log_probability
from eejax.inference.request import check_prompts
from eejax.inference.sampling import argmax
from eejax.inference.segment import SegmentRunner
from eejax.inference.weights import Weights
from eejax.kernels import call
from eejax.models.cache import init_cache
from eejax.models.config import ModelConfig

CHUNK = 128  # positions of given states whose logits exist at a time
SHORTEST, GROWTH = 512, 4  # texts are padded to the first length, or to that times powers of 4


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

    One program is compiled for each of `score_lengths`. `weights` are those of an engine.

    Raises:
      ConfigError: for unknown tokens, more tokens than the model's context, or an unknown exit.
    """
    e = weights.last if exit is None else exit
    require(0 <= e <= weights.last, "exit", exit, f"must be in 0..{weights.last}")
    # A text may fill the context: nothing follows it.
    check_prompts([tokens], config, config.context_length + 1)
    require(len(tokens) > 1, "tokens", f"{len(tokens)} tokens", "must be at least two")
    width = next(n for n in score_lengths(config.context_length) if n >= len(tokens))
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(tokens)] = tokens
    count = np.int32(len(tokens))
    found = _score(weights, padded, count, config=config, e=e, top_logprobs=top_logprobs)
    return jax.tree.map(lambda a: np.asarray(a)[: len(tokens) - 1], found)


def score_lengths(context: int) -> list[int]:
    """Return the lengths that texts of up to `context` tokens are padded to.

    Padding costs the memory of keys and values, but no time: only chunks with tokens run.
    """
    lengths = [min(SHORTEST, context)]
    while lengths[-1] < context:
        lengths.append(min(GROWTH * lengths[-1], context))
    return lengths


@partial(jax.jit, static_argnames=("config", "e", "top_logprobs"))
def _score(weights, tokens, count, *, config, e, top_logprobs) -> TextScores:
    run = partial(_score_chunks, config=config, e=e, top_logprobs=top_logprobs)
    if weights.mesh is None:
        return run(weights, tokens, count)
    specs = sharded.weights(config, len(weights.segments), weights.mesh)
    return sharded.shard(run, weights.mesh, (specs, P(), P()), P())(weights, tokens, count)


def _score_chunks(weights, tokens, count, *, config, e, top_logprobs) -> TextScores:
    """Score the first `count` of tokens [1, t] in chunks; scores behind them mean nothing."""
    t = tokens.shape[1]
    width = min(CHUNKS["gpu" if call.for_gpu() else "cpu"], t)
    runner = SegmentRunner(weights, config)
    labels = jnp.append(tokens[0, 1:], 0)

    def score_chunk(start, segments, blocks):
        x = runner.embed(
            take_slice(tokens, (0, start), (1, width)), start + jnp.arange(width)[None]
        )
        h, first, segments, blocks = x, start[None], [*segments], [*blocks]
        for i in range(e + 1):
            x, h, segments[i], blocks[i] = runner.run(i, x, first, segments[i], blocks[i])
        scores = _score_rows(runner, e, h[0], take_slice(labels, (start,), (width,)), top_logprobs)
        return scores, tuple(segments), tuple(blocks)

    def body(i, carry):
        found, *cache = carry
        start = chunk_start(i, width, t)
        scores, *cache = score_chunk(start, *cache)
        found = jax.tree.map(
            lambda a, new: put_slice(a, new, (start,) + (0,) * (a.ndim - 1)), found, scores
        )
        return found, *cache

    cache = init_cache(config, 1, t, len(weights.segments), weights.axes)
    cache = cache.segments, cache.blocks
    shapes = jax.eval_shape(score_chunk, jnp.int32(0), *cache)[0]
    found = jax.tree.map(lambda a: jnp.zeros((t, *a.shape[1:]), a.dtype), shapes)
    return lax.fori_loop(0, (count + width - 1) // width, body, (found, *cache))[0]


def _score_rows(runner, e, h, labels, top_logprobs) -> TextScores:
    """Score labels [t] after the states h [t, d] of exit e."""
    logits = runner.reader(e, h).logits()
    top = compute_top_logprobs(logits) if top_logprobs else None
    return TextScores(log_probability(logits, labels), argmax(logits) == labels, top)


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

    def score_rows(rows):
        h, labels = rows
        return _score_rows(runner, e, h, labels, top_logprobs)

    return map_chunks(score_rows, (h, jnp.append(tokens[1:], 0)), CHUNK)
