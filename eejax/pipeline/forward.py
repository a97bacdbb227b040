"""Pipelined passes without a backward pass through layers, for evaluation and for tuning exits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA
from eejax.common.trees import Tree, join
from eejax.losses.multi_exit import BatchSums, ExitSums
from eejax.losses.objective import CROSS_ENTROPY
from eejax.pipeline.partition import INPUT, INSIDE, OUTPUT
from eejax.pipeline.residuals import get, send, when
from eejax.pipeline.stage import Arrays, Pipeline, PipelineStage, Totals, sum_over, vary_over


def evaluation(
    pipeline: Pipeline, microbatches: int
) -> Callable[[Tree, Arrays], ExitSums[jax.Array]]:
    """Return `(params, batch) -> ExitSums` over all that the layout holds, trained and frozen."""

    specs = join(*reversed(pipeline.specs))
    plain = dataclasses.replace(pipeline, objective=CROSS_ENTROPY, sparse=False, sample_keys=None)

    def local(whole: Tree, batch: Arrays) -> ExitSums[jax.Array]:
        first, whole = jnp.zeros((), jnp.int32), vary_over(whole, specs)
        stage = PipelineStage(plain, {}, whole, batch, first, None, microbatches)
        weights = stage.vary(jnp.ones(len(stage.partition.which), jnp.float32))
        totals = stage.sum_totals(_run(stage, microbatches, weights, None))
        return ExitSums(totals.sums, stage.count(microbatches))

    return jax.shard_map(
        local, mesh=pipeline.mesh, in_specs=(specs, P(DATA)), out_specs=ExitSums(P(), P())
    )


def exit_gradients(pipeline: Pipeline, microbatches: int) -> Callable[..., BatchSums[jax.Array]]:
    """Return a function like `runner.gradients` for training exits only, without a backward pass.

    `squares` are those of the gradient in each exit's own parameters.
    """

    def local(trained, frozen, weights, rates, batch, step):
        trained, frozen = vary_over((trained, frozen), pipeline.specs)
        stage = PipelineStage(pipeline, trained, frozen, batch, step, rates, microbatches)
        refs = jax.tree.map(lambda a: jax.new_ref(jnp.zeros_like(a)), stage.trained)
        totals = _run(stage, microbatches, stage.vary(weights), refs)
        grads = sum_over(jax.tree.map(jax.freeze, refs), pipeline.specs[0], pipeline.grad_specs)
        totals = stage.sum_totals(totals)
        exits = ExitSums(totals.sums, stage.count(microbatches))
        return BatchSums(grads, totals.squares, totals.loss, exits)

    mapped = jax.shard_map(
        local,
        mesh=pipeline.mesh,
        in_specs=(*pipeline.specs, P(), P(), P(DATA), P()),
        out_specs=BatchSums(pipeline.grad_specs, P(), P(), ExitSums(P(), P())),
    )

    def run(*arguments):
        sums = mapped(*arguments)
        return sums._replace(squares=pipeline.stage_layout.squares_by_exit(sums.grads))

    return run


def _run(stage: PipelineStage, microbatches: int, weights: jax.Array, refs: Tree | None) -> Totals:
    """Run the passes of this stage; stage i takes microbatch m at step m + i, with its exits."""
    p = stage.partition
    branches, items = stage.exit_branches(weights, refs), stage.items(INPUT, INSIDE, OUTPUT)
    # Layers are not differentiated, so "full" recomputes nothing. It only lets a stage with fewer
    # layers than others skip the rows that it lacks.
    trunk = stage.trunk("full")

    def work(m, x, totals):
        context = stage.context(m)

        def embed():
            return stage.embed(stage.embedding(stage.params), m, context)

        x = lax.cond(stage.first, embed, lambda: x)
        y, inner = trunk(stage.masters, x, context)

        def read(item, _):
            h = jnp.where(item["output"], y, x)
            if inner is None:
                return h
            return jnp.where(item["output"] | item["input"], h, get(inner, item["slot"]))

        if items:
            _, totals = stage.run_exits(
                items, m, branches, (), totals, read, lambda item, kept, g: kept
            )
        return y, totals

    def step(carry, t):
        x, totals = carry
        m = t - stage.index
        active = (m >= 0) & (m < microbatches)
        x, totals = when(
            active, functools.partial(work, jnp.clip(m, 0, microbatches - 1)), x, totals
        )
        return (send(x, p.stages, up=True), totals), None

    steps = jnp.arange(microbatches + p.stages - 1)
    return lax.scan(step, (stage.hidden(), stage.no_totals()), steps)[0][1]
