"""The training loss of an early-exit model: a weighted sum over its exits (EE-LLM, Eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eejax.common.axes import LOCAL, Axes
from eejax.common.errors import require
from eejax.common.trees import Tree
from eejax.losses.cross_entropy import IGNORE, exits_cross_entropy
from eejax.models import exits, transformer
from eejax.models.config import ModelConfig


class ExitSums(NamedTuple):
    """What a batch contributes to the mean loss of every exit.

    sums: [e] float32, -log p summed over counted tokens, in nats, the final exit last.
    count: int32, number of counted tokens.
    """

    sums: jax.Array
    count: jax.Array


def multi_exit_loss(
    params: Tree,
    config: ModelConfig,
    tokens: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    dropout_keys: jax.Array | None = None,
    axes: Axes = LOCAL,
    remat: str = "none",
    which: Sequence[int] | None = None,
) -> tuple[jax.Array, ExitSums]:
    """(sum over exits of w_e S_e, the sums S_e and the token count): EE-LLM, Eq. 1.

    tokens, labels [b, t] int32 (`IGNORE` does not count); weights [e], the final exit's last;
    the rest as `models.transformer.exit_states`. With `which`, e counts these exits only, in
    their order, and layers above the deepest of them are not run. Sums and not means: whoever
    accumulates over microbatches or devices divides once, by the global count, and the result is
    that of one large batch. The second result is for reporting and has no gradient.
    """
    which = range(config.n_exits + 1) if which is None else which
    n = len(which)
    require(
        weights.shape == (n,), "weights", weights.shape,
        f"must have one entry for each exit of the loss, the final one included: ({n},)",
    )  # fmt: skip
    hs = transformer.exit_states(
        params,
        config,
        tokens,
        positions=positions,
        segment_ids=segment_ids,
        dropout_keys=dropout_keys,
        axes=axes,
        remat=remat,
        which=which,
    )
    heads = [exits.head(params, config, e) for e in which]
    total, sums = jnp.zeros((), jnp.float32), [None] * n
    for group in exits_by_table(heads):
        part, group_sums = exits_cross_entropy(
            [hs[e] for e in group],
            [heads[e] for e in group],
            labels,
            weights[jnp.array(group)],
            axis=axes.model,
        )
        total = total + part
        for i, e in enumerate(group):
            sums[e] = group_sums[i]
    return total, ExitSums(jnp.stack(sums), jnp.sum(labels != IGNORE, dtype=jnp.int32))


def exits_by_table(heads: list[exits.Head]) -> list[list[int]]:
    """Places in `heads`, of those that read the very same table array together.

    Tied and shared heads meet here, so that their table needs one gradient and not one each.
    """
    groups: dict[int, list[int]] = {}
    for e, head in enumerate(heads):
        groups.setdefault(id(head.table), []).append(e)
    return list(groups.values())
