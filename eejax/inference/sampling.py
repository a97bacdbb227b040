"""Choosing a token from logits: greedy, temperature, top-k, top-p, min-p, per request."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from eejax.common.errors import require, require_array
from eejax.models.layers import NEGATIVE

DRAFT, ACCEPT = 2**31, 2**31 + 1  # what a draw is for, in numbers that are no positions


@struct.dataclass
class Sampling:
    """Per-request settings as traced arrays [b]: changing one never recompiles.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; seed makes a request's draws
    depend on nothing but (seed, position).
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array

    @classmethod
    def make(
        cls,
        batch: int,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        seed: int | Sequence[int] = 0,
    ) -> Sampling:
        """Settings for `batch` requests, each a number or one per request.

        One number as seed gives request i the seed seed + i. Raises ConfigError when out of range.
        """
        largest = np.iinfo(np.int32).max
        if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
            seed = [int(seed) + i for i in range(batch)]

        def field(name, value, dtype, ok, allowed):
            a = require_array(name, value, allowed)
            number = a.dtype.kind in ("iu" if dtype is np.int32 else "iuf")
            fits = number and bool(np.all(np.abs(a) <= np.finfo(np.float32).max))  # NaN does not
            require(fits and bool(np.all(ok(a))), name, value, allowed)
            require(
                a.shape in ((), (batch,)), name, value, f"must be one number, or {batch}: one each"
            )
            return np.array(np.broadcast_to(a.astype(dtype), (batch,)))

        f, i = np.float32, np.int32
        small = lambda a: (a >= 0) & (a <= largest)
        return cls(
            field("temperature", temperature, f, lambda a: a >= 0, "must be at least 0"),
            field("top_k", top_k, i, small, "must be 0 (off) or an integer up to 2^31 - 1"),
            field("top_p", top_p, f, lambda a: (a > 0) & (a <= 1), "must be in (0, 1]"),
            field("min_p", min_p, f, lambda a: (a >= 0) & (a <= 1), "must be in [0, 1]"),
            field("seed", seed, i, small, "must be an integer from 0 to 2^31 - 1"),
        )


