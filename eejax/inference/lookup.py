"""Drafts that a text makes itself: what came after the same tokens before.

Prompt lookup decoding (Saxena 2023): summaries, code and edits repeat parts of their prompt, and
small models repeat what they said. Such a draft costs one more row of the pass that verifies it,
and no layer of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eejax.common.indexing import gather_each

SHORTEST, LONGEST = 2, 4  # tokens that must be the same, and that are compared
EXIT, TEXT = 1, 2  # `PendingRows.drafted`: where a draft is from


def continuation(text: jax.Array, position: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Return the n tokens that followed the last ones where they stood before.

    The place with the most equal tokens is taken, of several the last. A place so near that fewer
    than n tokens followed begins a repetition, which goes on.

    Args:
      text: [slots, t] int32, tokens of each text.
      position: [slots] int32, position of the last token in its text.

    Returns:
      (tokens [slots, n], found [slots] bool, whether there is a place with at least `SHORTEST`
      equal tokens).
    """
    place = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    end = position[:, None]
    same, equal = place < end, jnp.zeros(text.shape, jnp.int32)
    for back in range(LONGEST):
        own = gather_each(text, jnp.maximum(end - back, 0))
        before = jnp.pad(text, [(0, 0), (back, 0)], constant_values=-1)[:, : text.shape[1]]
        same = same & (before == own) & (end >= back)
        equal = equal + same.astype(jnp.int32)
    score = jnp.where(equal >= SHORTEST, equal * text.shape[1] + place, -1)
    best = jnp.argmax(score, -1).astype(jnp.int32)[:, None]
    period = jnp.maximum(end - best, 1)
    tokens = gather_each(text, best + 1 + jnp.arange(n, dtype=jnp.int32)[None] % period)
    return tokens, jnp.max(score, -1) >= 0
