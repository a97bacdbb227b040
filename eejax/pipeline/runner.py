"""The executor: a schedule's table as one scan in one fully manual `shard_map`.

In each step of the table a stage runs these operations, in this order and only if the table has
them:

    F   runs its layers on the state that arrived, and keeps its input (or the layers' residuals)
    R   with full rematerialisation, runs the layers of a backward pass again
    E   computes the losses of exits on its input, or on the last stage on its output: adds to the
        gradients of their heads, and keeps the gradient on the hidden state until B
    B   pulls the gradient that arrived, and those of its exits, back through its layers

B is the backward pass of the stage-local auxiliary loss L_i + <g_i, x_i>, with x_i the stage's
output and g_i the gradient that arrived, held constant (EE-LLM, Eq. 2 and Proposition 3.1); logits
of an exit never outlive its E. Then every stage sends its newest state up and its newest gradient
down, and arrivals wait in a slot until F or B reads them. Communication is outside every branch
that only some stages take, because the others would wait for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA, PIPE
from eejax.common.trees import Tree, nbytes
from eejax.losses.multi_exit import BatchSums, ExitSums
from eejax.models import fusion
from eejax.pipeline import schedule as schedules
from eejax.pipeline.layout import ABSENT, TOKENS
from eejax.pipeline.partition import INPUT, INSIDE, OUTPUT
from eejax.pipeline.plan import Factors
from eejax.pipeline.residuals import get, put, ring, send, split_vjp, when
from eejax.pipeline.schedule import BACKWARD, EXITS, FORWARD, Schedule
from eejax.pipeline.stage import Pipeline, PipelineStage, Totals, add_row, sum_over, vary_over


def gradients(
    pipeline: Pipeline, schedule: Schedule, factors: Factors | None = None
) -> Callable[..., BatchSums[jax.Array]]:
    """Return `(params, frozen, weights [e], layer_dropout [l] or None, batch, step) -> BatchSums`.

    params and frozen are in the form of the pipeline's layout. The batch's arrays are [b, t]; every
    device splits its part of them into as many microbatches as the schedule has. With `factors`,
    the sums are those expected of the main microbatches, and only their tokens are counted.
    """
    return jax.shard_map(
        functools.partial(_local, pipeline, schedule, factors),
        mesh=pipeline.mesh,
        in_specs=(*pipeline.specs, P(), P(), P(DATA), P()),
        out_specs=BatchSums(pipeline.grad_specs, P(), P(), ExitSums(P(), P())),
    )


class _StageCarry(NamedTuple):
    """State that a device carries from step to step.

    Attributes:
      arrived: [slots, b, t, d], states from the stage below that wait for their forward pass.
      returned: [slots, b, t, d], gradients from the stage above that wait for their backward pass.
      teacher: [slots, b, t, d], outputs of the last stage for the microbatches of `returned`; None
        if no exit is distilled.
      states: slots of `schedule.Rings`.
      residuals: slots of `schedule.Rings`, pairs of the layers' residuals and the states at
        boundaries inside the stage.
      totals: sums of losses so far.
    """

    arrived: jax.Array
    returned: jax.Array
    teacher: jax.Array | None
    states: jax.Array
    residuals: Tree
    totals: Totals


def _local(
    pipeline, schedule, factors, trained, frozen, weights, rates, batch, step
) -> BatchSums[jax.Array]:
    """Compute one device's part of `gradients`."""
    trained, frozen = vary_over((trained, frozen), pipeline.specs)
    n = schedule.microbatches
    stage = PipelineStage(pipeline, trained, frozen, batch, step, rates, n, factors)
    grads = jax.tree.map(jnp.zeros_like, stage.trained)
    grads["layers"] = fusion.flat_heads(grads["layers"])
    refs = jax.tree.map(jax.new_ref, grads)
    ops = _Operations(stage, schedule, stage.vary(weights), refs)
    table = {
        "forward": stage.own(schedule.table(FORWARD)[:, 0]),
        "backward": stage.own(schedule.table(BACKWARD)[:, 0]),
        "exits": stage.own(schedule.table(EXITS)),
    } | ops.exchanges()
    start = ops.start(jnp.maximum(table["forward"][0], 0))
    (*_, totals), _ = lax.scan(lambda kept, row: (ops.step(kept, row), None), start, table)
    return _sum(stage, jax.tree.map(jax.freeze, refs), totals, factors.main if factors else n)


def kept_bytes(stage: PipelineStage, schedule: Schedule) -> int:
    """Return the bytes that a device keeps from step to step, and one microbatch's more.

    The latter are made before they are put into a slot. It is called inside a `shard_map` whose
    results are unused.
    """
    weights = stage.vary(jnp.ones(len(stage.partition.which)))
    ops = _Operations(stage, schedule, weights, None)
    kept = ops.start(stage.index * 0)
    return nbytes(kept) + nbytes(kept.residuals) // ops.n_residuals


