"""Audits of answers by a whole model.

The answer runs through the whole model once. The result says for each token whether the whole model
would have chosen it, and how likely it was. Layers that are not loaded are brought one at a time
and freed again, so an audit needs room for one layer (`capacity.audit_bytes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from eejax.common.errors import require
from eejax.common.lengths import padded_length
from eejax.common.trees import Tree
from eejax.helios.disagreement_bound import AnswerAudit
from eejax.helios.quality import agreement_of, relative_to
from eejax.inference import scoring
from eejax.inference.deepening import on_host
from eejax.inference.segment import SegmentRunner
from eejax.inference.weights import Weights, unlayered_params
from eejax.models import layers, transformer
from eejax.models.cache import kv_heads, unstack_segments
from eejax.models.config import ModelConfig


class AnswerVerifier:
    """Judge of answers that runs the whole model."""

    def __init__(self, host: Tree, config: ModelConfig):
        """Keep the training tree `host`, without a second copy if `on_host` made it."""
        self._host, self.config = on_host(host, config), config

    def judge(
        self, loaded: Weights | None, prompt: Sequence[int], tokens: Sequence[int]
    ) -> AnswerAudit:
        """Judge the tokens after a prompt.

        One program is compiled for each power of two of tokens, and for each kind of layers.

        Args:
          loaded: the model's first segments, as far as they are on the device; None if nothing is
            loaded, and the embeddings are brought too.
        """
        require(len(prompt) > 0, "prompt", prompt, "must have at least one token")
        config = self.config
        if loaded is None:
            loaded = Weights((), _brought(unlayered_params(self._host, config, 0)))
        text = [*prompt, *tokens]
        width = padded_length(len(text), config.context_length + 1)
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(text)] = text
        # Early exits are not used, and differ from depth to depth.
        params = {k: v for k, v in loaded.params.items() if k != "exits"}
        x = _embedded(params, padded, config=config)
        n = len(loaded.segments)
        there = [layer for segment in loaded.segments for layer in segment]
        rest = unstack_segments(self._host, config, config.n_exits + 1, first=n)
        rest = [layer for segment in rest for layer in segment]

        def run(i: int, layer: Tree, x: jax.Array) -> jax.Array:
            return _through(layer, x, config=config, window=config.window(i), rope=config.rope(i))

        for i, layer in enumerate(there):
            x = run(i, layer, x)
        for i, layer in enumerate(rest, len(there)):
            # The layer is freed before the next one is brought.
            x = jax.block_until_ready(run(i, _brought(layer), x))
        if "final" not in params:
            params["final"] = _brought(self._host["final"])
        logprob, same = _read(params, x, padded, config=config)
        own = slice(len(prompt) - 1, len(text) - 1)
        return AnswerAudit(np.asarray(same)[own], np.asarray(logprob)[own])


class ReferenceJudge:
    """The model that judges the answers of all members of a fleet.

    Attributes:
      name: name of the member that this model is, whose loaded segments are used; None if it is
        not a member.
      least: the lowest perplexity of the members' answers, whose ratio to an answer's perplexity is
        its quality; None if the quality is the share of tokens that this model would have chosen.
    """

    def __init__(
        self, host: Tree, config: ModelConfig, name: str | None = None, least: float | None = None
    ):
        self.host, self.config = host, config
        self.verifier = AnswerVerifier(host, config)
        self.name, self.least = name, least

    def quality(self, verdict: AnswerAudit) -> float:
        if self.least is None:
            return agreement_of(verdict)
        return relative_to(self.least, verdict)


def _brought(tree: Tree) -> Tree:
    return jax.device_put(tree)


@partial(jax.jit, static_argnames="config")
def _embedded(params, tokens, *, config):
    return transformer.embed(params, config, tokens, jnp.arange(tokens.shape[1])[None])


@partial(jax.jit, static_argnames=("config", "window", "rope"))
def _through(layer, x, *, config, window, rope):
    # With buffers of keys and values, so that the same kernel runs as in the engine.
    positions = jnp.arange(x.shape[1])[None]
    context = layers.make_context(
        config, positions, key_positions=positions, start=jnp.zeros((1,), jnp.int32)
    )
    buffer = jnp.zeros((kv_heads(config), x.shape[1], config.head_dim), config.dtype)
    cache = (buffer, buffer)
    return layers.layer(layer, x, config, context, window=window, rope=rope, cache=cache)[0]


@partial(jax.jit, static_argnames="config")
def _read(params, x, tokens, *, config):
    runner = SegmentRunner(Weights((), params), config)
    scores = scoring.score_states(runner, config.n_exits, x[0], tokens[0])
    return scores.logprob, scores.top
