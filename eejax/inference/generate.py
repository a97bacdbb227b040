"""Generation: prompts in, tokens out, each with its exit, confidence and executed layers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA
from eejax.common.errors import ConfigError, require, require_count
from eejax.common.lengths import padded_length, power_of_two, round_up
from eejax.common.trees import Tree
from eejax.inference import posthoc, sharded
from eejax.inference.decoding import decode, default_plan
from eejax.inference.options import EngineOptions, engine_config, engine_options
from eejax.inference.policy import ExitPolicy, ExitRules
from eejax.inference.request import FinishReason, check_prompts
from eejax.inference.result import Collector, GenerationResult
from eejax.inference.sampling import SamplingParams
from eejax.inference.segment_branches import SPAN
from eejax.inference.state import DecodeRecord, EngineState, RequestRows
from eejax.inference.weights import Weights, prepare
from eejax.models.config import ModelConfig
from eejax.sharding.mesh import MeshConfig, check_batch

STREAM_CHUNK = 16  # steps per call while streaming or looking for stop strings
DECODE_STEPS = 128  # steps that the decoding loop is compiled for; it runs any number up to this
LENGTH_STEP = 128  # positions of cache come in multiples of this, so that few programs are compiled
LENGTH_UNIT = 16  # the longest cache is a multiple of this
GROWING_LENGTH = 512  # least positions of cache for prompts that grow


@partial(jax.jit, static_argnames=("config", "options", "length"))
def prefill(weights, plan, tokens, request, *, config, options, length):
    """Run `posthoc.prefill` as a compiled program, on a mesh if there is one."""
    run = partial(posthoc.prefill, config=config, options=options, length=length)
    if (mesh := weights.mesh) is not None:
        axes, row = weights.axes, P(weights.axes.data)
        specs = (sharded.weights(config, options.num_segments, mesh), P(), row, row)
        run = sharded.shard(run, mesh, specs, (sharded.state(axes), row))
    return run(weights, plan, tokens, request)


class GenerationParams(ExitRules, total=False):
    """Parameters of a generation, as keywords: exit rules, sampling, and what ends a request.

    Attributes:
      threshold: see `ExitPolicy.make`. The engines "full" and "speculative" ignore it and the other
        exit rules.
      temperature, top_k, top_p, min_p, seed: see `SamplingParams.make`.
      stop_token_ids: token ids that end a request; kept as its last token.
      stop_strings: texts that end a request, with the token that completes one.
      decode_text: turns token ids into text; stop strings need it.
    """

    threshold: float | Sequence[float] | np.ndarray
    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    seed: int | Sequence[int]
    stop_token_ids: Sequence[int]
    stop_strings: Sequence[str]
    decode_text: Callable[[Sequence[int]], str] | None


EXIT_RULES = ExitRules.__optional_keys__ | {"threshold"}
SAMPLING = frozenset(("temperature", "top_k", "top_p", "min_p", "seed"))
"""Names of the `GenerationParams` that make an exit policy, and of those that make sampling."""


class Decoder(abc.ABC):
    """Base of generators: checks arguments, builds a request and collects results.

    A subclass has `config` and `options`, and an engine state with the fields `token`, `position`,
    `remaining` and `request` of `EngineState` and with `replace`.
    """

    config: ModelConfig
    options: EngineOptions

    @abc.abstractmethod
    def _prefill(
        self, tokens: np.ndarray, request: RequestRows, length: int
    ) -> tuple[Any, DecodeRecord]:
        """Run padded prompts [b, t] with `length` positions of cache: (state, first record [b])."""

    @abc.abstractmethod
    def _decode(self, state: Any, n: int) -> tuple[Any, DecodeRecord]:
        """Run up to n steps: (state, records [steps (draft_rows + 1), b]), as `decode`."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        chunk: int | None = None,
        **params: Unpack[GenerationParams],
    ) -> GenerationResult:
        """Generate tokens for all prompts; arguments as `stream`."""
        *_, last = self.stream(prompts, max_new_tokens, chunk=chunk, **params)
        return last

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        chunk: int | None = STREAM_CHUNK,
        growing: bool = False,
        **params: Unpack[GenerationParams],
    ) -> Iterator[GenerationResult]:
        """Yield the growing result: the first token, then those of `chunk` steps (None: all).

        A step emits one token for each request, with drafts none or up to `options.draft_rows` + 1
        (a single request of "speculative" always emits some). A larger `chunk` returns less often,
        and up to that many steps may run for nothing behind a stop string.

        Args:
          prompts: token ids, each at least one token and shorter than the context.
          max_new_tokens: most tokens to generate for a prompt.
          growing: whether longer prompts follow, as in a conversation. The cache then has room for
            them, so that programs are compiled when it doubles (`cache_length`).
          params: how tokens exit, are drawn and end a request.

        Raises:
          ConfigError: for a value out of range.
          FloatingPointError: for logits that are not finite.
          TypeError: for an unknown parameter.
        """
        config, options = self.config, self.options
        known = GenerationParams.__optional_keys__
        if unknown := sorted(set(params) - known):
            raise TypeError(f"unknown parameters {unknown}; known are {sorted(known)}")
        stop_token_ids = params.get("stop_token_ids", ())
        stop_strings, decode_text = params.get("stop_strings", ()), params.get("decode_text")
        tokens, lengths = self._pad(prompts)
        b = len(prompts)
        require_count("max_new_tokens", max_new_tokens)
        if chunk is not None:
            require_count("chunk", chunk)
        texts = not isinstance(stop_strings, str) and all(
            isinstance(s, str) and s for s in stop_strings
        )
        require(texts, "stop_strings", stop_strings, "must be a sequence of nonempty strings")
        if stop_strings and decode_text is None:
            raise ConfigError("stop_strings: need decode_text, which turns token ids into text.")
        rules: dict[str, Any] = {k: v for k, v in params.items() if k in EXIT_RULES}
        if not options.leaves_early:
            rules = {}
        policy = ExitPolicy.make(config, b, **rules, drafts=options.draft_rows)
        drawn: dict[str, Any] = {k: v for k, v in params.items() if k in SAMPLING}
        sampling = SamplingParams.make(b, **drawn)
        room = config.context_length - lengths
        max_new = np.minimum(min(max_new_tokens, config.context_length), room).astype(np.int32)
        request = RequestRows.make(config, lengths, max_new, policy, sampling, stop_token_ids)
        longest, most = int(lengths.max()), int((lengths + max_new).max())
        _, length = program_lengths(longest, most, config.context_length, options, growing)
        if chunk is None:
            chunk = STREAM_CHUNK if stop_strings else int(max_new.max())
        chunk = min(chunk, max(1, int(max_new.max())))  # a loop has room for all steps of a chunk
        state, first = self._prefill(tokens, request, length)
        more = jax.tree.map(lambda a: a[None], first)
        limits = [
            FinishReason.CONTEXT if full else FinishReason.LENGTH for full in room < max_new_tokens
        ]
        collector = Collector(
            config, prompts, max_new, limits, stop_token_ids, stop_strings, decode_text
        )
        while True:
            result = collector.add(jax.device_get(more))
            over = result.finished
            yield result
            if over.all():
                return
            if stop_strings:  # a request that reached a stop string needs no further steps
                state = state.replace(remaining=jnp.where(over, 0, state.remaining))
            state, more = self._decode(state, chunk)

    def _pad(self, prompts) -> tuple[np.ndarray, np.ndarray]:
        check_prompts(prompts, self.config, self.config.context_length)
        lengths = np.array([len(p) for p in prompts], np.int32)
        width = padded_length(int(lengths.max()), self.config.context_length)
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, p in zip(tokens, prompts, strict=True):
            row[: len(p)] = p
        return tokens, lengths


