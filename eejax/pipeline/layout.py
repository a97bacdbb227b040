"""Layout of parameters on pipeline stages, and the conversion in both directions.

Every device runs the same program, so all stages have leaves of the same shapes:

    layers    [P * L, ...]      stage i's layers are rows i * L onward, padded with zeros; L is the
                                maximum number of layers of a stage
    tables    [P * T, v, d]     vocabulary tables: on the first stage the input embedding, elsewhere
                                the heads of its exits; T is the maximum number of a stage
    exits     [P * K, ...]      an exit's own norm, mlp, block and bias; K, by kind, is the maximum
                                number of a stage
    embed     as in the model   positions and norm, on every stage

All but the last are sharded over the mesh axis `pipe`. A head that is tied or shared is in `tables`
of every stage that uses it; its gradients are added up once a step (EE-LLM, section 3.1.2). If all
stages have equally many layers, `layers` is the model's own stack.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eejax.common.trees import Tree, split
from eejax.models import exits, params
from eejax.models.config import ModelConfig
from eejax.models.params import Param
from eejax.pipeline.partition import Partition

TOKENS, SHARED = "tokens", "shared_head"
TABLES, HEADS = "tables", "heads"
ABSENT = -1


def table_name(config: ModelConfig, e: int) -> str:
    """Return the name of exit e's output embedding here: "tokens", "shared_head" or "head_E"."""
    where = exits.head_name(config, e)
    return {"tied": TOKENS, "shared": SHARED}.get(where, f"head_{e}")


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """Places of a model's parameters on the stages of a `Partition`.

    Attributes:
      partition: layers and exits of the stages.
      tuned: whether only the exits of the partition are trained (`train.scope.Scope`). All other
        parameters that their losses read are then a tree of its own, the frozen parameters.
    """

    partition: Partition
    tuned: bool = False

    @property
    def config(self) -> ModelConfig:
        return self.partition.config

    @functools.cached_property
    def slots(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Slot of each table on each stage, or ABSENT: group -> table -> slots.

        There is one group, "tables". While exits are tuned, their own heads are a group "heads",
        because they are trained and the rest is not.
        """
        p, groups = self.partition, {}
        for stage in range(p.stages):
            wanted = [TOKENS] if stage == 0 else []
            wanted += [table_name(self.config, place.exit) for place in p.on(stage)]
            for group, names in self._by_group(dict.fromkeys(wanted)).items():
                for slot, name in enumerate(names):
                    held = groups.setdefault(group, {}).setdefault(name, [ABSENT] * p.stages)
                    held[stage] = slot
        return {g: {n: tuple(s) for n, s in t.items()} for g, t in groups.items()}

    def _by_group(self, names) -> dict[str, list[str]]:
        own = [n for n in names if n not in (TOKENS, SHARED)]
        if not self.tuned:
            return {TABLES: list(names)}
        return {TABLES: [n for n in names if n not in own], HEADS: own}

    def find(self, name: str, stage: int) -> tuple[str, int]:
        """Return (group, slot) of a table on a stage."""
        group = next(g for g, tables in self.slots.items() if name in tables)
        return group, self.slots[group][name][stage]

    @functools.cached_property
    def parts(self) -> dict[str, dict[int, int]]:
        """Slots of the exits' own parameters: kind ("norm", "mlp", ...) -> exit -> slot."""
        kinds: dict[str, dict[int, int]] = {}
        for stage in range(self.partition.stages):
            used: dict[str, int] = {}
            for place in self.partition.on(stage):
                for kind in _own(self.config, place.exit):
                    kinds.setdefault(kind, {})[place.exit] = used.get(kind, 0)
                    used[kind] = used.get(kind, 0) + 1
        return kinds

    def _rows(self, slots: Mapping[Any, int] | list[int]) -> int:
        values = slots.values() if isinstance(slots, Mapping) else slots
        return 1 + max(values)

    @functools.cached_property
    def layer_rows(self) -> np.ndarray:
        """Number of the layer in each row of the stack, [P * L], or ABSENT."""
        p = self.partition
        rows = np.full((p.stages, p.max_layers), ABSENT)
        for i, (start, n) in enumerate(zip(p.starts, p.layers, strict=True)):
            rows[i, :n] = start + np.arange(n)
        return rows.reshape(-1)

    def to_stages(self, tree: Tree) -> Tree:
        """Arrange a model's parameters, or anything of their tree, by stages.

        Leaves are arrays; a part of the tree (trained or frozen parameters only) gives that part.
        """
        return self._to_stages(tree, _stack_arrays, self._pad_arrays)

    def declarations(self) -> tuple[Tree, Tree]:
        """Return (trained, frozen) parameters as `models.params.abstract` declares a model's."""
        whole = self._held(params.abstract(self.config))
        if not self.tuned:
            return self._to_stages(whole, _stack_params, self._pad_params), {}
        trained, frozen = split(whole, lambda name: name.startswith("exits/"))
        return tuple(self._to_stages(t, _stack_params, self._pad_params) for t in (trained, frozen))

    def _held(self, tree: Tree) -> Tree:
        """Return the part of a whole model's tree that the stages read."""
        if not self.tuned:
            return tree
        names = {self.config.exits[e].name for e in self.partition.which}
        heads = {exits.head_name(self.config, e) for e in self.partition.which}
        kept = {k: tree[k] for k in ("embed", "layers")}
        kept["exits"] = {k: v for k, v in tree["exits"].items() if k in names}
        if "shared" in heads:
            kept[SHARED] = tree[SHARED]
        return kept

    def _to_stages(self, tree: Tree, stack: Callable, pad: Callable) -> Tree:
        p, out = self.partition, {}
        if "layers" in tree:

            def is_leaf(x):
                return isinstance(x, Param)

            out["layers"] = jax.tree.map(pad, tree["layers"], is_leaf=is_leaf)
        rest = {k: v for k, v in tree.get("embed", {}).items() if k != TOKENS}
        if rest:
            out["embed"] = rest
        found = self._tables(tree)
        for group, tables in self.slots.items():
            if not tables or not any(name in found for name in tables):
                continue
            rows: list[Any] = [None] * (p.stages * self._n_tables(group))
            for name, slots in tables.items():
                for stage, slot in enumerate(slots):
                    if slot != ABSENT:
                        rows[stage * self._n_tables(group) + slot] = found[name]
            out[group] = stack(rows)
        own = {}
        for kind, slots in self.parts.items():
            n = self._rows(slots)
            rows = [None] * (p.stages * n)
            for place in p.places:
                part = self._exit_tree(tree, place.exit).get(kind)
                if part is not None and place.exit in slots:
                    rows[place.stage * n + slots[place.exit]] = part
            if any(r is not None for r in rows):
                like = next(r for r in rows if r is not None)

                def is_leaf(x):
                    return isinstance(x, Param)

                columns = [
                    jax.tree.leaves(r, is_leaf=is_leaf) if r is not None else None for r in rows
                ]
                leaves, treedef = jax.tree.flatten(like, is_leaf=is_leaf)
                own[kind] = jax.tree.unflatten(
                    treedef,
                    [stack([c and c[i] for c in columns]) for i in range(len(leaves))],
                )
        if own:
            out["exits"] = own
        return out

    def from_stages(self, tree: Tree) -> Tree:
        """Invert `to_stages`; of copies of a table, the first is taken."""
        p, out = self.partition, {}
        if "layers" in tree:
            rows = np.flatnonzero(self.layer_rows != ABSENT)

            def take(a):
                return a if p.even else a[rows]

            out["layers"] = jax.tree.map(take, tree["layers"])
        if "embed" in tree:
            out["embed"] = dict(tree["embed"])
        places = {place.exit: place for place in p.places}
        for e in p.which:
            part = {}
            for kind, slots in self.parts.items():
                if e in slots and kind in tree.get("exits", {}):
                    row = places[e].stage * self._rows(slots) + slots[e]
                    part[kind] = jax.tree.map(lambda a, row=row: a[row], tree["exits"][kind])
            if e == self.config.n_exits:
                if not self.tuned:
                    out["final"] = part
            elif part or "exits" in tree or not self.tuned:
                out.setdefault("exits", {})[self.config.exits[e].name] = part
        for group, tables in self.slots.items():
            if group not in tree:
                continue
            for name, slots in tables.items():
                stage = next(i for i, slot in enumerate(slots) if slot != ABSENT)
                value = tree[group][stage * self._n_tables(group) + slots[stage]]
                if name == TOKENS:
                    out.setdefault("embed", {})[TOKENS] = value
                elif name == SHARED:
                    out[SHARED] = value
                else:
                    e = int(name.removeprefix("head_"))
                    final = e == self.config.n_exits
                    owner = out["final"] if final else out["exits"][self.config.exits[e].name]
                    owner["head"] = value
        if not self.tuned:
            out.setdefault("exits", {})
        return out

    def _n_tables(self, group: str) -> int:
        return 1 + max(max(slots) for slots in self.slots[group].values())

    def copies(self, group: str) -> np.ndarray:
        """Return [P * T] factors, 1.0 for a table's first copy, 0.0 for other copies and empty
        slots."""
        n = self._n_tables(group)
        first = np.zeros(self.partition.stages * n, np.float32)
        for slots in self.slots[group].values():
            stage = next(i for i, slot in enumerate(slots) if slot != ABSENT)
            first[stage * n + slots[stage]] = 1.0
        return first

    def squared_norm(self, tree: Tree) -> jax.Array:
        """Return the sum of squares of parameters or gradients on stages, with each table
        counted once."""
        total = jnp.zeros((), jnp.float32)
        for name, part in tree.items():
            for a in jax.tree.leaves(part):
                squares = jnp.square(a.astype(jnp.float32))
                if name in self.slots:
                    by_row = jnp.sum(squares, tuple(range(1, a.ndim)))
                    squares = jnp.where(self.copies(name) > 0, by_row, 0.0)
                total = total + jnp.sum(squares)
        return total

    def squares_by_exit(self, grads: Tree) -> jax.Array:
        """Return [e], the sums of squares of the gradients in the own parameters of tuned exits."""
        exits_ = self.from_stages(grads)["exits"]
        names = [self.config.exits[e].name for e in self.partition.which]
        leaves = [jax.tree.leaves(exits_[name]) for name in names]
        return jnp.stack([sum(jnp.sum(jnp.square(a)) for a in own) for own in leaves])

    def _tables(self, tree: Tree) -> dict[str, Any]:
        found = {}
        if TOKENS in tree.get("embed", {}):
            found[TOKENS] = tree["embed"][TOKENS]
        if SHARED in tree:
            found[SHARED] = tree[SHARED]
        for e in self.partition.which:
            if "head" in (own := self._exit_tree(tree, e)):
                found[f"head_{e}"] = own["head"]
        return found

    def _exit_tree(self, tree: Tree, e: int) -> Tree:
        if e == self.config.n_exits:
            return tree.get("final", {})
        return tree.get("exits", {}).get(self.config.exits[e].name, {})

    def _pad_arrays(self, a: jax.Array) -> jax.Array:
        if self.partition.even:
            return a
        rows, held = jnp.asarray(np.maximum(self.layer_rows, 0)), self.layer_rows != ABSENT
        keep = jnp.asarray(held).reshape(-1, *[1] * (a.ndim - 1))
        return jnp.where(keep, a[rows], jnp.zeros((), a.dtype))

    def _pad_params(self, p: Param) -> Param:
        return dataclasses.replace(p, shape=(len(self.layer_rows), *p.shape[1:]))


def _own(config: ModelConfig, e: int) -> list[str]:
    """Return the kinds of exit e's own parameters, without its head."""
    declared = params.abstract(config)
    own = exits.exit_params(declared, config, e)
    return [kind for kind in own if kind != "head"]


def _stack_arrays(rows: list[Any]) -> jax.Array:
    like = next(r for r in rows if r is not None)
    return jnp.stack([jnp.zeros_like(like) if r is None else r for r in rows])


def _stack_params(rows: list[Any]) -> Param:
    like = next(r for r in rows if r is not None)
    return dataclasses.replace(like, shape=(len(rows), *like.shape), axes=("p", *like.axes))
