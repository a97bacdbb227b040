"""One device's share of a pipelined model: its layers, its exits, its rows of the tables."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA, PIPE
from eejax.common.errors import require
from eejax.common.trees import Tree, join
from eejax.losses.cross_entropy import IGNORE, Teacher
from eejax.losses.multi_exit import exits_loss
from eejax.losses.objective import CROSS_ENTROPY, LossObjective
from eejax.models import exits, fusion, layers, params, shards, transformer
from eejax.models.config import ModelConfig
from eejax.pipeline.layout import ABSENT, TOKENS, StageLayout, table_name
from eejax.pipeline.partition import INPUT, INSIDE, OUTPUT
from eejax.pipeline.residuals import get, when
from eejax.sharding import rules
from eejax.sharding.mesh import DEFAULT, Layout, mesh_axes

Arrays = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A model's stages on a mesh, and their computation.

    Attributes:
      cuts: what the mesh's axes split beside batch, layers and matrices.
      remat: what a stage keeps of a microbatch between its passes: "full" its input, to run the
        layers again, "dots" the products with weights, "none" all that the backward pass reads.
      sample_keys: (step, n) -> dropout keys of this device's n samples.

    Raises:
      ConfigError: for tuned exits that are to be distilled.
    """

    stage_layout: StageLayout
    mesh: Mesh | AbstractMesh
    cuts: Layout = DEFAULT
    remat: str = "dots"
    objective: LossObjective = CROSS_ENTROPY
    sparse: bool = False
    sample_keys: Callable[[jax.Array, int], jax.Array] | None = None

    def __post_init__(self):
        require(
            not (self.stage_layout.tuned and self.objective.distillation),
            "loss.distillation",
            self.objective.distillation,
            "must be 0 while exits are tuned, because the final exit does not run",
        )
        require(
            self.objective.exit_tokens == 1,
            "loss.exit_tokens",
            self.objective.exit_tokens,
            "must be 1 on several stages, because heads of exits fill idle time there",
        )

    @property
    def distils(self) -> bool:
        """True if exits learn from the final exit."""
        return bool(self.objective.distillation and self.config.n_exits)

    @property
    def config(self) -> ModelConfig:
        return self.stage_layout.config

    @functools.cached_property
    def specs(self) -> tuple[Tree, Tree]:
        """Return the partition specs of (trained, frozen) parameters."""
        return tuple(rules.specs(d, self.mesh) for d in self.stage_layout.declarations())

    @functools.cached_property
    def grad_specs(self) -> Tree:
        """Return the partition specs of gradients: every device gets the part whose moments it
        holds."""
        return rules.specs(self.stage_layout.declarations()[0], self.mesh, self.cuts.moments_over)


class _Kind(NamedTuple):
    """Properties of an exit that decide its program and the place of its parameters."""

    exit: int  # any one exit of the kind
    table: tuple[str, int]
    parts: tuple[tuple[str, int], ...]


class Totals(NamedTuple):
    """Sums over this device's part of a batch.

    The weighted loss and, by exit [e], the cross entropy and the squared norm of the gradient that
    the exit sends into the hidden states.
    """

    loss: jax.Array
    sums: jax.Array  # [e]
    squares: jax.Array  # [e]