class _Operations:
    """The operations of a stage in a step."""

    def __init__(
        self, stage: PipelineStage, schedule: Schedule, weights: jax.Array, refs: Tree | None
    ):
        self.stage, self.recompute, self.refs = stage, schedule.recompute, refs
        self.distils = stage.pipeline.distils
        rings = schedules.rings(schedule, stage.partition.input_exit_stages, self.distils)
        names = ("inputs", "cotangents", "outputs", "teacher", "residuals")
        self.slots = {name: stage.own(getattr(rings, name)) for name in names}
        self.arrived, self.returned = rings.arrived, rings.returned
        self.slots |= {
            "arrived": stage.own(rings.arrived.read),
            "returned": stage.own(rings.returned.read),
        }
        self.n_states = rings.n_states
        links = [step.links for step in schedule.steps]
        self.patterns = list(dict.fromkeys(links))  # different rows of links, in order
        self.pattern = [self.patterns.index(one) for one in links]
        self.n_residuals = 1 if self.recompute else rings.n_residuals
        self.top = jnp.asarray([route.top for route in schedule.routes])
        self.branches = stage.exit_branches(weights, refs)
        self.edges, self.inside = stage.items(INPUT, OUTPUT), stage.items(INSIDE)
        # Recomputed layers are used at once, so they may keep more.
        self.trunk = stage.trunk("dots" if self.recompute else stage.pipeline.remat)
        self.restore: Callable | None = None

    def start(self, m: jax.Array) -> _StageCarry:
        """Return the carry before the first step, with the shapes of microbatch m."""
        blank = self.stage.hidden()
        like, self.restore = self.forward(m, blank)[1:]
        returned = ring(self.returned.n, blank)
        return _StageCarry(
            arrived=ring(self.arrived.n, blank),
            returned=returned,
            teacher=returned if self.distils else None,
            states=ring(self.n_states, blank),
            residuals=ring(self.n_residuals, like),
            totals=self.stage.no_totals(),
        )

    def exchanges(self) -> dict[str, jax.Array]:
        """Rows [steps] of the exchange: its pattern of links, and the slots that arrivals take."""
        own = self.stage.own
        return {
            "pattern": jnp.asarray(self.pattern, jnp.int32),
            "arrives": own(self.arrived.write),
            "returns": own(self.returned.write),
        }

    def forward(self, m: jax.Array, x: jax.Array):
        """Return the stage's output, residuals for `backward`, and `split_vjp`'s restore."""
        context = self.stage.context(m)

        def run(masters, x):
            return self.trunk(masters, x, context)

        closed = context, self.stage.stack
        (y, inner), residuals, restore = split_vjp(run, self.stage.masters, x, closed)
        return y, (residuals, None if inner is None else inner[:-1]), restore

    def step(self, kept: _StageCarry, row: dict[str, jax.Array]) -> _StageCarry:
        stage = self.stage
        f, b = row["forward"], row["backward"]
        fm, bm = jnp.maximum(f, 0), jnp.maximum(b, 0)
        x = get(kept.arrived, self.slots["arrived"][fm])
        g = get(kept.returned, self.slots["returned"][bm])
        x, states = when(f >= 0, functools.partial(self.enter, fm), x, kept.states)
        if self.recompute:
            # The last stage has no forward pass of its own: it would be recomputed in B.
            def run(x):
                return (self.trunk(stage.masters, x, stage.context(fm))[0],)

            (x,) = when((f >= 0) & ~stage.last, run, x)
            again = functools.partial(self.again, bm, states)
            x, residuals = when(b >= 0, again, x, kept.residuals)
        else:
            x, residuals = when(f >= 0, functools.partial(self.keep, fm), x, kept.residuals)
        totals, teacher = kept.totals, None
        if self.distils:
            teacher = get(kept.teacher, self.slots["returned"][bm])
        if self.edges:
            for m in row["exits"]:
                states, totals = self.exits(m, x, teacher, states, totals)
        g = jnp.where(stage.index < self.top[bm], g, jnp.zeros((), g.dtype))
        if teacher is not None:
            teacher = jnp.where(stage.last, get(states, self.slots["teacher"][bm]), teacher)
        back = functools.partial(self.backward, bm, states, residuals, teacher)
        g, totals = when(b >= 0, back, g, totals)
        x, g, teacher = self.exchange(row["pattern"], x, g, teacher)
        return _StageCarry(
            arrived=put(kept.arrived, x, row["arrives"]),
            returned=put(kept.returned, g, row["returns"]),
            teacher=put(kept.teacher, teacher, row["returns"]) if self.distils else None,
            states=states,
            residuals=residuals,
            totals=totals,
        )

    def exchange(self, pattern: jax.Array, x, g, teacher):
        """Send x up, g and `teacher` down over the links, and return the arrivals."""
        n = self.stage.partition.stages

        def over(links, x, g, teacher):
            down = functools.partial(send, n=n, up=False, links=links)
            return send(x, n, up=True, links=links), down(g), jax.tree.map(down, teacher)

        branches = [functools.partial(over, links) for links in self.patterns]
        if len(branches) == 1:
            return branches[0](x, g, teacher)
        # All stages have the same pattern in a step, so all devices take the same branch.
        return lax.switch(pattern, branches, x, g, teacher)

    def enter(self, m, x, states):
        """Return the stage's input of a microbatch, and the states that keep it."""
        stage = self.stage

        def embed():
            return stage.embed(stage.embedding(stage.params), m, stage.context(m))

        x = lax.cond(stage.first, embed, lambda: x)
        return x, put(states, x, self.slots["inputs"][m])

    def keep(self, m, x, residuals):
        y, new, _ = self.forward(m, x)
        return y, put(residuals, new, self.slots["residuals"][m])

    def again(self, m, states, x, residuals):
        y, new, _ = self.forward(m, get(states, self.slots["inputs"][m]))
        return jnp.where(self.stage.last, y, x), put(residuals, new, 0)

    def exits(self, m, leaving, teacher, states, totals):
        """Run E of microbatch m.

        `leaving` is the output of the last stage; `teacher` is the same on the other stages.
        """
        at = jnp.maximum(m, 0)
        if self.distils:

            def keep(states):
                return (put(states, leaving, self.slots["teacher"][at]),)

            (states,) = when((m >= 0) & self.stage.last, keep, states)
            teacher = jnp.where(self.stage.last, leaving, teacher)

        def place(item):
            return jnp.where(
                item["output"], self.slots["outputs"][at], self.slots["cotangents"][at]
            )

        def read(item, states):
            return jnp.where(item["output"], leaving, get(states, self.slots["inputs"][at]))

        def write(item, states, g):
            before = jnp.where(item["begins"], jnp.zeros((), g.dtype), get(states, place(item)))
            return put(states, g + before, place(item))

        return self.stage.run_exits(
            self.edges, m, self.branches, states, totals, read, write, teacher
        )

    def backward(self, m, states, residuals, teacher, g, totals):
        """Run B: return the gradient on the stage's input, from that on its output."""
        stage, p = self.stage, self.stage.partition
        assert self.refs is not None and self.restore is not None  # after `start`
        refs = self.refs
        slot = 0 if self.recompute else self.slots["residuals"][m]
        mine, inner = get(residuals, slot)
        g = jnp.where(stage.last, get(states, self.slots["outputs"][m]), g)
        gs = None
        if self.inside:
            gs = ring(stage.n_inside + 1, jnp.zeros_like(g))
            gs, totals = stage.run_exits(
                self.inside,
                m,
                self.branches,
                gs,
                totals,
                read=lambda item, _: get(inner, item["slot"]),
                write=lambda item, gs, g: put(gs, g, item["slot"]),
                teacher_state=teacher,
            )
        x, context = get(states, self.slots["inputs"][m]), stage.context(m)
        pullback = self.restore(mine, stage.masters, x, (context, stage.stack))
        # Type checkers see only an import that `jax` deletes again, and not its namespace `ad`.
        whole = jax.ad.GradValue()  # pyright: ignore[reportPrivateImportUsage]
        _, gx = pullback.with_refs(refs["layers"], whole)((g, gs))
        if p.input_exit_stages:
            has = stage.own([i in p.input_exit_stages for i in range(p.stages)])
            own = get(states, self.slots["cotangents"][m])
            gx = gx + jnp.where(has, own, jnp.zeros((), own.dtype))

        def scatter(gx):
            (ge,) = jax.vjp(lambda e: stage.embed(e, m, context), stage.embedding(stage.params))[1](
                gx
            )
            group, row = stage.stage_layout.find(TOKENS, 0)
            add_row(row, refs[group], ge.pop(TOKENS))
            if ge:
                jax.tree.map(functools.partial(add_row, ...), refs["embed"], ge)
            return (gx,)

        return *when(stage.first, scatter, gx), totals


