"""Measured costs of a model's parts: seconds of a decoding step's layers and heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

STEPS, ROUNDS = 16, 9  # tokens of a timed run, and runs


def of_segments(params, config, widths: Sequence[int] = (1,)) -> tuple[np.ndarray, np.ndarray]:
    """Measure the seconds of each segment for `widths` rows [widths, e], and of each head [e].

    They are medians over runs in turns, beside a cache as long as the context.
    """
    from eejax.analysis import interleave
    from eejax.inference.weights import prepare

    runs, read = segment_runs(prepare(params, config), config, widths, config.context_length)
    return read(np.median(interleave(runs, ROUNDS, time.perf_counter), 1))


def segment_runs(weights, config, widths: Sequence[int], length: int):
    """Return the runs to time by `analysis.interleave`, and a function of their seconds.

    The function returns the seconds of `of_segments`, beside a cache of `length` positions, half of
    it written. A segment's seconds are what it adds to those below it: alone, its weights might
    stay in a processor's cache that does not hold all segments.
    """
    import jax.numpy as jnp

    from eejax.inference.segment import SegmentRunner
    from eejax.models.cache import init_cache

    n = config.n_exits + 1
    cache = init_cache(config, 1, length, n)
    start = jnp.full((1,), cache.length // 2, jnp.int32)

    def through(weights, carry):
        """Run rows through the segments that have caches; the results are the next rows."""
        runner, x, parts = SegmentRunner(weights, config), carry[0], []
        for i, (_, kvs, block) in enumerate(carry[1]):
            x, *part = runner.run(i, x, start, kvs, block)
            parts.append(tuple(part))
        return x, tuple(parts)

    def run(width, e):
        x = _rows(config, width)
        parts = ((x, cache.segments[i], cache.blocks[i]) for i in range(e + 1))
        return through, (x, tuple(parts))

    steps = [run(w, e) for w in widths for e in range(n)] + _heads(config, n)

    def read(seconds):
        seconds = np.asarray(seconds) / STEPS
        upto = seconds[:-n].reshape(len(widths), n)
        upto = np.maximum.accumulate(upto, 1)  # removes noise: more segments are never faster
        return np.diff(upto, axis=1, prepend=0.0), seconds[-n:]

    return _loops(weights, steps), read


def of_layers(params, config, widths: Sequence[int]):
    """Measure (`ForwardTimes` of one token; by width, the times of one that `width` rows take).

    They are medians over runs in turns, beside a cache as long as the context.
    """
    from eejax.analysis import interleave
    from eejax.inference.weights import prepare

    length = config.context_length + max(widths)
    runs, read = layer_runs(prepare(params, config), config, widths, length)
    return read(np.median(interleave(runs, ROUNDS, time.perf_counter), 1))


def layer_runs(weights, config, widths: Sequence[int], length: int):
    """Return the runs to time by `analysis.interleave`, and a function of their seconds.

    The function returns the times of `of_layers`, beside a cache of `length` positions, half of it
    written. Layers count as equal: each has its share of all of them. An exit's time is that of its
    own layers, its head, and the evaluation of the logits.
    """
    import jax.numpy as jnp

    from eejax.experiments.latency import ForwardTimes
    from eejax.inference.segment import SegmentRunner
    from eejax.models.cache import init_cache

    n, plain = config.n_exits + 1, config.replace(exits=())
    start = jnp.full((1,), (length - max(widths)) // 2, jnp.int32)

    def through(weights, carry):
        whole = weights.replace(segments=(sum(weights.segments, ()),))
        x, _, kvs, _ = SegmentRunner(whole, plain).run(0, carry[0], start, *carry[1:])
        return x, kvs, None

    kvs = init_cache(plain, 1, length, 1).segments[0]
    runs = [(through, (_rows(config, w), kvs, None)) for w in widths]
    blocks = init_cache(config, 1, length, n).blocks

    def read(seconds):
        seconds = np.asarray(seconds) / STEPS
        alone = float(seconds[0])
        layers = (alone / config.n_layers,) * config.n_layers
        times = ForwardTimes(layers, tuple(seconds[-n:].tolist()))
        # More rows are never faster, except by noise.
        factors = np.maximum.accumulate(seconds[:-n] / alone).tolist()
        return times, dict(zip(widths, factors, strict=True))

    return _loops(weights, runs + _heads(config, n, blocks, start)), read


def _rows(config, width: int):
    import jax

    return jax.random.normal(jax.random.key(0), (1, width, config.d_model), config.dtype)


def _heads(config, n: int, blocks=None, start=None) -> list[tuple[Callable, Any]]:
    """Return a run of every exit: its head, and with `blocks` the layers of its own below it."""
    import jax.numpy as jnp

    from eejax.gates.confidence import max_probability
    from eejax.inference.sampling import argmax
    from eejax.inference.segment import SegmentRunner

    def look(e, weights, carry):
        x, block, _ = carry
        runner, h = SegmentRunner(weights.replace(segments=((),) * n), config), x
        if blocks is not None:
            _, h, _, block = runner.run(e, x, start, (), block)
        y = runner.reader(e, h[:, 0]).logits()
        # The next row depends on these logits, so that XLA cannot hoist them out of the loop.
        return jnp.where(max_probability(y)[:, None, None] < 2, x, -x), block, argmax(y)

    token, of = jnp.zeros((1,), jnp.int32), blocks or (None,) * n
    return [(partial(look, e), (_rows(config, 1), of[e], token)) for e in range(n)]


def _loops(weights, steps: list[tuple[Callable, Any]]) -> list[Callable]:
    """Return a run of each step(weights, carry), `STEPS` of them in one compiled loop."""
    import jax
    from jax import lax

    jax.block_until_ready(weights)

    def loop(step, carry):
        compiled = jax.jit(
            lambda weights, carry: lax.fori_loop(0, STEPS, lambda _, c: step(weights, c), carry)
        )
        return lambda _: jax.block_until_ready(compiled(weights, carry))

    return [loop(*step) for step in steps]
