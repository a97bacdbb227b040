"""The training loss of an early-exit model: a weighted sum over its exits (EE-LLM, Eq. 1)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.axes import LOCAL, Axes
from eejax.common.errors import ConfigError, require
from eejax.common.trees import Tree
from eejax.losses.cross_entropy import IGNORE, Teacher, exits_cross_entropy
from eejax.losses.objective import CROSS_ENTROPY, LossObjective
from eejax.models import exits, transformer
from eejax.models.config import ModelConfig
from eejax.sharding.spread import gathered

TOKENS = 0x70C5  # folded into a sample's key; no layer's dropout has this number

Leaf = TypeVar("Leaf")  # an array, or what stands for one, such as a `PartitionSpec`


class ExitSums(NamedTuple, Generic[Leaf]):
    """Contribution of a batch to the mean loss of every exit.

    Attributes:
      sums: [e] float32, -log p summed over counted tokens, in nats, the final exit last.
      num_tokens: int32, number of counted tokens.
    """

    sums: Leaf
    num_tokens: Leaf


class BatchSums(NamedTuple, Generic[Leaf]):
    """Sums over all samples of a batch, of a loss sum_e w_e C_e (`multi_exit_loss`).

    Attributes:
      grads: gradient in the trained parameters.
      squares: [e] squared norm of the gradient that each exit sends into the hidden states at its
        boundary or, if these are frozen, of the gradient in its own parameters.
      total: the loss.
      exits: the plain cross entropies.
    """

    grads: Tree
    squares: Leaf
    total: Leaf
    exits: ExitSums[Leaf]


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
    objective: LossObjective = CROSS_ENTROPY,
    sparse: bool = False,
    layer_dropout: jax.Array | None = None,
    probes: jax.Array | None = None,
) -> tuple[jax.Array, ExitSums[jax.Array]]:
    """Compute the weighted sum of the exits' losses (EE-LLM, Eq. 1).

    The results are sums, not means: whoever accumulates over microbatches or devices divides once,
    by the global count, so that the result is that of one large batch.

    Args:
      tokens: [b, t] int32.
      labels: [b, t] int32; `IGNORE` does not count.
      weights: [e], the final exit's last.
      which: exits of the loss, by which e counts, in their order; by default all. Layers above the
        deepest are not run, unless exits distil: then a final exit that is not among them runs as
        their teacher.
      objective: the cost of a token. With `exit_tokens` below 1, the tokens of early exits are
        drawn by the dropout keys, and S_e and C_e are estimates.
      sparse: leave out exits with weight 0 at run time; their sum is 0.
      probes: [e] float32 of any value. Their gradient is the sum of squares of the gradient that
        exit e's loss sends into the hidden states at its boundary.
      positions: as in `models.transformer.exit_states`.
      segment_ids: as in `models.transformer.exit_states`.
      dropout_keys: as in `models.transformer.exit_states`.
      axes: as in `models.transformer.exit_states`.
      remat: as in `models.transformer.exit_states`.
      layer_dropout: as in `models.transformer.exit_states`.

    Returns:
      The sum over exits of w_e C_e, where C_e is exit e's cost by `objective`; and the sums S_e of
      the exits' cross entropies with the token count, which are for reports and have no gradient.
    """
    which = range(config.n_exits + 1) if which is None else which
    n = len(which)
    require(
        weights.shape == (n,),
        "weights",
        weights.shape,
        f"must have one entry for each exit of the loss, the final one included: ({n},)",
    )
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
        # A teacher that is not one of these exits has no probe.
        tap=None
        if probes is None
        else lambda i, x: _tap(x, _as_the_stream(probes[i], axes)) if i < n else x,
    )
    teacher = None
    if taught:
        *hs, last = hs
        teacher = Teacher(last, gathered(exits.head(params, config, config.n_exits)))
    drawn = None
    if objective.exit_tokens < 1:
        if dropout_keys is None:
            raise ConfigError(
                f"objective.exit_tokens = {objective.exit_tokens!r}: needs dropout_keys to draw "
                "tokens by. Give them, or set it to 1."
            )
        drawn = draw_tokens(dropout_keys, labels.shape[1], objective.exit_tokens)
    count = jnp.sum(labels != IGNORE, dtype=jnp.int32)
    total, sums = exits_loss(
        params,
        config,
        hs,
        labels,
        weights,
        which,
        objective=objective,
        teacher=teacher,
        sparse=sparse,
        axes=axes,
        drawn=drawn,
    )
    return total, ExitSums(sums, count)


def draw_tokens(keys: jax.Array, length: int, share: float) -> jax.Array:
    """Draw positions [b, k] of each sample by its key, without replacement.

    k is the share of `length`, at least one.
    """
    own = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, TOKENS), (length,)))
    return lax.top_k(own(keys), max(1, round(share * length)))[1]


def exits_loss(
    params: Tree,
    config: ModelConfig,
    hs: Sequence[jax.Array],
    labels: jax.Array,
    weights: jax.Array,
    which: Sequence[int],
    *,
    objective: LossObjective = CROSS_ENTROPY,
    teacher: Teacher | None = None,
    sparse: bool = False,
    axes: Axes = LOCAL,
    drawn: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the loss of exits from the states that their heads read.

    Args:
      hs: a state [b, t, d] for each exit, from `models.transformer.exit_states`.
      which: numbers of the exits.
      teacher: the teacher of early exits, by default the final exit, which is then the last of
        `which`.
      drawn: [b, k] the only positions at which early exits have a loss, scaled by t / k.
      labels: as in `multi_exit_loss`.
      weights: as in `multi_exit_loss`.
      objective: as in `multi_exit_loss`.
      sparse: as in `multi_exit_loss`.
      axes: as in `multi_exit_loss`.

    Returns:
      The sum over exits of w_e C_e, and the sums S_e [e].
    """
    heads = [exits.head(params, config, e) for e in which]
    early = [e != config.n_exits for e in which]
    objectives = [objective if x else _final(objective) for x in early]
    if teacher is None and objective.distillation and any(early):
        require(
            not early[-1],
            "objective.distillation",
            objective.distillation,
            "needs the final exit, which this loss does not have",
            "Set it to 0.",
        )
        teacher = Teacher(hs[-1], gathered(heads[-1]))
    total = jnp.zeros((), jnp.float32)
    sums: dict[int, jax.Array] = {}  # by index in `which`
    for same_table in exits_by_table(heads):
        table = gathered(heads[same_table[0]].table)  # once, so that it has one gradient
        apart = [same_table]
        if drawn is not None:  # early and final exits have different tokens, so separate losses
            apart = [[e for e in same_table if early[e] == x] for x in (True, False)]
        for group in filter(None, apart):
            take, scale = lambda a: a, 1.0
            if drawn is not None and early[group[0]]:
                take = functools.partial(_at, positions=drawn)
                scale = labels.shape[1] / drawn.shape[1]
            part, group_sums = exits_cross_entropy(
                [take(hs[e]) for e in group],
                [heads[e]._replace(table=table, bias=gathered(heads[e].bias)) for e in group],
                take(labels),
                weights[jnp.array(group)] * scale,
                objectives=[objectives[e] for e in group],
                teacher=teacher and teacher._replace(h=take(teacher.h)),
                sparse=sparse,
                axis=axes.model,
            )
            total = total + part
            for i, e in enumerate(group):
                sums[e] = group_sums[i] * scale
    return total, jnp.stack([sums[e] for e in range(len(heads))])