class PipelineStage:
    """One device's part of the run: its parameters, and its own rows of the tables.

    trained, frozen: parameters that vary over data and pipe (`vary_over`); batch: arrays [b, t],
    in `parts` microbatches; factors: those of inserted ones (`plan.Factors`), or None.
    """

    def __init__(self, pipeline, trained, frozen, batch, step, rates, parts, factors=None):
        self.pipeline, self.config = pipeline, pipeline.config
        self.stage_layout, self.partition = pipeline.stage_layout, pipeline.stage_layout.partition
        self.axes = mesh_axes(pipeline.mesh, pipeline.cuts)
        self.trained, self.factors = trained, factors
        self.rates = None if rates is None else vary_over(rates, P())
        self.params = params.for_compute(join(frozen, self.trained), self.config.dtype)
        for name in ("embed", *self.stage_layout.slots):  # tables are cast where they are used
            if name in (whole := join(frozen, self.trained)):
                self.params[name] = whole[name]
        self.stack = fusion.flat_heads(self.params["layers"])
        # Gradients are taken in these, in the dtype in which they are added up.
        self.masters = fusion.flat_heads(join(frozen, trained)["layers"])
        self.index = lax.axis_index(PIPE)
        self.first, self.last = self.index == 0, self.index == self.partition.stages - 1

        def part(a):
            return vary_over(a.reshape(parts, -1, *a.shape[1:]), P(DATA))

        self.batch = jax.tree.map(part, dict(batch))
        self.keys = None
        if pipeline.sample_keys is not None and (self.config.dropout or rates is not None):
            keys = pipeline.sample_keys(step, batch["tokens"].shape[0])
            self.keys = vary_over(keys.reshape(parts, -1), P(DATA))
        self.final = self.final_exit() if pipeline.distils else None

    def own(self, table: Sequence | np.ndarray) -> jax.Array:
        """Return this stage's entry of a table [..., stages]."""
        return jnp.asarray(np.asarray(table))[..., self.index]

    def hidden(self) -> jax.Array:
        """Return a blank state [b, t, d], of this shard's own positions."""
        b, t = self.batch["tokens"].shape[1:]
        x = shards.own_positions(
            jnp.zeros((b, t, self.config.d_model), self.config.dtype), self.axes
        )
        return self.vary(x)

    def no_totals(self) -> Totals:
        """Return totals of 0."""
        n, sequence = len(self.partition.which), self.axes.sequence
        squares = jnp.zeros(n)
        if sequence:
            squares = lax.pcast(squares, sequence, to="varying")
        return self.vary(Totals(jnp.zeros(()), jnp.zeros(n), squares))

    def count(self, microbatches: int) -> jax.Array:
        """Return the number of tokens of the first `microbatches` on all devices."""
        counted = jnp.sum(self.batch["labels"][:microbatches] != IGNORE, dtype=jnp.int32)
        # Every stage counts the same tokens.
        return lax.psum(jnp.where(self.first, counted, 0), (DATA, PIPE))

    def sum_totals(self, totals: Totals) -> Totals:
        """Sum totals over all devices."""
        if self.axes.sequence:
            totals = totals._replace(squares=lax.psum(totals.squares, self.axes.sequence))
        return lax.psum(totals, (DATA, PIPE))

    def vary(self, tree: Tree) -> Tree:
        return vary_over(tree, P())

    def context(self, m: jax.Array) -> layers.LayerContext:
        """Return what all layers share for microbatch m."""
        return layers.make_context(
            self.config,
            self.positions(m),
            segment_ids=get(self.batch["segment_ids"], m) if "segment_ids" in self.batch else None,
            dropout_keys=None if self.keys is None else get(self.keys, m),
        )

    def positions(self, m: jax.Array) -> jax.Array:
        """Return the positions [b, t] of microbatch m, or [1, t] if all rows have the same."""
        if "positions" in self.batch:
            return get(self.batch["positions"], m)
        return jnp.arange(self.batch["tokens"].shape[-1])[None]

    def embed(self, embedding: Tree, m: jax.Array, context: layers.LayerContext) -> jax.Array:
        """Return the embedding [b, t, d] of microbatch m."""
        tokens = get(self.batch["tokens"], m)
        positions = self.positions(m)
        x = transformer.embed({"embed": embedding}, self.config, tokens, positions, self.axes)
        return layers.dropout(x, self.config.dropout, context.dropout_keys, 0, 2, self.axes)

    def embedding(self, tree: Tree) -> Tree:
        """Return the parameters that `embed` takes, from all of them or from their gradients."""
        group, slot = self.stage_layout.find(TOKENS, 0)
        return {TOKENS: tree[group][slot], **tree.get("embed", {})}

    def trunk(self, remat: str) -> Callable:
        """Return (masters, x, context) -> (the stage's output, states at boundaries inside or
        None)."""
        p = self.partition
        rows = np.arange(p.max_layers)
        index = jnp.minimum(self.own(p.starts) + rows, p.depth - 1)
        active = None if p.even else rows < self.own(p.layers)
        slots = None
        if self.n_inside:
            ends = [[place.layers for place in p.on(i, INSIDE)] for i in range(p.stages)]
            table = [[sum(n <= row for n in ends[i]) for i in range(p.stages)] for row in rows]
            slots = self.own(table)

        def run(masters, x, context):
            return transformer.run_layers(
                (masters, self.stack),
                x,
                self.config,
                context,
                index,
                slots=slots,
                n_slots=self.n_inside + 1,
                active=active,
                load=_load,
                axes=self.axes,
                remat=remat,
                layer_dropout=self.rates,
            )

        return run

    @property
    def n_inside(self) -> int:
        """Number of exits inside the stage with the most of them."""
        p = self.partition
        return max(len(p.on(i, INSIDE)) for i in range(p.stages))

    @functools.cached_property
    def kinds(self) -> tuple[tuple[_Kind, ...], dict[int, int]]:
        """Return the kinds of exits with one program each, and the kind of every exit."""
        found: dict[tuple, int] = {}
        kinds, of_exit = [], {}
        c = self.config
        for place in self.partition.places:
            e = place.exit
            table = self.stage_layout.find(table_name(c, e), place.stage)
            parts = tuple((k, s[e]) for k, s in self.stage_layout.parts.items() if e in s)
            final = e == c.n_exits
            early = () if final else dataclasses.astuple(c.exits[e])[1:]
            block = not final and c.exits[e].block
            # A block may have its own window and angles; dropout is drawn by the exit's number.
            alone = (c.exit_window(e), c.exit_rope(e), e if c.dropout else None) if block else ()
            key = (final, early, table, parts, alone)
            if key not in found:
                found[key] = len(kinds)
                kinds.append(_Kind(e, table, parts))
            of_exit[e] = found[key]
        return tuple(kinds), of_exit

    def exit_loss(self, kind: _Kind, own: Tree, table, h, labels, weight, context, teacher_state):
        """Return (weighted loss, (sum [1])) of an exit of a kind, from its parameters and state.

        `teacher_state` is the output of the last stage, if the exit is distilled from it.
        """
        e, c = kind.exit, self.config
        tree, teacher = self.exit_tree(e, own, table), None

        def read(h):
            return exits.state(tree, c, e, h, context, axes=self.axes)

        state = transformer.rematerialised(read, self.pipeline.remat)(h)
        if teacher_state is not None and e != c.n_exits:
            assert self.final is not None, "distillation needs the final exit's parameters"
            final = self.exit_tree(c.n_exits, *self.final)
            h = exits.state(final, c, c.n_exits, teacher_state, context, axes=self.axes)
            teacher = Teacher(h, exits.head(final, c, c.n_exits))
        return exits_loss(
            tree,
            c,
            [state],
            labels,
            weight,
            (e,),
            objective=self.pipeline.objective,
            teacher=teacher,
            sparse=self.pipeline.sparse,
            axes=self.axes,
        )

    def exit_tree(self, e: int, own: Tree, table: jax.Array) -> Tree:
        """Return a tree in a model's form from which exit e reads its parameters."""
        c, tree = self.config, {"embed": {TOKENS: table}, "shared_head": table}
        whole = dict(own) | ({"head": table} if exits.head_name(c, e) == "own" else {})
        if e == c.n_exits:
            return tree | {"final": whole}
        return tree | {"exits": {c.exits[e].name: whole}}

    def final_exit(self) -> tuple[Tree, jax.Array]:
        """Return (own parameters, table) of the final exit, sent by the last stage to the others; a
        table that is on every stage with an exit is not sent."""
        e, slots = self.config.n_exits, self.stage_layout.slots
        name = table_name(self.config, e)
        group, slot = self.stage_layout.find(name, self.partition.stages - 1)

        def from_last(a):
            sent = lax.psum(jnp.where(self.last, a, jnp.zeros((), a.dtype)), PIPE)
            return lax.pcast(sent, (PIPE,), to="varying")

        held = self.params.get("exits", {})
        own = {
            k: jax.tree.map(lambda a, r=rows[e]: a[r], held[k])
            for k, rows in self.stage_layout.parts.items()
            if e in rows
        }
        if any(slots[group][name][place.stage] == ABSENT for place in self.partition.places):
            table = from_last(self.params[group][slot])
        else:
            table = get(self.params[group], self.own(np.maximum(slots[group][name], 0)))
        return jax.tree.map(from_last, own), table

    def exit_branches(self, weights: jax.Array, refs: Tree | None) -> list[Callable]:
        """Return a function for each kind of exit.

        It takes (h, m, the exit's index among the weights, the teacher's state or None) and returns
        (gradient on h, loss, sum). With `refs`, gradients of the exit's parameters are added to
        these. The gradient on h is None if nothing below is trained.
        """
        return [functools.partial(self._exit, k, weights, refs) for k in self.kinds[0]]

    def _exit(self, kind: _Kind, weights, refs, h, m, which, teacher_state):
        labels = lax.dynamic_index_in_dim(self.batch["labels"], m, 0, keepdims=False)
        weight = lax.dynamic_slice_in_dim(weights, which, 1)
        if self.factors is not None:
            weight = weight * self.own(self.factors.losses)[m]
        context = self.context(m)

        def row(tree, s):
            return jax.tree.map(lambda a: a[s], tree)

        own = {k: row(self.params["exits"][k], s) for k, s in kind.parts}
        group, slot = kind.table
        table = self.params[group][slot]

        def loss(own, table, h):
            return self.exit_loss(kind, own, table, h, labels, weight, context, teacher_state)

        if refs is None:
            total, sums = loss(own, table, h)
            return None, total, sums[0]
        given = {"own": own}
        if group in self.trained:
            given["table"] = table
        if "layers" in self.trained:  # else nothing below the exit needs the gradient on h
            given["h"] = h

        def of(given):
            return loss(given["own"], given.get("table", table), given.get("h", h))

        (total, sums), grads = jax.value_and_grad(of, has_aux=True)(given)
        for k, s in kind.parts:
            jax.tree.map(functools.partial(add_row, s), refs["exits"][k], grads["own"][k])
        if "table" in given:
            add_row(slot, refs[group], grads["table"])
        return grads.get("h"), total, sums[0]

    def items(self, *at: str) -> dict[str, jax.Array]:
        """Return this stage's exits `at` such places: arrays [n], n the largest number; or {}.
        kind: number of its program, -1 for padding; which: index among the exits with a loss;
        output, input: whether it reads the stage's output or input; begins: whether it is the
        first to read that; slot: index among the states inside the stage.
        """
        p, rows = self.partition, []
        for i in range(p.stages):
            seen, inside, row = set(), 0, []
            for place in p.on(i, *at):
                kind, which = self.kinds[1][place.exit], p.which.index(place.exit)
                row.append(
                    (
                        kind,
                        which,
                        place.at == OUTPUT,
                        place.at == INPUT,
                        place.at not in seen,
                        inside,
                    )
                )
                seen.add(place.at)
                inside += place.at == INSIDE
            rows.append(row)
        n = max(map(len, rows))
        if not n:
            return {}
        filled = [row + [(-1, 0, False, False, True, 0)] * (n - len(row)) for row in rows]
        columns = np.array(filled, np.int32)
        names = ("kind", "which", "output", "input", "begins", "slot")
        own = {k: self.own(columns[:, :, c].T) for c, k in enumerate(names)}
        return own | {k: own[k].astype(bool) for k in ("output", "input", "begins")}

    def run_exits(
        self,
        items: dict[str, jax.Array],
        m: jax.Array,
        branches: Sequence[Callable],
        kept: Tree,
        totals: Totals,
        read: Callable,
        write: Callable,
        teacher_state: jax.Array | None = None,
    ) -> tuple[Tree, Totals]:
        """Run this stage's `items` on microbatch m, none if m < 0, and return (kept, totals).

        read(item, kept) returns an exit's input; write(item, kept, gradient) keeps the gradient on
        it. `teacher_state` is the output of the last stage, if exits are distilled from it.
        """

        def one(carry, item):
            def work(branch, kept, totals):
                g, loss, ce = branch(read(item, kept), m, item["which"], teacher_state)
                square = 0.0 if g is None else jnp.sum(jnp.square(g.astype(jnp.float32)))
                at = jnp.arange(totals.sums.size) == item["which"]
                if self.factors is not None:
                    report, used = self.own(self.factors.reports), self.own(self.factors.losses)[m]
                    loss, ce = loss * report / used, ce * report
                    square = square * report / used**2

                def add(a, value):
                    return a + jnp.where(at, value, 0.0)

                totals = Totals(
                    totals.loss + loss, add(totals.sums, ce), add(totals.squares, square)
                )
                return write(item, kept, g), totals

            # A chain of two-way conditionals: XLA copies what passes through one of more branches,
            # such as the gradients of tables.
            kind = jnp.where(m >= 0, item["kind"], -1)
            for k, branch in enumerate(branches):
                carry = when(kind == k, functools.partial(work, branch), *carry)
            return carry, None

        if len(items["kind"]) == 1:
            return one((kept, totals), jax.tree.map(lambda a: a[0], items))[0]
        return lax.scan(one, (kept, totals), items)[0]


