"""The training loss of an early-exit model: a weighted sum over its exits (EE-LLM, Eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.axes import LOCAL, Axes
from eejax.common.errors import require
from eejax.common.trees import Tree
from eejax.losses.cross_entropy import IGNORE, Teacher, exits_cross_entropy
from eejax.losses.objective import CROSS_ENTROPY, Objective
from eejax.models import exits, transformer
from eejax.models.config import ModelConfig
from eejax.sharding.spread import gathered


class ExitSums(NamedTuple):
    """What a batch contributes to the mean loss of every exit.

    sums: [e] float32, -log p summed over counted tokens, in nats, the final exit last.
    count: int32, number of counted tokens.
    """

    sums: jax.Array
    count: jax.Array


class BatchSums(NamedTuple):
    """What all samples of a batch add up to, of a loss sum_e w_e C_e (`multi_exit_loss`).

    grads: the gradient in the trained parameters. squares [e]: of what each exit sends into the
    hidden states at its boundary or, where these are frozen, of the gradient in its own
    parameters. total: the loss. exits: the plain cross entropies.
    """

    grads: Tree
    squares: jax.Array
    total: jax.Array
    exits: ExitSums


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
    objective: Objective = CROSS_ENTROPY,
    sparse: bool = False,
    layer_dropout: jax.Array | None = None,
    probes: jax.Array | None = None,
) -> tuple[jax.Array, ExitSums]:
    """(sum over exits of w_e C_e, the sums S_e and the token count): EE-LLM, Eq. 1.

    tokens, labels [b, t] int32 (`IGNORE` does not count); weights [e], the final exit's last;
    the rest as `models.transformer.exit_states`. With `which`, e counts these exits only, in
    their order, and layers above the deepest of them are not run, unless exits distil: a final exit
    that is not among them is run all the same, as their teacher. S_e is exit e's cross entropy and
    C_e what `objective` makes of it. With `sparse`, exits whose weight is 0 are left out at run
    time and have the sum 0. Sums and not means: whoever accumulates over microbatches or devices
    divides once, by the global count, and the result is that of one large batch. The second result
    is for reporting and has no gradient.

    probes [e] float32, of any value: their gradient is the sum of squares of the gradient that
    exit e's loss sends into the hidden states at its boundary.
    """
    which = range(config.n_exits + 1) if which is None else which
    n = len(which)
    require(
        weights.shape == (n,), "weights", weights.shape,
        f"must have one entry for each exit of the loss, the final one included: ({n},)",
    )  # fmt: skip
    taught = bool(objective.distillation) and config.n_exits not in which
    hs = transformer.exit_states(
        params,
        config,
        tokens,
        positions=positions,
        segment_ids=segment_ids,
        dropout_keys=dropout_keys,
        axes=axes,
        remat=remat,
        which=(*which, config.n_exits) if taught else which,
        layer_dropout=layer_dropout,
        # A teacher that is not among them has no probe.
        tap=None
        if probes is None
        else lambda i, x: _tap(x, _as_the_stream(probes[i], axes)) if i < n else x,
    )
    teacher = None
    if taught:
        *hs, last = hs
        teacher = Teacher(last, gathered(exits.head(params, config, config.n_exits)))
    count = jnp.sum(labels != IGNORE, dtype=jnp.int32)
    total, sums = exits_loss(
        params, config, hs, labels, weights, which, objective=objective, teacher=teacher,
        sparse=sparse, axes=axes,
    )  # fmt: skip
    return total, ExitSums(sums, count)


def exits_loss(
    params: Tree,
    config: ModelConfig,
    hs: Sequence[jax.Array],
    labels: jax.Array,
    weights: jax.Array,
    which: Sequence[int],
    *,
    objective: Objective = CROSS_ENTROPY,
    teacher: Teacher | None = None,
    sparse: bool = False,
    axes: Axes = LOCAL,
) -> tuple[jax.Array, jax.Array]:
    """(sum over exits of w_e C_e, the sums S_e [e]) of what the heads of the exits `which` read.

    hs: a state [b, t, d] for each of them, as `models.transformer.exit_states` gives; teacher: what
    early exits are distilled from, by default the final exit, which is then the last of `which`;
    the rest as in `multi_exit_loss`.
    """
    heads = [exits.head(params, config, e) for e in which]
    early = [e != config.n_exits for e in which]
    objectives = [objective if x else _final(objective) for x in early]
    if teacher is None and objective.distillation and any(early):
        require(
            not early[-1], "objective.distillation", objective.distillation,
            "needs the final exit, which is not part of this loss", "Set it to 0.",
        )  # fmt: skip
        teacher = Teacher(hs[-1], gathered(heads[-1]))
    total, sums = jnp.zeros((), jnp.float32), [None] * len(heads)
    for group in exits_by_table(heads):
        table = gathered(heads[group[0]].table)  # once, so that its gradient is one too
        part, group_sums = exits_cross_entropy(
            [hs[e] for e in group],
            [heads[e]._replace(table=table, bias=gathered(heads[e].bias)) for e in group],
            labels,
            weights[jnp.array(group)],
            objectives=[objectives[e] for e in group],
            teacher=teacher,
            sparse=sparse,
            axis=axes.model,
        )
        total = total + part
        for i, e in enumerate(group):
            sums[e] = group_sums[i]
    return total, jnp.stack(sums)


def _final(objective: Objective) -> Objective:
    """The final exit's part of an objective."""
    return Objective(z_loss=objective.z_loss)


def _as_the_stream(probe: jax.Array, axes: Axes) -> jax.Array:
    """A probe of each shard's own positions, whose gradients add up to that of the whole."""
    return lax.pcast(probe, axes.sequence, to="varying") if axes.sequence else probe


@jax.custom_vjp
def _tap(x: jax.Array, probe: jax.Array) -> jax.Array:
    """x; the gradient of `probe`, a float32 scalar, is the sum of squares of that of x."""
    return x


def _tap_backward(_, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g, jnp.sum(jnp.square(g.astype(jnp.float32)))


_tap.defvjp(lambda x, probe: (x, None), _tap_backward)


def exits_by_table(heads: list[exits.Head]) -> list[list[int]]:
    """Places in `heads`, of those that read the very same table array together.

    Tied and shared heads meet here, so that their table needs one gradient and not one each.
    """
    groups: dict[int, list[int]] = {}
    for e, head in enumerate(heads):
        groups.setdefault(id(head.table), []).append(e)
    return list(groups.values())