def _at(a: jax.Array, positions: jax.Array) -> jax.Array:
    """Return a [b, t, ...] at the positions [b, k] of each row."""
    return jax.vmap(lambda row, i: row[i])(a, positions)


def _final(objective: LossObjective) -> LossObjective:
    """Return the final exit's part of an objective."""
    return LossObjective(z_loss=objective.z_loss)


def _as_the_stream(probe: jax.Array, axes: Axes) -> jax.Array:
    """Return a probe of each shard's own positions; the shards' gradients add up to the whole
    one."""
    return lax.pcast(probe, axes.sequence, to="varying") if axes.sequence else probe


@jax.custom_vjp
def _tap(x: jax.Array, probe: jax.Array) -> jax.Array:
    """Return x; the gradient of `probe`, a float32 scalar, is the sum of squares of x's
    gradient."""
    return x


def _tap_backward(_, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g, jnp.sum(jnp.square(g.astype(jnp.float32)))


_tap.defvjp(lambda x, probe: (x, None), _tap_backward)


def exits_by_table(heads: list[exits.Head]) -> list[list[int]]:
    """Return groups of indices into `heads` that read the very same table array.

    Tied and shared heads form a group, so that their table needs one gradient and not one each.
    """
    groups: dict[int, list[int]] = {}
    for e, head in enumerate(heads):
        groups.setdefault(id(head.table), []).append(e)
    return list(groups.values())
