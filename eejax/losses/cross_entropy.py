"""Cross entropy of a linear head, and losses made of it, without the logits of a whole batch.

The tokens are taken in chunks. When the loss is differentiated, the forward pass forms each
chunk's logits once and turns them into the gradients of the hidden states and of the table on
the spot (the logits' gradient needs nothing from the backward pass but one scalar factor), so
that the backward pass only scales. That is three matrix products per exit, as plain autodiff
needs, against four when logits are recomputed, and the memory of one chunk of logits. Do not
put it under `jax.checkpoint`, which would run it twice for nothing.

On GPUs all of this is the op `kernels.linear_cross_entropy`, but for exits that are distilled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.errors import require
from eejax.common.trees import varying_zero
from eejax.kernels import call
from eejax.kernels.linear_cross_entropy import api as kernel
from eejax.losses.objective import CROSS_ENTROPY, LossObjective
from eejax.models.exits import Head, HeadOptions, logits
from eejax.models.layers import NEGATIVE

IGNORE = -1
"""Label of a token whose loss does not count."""

CHUNK_LOGITS = 2**22
"""Logits held at a time (16 MiB of float32), unless that is under `MIN_CHUNK` tokens."""

MIN_CHUNK = 256
"""Fewer tokens at a time would spend the time on reading and writing the table's gradient."""

MIN_CHUNKS = 4
"""So that even a small batch never holds more than a quarter of its logits."""


class Teacher(NamedTuple):
    """Teacher of an exit's distillation: hidden states [..., d] of another exit, and its head."""

    h: jax.Array
    head: Head


class _Spec(NamedTuple):
    """The static part of a loss over exits that share a table."""

    options: tuple[HeadOptions, ...]  # one per exit
    objectives: tuple[LossObjective, ...]  # one per exit
    axis: str | None
    chunk: int
    sparse: bool
    teacher: HeadOptions | None = None


def linear_cross_entropy(
    h: jax.Array,
    head: Head,
    labels: jax.Array,
    *,
    weights: jax.Array | None = None,
    axis: str | None = None,
) -> jax.Array:
    """Sum over tokens of weight * -log p(label), a float32 scalar, without [..., v] logits.

    h [..., d] in the dtype of computation (products accumulate in float32); labels [...] int32,
    `IGNORE` where a token does not count; weights [...] float32, by default 1. With a mesh
    `axis`, inside a `shard_map` with `check_vma=True`, `head.table` and `head.bias` are this
    shard's rows, and the loss and all gradients are those of the whole vocabulary. A label
    that is no token of the vocabulary makes loss and gradients NaN.

    Differentiable once, in h, table, bias and weights.
    """
    one = jnp.ones((1,), jnp.float32)
    weights = None if weights is None else (weights,)
    return exits_cross_entropy((h,), (head,), labels, one, weights=weights, axis=axis)[0]


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
    """(sum over exits of c_e C_e, the sums S [e]) for exits whose heads share one table.

    S_e is `linear_cross_entropy` of hs[e]. C_e is the same sum of what a token costs by
    objectives[e], by default its cross entropy, so that C_e = S_e. `teacher` is needed where an
    objective distils, and has no gradient. Together the exits need one gradient of the table
    between the forward and the backward pass, not one each. Only the first result is
    differentiable (in `coefficients` too); the sums are for reporting.

    `sparse`: an exit with the coefficient 0 is left out at run time, and its sum is 0.
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
    if not any(o.distillation for o in objectives):
        teacher = None
    else:
        require(teacher is not None, "teacher", teacher, "must be given where an objective distils")
    labels = labels.reshape(-1)
    n, chunk = labels.size, chunk_size(labels.size, table.shape[0])
    pad = -n % chunk
    flat = lambda h: jnp.pad(h.reshape(-1, h.shape[-1]), ((0, pad), (0, 0)))
    labels = jnp.pad(labels, (0, pad), constant_values=IGNORE)
    hs = tuple(flat(h) for h in hs)
    if weights is not None:
        weights = tuple(jnp.pad(w.reshape(-1), (0, pad)).astype(jnp.float32) for w in weights)
    biases = tuple(head.bias for head in heads)
    spec = _Spec(tuple(head.options for head in heads), objectives, axis, chunk, sparse)
    taught = None
    if teacher is not None:
        spec = spec._replace(teacher=teacher.head.options)
        work = teacher.head.table.astype(teacher.h.dtype)
        taught = lax.stop_gradient((flat(teacher.h), work, teacher.head.bias))
    inputs = _vary_alike((hs, table, biases, labels, weights, coefficients, taught), axis)
    total, sums = _fused(spec, *inputs)
    return total, lax.stop_gradient(sums)


def chunk_size(n: int, rows: int) -> int:
    """Tokens per chunk: near the target, and dividing n evenly where that is possible.

    At least `MIN_CHUNKS` of them: XLA unrolls a loop that runs once, and then holds the logits
    of several exits at the same time.
    """
    target = max(MIN_CHUNK, CHUNK_LOGITS // rows)
    return max(1, -(-n // max(MIN_CHUNKS, -(-n // target))))


def _vary_alike(inputs, axis: str | None):
    """The inputs, all varying over every mesh axis that any of them varies over, and `axis`.

    A custom VJP returns cotangents that vary as its inputs do. Made alike beforehand, each
    input's cotangent may vary freely, and the transpose of the broadcast done here sums it over
    the axes the input did not vary over.
    """
    zero = varying_zero(inputs)
    if axis:
        zero = zero + lax.axis_index(axis) * 0
    return jax.tree.map(lambda a: a + lax.stop_gradient(zero).astype(a.dtype), inputs)


def _first(spec: _Spec, rows: int) -> jax.Array | int:
    """Token id of this shard's first row."""
    return lax.axis_index(spec.axis) * rows if spec.axis else 0


