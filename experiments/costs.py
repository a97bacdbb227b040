"""What a model's segments and heads cost here, measured."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

STEPS, ROUNDS = 16, 9  # tokens of a timed run, and runs


def measure(
    params, config, widths: Sequence[int] = (1,), length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of each segment for so many rows of a request [widths, e], of each head [e]).

    Beside a cache of `length` positions, by default the context, half of it written. A segment's
    seconds are what it adds to those below it: alone, its weights might stay in a cache that all of
    them together do not fit. Medians over runs that take turns, each of several tokens in one
    compiled loop.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    from eejax.analysis import interleave
    from eejax.gates.confidence import max_probability
    from eejax.inference.sampling import argmax
    from eejax.inference.state import prepare, step_logits
    from eejax.models.cache import init_cache, run_segment

    n = config.n_exits + 1
    weights = jax.block_until_ready(prepare(params, config))
    cache = init_cache(config, 1, length or config.context_length, n)
    rows = lambda w: jax.random.normal(jax.random.key(0), (1, w, config.d_model), config.dtype)
    start = jnp.full((1,), cache.length // 2, jnp.int32)

    def through(e, weights, carry):
        """Rows through the segments up to e; they come out as the next ones."""
        x, parts = carry[0], []
        for i, (_, kvs, block) in enumerate(carry[1]):
            x, *part = run_segment(
                weights.params, weights.segments[i], config, i, x, start, kvs, block
            )
            parts.append(tuple(part))
        return x, tuple(parts)

    def read(e, weights, carry):
        y = step_logits(weights, config, e, carry[0])
        # The next row depends on this one's logits, so that none is made but once.
        return jnp.where(max_probability(y)[:, None] < 2, carry[0], -carry[0]), argmax(y)

    def timed(step, e, carry):
        loop = jax.jit(
            lambda weights, carry: lax.fori_loop(0, STEPS, lambda _, c: step(e, weights, c), carry)
        )
        return lambda _: jax.block_until_ready(loop(weights, carry))

    def cached(x, e):
        return tuple((x, cache.segments[i], cache.blocks[i]) for i in range(e + 1))

    runs = [timed(through, e, (rows(w), cached(rows(w), e))) for w in widths for e in range(n)]
    runs += [timed(read, e, (rows(1)[:, 0], jnp.zeros((1,), jnp.int32))) for e in range(n)]
    seconds = np.median(interleave(runs, ROUNDS, time.perf_counter), 1) / STEPS
    upto = np.maximum.accumulate(seconds[:-n].reshape(len(widths), n), 1)  # noise is no gain
    return np.diff(upto, axis=1, prepend=0.0), seconds[-n:]