def restrict(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits [b, v] after temperature, with tokens outside top-k, top-p and min-p masked.

    As is usual, the filters are applied in that order, each to what the one before left, and the
    most likely token always stays.
    """
    t = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # Padded rows of the vocabulary stay what they are: a high temperature would bring them back.
    y = jnp.where(logits > NEGATIVE, logits / t[:, None], NEGATIVE)
    v = y.shape[-1]
    ordered = lax.sort(y, dimension=-1)[:, ::-1]  # [b, v], descending
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, v), v)
    kept = jnp.where(jnp.arange(v)[None] < k[:, None], ordered, NEGATIVE)
    probability = jax.nn.softmax(kept, -1)
    before = jnp.cumsum(probability, -1) - probability  # mass of strictly likelier tokens
    # A float32 sum may reach 1 before its last terms: top_p 1 is off by definition.
    within = (before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1)
    enough = within & (probability >= sampling.min_p[:, None] * probability[:, :1])
    enough = (enough & (kept > NEGATIVE)).at[:, 0].set(True)
    last = jnp.take_along_axis(kept, jnp.sum(enough, -1, keepdims=True) - 1, -1)  # least kept
    return jnp.where(y >= last, y, NEGATIVE)


def argmax(logits: jax.Array) -> jax.Array:
    """The first most likely token [...] int32 of logits [..., v].

    `jnp.argmax`'s result, from two plain reductions: XLA's CPU backend does not vectorise the
    paired reduction of argmax, which at 50,000 tokens is ten times slower. NaN gives v.
    """
    v = logits.shape[-1]
    peak = jnp.max(logits, -1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.min(jnp.where(logits == peak, index, v), -1)


def choose(logits: jax.Array, sampling: Sampling, position: jax.Array) -> jax.Array:
    """A token [b] int32 for each row of float32 logits [b, v], at positions [b].

    The draw is keyed by (seed, position) alone, so it does not depend on the batch, the chunking
    or the engine. Nothing is sorted unless some request samples.
    """
    greedy = argmax(logits)

    samples = sampling.temperature > 0
    draw = lambda: _categorical(_keys(sampling, position), restrict(logits, sampling))
    return jnp.where(samples, lax.cond(jnp.any(samples), draw, lambda: greedy), greedy)


def draft(
    logits: jax.Array, sampling: Sampling, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As `choose`, by draws of its own: tokens [b], and the logits [b, v] they were drawn from."""
    greedy, samples = argmax(logits), sampling.temperature > 0

    def draw():
        allowed = restrict(logits, sampling)
        return _categorical(_keys(sampling, position, DRAFT), allowed), allowed

    drawn, allowed = lax.cond(jnp.any(samples), draw, lambda: (greedy, logits))
    return jnp.where(samples, drawn, greedy), allowed


def verify(
    logits: jax.Array,
    drafted: jax.Array,
    drafts: jax.Array,
    count: jax.Array,
    sampling: Sampling,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """How many drafts stand [b], and the token [b] that comes after those.

    logits [b, w, v]: at `position` [b] and behind it, given all drafts before. drafts [b, w - 1]
    and drafted [b, w - 1, v]: of `draft`, at the same positions; count [b]: those that are real.
    Then the tokens are distributed as `choose` would draw each, whatever drafted them: a draft x
    stands with probability min(1, p(x) / q(x)), and in place of the first that does not comes a
    draw from max(p - q, 0), normed; p and q are distributions after `restrict` (speculative
    sampling; Leviathan et al. 2023, section 2.3 and appendix A.1). Greedy requests take the most
    likely token. Draws are keyed by (seed, position, what for), that of a token which was not
    drafted as `choose`'s: without drafts it is the same token.
    """
    b, w, _ = logits.shape
    greedy, samples = argmax(logits), sampling.temperature > 0
    real = jnp.arange(w - 1)[None] < count[:, None]
    leading = lambda stands: jnp.sum(jnp.cumprod((stands & real).astype(jnp.int32), -1), -1)
    at = lambda a, i: jnp.take_along_axis(a, i.reshape(b, *[1] * (a.ndim - 1)), 1)[:, 0]
    agrees = drafts == greedy[:, : w - 1]

    def plain():
        stand = leading(agrees)
        return stand, at(greedy, stand)

    def sampled():
        p = jax.nn.softmax(jax.vmap(restrict, (1, None), 1)(logits, sampling), -1)
        # Behind the last draft nothing was expected: what is left of p there is p.
        q = jnp.where(real[..., None], jax.nn.softmax(drafted, -1), 0.0)
        q = jnp.pad(q, [(0, 0), (0, 1), (0, 0)])
        of = lambda a: jnp.take_along_axis(a[:, : w - 1], drafts[..., None], -1)[..., 0]
        draw = lambda i: jax.vmap(jax.random.uniform)(_keys(sampling, position + i, ACCEPT))
        chance = jax.vmap(draw, out_axes=1)(jnp.arange(w - 1, dtype=jnp.int32))
        stand = leading(jnp.where(samples[:, None], chance * of(q) < of(p), agrees))
        p, q = at(p, stand), at(q, stand)
        left = jnp.maximum(p - q, 0)
        left = jnp.where(jnp.sum(left, -1, keepdims=True) > 0, left, p)  # p is q, but for rounding
        left = jnp.where(left > 0, jnp.log(left), NEGATIVE)
        drawn = _categorical(_keys(sampling, position + stand), left)
        return stand, jnp.where(samples, drawn, at(greedy, stand))

    return lax.cond(jnp.any(samples), sampled, plain)


def _keys(sampling: Sampling, position: jax.Array, purpose: int | None = None) -> jax.Array:
    """[b] keys of (seed, position), and a purpose."""

    def one(seed, position):
        key = jax.random.key(seed)
        key = key if purpose is None else jax.random.fold_in(key, purpose)
        return jax.random.fold_in(key, position)

    return jax.vmap(one)(sampling.seed, position)


def _categorical(keys: jax.Array, logits: jax.Array) -> jax.Array:
    """[b] a token by each key, of logits [b, v]."""
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
