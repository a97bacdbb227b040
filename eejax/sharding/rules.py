"""Rules that map logical axes to mesh axes, and the shardings that follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from eejax.common.axes import MESH_AXES, MODEL, PIPE
from eejax.common.errors import ConfigError
from eejax.common.trees import Tree, path_name

# Letters as in eejax.common.axes. Megatron's layout: heads, feed-forward and vocabulary are split
# into tensor-parallel shards, layers into pipeline stages; all else is whole on every device.
RULES: Mapping[str, str | None] = {
    "l": PIPE,
    "p": PIPE,
    "n": MODEL,
    "k": MODEL,
    "f": MODEL,
    "v": MODEL,
    "d": None,
    "h": None,
    "r": None,
    "t": None,
}

# Logical axes that may have fewer members than the mesh axis has devices. If each member has an
# equal group of devices, the axis is whole on every device, which takes the member it needs. Query
# heads of one group read the same key/value head (`models.layers.self_attention`).
SHARED = ("k",)

# Alternatives for errors about a logical axis that does not divide by the number of devices.
OTHERWISE: Mapping[str, str] = {
    "n": ", or another model.n_heads",
    "k": ", or another model.n_kv_heads",
    "f": ", or another model.d_ff, or mlp_width of the exits",
    "v": ", or pad the vocabulary with model.vocab_multiple = {}",
}


def spec(
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    mesh_shape: Mapping[str, int],
    rules: Mapping[str, str | None] = RULES,
) -> PartitionSpec:
    """Return the `PartitionSpec` of a parameter.

    Args:
      name: name of the parameter in errors.
      shape: its shape.
      axes: a logical axis, or None, for each dimension. An axis of `SHARED` with fewer members than
        devices, and an equal group of devices for each, is left whole.
      mesh_shape: number of devices by mesh axis.
      rules: mesh axis by logical axis.

    Raises:
      ConfigError: if a logical axis has no rule, two dimensions map to the same mesh axis, or a
        dimension does not divide by it.
    """
    if len(axes) != len(shape):
        raise ConfigError(
            f"{name}: shape {shape} has {len(shape)} dimensions, axes {axes} name "
            f"{len(axes)}. Name one logical axis for each dimension."
        )
    placed: dict[str, str] = {}
    entries: list[str | None] = []
    for size, logical in zip(shape, axes, strict=True):
        if logical is None:
            entries.append(None)
            continue
        if logical not in rules:
            raise ConfigError(
                f"{name}: logical axis {logical!r} has no rule. Known: {', '.join(rules)}."
            )
        axis = rules[logical]
        if axis is None:
            entries.append(None)
            continue
        if axis not in mesh_shape:
            raise ConfigError(
                f"{name}: the rule {logical!r} -> {axis!r} names no mesh axis. The mesh has "
                f"{', '.join(mesh_shape)}."
            )
        if axis in placed:
            raise ConfigError(
                f"{name}: logical axes {placed[axis]!r} and {logical!r} of {axes} both lie on mesh "
                f"axis {axis!r}. Map one of them to another axis, or to None."
            )
        if logical in SHARED and size < mesh_shape[axis] and mesh_shape[axis] % size == 0:
            entries.append(None)
            continue
        if logical == "l" and size % mesh_shape[axis]:  # stages of unequal size have a stack of
            entries.append(None)  # their own (`pipeline.layout`); the model's is not cut
            continue
        if size % mesh_shape[axis]:
            raise ConfigError(
                f"{name}: dimension {logical!r} of size {size} does not divide by mesh.{axis} = "
                f"{mesh_shape[axis]}. Choose a mesh.{axis} that divides {size}"
                f"{OTHERWISE.get(logical, '').format(mesh_shape[axis])}."
            )
        placed[axis] = logical
        # An axis of one device splits nothing. Left out, values do not count as varying over it.
        entries.append(axis if mesh_shape[axis] > 1 else None)
    return PartitionSpec(*entries)


def spread(
    spec: PartitionSpec,
    shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
    axis: str,
    start: int = 0,
) -> PartitionSpec:
    """Return `spec` with one more dimension split over `axis`.

    It is the first dimension, from `start` on, that no axis splits and that divides by `axis`;
    without one, `spec` is returned unchanged.
    """
    entries = [*spec, *(None,) * (len(shape) - len(spec))]
    if mesh.shape[axis] == 1 or axis in entries:
        return spec
    for i in range(start, len(shape)):
        if entries[i] is None and shape[i] % mesh.shape[axis] == 0:
            return PartitionSpec(*entries[:i], axis, *entries[i + 1 :])
    return spec


def specs(
    declaration: Tree,
    mesh: Mesh | AbstractMesh,
    over: str | tuple[str, ...] | None = None,
    *,
    rules: Mapping[str, str | None] = RULES,
) -> Tree:
    """Return a tree of `PartitionSpec`s for a tree of declared parameters (leaves with shape and
    axes).

    Parameters are also spread over the mesh axes `over`, if there are any, but layers are never
    separated: a layer of a stack is gathered and saved by itself.
    """
    more = () if over is None else (over,) if isinstance(over, str) else over
    mesh_shape = {axis: mesh.shape[axis] for axis in MESH_AXES}

    def one(path, p):
        placed = spec(path_name(path), p.shape, p.axes, mesh_shape, rules)
        for axis in more:
            placed = spread(placed, p.shape, mesh, axis, start=int(p.axes[:1] == ("l",)))
        return placed

    return jax.tree_util.tree_map_with_path(one, declaration, is_leaf=_declared)


def shardings(specs: Tree, mesh: Mesh | AbstractMesh) -> Tree:
    """Return a tree of `NamedSharding`s for a tree of `PartitionSpec`s."""
    return jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def structs(
    declaration: Tree, mesh: Mesh | AbstractMesh, over: str | tuple[str, ...] | None = None
) -> Tree:
    """Return float32 shape structs of declared parameters, with their shardings on `mesh`.

    `over` is as in `specs`.
    """
    return jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=s),
        declaration,
        shardings(specs(declaration, mesh, over), mesh),
        is_leaf=_declared,
    )


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of a value that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def _declared(node: Any) -> bool:
    return hasattr(node, "axes") and hasattr(node, "shape")