def _counted(labels: jax.Array, vocab_size: int) -> jax.Array:
    """1.0 where the label counts, 0.0 where it is ignored, NaN where it is no token."""
    counted = (labels != IGNORE).astype(jnp.float32)
    return jnp.where((labels < IGNORE) | (labels >= vocab_size), jnp.nan, counted)


class _Norms(NamedTuple):
    """Per token [n]: what turns logits into the distributions a cost is made of.

    lse: log-sum-exp of the logits. confidence: the highest probability, or None. tempered, taught:
    log-sum-exp of the exit's and the teacher's logits divided by the temperature, or None.
    """

    lse: jax.Array
    confidence: jax.Array | None = None
    tempered: jax.Array | None = None
    taught: jax.Array | None = None


def _over(axis: str | None):
    """Reductions over the vocabulary's shards, or nothing where there are none."""
    return (lambda f, a: f(a, axis)) if axis else (lambda f, a: a)


def _log_sum_exp(y: jax.Array, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """([n] log-sum-exp, [n] largest) of logits [n, v], this shard's columns of them."""
    over = _over(axis)
    top = over(lax.pmax, y.max(-1))
    return top + jnp.log(over(lax.psum, jnp.exp(y - top[:, None]).sum(-1))), top


def _costs(spec: _Spec, e: int, y, z, labels, first):
    """(cost [n], -log p(label) [n], `_Norms`) of logits y [n, v] and the teacher's z [n, v]."""
    o, over = spec.objectives[e], _over(spec.axis)
    lse, top = _log_sum_exp(y, spec.axis)
    i = labels - first
    own = (i >= 0) & (i < y.shape[1])
    picked = jnp.take_along_axis(y, jnp.clip(i, 0, y.shape[1] - 1)[:, None], 1)[:, 0]
    nll = lse - over(lax.psum, jnp.where(own, picked, 0.0))
    cost, norms = nll, _Norms(lse)
    if o.distillation:
        t = o.distillation_temperature
        tempered, _ = _log_sum_exp(y / t, spec.axis)
        taught, _ = _log_sum_exp(z / t, spec.axis)
        q = jnp.exp(z / t - taught[:, None])
        mean = over(lax.psum, jnp.sum(q * (z - y), -1)) / t
        cost = (1 - o.distillation) * cost + o.distillation * t**2 * (mean + tempered - taught)
        norms = norms._replace(tempered=tempered, taught=taught)
    if o.confidence_weighted:
        norms = norms._replace(confidence=jnp.exp(top - lse))
        cost = cost * norms.confidence
    if o.z_loss:
        cost = cost + o.z_loss * jnp.square(lse)
    return cost, nll, norms


def _logits_gradient(spec: _Spec, e: int, y, z, norms: _Norms, labels, first, weights):
    """Gradient [n, v] of sum(weights * cost) by the product h @ table.T + bias, float32."""
    column = first + lax.broadcasted_iota(jnp.int32, y.shape, 1)
    # Without the barrier XLA fuses the reductions behind `lse` into this expression and
    # evaluates the exponentials several times over (1.5 times slower on CPU).
    norms = lax.optimization_barrier(norms)
    o, objective = spec.options[e], spec.objectives[e]
    p = jnp.exp(y - norms.lse[:, None])
    g = p - (column == labels[:, None]).astype(jnp.float32)
    if objective.distillation:
        t = objective.distillation_temperature
        apart = jnp.exp(y / t - norms.tempered[:, None]) - jnp.exp(z / t - norms.taught[:, None])
        g = (1 - objective.distillation) * g + objective.distillation * t * apart
    if objective.confidence_weighted:
        g = g * norms.confidence[:, None]
    if objective.z_loss:
        g = g + p * (2 * objective.z_loss * norms.lse)[:, None]
    g = g * (weights / o.temperature)[:, None]
    if o.softcap is not None:
        tanh = y * (o.temperature / o.softcap)
        g = jnp.where(y > NEGATIVE, g * (1.0 - jnp.square(tanh)), 0.0)
    return g


def _chunk(spec: _Spec, i):
    """Cuts chunk i out of arrays [n, ...]."""
    return lambda a: lax.dynamic_slice_in_dim(a, i * spec.chunk, spec.chunk)


def _taught_logits(spec: _Spec, e: int, teacher, cut):
    """The teacher's logits of a chunk, None for an exit that does not need them."""
    if not spec.objectives[e].distillation:
        return None
    h, table, bias = teacher
    return logits(Head(table, bias, spec.teacher), cut(h), spec.axis)


def _chunks(spec: _Spec, e: int, labels, coefficients):
    """Chunks to go through for exit e."""
    n = labels.size // spec.chunk
    return jnp.where(coefficients[e] == 0, 0, n) if spec.sparse else n


def _by_kernels(spec: _Spec, e: int) -> bool:
    """Return whether kernels compute exit e's loss; they do not distil."""
    return call.by_kernels() and not spec.objectives[e].distillation


def _kernel_options(spec: _Spec, e: int) -> kernel.LossOptions:
    head, o = spec.options[e], spec.objectives[e]
    return kernel.LossOptions(
        head.vocab_size, head.softcap, head.temperature, o.z_loss, o.confidence_weighted
    )


def _skip(spec: _Spec, e: int, coefficients) -> jax.Array | None:
    return coefficients[e] == 0 if spec.sparse else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(spec: _Spec, hs, table, biases, labels, weights, coefficients, teacher):
    costs, sums = [], []
    for e, h in enumerate(hs):
        if _by_kernels(spec, e):
            weight = None if weights is None else weights[e]
            cost, nll = kernel.sums(
                h,
                table,
                biases[e],
                labels,
                weight,
                options=_kernel_options(spec, e),
                axis=spec.axis,
                skip=_skip(spec, e, coefficients),
            )
            costs.append(cost)
            sums.append(nll)
            continue
        work = table.astype(h.dtype)

        def body(i, totals, e=e, h=h, work=work):
            cut = _chunk(spec, i)
            y = logits(Head(work, biases[e], spec.options[e]), cut(h), spec.axis)
            z = _taught_logits(spec, e, teacher, cut)
            cost, nll, _ = _costs(spec, e, y, z, cut(labels), _first(spec, table.shape[0]))
            counted = _counted(cut(labels), spec.options[e].vocab_size)
            if weights is not None:
                counted = counted * cut(weights[e])
            return totals[0] + jnp.sum(cost * counted), totals[1] + jnp.sum(nll * counted)

        begin = (_zeros((), labels), _zeros((), labels))
        cost, nll = lax.fori_loop(0, _chunks(spec, e, labels, coefficients), body, begin)
        costs.append(cost)
        sums.append(nll)
    return _results(spec, coefficients, costs, sums)


def _results(spec: _Spec, coefficients, costs, sums):
    costs, sums = (_once(spec, jnp.stack(a)) for a in (costs, sums))
    total = jnp.sum(coefficients.astype(jnp.float32) * costs)
    if spec.axis:  # equal on all shards; a sum with one term is how to say so to the type system
        return lax.psum(total, spec.axis), lax.psum(sums, spec.axis)
    return total, sums


def _once(spec: _Spec, a: jax.Array) -> jax.Array:
    """Keep a value that all shards of the vocabulary have on the first one, 0 on the others."""
    return jnp.where(lax.axis_index(spec.axis) == 0, a, 0.0) if spec.axis else a


def _zeros(shape, labels) -> jax.Array:
    """float32 zeros that vary over the mesh axes `labels` vary over, as a loop's carry must."""
    return jnp.zeros(shape, jnp.float32) + (labels[0] * 0).astype(jnp.float32)


def _forward(spec: _Spec, hs, table, biases, labels, weights, coefficients, teacher):
    rows, d = table.shape
    counted = _counted(labels, spec.options[0].vocab_size)
    # h.T @ g is a faster product than g.T @ h on CPU; kernels add to [v, d].
    upright = any(_by_kernels(spec, e) for e in range(len(hs)))
    d_table = _zeros((rows, d) if upright else (d, rows), labels)
    costs, sums, d_hs, d_biases, d_weights = [], [], [], [], []
    for e, h in enumerate(hs):
        if _by_kernels(spec, e):
            (cost, nll), d = kernel.sums_and_gradients(
                h,
                table,
                biases[e],
                labels,
                None if weights is None else weights[e],
                options=_kernel_options(spec, e),
                axis=spec.axis,
                scale=coefficients[e],
                into=d_table,
                skip=_skip(spec, e, coefficients),
            )
            costs.append(cost)
            sums.append(nll)
            d_hs.append(d.h)
            d_table = d.table
            d_biases.append(d.bias)
            d_weights.append(None if weights is None else d.weights)
            continue
        work = table.astype(h.dtype)
        weight = counted if weights is None else counted * weights[e]

        def body(i, carry, e=e, work=work, weight=weight):
            totals, h, d_table, d_bias, d_weight = carry
            cut = _chunk(spec, i)
            paste = lambda a, u: lax.dynamic_update_slice_in_dim(a, u, i * spec.chunk, 0)
            part, label = cut(h), cut(labels)
            y = logits(Head(work, biases[e], spec.options[e]), part, spec.axis)
            z = _taught_logits(spec, e, teacher, cut)
            first = _first(spec, rows)
            cost, nll, norms = _costs(spec, e, y, z, label, first)
            more = jnp.sum(cost * cut(weight)), jnp.sum(nll * cut(weight))
            scale = cut(weight) * coefficients[e].astype(jnp.float32)
            g = _logits_gradient(spec, e, y, z, norms, label, first, scale)
            if d_bias is not None:
                d_bias = d_bias + g.sum(0)
            g = g.astype(part.dtype)
            product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            new = product("nv,nd->vd", g, part) if upright else product("nd,nv->dv", part, g)
            d_table = d_table + new
            # A chunk's hidden states are not read again: their gradient takes their place.
            h = paste(h, product("nv,vd->nd", g, work).astype(h.dtype))
            if d_weight is not None:
                d_weight = paste(d_weight, cost * cut(counted))
            return (totals[0] + more[0], totals[1] + more[1]), h, d_table, d_bias, d_weight

        d_bias = None if biases[e] is None else _zeros((rows,), labels)
        d_weight = None if weights is None else _zeros(labels.shape, labels)
        carry = ((_zeros((), labels), _zeros((), labels)), h, d_table, d_bias, d_weight)
        totals, d_h, d_table, d_bias, d_weight = lax.fori_loop(
            0, _chunks(spec, e, labels, coefficients), body, carry
        )
        costs.append(totals[0])
        sums.append(totals[1])
        if spec.sparse:  # an exit that was left out still has its states there
            d_h = jnp.where(coefficients[e] == 0, jnp.zeros((), h.dtype), d_h)
        d_hs.append(d_h)
        d_biases.append(d_bias)
        d_weights.append(d_weight)
    results = _results(spec, coefficients, costs, sums)
    like = jax.tree.map(lambda a: jnp.zeros((), a.dtype), (table, biases, coefficients))
    d_table = d_table if upright else d_table.T
    gradients = (tuple(d_hs), d_table, tuple(d_biases), tuple(d_weights), jnp.stack(costs))
    return results, (gradients, coefficients, like)


def _backward(spec: _Spec, saved, cotangents):
    (d_hs, d_table, d_biases, d_weights, costs), coefficients, like = saved
    g, _ = cotangents
    scaled = lambda a, to: None if a is None else (a.astype(jnp.float32) * g).astype(to.dtype)
    weights = None
    if d_weights[0] is not None:
        c = coefficients.astype(jnp.float32)
        weights = tuple(scaled(_once(spec, a) * c[e], a) for e, a in enumerate(d_weights))
    return (
        tuple(scaled(a, a) for a in d_hs),
        scaled(d_table, like[0]),
        tuple(scaled(a, b) for a, b in zip(d_biases, like[1], strict=True)),
        None,
        weights,
        scaled(_once(spec, costs), like[2]),
        None,  # the teacher is held constant
    )


_fused.defvjp(_forward, _backward)
