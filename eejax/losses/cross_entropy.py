"""Cross entropy of a linear head, and losses made of it, without the logits of a whole batch.

The tokens are taken in chunks by `kernels.linear_cross_entropy.chunks`. When the loss is
differentiated, the forward pass turns each chunk's logits into the gradients of the hidden states
and of the table on the spot (the logits' gradient needs nothing from the backward pass but one
scalar factor), so that the backward pass only scales. This takes three matrix products for each
exit, as plain autodiff does; recomputing the logits would take four. Only one chunk of logits
exists at a time. Do not wrap the loss in `jax.checkpoint`: it would run twice.

On GPUs a chunk's costs and gradient are those of the kernels, except for exits that are distilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.errors import require, require_given
from eejax.common.trees import varying_zero
from eejax.kernels import call
from eejax.kernels.linear_cross_entropy import api as kernel
from eejax.kernels.linear_cross_entropy import chunks
from eejax.losses.objective import CROSS_ENTROPY, LossObjective
from eejax.models.exits import Head, HeadOptions, logits
from eejax.models.layers import NEGATIVE

IGNORE = chunks.IGNORE
"""Label of a token whose loss does not count."""

CHUNK_LOGITS = 2**22
"""Logits that exist at a time (16 MiB of float32), unless that is below `MIN_CHUNK` tokens."""

MIN_CHUNK = 256
"""With fewer tokens at a time, most time would go into reading and writing the table's gradient."""

MIN_CHUNKS = 4
"""Minimum number of chunks, so that even a small batch holds at most a quarter of its logits."""


class Teacher(NamedTuple):
    """Teacher of an exit's distillation: another exit.

    Attributes:
      h: [..., d] hidden states.
      head: its head.
    """

    h: jax.Array
    head: Head


class _Spec(NamedTuple):
    """Static part of the loss of exits that share a table.

    Attributes:
      options: of each exit's head.
      objectives: cost of a token at each exit.
      teacher: options of the teacher's head, or None.
      axis: the mesh axis that the vocabulary is split over.
      sparse: exits with the coefficient 0 are left out at run time.
    """

    options: tuple[HeadOptions, ...]
    objectives: tuple[LossObjective, ...]
    teacher: HeadOptions | None
    axis: str | None
    sparse: bool


class _Inputs(NamedTuple):
    """Arrays of the loss of exits that share a table, of n tokens.

    Attributes:
      hs: [n, d] states of each exit.
      table: [v, d].
      biases: [v] of each exit, or None.
      labels: [n].
      weights: [n] float32 of each exit, or None.
      coefficients: [e].
      teacher: (states [n, d], table [v, d] in their dtype, bias [v] or None), or None.
    """

    hs: tuple[jax.Array, ...]
    table: jax.Array
    biases: tuple[jax.Array | None, ...]
    labels: jax.Array
    weights: tuple[jax.Array, ...] | None
    coefficients: jax.Array
    teacher: tuple[jax.Array, jax.Array, jax.Array | None] | None


def linear_cross_entropy(
    h: jax.Array,
    head: Head,
    labels: jax.Array,
    *,
    weights: jax.Array | None = None,
    axis: str | None = None,
) -> jax.Array:
    """Sum weight * -log p(label) over tokens, without logits of all of them.

    Differentiable once, in h, table, bias and weights.

    Args:
      h: [..., d] in the dtype of computation; products accumulate in float32.
      head: with a mesh `axis` its table and bias are this shard's rows.
      labels: [...] int32, `IGNORE` where a token does not count. A label that is no token of the
        vocabulary makes loss and gradients NaN.
      weights: [...] float32, by default 1.
      axis: the mesh axis, inside a `shard_map` with `check_vma=True`, that the vocabulary is split
        over. The loss and all gradients are those of the whole vocabulary.

    Returns:
      The sum in nats, float32 [].
    """
    one = jnp.ones((1,), jnp.float32)
    own = None if weights is None else (weights,)
    return exits_cross_entropy((h,), (head,), labels, one, weights=own, axis=axis)[0]