@dataclasses.dataclass(frozen=True)
class Generator(Decoder):
    """A model prepared for generation with one engine; build it with `Generator.make`.

    `generate` and `stream` compile once for each batch size, prompt length (rounded up to a power
    of two, at least 16), cache length (`cache_length`), number of stop tokens (to a power of two)
    and, above `DECODE_STEPS`, `chunk` (to a power of two). Stop strings are searched outside the
    compiled program, after every `STREAM_CHUNK` steps unless `chunk` is set.
    """

    weights: Weights
    config: ModelConfig
    options: EngineOptions

    @classmethod
    def make(
        cls,
        params: Tree,
        config: ModelConfig,
        options: EngineOptions | str = "recompute",
        mesh: MeshConfig | Mesh | None = None,
    ) -> Generator:
        """Prepare a generator from training parameters (stacked layers).

        On a `mesh`, heads, feed-forward and vocabulary are split over its axis `model`, and
        requests, whose number must be divisible by it, over `data`. Tokens equal those of one
        device up to rounding. `GenerationResult.layers` count steps that only the requests of a
        data shard share.

        Args:
          options: `EngineOptions`, or the name of an engine.

        Raises:
          ConfigError: if the mesh has stages, needs more devices than there are, or does not fit
            the model, and for options with `logits_params`.
        """
        options = engine_options(options)
        require(
            not options.logits_params,
            "logits_params",
            True,
            "must be False with a Generator",
            "A Scheduler with an EarlyExitEngine takes LogitsParams.",
        )
        config = engine_config(config, options)
        if mesh is None:
            weights = jax.device_put(prepare(params, config, options.num_segments))
            return cls(weights, config, options)
        mesh = sharded.without_stages(mesh, options.engine)
        return cls(sharded.place(params, config, options.num_segments, mesh), config, options)

    @property
    def mesh(self) -> Mesh | None:
        return self.weights.mesh

    def slots_for(self, requests: int) -> tuple[EngineOptions, int]:
        """Return (options, slots of a data shard) of an engine for a number of requests."""
        slots = requests // (1 if self.mesh is None else self.mesh.shape[DATA])
        return self.options.resolved(self.config, slots), slots

    def _prefill(self, tokens, request, length) -> tuple[EngineState, DecodeRecord]:
        if self.mesh is not None:
            check_batch(len(tokens), self.mesh, field="prompts")
        options, slots = self.slots_for(len(tokens))
        plan = default_plan(self.config, options, slots)
        static = dict(config=self.config, options=options, length=length)
        return prefill(self.weights, plan, tokens, request, **static)

    def _decode(self, state, n) -> tuple[EngineState, DecodeRecord]:
        options, _ = self.slots_for(len(state.token))
        static = dict(config=self.config, options=options, size=decode_size(n))
        return decode(self.weights, state, np.int32(n), **static)


