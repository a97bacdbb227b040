"""Generation: prompts in, tokens out, with each token's exit, confidence and layers executed."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eejax.common.errors import ConfigError, require, require_count
from eejax.common.trees import Tree
from eejax.gates.confidence import GATES
from eejax.inference import posthoc, propagate, recompute, sharded, speculative
from eejax.inference.policy import ExitPolicy
from eejax.inference.result import Collector, Result
from eejax.inference.sampling import Sampling
from eejax.inference.state import (
    STOPS,
    DecodeState,
    EngineOptions,
    Record,
    Request,
    Weights,
    engine_config,
    prepare,
    without_stages,
)
from eejax.models.cache import varying
from eejax.models.config import ModelConfig
from eejax.sharding.mesh import MeshConfig, check_batch

STEPS = {
    "full": posthoc.step,
    "posthoc": posthoc.step,
    "recompute": recompute.step,
    "propagate": propagate.step,
    "speculative": speculative.step,
}
STREAM_CHUNK = 16  # steps per call while streaming or looking for stop strings
LENGTH_STEP = 64  # cache lengths are rounded up to this, so that few programs are compiled


@partial(jax.jit, static_argnames=("config", "options", "length", "mesh"))
def prefill(weights, tokens, request, *, config, options, length, mesh=None):
    """Jitted `posthoc.prefill`, on a mesh if there is one."""
    run = partial(posthoc.prefill, config=config, options=options, length=length)
    if mesh is not None:
        axes, row = weights.axes, P(weights.axes.data)
        specs = (sharded.weights(config, options.max_depth, mesh), row, row)
        run = sharded.shard(run, mesh, specs, (sharded.state(axes), row))
    return run(weights, tokens, request)


@partial(jax.jit, static_argnames=("config", "options", "n", "mesh"), donate_argnames="state")
def decode(
    weights: Weights,
    state: DecodeState,
    *,
    config: ModelConfig,
    options: EngineOptions,
    n: int,
    mesh: Mesh | None = None,
) -> tuple[DecodeState, Record]:
    """Up to `n` steps for every live request in one compiled loop; records are [n, b].

    Those of an engine that emits up to m tokens in a step are [n m, b]. Stops when all requests are
    done. Steps not taken have exit -1, as have the tokens a step could have emitted and did not.
    `state` is donated. On a `mesh` the requests of every data shard have steps of their own.
    """
    step = partial(STEPS[options.engine], config=config, options=options)
    run = partial(loop, step, n)
    if mesh is not None:
        axes, specs = weights.axes, sharded.state(weights.axes)
        given = (sharded.weights(config, options.max_depth, mesh), specs)
        run = sharded.shard(run, mesh, given, (specs, P(None, axes.data)))
    return run(weights, state)


def loop(step: Callable, size: int, weights: Weights, state, n: jax.Array | None = None):
    """Up to `n` steps, by default `size`, of a device's own requests, until all are done.

    The state, and records [size m, b] of steps that emit up to m tokens each.
    """
    n = jnp.int32(size) if n is None else n
    shapes = jax.eval_shape(step, weights, state)[1]
    records = jax.tree.map(lambda r: jnp.zeros((size, *r.shape), r.dtype), shapes)
    records = records._replace(exit=jnp.full_like(records.exit, -1))
    records = varying(records, weights.axes.data)

    def body(carry):
        i, state, records = carry
        state, record = step(weights, state)
        records = jax.tree.map(
            lambda a, r: lax.dynamic_update_index_in_dim(a, r, i, 0), records, record
        )
        return i + 1, state, records

    carry = lax.while_loop(
        lambda c: (c[0] < n) & jnp.any(c[1].live), body, (jnp.int32(0), state, records)
    )
    axis = carry[2].token.ndim - 1  # the requests'
    return carry[1], jax.tree.map(lambda a: a.reshape(-1, *a.shape[axis:]), carry[2])


class Decoder(abc.ABC):
    """What generators share: arguments checked, a request made of them, and results collected.

    A subclass has a `config` and `options`, and passes on the engine's state: with `token` ...
    `request` of `DecodeState`, and `replace`.
    """

    config: ModelConfig
    options: EngineOptions

    @abc.abstractmethod
    def _prefill(self, tokens: np.ndarray, request: Request, length: int) -> tuple[Any, Record]:
        """(state, first record [b]) of padded prompts [b, t], with `length` positions of cache."""

    @abc.abstractmethod
    def _decode(self, state: Any, n: int) -> tuple[Any, Record]:
        """Up to n tokens more for every request: (state, records [n, b])."""

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **kwargs) -> Result:
        """Tokens for every prompt at once; see `stream` for the arguments."""
        *_, last = self.stream(prompts, max_new_tokens, chunk=None, **kwargs)
        return last

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        threshold: float | Sequence[float] | np.ndarray = 1.0,
        exits: Sequence[int] | None = None,
        prefill_exit: bool = False,
        gate: str | Sequence[str] = "max_probability",
        min_depth: int | Sequence[int] = 0,
        decay: float | Sequence[float] | None = None,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        seed: int | Sequence[int] = 0,
        stop_tokens: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        decode_text: Callable[[Sequence[int]], str] | None = None,
        chunk: int | None = STREAM_CHUNK,
    ) -> Iterator[Result]:
        """Yields the growing `Result`: the first token, then those of `chunk` steps (None: all).

        A step has a token for each request, under "speculative" up to gamma + 1.

        Each value of `chunk` is a program of its own: keep to one. A larger one gives control
        back less often, and a stop string lets up to that many steps run in vain.

        prompts: token ids, each at least one token and shorter than the context.
        threshold ... decay: `ExitPolicy.make`; ignored by the engines "full" and "speculative".
            `prefill_exit` decides which exit the first token is emitted from, and spares no
            layer: the prompt's pass runs all of them (`posthoc.prefill`).
        temperature ... seed: `Sampling.make`.
        stop_tokens end a request and are kept as its last token; stop_strings end it with the
        token that completes one, and need `decode_text`, which turns token ids into text.

        Raises ConfigError for anything out of range, FloatingPointError for NaN logits.
        """
        config, options = self.config, self.options
        tokens, lengths = self._pad(prompts)
        b = len(prompts)
        require_count("max_new_tokens", max_new_tokens)
        if chunk is not None:
            require_count("chunk", chunk)
        texts = not isinstance(stop_strings, str) and all(
            isinstance(s, str) and s for s in stop_strings
        )
        require(texts, "stop_strings", stop_strings, "must be a sequence of texts, none empty")
        if stop_strings and decode_text is None:
            raise ConfigError("stop_strings: need decode_text, which turns token ids into text.")
        if not options.leaves_early:
            threshold, exits, prefill_exit, min_depth, gate = 1.0, None, False, 0, GATES[0]
        policy = ExitPolicy.make(config, b, threshold, exits, prefill_exit, gate, min_depth, decay)
        sampling = Sampling.make(b, temperature, top_k, top_p, min_p, seed)
        room = config.context_length - lengths
        max_new = np.minimum(min(max_new_tokens, config.context_length), room).astype(np.int32)
        # Padded, so that few counts of stop tokens are compiled for.
        width = max(STOPS, power_of_two(max(1, np.size(stop_tokens))))
        request = Request.make(config, lengths, max_new, policy, sampling, stop_tokens, width)
        length = int(max(tokens.shape[1], (lengths + max_new).max())) + options.most_rows
        length = -(-length // LENGTH_STEP) * LENGTH_STEP
        if chunk is None:
            chunk = STREAM_CHUNK if stop_strings else power_of_two(int(max_new.max()))
        state, first = self._prefill(tokens, request, length)
        more = jax.tree.map(lambda a: a[None], first)
        limits = np.where(room < max_new_tokens, "context", "length")
        collector = Collector(
            config, prompts, max_new, limits, stop_tokens, stop_strings, decode_text
        )
        while True:
            result = collector.add(jax.device_get(more))
            over = result.finished
            yield result
            if over.all():
                return
            if stop_strings:  # a request that met a stop string needs no further steps
                state = state.replace(remaining=jnp.where(over, 0, state.remaining))
            state, more = self._decode(state, chunk)

    def _pad(self, prompts) -> tuple[np.ndarray, np.ndarray]:
        check_prompts(prompts, self.config, self.config.context_length)
        lengths = np.array([len(p) for p in prompts], np.int32)
        width = min(max(16, power_of_two(int(lengths.max()))), self.config.context_length)
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, p in zip(tokens, prompts, strict=True):
            row[: len(p)] = p
        return tokens, lengths


def check_prompts(prompts: Sequence[Sequence[int]], config: ModelConfig, context: int) -> None:
    """Raises ConfigError for what is no sequence of prompts, and for a prompt that is no sequence
    of token ids, is empty, or leaves no room for a token in `context`."""
    listed = lambda a: hasattr(a, "__len__") and not isinstance(a, str | bytes)
    require(
        listed(prompts) and len(prompts) > 0, "prompts", prompts,
        "must be a sequence of at least one prompt", "Encode text with the model's tokenizer.",
    )  # fmt: skip
    for i, p in enumerate(prompts):
        require(
            listed(p), f"prompts[{i}]", p, "must be a sequence of token ids",
            "Encode text with the model's tokenizer.",
        )  # fmt: skip
        require(
            1 <= len(p) < context,
            f"prompts[{i}]",
            f"{len(p)} tokens",
            f"must have at least 1 token and fewer than the context ({context})",
            "Shorten the prompt." if len(p) else "Start with an end-of-document token.",
        )
        try:
            ids = np.asarray(p)
        except ValueError:  # lists of unlike lengths
            ids = np.empty((0, 0))
        whole = ids.ndim == 1 and ids.dtype.kind in "iu"
        require(
            whole and 0 <= ids.min() and ids.max() < config.vocab_size,
            f"prompts[{i}]",
            f"ids {ids.min()}..{ids.max()}" if whole else p,
            f"must be integers in 0..{config.vocab_size - 1}",
            "Is it the model's tokenizer?",
        )


@dataclasses.dataclass(frozen=True)
class Generator(Decoder):
    """A model ready to generate with one engine.

    Build with `Generator.make(params, config, options)`; `generate` and `stream` then compile once
    for each batch size, prompt length (rounded up to a power of two, at least 16), cache length
    (to a multiple of `LENGTH_STEP`), number of stop tokens (to a power of two) and `chunk`, which
    `generate` rounds up to a power of two itself. Stop strings are looked for outside of the
    compiled program, after every `STREAM_CHUNK` steps unless `chunk` says otherwise.
    """

    weights: Weights
    config: ModelConfig
    options: EngineOptions
    mesh: Mesh | None = None

    @classmethod
    def make(
        cls,
        params: Tree,
        config: ModelConfig,
        options: EngineOptions | str = "recompute",
        mesh: MeshConfig | Mesh | None = None,
    ) -> Generator:
        """From training parameters (stacked layers); `options` may be an engine's name.

        On a `mesh` heads, feed-forward and vocabulary are cut over its axis `model`, and requests,
        whose number must divide by it, over `data`. Tokens are those of one device but for
        rounding; `Result.layers` are of steps that only a data shard's requests share. Raises
        ConfigError where the mesh has stages, needs more devices than there are, or does not fit
        the model.
        """
        options = without_stages(options)
        config = engine_config(config, options)
        if mesh is None:
            return cls(prepare(params, config, options.max_depth), config, options)
        mesh = sharded.without_stages(mesh, options.engine)
        return cls(sharded.place(params, config, options.max_depth, mesh), config, options, mesh)

    @property
    def _static(self) -> dict:
        return dict(config=self.config, options=self.options, mesh=self.mesh)

    def _prefill(self, tokens, request, length):
        if self.mesh is not None:
            check_batch(len(tokens), self.mesh, field="prompts")
        return prefill(self.weights, tokens, request, length=length, **self._static)

    def _decode(self, state, n):
        return decode(self.weights, state, n=n, **self._static)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