def exits_cross_entropy(
    hs: Sequence[jax.Array],
    heads: Sequence[Head],
    labels: jax.Array,
    coefficients: jax.Array,
    *,
    weights: Sequence[jax.Array] | None = None,
    objectives: Sequence[LossObjective] | None = None,
    teacher: Teacher | None = None,
    sparse: bool = False,
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum c_e C_e over exits e whose heads share one table.

    C_e is the sum over tokens of the cost by objectives[e], by default the cross entropy. Together
    the exits keep one gradient of the table between the forward and the backward pass, not one
    each.

    Args:
      hs: states [..., d] of each exit.
      heads: a head for each exit; all of the very same table.
      labels: as in `linear_cross_entropy`.
      coefficients: c, [e].
      weights: for each exit as in `linear_cross_entropy`.
      objectives: one for each exit.
      teacher: needed if an objective distils. It has no gradient.
      sparse: leave out an exit with the coefficient 0 at run time; its sum is 0.
      axis: as in `linear_cross_entropy`.

    Returns:
      The sum, float32 [], and S [e], `linear_cross_entropy` of each exit. Only the first is
      differentiable (in `coefficients` too); the second is for reporting.

    Raises:
      ConfigError: heads of different tables, or an objective that distils without a teacher.
    """
    table = heads[0].table
    require(
        all(head.table is table for head in heads),
        "heads",
        len(heads),
        "must share one table",
        "Call once for each distinct table.",
    )
    objectives = tuple(objectives or [CROSS_ENTROPY] * len(heads))
    teacher_arrays, teacher_options = None, None
    if any(o.distillation for o in objectives):
        teacher = require_given("teacher", teacher, "must be given if an objective distils")
        work = teacher.head.table.astype(teacher.h.dtype)
        teacher_arrays = lax.stop_gradient((_flat(teacher.h), work, teacher.head.bias))
        teacher_options = teacher.head.options
    if weights is not None:
        weights = tuple(w.reshape(-1).astype(jnp.float32) for w in weights)
    inputs = _Inputs(
        tuple(map(_flat, hs)),
        table,
        tuple(head.bias for head in heads),
        labels.reshape(-1),
        weights,
        coefficients,
        teacher_arrays,
    )
    spec = _Spec(tuple(head.options for head in heads), objectives, teacher_options, axis, sparse)
    total, sums = _exits_loss(spec, chunks.vary_alike(inputs, axis))
    return total, lax.stop_gradient(sums)


def _flat(h: jax.Array) -> jax.Array:
    return h.reshape(-1, h.shape[-1])


def chunk_size(n: int, rows: int) -> int:
    """Return the tokens of a chunk: near the target, and dividing n evenly where possible.

    There are at least `MIN_CHUNKS` chunks: XLA unrolls a loop that runs once, and then holds the
    logits of several exits at the same time.
    """
    target = max(MIN_CHUNK, CHUNK_LOGITS // rows)
    return max(1, -(-n // max(MIN_CHUNKS, -(-n // target))))


class _Norms(NamedTuple):
    """Normalisers that turn logits of n tokens into the distributions of a cost.

    Attributes:
      lse: [n] log-sum-exp of the logits.
      confidence: [n] the highest probability, or None.
      tempered: [n] log-sum-exp of the logits divided by the temperature, or None.
      teacher: [n] tempered log-sum-exp of the teacher's logits, or None.
    """

    lse: jax.Array
    confidence: jax.Array | None = None
    tempered: jax.Array | None = None
    teacher: jax.Array | None = None


def _log_sum_exp(y: jax.Array, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """Return log-sum-exp [n] and maximum [n] of logits [n, v], of which this shard has some
    columns."""
    top = chunks.over_shards(lax.pmax, y.max(-1), axis)
    total = chunks.over_shards(lax.psum, jnp.exp(y - top[:, None]).sum(-1), axis)
    return top + jnp.log(total), top


def _costs(o: LossObjective, axis: str | None, y, z, labels) -> chunks.TokenCosts:
    """Return the costs from logits y [n, v] and the teacher's z [n, v], and what the gradient
    needs."""
    lse, top = _log_sum_exp(y, axis)
    picked = jnp.take_along_axis(y, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
    nll = lse - chunks.over_shards(lax.psum, jnp.where(labels >= 0, picked, 0.0), axis)
    cost, norms = nll, _Norms(lse)
    if o.distillation:
        t = o.distillation_temperature
        tempered, _ = _log_sum_exp(y / t, axis)
        teacher, _ = _log_sum_exp(z / t, axis)
        q = jnp.exp(z / t - teacher[:, None])
        mean = chunks.over_shards(lax.psum, jnp.sum(q * (z - y), -1), axis) / t
        cost = (1 - o.distillation) * cost + o.distillation * t**2 * (mean + tempered - teacher)
        norms = norms._replace(tempered=tempered, teacher=teacher)
    if o.confidence_weighted:
        confidence = jnp.exp(top - lse)
        norms = norms._replace(confidence=confidence)
        cost = cost * confidence
    if o.z_loss:
        cost = cost + o.z_loss * jnp.square(lse)
    return chunks.TokenCosts(cost, nll, (y, z, norms))


def _logits_gradient(o: HeadOptions, objective: LossObjective, kept, labels, scale):
    """Return the float32 gradient [n, v] of sum(scale * cost) in h @ table.T + bias."""
    y, z, norms = kept
    column = lax.broadcasted_iota(jnp.int32, y.shape, 1)
    # Without the barrier XLA fuses the reductions behind `lse` into this expression and
    # evaluates the exponentials several times over (1.5 times slower on CPU).
    norms = lax.optimization_barrier(norms)
    p = jnp.exp(y - norms.lse[:, None])
    g = p - (column == labels[:, None]).astype(jnp.float32)
    if objective.distillation:
        t = objective.distillation_temperature
        apart = jnp.exp(y / t - norms.tempered[:, None]) - jnp.exp(z / t - norms.teacher[:, None])
        g = (1 - objective.distillation) * g + objective.distillation * t * apart
    if objective.confidence_weighted:
        g = g * norms.confidence[:, None]
    if objective.z_loss:
        g = g + p * (2 * objective.z_loss * norms.lse)[:, None]
    g = g * (scale / o.temperature)[:, None]
    if o.softcap is not None:
        tanh = y * (o.temperature / o.softcap)
        g = jnp.where(y > NEGATIVE, g * (1.0 - jnp.square(tanh)), 0.0)
    return g


def _logits_loss(spec: _Spec, e: int, inputs: _Inputs) -> chunks.ChunkLoss:
    """Return costs and gradient of a chunk at exit e by XLA's operations on the chunk's logits."""
    options, objective, bias = spec.options[e], spec.objectives[e], inputs.biases[e]
    table = inputs.table.astype(inputs.hs[e].dtype)

    def costs(h: jax.Array, tokens: chunks.LossTokens, _) -> chunks.TokenCosts:
        y, z = logits(Head(table, bias, options), h, spec.axis), None
        if objective.distillation:
            assert inputs.teacher is not None and tokens.teacher is not None
            assert spec.teacher is not None  # `exits_cross_entropy` requires a teacher
            _, teacher_table, teacher_bias = inputs.teacher
            z = logits(Head(teacher_table, teacher_bias, spec.teacher), tokens.teacher, spec.axis)
        return _costs(objective, spec.axis, y, z, tokens.labels)

    def gradient(kept, tokens: chunks.LossTokens, scale: jax.Array):
        g = _logits_gradient(options, objective, kept, tokens.labels, scale)
        return g.astype(table.dtype), None if bias is None else g.sum(0)

    return chunks.ChunkLoss(table, bias, costs, gradient, transposed=not call.by_kernels())


def _exit_sums(spec: _Spec, e: int, inputs: _Inputs, into: jax.Array | None):
    """Return the sums of exit e, and its gradients if there is an array to add them `into`."""
    options, o = spec.options[e], spec.objectives[e]
    h, table, labels = inputs.hs[e], inputs.table, inputs.labels
    weights = None if inputs.weights is None else inputs.weights[e]
    coefficient = inputs.coefficients[e]
    scale = coefficient.astype(jnp.float32)
    skip = coefficient == 0 if spec.sparse else None
    if call.by_kernels() and not o.distillation:  # kernels do not distil
        kernel_options = kernel.LossOptions(
            options.vocab_size,
            options.softcap,
            options.temperature,
            o.z_loss,
            o.confidence_weighted,
        )
        return kernel.linear_cross_entropy(
            h,
            table,
            inputs.biases[e],
            labels,
            weights,
            options=kernel_options,
            axis=spec.axis,
            scale=scale,
            into=into,
            skip=skip,
        )
    rows = table.shape[0]
    tokens = chunks.loss_tokens(labels, weights, options.vocab_size, rows, spec.axis)
    if o.distillation:
        assert inputs.teacher is not None
        tokens = tokens._replace(teacher=inputs.teacher[0])
    size = chunk_size(labels.size, rows)
    loss = _logits_loss(spec, e, inputs)
    return chunks.sum_chunks(loss, h, tokens, size, scale=scale, into=into, skip=skip)


def _total_and_sums(spec: _Spec, inputs: _Inputs) -> tuple[jax.Array, jax.Array]:
    """Return (sum of c_e C_e, S [e])."""
    found = [_exit_sums(spec, e, inputs, None)[0] for e in range(len(inputs.hs))]
    return _results(spec, inputs.coefficients, found)[0]


_exits_loss = jax.custom_vjp(_total_and_sums, nondiff_argnums=(0,))


def _results(spec: _Spec, coefficients: jax.Array, found: Sequence[chunks.Sums]):
    """Return the results of `_exits_loss`, and this shard's value of C [e] (`_once`)."""
    costs, sums = (_once(spec, jnp.stack(a)) for a in zip(*found, strict=True))
    total = jnp.sum(coefficients.astype(jnp.float32) * costs)
    if spec.axis:  # equal on all shards, which a sum with one term tells the type system
        total, sums = lax.psum((total, sums), spec.axis)
    return (total, sums), costs


def _once(spec: _Spec, a: jax.Array) -> jax.Array:
    """Keep a value that is equal on all shards of the vocabulary on the first one; 0 on the
    others."""
    return jnp.where(lax.axis_index(spec.axis) == 0, a, 0.0) if spec.axis else a


def _forward(spec: _Spec, inputs: _Inputs):
    # h.T @ g is a faster product than g.T @ h on CPU; kernels add to [v, d].
    table = inputs.table if call.by_kernels() else inputs.table.T
    into = jnp.zeros_like(table, jnp.float32) + varying_zero(inputs).astype(jnp.float32)
    found, gradients = [], []
    for e in range(len(inputs.hs)):
        sums, d = _exit_sums(spec, e, inputs, into)
        assert d is not None  # as `into` is given
        into = d.table
        found.append(sums)
        gradients.append(d)
    results, costs = _results(spec, inputs.coefficients, found)
    d_weights = None
    if inputs.weights is not None:
        c = inputs.coefficients.astype(jnp.float32)
        d_weights = tuple(_once(spec, d.weights) * c[e] for e, d in enumerate(gradients))
    gradients = inputs._replace(
        hs=tuple(d.h for d in gradients),
        table=into if call.by_kernels() else into.T,
        biases=tuple(d.bias for d in gradients),
        labels=None,
        weights=d_weights,
        coefficients=costs,
        teacher=None,  # held constant
    )
    like = jax.tree.map(
        lambda a: jnp.zeros((), a.dtype), inputs._replace(labels=None, teacher=None)
    )
    return results, (gradients, like)


def _backward(spec: _Spec, saved, cotangents):
    gradients, like = saved
    g, _ = cotangents

    def scaled(a: jax.Array, to: jax.Array) -> jax.Array:
        return (a.astype(jnp.float32) * g).astype(to.dtype)

    return (jax.tree.map(scaled, gradients, like),)


_exits_loss.defvjp(_forward, _backward)
