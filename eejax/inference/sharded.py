"""Engines on a mesh: matrices are split over `model`, requests over `data`.

The run of the prompts and the decoding loop are one manual `shard_map` each, in which the engines'
own steps run on a device's share. Every model shard has the logits of the whole vocabulary, so all
of them decide alike and take the same branches. Data shards share nothing but the program: each
runs as many layers and steps as its own requests need.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eejax.common.axes import PIPE, Axes
from eejax.common.errors import require
from eejax.common.trees import Tree
from eejax.inference.options import PIPELINED
from eejax.inference.state import EngineState
from eejax.inference.weights import Weights, prepare, unlayered_params
from eejax.models import exits, fusion
from eejax.models.cache import KVCache, varying
from eejax.models.config import ModelConfig
from eejax.models.params import abstract, layer, map_params
from eejax.sharding import rules
from eejax.sharding.mesh import MeshConfig, known_mesh, mesh_axes


def without_stages(mesh: MeshConfig | Mesh, engine: str) -> Mesh:
    """Return a mesh of data and model shards. Raises `ConfigError` for any other mesh."""
    stages = mesh.pipe if isinstance(mesh, MeshConfig) else known_mesh(mesh).shape[PIPE]
    require(
        stages == 1,
        "mesh.pipe",
        stages,
        f"must be 1 with the engine {engine!r}",
        f"Stages are decoded on by the engine {PIPELINED!r} (inference.PipelinedGenerator); this"
        " one uses mesh.data and mesh.model.",
    )
    return known_mesh(mesh)


def shard(f: Callable, mesh: Mesh, in_specs: tuple, out_specs) -> Callable:
    """Return a function that runs `f` on every device's share of its arguments.

    Arrays without elements are made on the devices: XLA of jax 0.11 crashes where one is passed.
    """

    def run(*args):
        leaves, tree = jax.tree.flatten(args)
        specs = jax.tree.leaves(
            jax.tree.broadcast(in_specs, args, is_leaf=_is_spec), is_leaf=_is_spec
        )
        full = [a.size > 0 for a in leaves]

        def local(given):
            rest = iter(given)
            own = [
                next(rest) if passed else _empty(a, spec, mesh)
                for a, spec, passed in zip(leaves, specs, full, strict=True)
            ]
            return f(*jax.tree.unflatten(tree, own))

        own_specs = list(itertools.compress(specs, full))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(own_specs,), out_specs=out_specs)
        return mapped(list(itertools.compress(leaves, full)))

    return run


def _is_spec(spec: Any) -> bool:
    return isinstance(spec, P)


def _empty(a: jax.Array, spec: P, mesh: Mesh) -> jax.Array:
    """Return a device's share of an array without elements."""
    shape = NamedSharding(mesh, spec).shard_shape(a.shape)
    return varying(jnp.zeros(shape, a.dtype), *jax.tree.leaves(tuple(spec)))


def place(params: Tree, config: ModelConfig, num_segments: int | None, mesh: Mesh) -> Weights:
    """Run `weights.prepare` on every device's share of training parameters (stacked layers)."""
    specs, axes = _given(config, num_segments, mesh), mesh_axes(mesh)
    shares = jax.device_put(_part(params, specs), rules.shardings(specs, mesh))

    def local(shares):
        return prepare(shares, config, num_segments, axes).replace(mesh=mesh)

    return jax.jit(shard(local, mesh, (specs,), weights(config, num_segments, mesh)))(shares)


def weights(config: ModelConfig, num_segments: int | None, mesh: Mesh) -> Weights:
    """Return partition specs of the weights from `place`; fused matrices are split by columns."""
    axes, model = mesh_axes(mesh), abstract(config)

    def derived(fuse: Callable, declared: Tree) -> Tree:
        shapes = map_params(lambda p: jax.ShapeDtypeStruct(p.shape, config.dtype), declared)
        return _derived(jax.eval_shape(fuse, shapes), rules.specs(declared, mesh), axes.model)

    fused = _own_heads(derived(fusion.fuse, layer(config)), config, axes.model)
    rest = {k: v for k, v in _given(config, num_segments, mesh).items() if k != "layers"}
    if rest["exits"]:
        named = {name: model["exits"][name] for name in rest["exits"]}

        def ready(named: Tree) -> Tree:
            if not axes.model:
                tables = map_params(lambda p: jnp.zeros(p.shape, config.dtype), model)
                named = exits.with_small_heads(tables | {"exits": named}, config)
            return exits.fuse(named, config)

        rest["exits"] = derived(ready, named)
        for p in rest["exits"].values():
            if "block" in p:
                _own_heads(p["block"], config, axes.model)
    segments = config.segments[: num_segments or config.n_exits + 1]
    return Weights(tuple((fused,) * (end - start) for start, end in segments), rest, axes, mesh)


def _own_heads(specs: Tree, config: ModelConfig, axis: str | None) -> Tree:
    """Return a layer's specs where each shard has only the norm of its own heads' keys."""
    if config.qk_norm == "full" and "qkv" in specs["attn"]:
        specs["attn"]["k_norm"]["scale"] = P(axis, None)
    return specs


def state(axes: Axes) -> EngineState:
    """Return prefixes of a state's specs: keys and values by request and head."""
    row, pair = P(axes.data), P(tuple(axis for axis in (axes.data, axes.model) if axis))
    caches: dict[str, Any] = dict(segments=pair, blocks=pair, filled=row)
    specs: dict[str, Any] = dict.fromkeys((f.name for f in dataclasses.fields(EngineState)), row)
    specs.update(cache=KVCache(**caches), clock=P(), work=P(), plan=P())
    return EngineState(**specs)


def local_slots(slots: jax.Array, n: int, axes: Axes) -> jax.Array:
    """Return slots of all data shards by the numbers of this shard, which has n slots.

    Slots of other shards get a number beyond the last one.
    """
    if not axes.data:
        return slots
    i = slots - lax.axis_index(axes.data) * n
    return jnp.where((i >= 0) & (i < n), i, n)


def _given(config: ModelConfig, num_segments: int | None, mesh: Mesh) -> Tree:
    """Return partition specs of the training parameters that an engine needs."""
    specs = rules.specs(abstract(config), mesh)
    n = num_segments or config.n_exits + 1
    return unlayered_params(specs, config, n) | {"layers": specs["layers"]}


def _part(tree: Tree, like: Tree) -> Tree:
    """Return the part of nested dicts that `like` has too."""
    if not isinstance(like, dict):
        return tree
    return {name: _part(tree[name], part) for name, part in like.items()}


def _derived(shapes: Tree, specs: Tree | None, axis: str | None) -> Tree:
    """Return specs of nested dicts made from one with `specs`; new leaves are split by columns."""
    if isinstance(shapes, dict):
        return {k: _derived(part, (specs or {}).get(k), axis) for k, part in shapes.items()}
    return P(*(None,) * (shapes.ndim - 1), axis) if specs is None else specs