def decode_size(steps: int) -> int:
    """Return the steps that a decoding loop of `steps` is compiled for."""
    return max(DECODE_STEPS, power_of_two(steps))


def program_lengths(
    prompt: int, tokens: int, context: int, options: EngineOptions, growing: bool = False
) -> tuple[int, int]:
    """Return the lengths of prompts and caches that programs are compiled for.

    Args:
      prompt: tokens of the longest prompt.
      tokens: maximum tokens of a request, its prompt included.
      context: the model's context.
      options: the engine's.
      growing: as in `cache_length`.
    """
    width = padded_length(prompt, context)
    return width, cache_length(max(width, tokens), context, options, growing)


def cache_length(tokens: int, context: int, options: EngineOptions, growing: bool = False) -> int:
    """Return the positions of cache for requests of `tokens` tokens, prompts included.

    There is room behind the tokens for whole spans, and for all rows that wait at once. Attention
    reads all positions of a short cache, and every length is a program to compile, so there are at
    most four lengths from a power of two to the next, and one for requests that grow. No cache is
    longer than the context needs.
    """
    behind = max(SPAN, options.cap)
    rows = tokens + behind
    if growing:
        step = power_of_two(max(rows, GROWING_LENGTH))
    else:
        step = max(LENGTH_STEP, power_of_two(rows) // 8)
    return min(round_up(rows, step), round_up(context + behind, LENGTH_UNIT))