def _sum(stage: PipelineStage, grads: Tree, totals: Totals, counted: int) -> BatchSums[jax.Array]:
    """Sum over all devices; tokens are those of the first `counted` microbatches."""
    if "layers" in grads:  # their heads were flattened

        def shape(g, a):
            return g.reshape(a.shape)

        grads["layers"] = jax.tree.map(shape, grads["layers"], stage.trained["layers"])
    if stage.factors is not None:  # before copies are added: each stage has its own factor
        factor = stage.own(stage.factors.gradients)
        grads = jax.tree.map(lambda g: g * factor, grads)
    for group, tables in stage.stage_layout.slots.items():
        if group in grads:
            for slots in tables.values():
                grads[group] = _sum_copies(stage, grads[group], slots)
    grads = sum_over(grads, stage.pipeline.specs[0], stage.pipeline.grad_specs)
    totals = stage.sum_totals(totals)
    return BatchSums(
        grads, totals.squares, totals.loss, ExitSums(totals.sums, stage.count(counted))
    )


def _sum_copies(stage: PipelineStage, grads: jax.Array, slots: tuple[int, ...]) -> jax.Array:
    """Replace the gradient of each copy of a table by the sum over copies (EE-LLM, section
    3.1.2)."""
    if sum(slot != ABSENT for slot in slots) < 2:
        return grads
    own = stage.own(slots)
    has, row = own != ABSENT, jnp.maximum(own, 0)
    g = get(grads, row)
    total = lax.pcast(lax.psum(jnp.where(has, g, 0.0), PIPE), (PIPE,), to="varying")
    return put(grads, jnp.where(has, total, g), row)
