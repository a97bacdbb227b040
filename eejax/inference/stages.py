"""A model on pipeline stages for decoding: its weights, and a stage's share of a pass.

A stage is cut into parts at its exits, so that an exit can emit as soon as the layers below it have
run. For the same reason, an exit between two stages belongs to the lower one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA, MODEL, PIPE, Axes
from eejax.common.trees import Tree, where_rows
from eejax.gates import router
from eejax.gates.confidence import Memory
from eejax.inference.policy import Emission, emit_early, emit_final
from eejax.inference.state import RequestRows, newest_row
from eejax.models import exits, layers, transformer
from eejax.models.cache import KeyValue, kv_heads, varying
from eejax.models.config import NO_WINDOW, ModelConfig
from eejax.models.params import for_compute
from eejax.pipeline.layout import TOKENS, StageLayout, table_name
from eejax.pipeline.partition import ExitPlace, Partition
from eejax.pipeline.residuals import when
from eejax.pipeline.stage import vary_over
from eejax.sharding import rules
from eejax.sharding.mesh import mesh_axes


class StageWeights(struct.PyTreeNode):
    """Parameters of all stages in the dtype of computation; leaves [P, ...], sharded over `pipe`.

    Each is an array of its own, because a loop that slices a stack would copy it.

    Attributes:
      rows: the r-th layer of every stage.
      tables: the vocabulary tables in every slot.
      parts: by kind, the parameters that exits own in every slot.
      embed: the embedding's other parameters; these leaves have no axis P.
    """

    rows: tuple[Tree, ...]
    tables: tuple[jax.Array, ...]
    parts: dict[str, tuple[Tree, ...]]
    embed: Tree


class StageCache(NamedTuple):
    """Keys and values of a stage's layers, and of the exit blocks in its slots.

    On a device they are [b * k, s, h]. Rows with nothing to keep write into the last position.
    """

    layers: tuple[KeyValue, ...]
    blocks: tuple[KeyValue, ...]


class StageRows(NamedTuple):
    """Constants of a pass of rows [b, w, d] through the stages.

    Attributes:
      start: [b] int32, positions of the first rows.
      row: [b] int32, the row that emits.
      early: [b] bool, whether early exits may emit.
      request: the requests.
    """

    start: jax.Array
    row: jax.Array
    early: jax.Array
    request: RequestRows


@dataclasses.dataclass(frozen=True)
class StagedModel:
    """The stages on which a model's layers and exits are decoded; static and hashable.

    The emitting exits are those of the layout's partition; the last one emits every token that no
    other did.
    """

    layout: StageLayout
    mesh: Mesh

    @property
    def partition(self) -> Partition:
        return self.layout.partition

    @property
    def config(self) -> ModelConfig:
        return self.layout.config

    @functools.cached_property
    def axes(self) -> Axes:
        return mesh_axes(self.mesh)

    @property
    def last(self) -> int:
        """Number of the last exit, which emits every token that no other did."""
        which = self.partition.which
        assert which is not None
        return which[-1]

    @functools.cached_property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """Number of layers below the end of each part, for every stage."""
        p = self.partition
        inside = ({place.layers for place in p.on(i)} for i in range(p.stages))
        return tuple(
            tuple(sorted({n for n in cuts if 0 < n < total} | {total}))
            for cuts, total in zip(inside, p.layers, strict=True)
        )

    @functools.cached_property
    def executed(self) -> tuple[int, ...]:
        """Layers that a token has run before the next one starts, for every exit.

        These are the layers below the exit, and at least all of the first stage.
        """
        c, p = self.config, self.partition
        return tuple(max(c.exit_boundaries[e], p.layers[0]) for e in range(self.last + 1))

    @functools.cached_property
    def specs(self) -> StageWeights:
        return self._arranged(rules.specs(self._declared, self.mesh), lambda spec, i, n: spec)

    @property
    def cache_spec(self) -> P:
        """Return the spec of keys and values [P, rows of all data and model shards, s, h]."""
        return P(PIPE, (DATA, MODEL) if self.axes.model else DATA)

    def prepare(self, params: Tree) -> StageWeights:
        """Return the weights on the mesh, from training parameters (stacked layers)."""
        c, depth = self.config, self.partition.depth
        params = for_compute(params, c.dtype)
        params = params | {"layers": jax.tree.map(lambda a: a[:depth], params["layers"])}

        def arrange(tree):
            return self._arranged(self.layout.to_stages(tree), lambda a, i, n: a[i::n])

        return jax.device_put(jax.jit(arrange)(params), rules.shardings(self.specs, self.mesh))

    @functools.cached_property
    def _declared(self) -> Tree:
        return self.layout.declarations()[0]

    def _arranged(self, tree: Tree, cut) -> StageWeights:
        """Arrange `tree` by stages; cut(leaf, i, n) returns what the i-th of n slots has."""
        declared = self._declared

        def slots(part, like):
            n = jax.tree.leaves(like, is_leaf=_is_param)[0].shape[0] // self.partition.stages

            def one(i):
                return jax.tree.map(lambda a: cut(a, i, n), part, is_leaf=_is_spec)

            return tuple(one(i) for i in range(n))

        parts = {k: slots(tree["exits"][k], v) for k, v in declared.get("exits", {}).items()}
        return StageWeights(
            slots(tree["layers"], declared["layers"]),
            slots(tree["tables"], declared["tables"]),
            parts,
            tree.get("embed", {}),
        )


def _is_param(node) -> bool:
    return hasattr(node, "axes")


def _is_spec(node) -> bool:
    return isinstance(node, P)


class DecodingStage:
    """One device's share inside a `shard_map` over the mesh: its weights and its number."""

    def __init__(self, stages: StagedModel, weights: StageWeights):
        self.stages, self.config, self.axes = stages, stages.config, stages.axes

        def own(tree):
            return jax.tree.map(lambda a: a[0], tree)

        weights = vary_over(weights, stages.specs)
        self.weights = own(weights.replace(embed={})).replace(embed=weights.embed)
        self.index = lax.axis_index(PIPE)
        p = stages.partition
        self.first, self.last = self.index == 0, self.index == p.stages - 1

    def own(self, table) -> jax.Array:
        """Return this stage's entry of a table [P, ...]."""
        return jnp.asarray(np.asarray(table))[self.index]

    @functools.cached_property
    def ends(self) -> jax.Array:
        """Layers of this stage below the end of each of its parts, [parts].

        The last number is repeated if another stage has more parts.
        """
        ends = self.stages.ends
        n = max(map(len, ends))
        return self.own([e + e[-1:] * (n - len(e)) for e in ends])

    def empty(self, rows: int, length: int) -> StageCache:
        """Return an empty cache for `rows` requests and `length` positions."""
        shape = (rows * kv_heads(self.config, self.axes), length, self.config.head_dim)

        def one():
            blank = vary_over(jnp.zeros(shape, self.config.dtype), P())
            return varying(blank, self.axes.model)

        def pairs(n):
            return tuple((one(), one()) for _ in range(n))

        blocks = self.weights.parts.get("block", ())
        return StageCache(pairs(len(self.weights.rows)), pairs(len(blocks)))

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Embed tokens [b, t] as [b, t, d], on the first stage, the only one with the table."""
        _, slot = self.stages.layout.find(TOKENS, 0)
        tree = {"embed": {TOKENS: self.weights.tables[slot], **self.weights.embed}}
        return transformer.embed(tree, self.config, tokens, positions, self.axes)

    def run(
        self,
        cache: StageCache,
        x: jax.Array,
        begin: jax.Array,
        end: jax.Array,
        rows: StageRows,
        memory: Memory,
        emission: Emission,
    ) -> tuple[StageCache, jax.Array, Memory, Emission]:
        """Run rows x [b, w, d] through layers begin [b] to end [b] and the exits there.

        Requests may be at different layers: a layer that no request needs is skipped, and a request
        with begin = end = 0 is at none.
        """
        c, p = self.config, self.stages.partition
        kvs, blocks = list(cache.layers), list(cache.blocks)
        w, length = x.shape[1], kvs[0][0].shape[1]
        context = layers.make_context(
            c,
            rows.start[:, None] + jnp.arange(w, dtype=jnp.int32)[None],
            key_positions=jnp.arange(length, dtype=jnp.int32)[None],
        )

        # A request that is at another layer writes into the spare position.
        def at(here):
            return context._replace(start=jnp.where(here, rows.start, length - 1))

        for n in range(p.max_layers + 1):
            for place in p.places:
                if place.layers == n:
                    here = (begin < n) & (n <= end) if n else (begin == 0) & (end > 0)
                    here = here & (self.index == place.stage)
                    slot = self.stages.layout.parts.get("block", {}).get(place.exit)
                    carry = None if slot is None else blocks[slot], memory, emission
                    block, memory, emission = self._exit(place, here, x, at(here), rows, carry)
                    if slot is not None:
                        blocks[slot] = block
            if n < p.max_layers:
                here = (begin <= n) & (n < end)
                run = functools.partial(self._layer, n, here, at(here))
                x, kvs[n] = when(jnp.any(here), run, x, kvs[n])
        return StageCache(tuple(kvs), tuple(blocks)), x, memory, emission

    def _layer(self, n: int, here, context, x, kv):
        """Run the n-th layer of this stage, as a branch of a conditional."""
        c, p = self.config, self.stages.partition
        window, rope = c.sliding_window, c.rope(0)
        numbers = np.minimum(np.add(p.starts, n), p.depth - 1).tolist()
        if isinstance(window, tuple):  # one window per stage
            window = self.own([NO_WINDOW if window[i] is None else window[i] for i in numbers])
        if isinstance(c.sliding_window, tuple) or c.no_rope_layers:
            rope = self.own([c.rope(i) for i in numbers])
        y, kv = layers.layer(
            self.weights.rows[n],
            x,
            self.config,
            context,
            window=window,
            rope=rope,
            cache=kv,
            axes=self.axes,
        )
        return jnp.where(here[:, None, None], y, x), kv

    def _exit(self, place: ExitPlace, here, x, context, rows: StageRows, carry):
        """Run an exit of this stage for the requests that are `here` [b].

        carry: keys and values of the exit's block, what gates remember, and the emission. For a
        request that has emitted, the exit only writes keys and values.
        """
        e, c, request = place.exit, self.config, rows.request
        block, _, emission = carry

        position, last = rows.start + rows.row + 1, e == self.stages.last
        allowed = here if last else here & rows.early

        def work(block, memory, emission):
            tree = self._exit_tree(place)
            h, block = exits.attend(tree, c, e, x, context, cache=block, axes=self.axes)
            head = exits.reader(tree, c, e, newest_row(h, rows.row), self.axes)
            confidence = router.of_exit(tree, c, e)
            state = newest_row(x, rows.row)
            look = request.exit_input(e, state, head, allowed, position, confidence)
            if last:
                return block, memory, emit_final(emission, look)
            emission, after = emit_early(emission, memory, look, c)
            return block, where_rows(here, after, memory), emission

        needed = allowed & (emission.exit < 0) if block is None else here
        return when(jnp.any(needed), work, *carry)

    def _exit_tree(self, place: ExitPlace) -> Tree:
        """Return the model's parameters that an exit of this stage reads."""
        e, c, layout = place.exit, self.config, self.stages.layout
        _, slot = layout.find(table_name(c, e), place.stage)
        table = self.weights.tables[slot]
        own = {k: self.weights.parts[k][of[e]] for k, of in layout.parts.items() if e in of}
        own["head"] = table
        whole = {"embed": {TOKENS: table}, "shared_head": table}
        return whole | ({"final": own} if e == c.n_exits else {"exits": {c.exits[e].name: own}})