def _load(pair: tuple[Tree, Tree]) -> Tree:
    """Return the parameters of (masters, parameters), whose gradient goes to the masters.

    Unlike a cast's, it is added up in float32 whatever remat does, and keeps no cast value.
    """
    return jax.tree.map(_stand_in, *pair)


@jax.custom_vjp
def _stand_in(master: jax.Array, value: jax.Array) -> jax.Array:
    return value


_stand_in.defvjp(lambda master, value: (value, None), lambda _, g: (g.astype(jnp.float32), None))


def add_row(row: int | types.EllipsisType, ref, update: jax.Array) -> None:
    ref[row] = ref[row] + update.astype(ref.dtype)


def vary_over(tree: Tree, specs: Any) -> Tree:
    """Mark values as varying over data and pipe: no sum over these axes may hide in the backward
    pass of a branch that only some stages take."""

    def one(a, spec):
        missing = tuple(axis for axis in (DATA, PIPE) if axis not in _cut_over(spec))
        return lax.pcast(a, missing, to="varying") if missing else a

    if isinstance(specs, P):
        return jax.tree.map(lambda a: one(a, specs), tree)
    return jax.tree.map(one, tree, specs)


def sum_over(grads: Tree, specs: Tree, parts: Tree) -> Tree:
    """Sum gradients over the axes that do not split their parameters, or give each device its part
    of the sum over data, as `parts` says."""

    def one(g, spec, part):
        if PIPE not in _cut_over(spec):
            g = lax.psum(g, PIPE)
        if DATA not in part:
            return lax.psum(g, DATA)
        return lax.psum_scatter(g, DATA, scatter_dimension=part.index(DATA), tiled=True)

    return jax.tree.map(one, grads, specs, parts)


def _cut_over(spec: P) -> set[str]:
    return {axis for entry in spec if entry for axis in np.atleast_1d(entry)}
