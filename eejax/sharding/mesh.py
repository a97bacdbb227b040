"""The device mesh: (data, pipe, model), always all three, any of them of size 1."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from eejax.common.axes import DATA, MESH_AXES, MODEL, Axes
from eejax.common.errors import ConfigError, require
from eejax.common.fields import PositiveInt, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Dimensions that the mesh's axes shard beside batch, layers and matrices.

    Attributes:
      sequence: whether a layer holds, between its matrix products, only a part of the positions on
        each shard of the model axis (Korthikanti et al. 2022). It saves memory but no
        communication, and has no effect if that axis has one device.
      shard_optimizer: whether optimizer moments and averaged parameters are sharded over the data
        axis (ZeRO-1, Rajbhandari et al. 2020), with the same communication.
      shard_params: whether parameters are sharded too (ZeRO-3), and gathered layer by layer in each
        forward and backward pass (in the forward pass only with train.remat "none").
    """

    sequence: bool = False
    shard_optimizer: bool = True
    shard_params: bool = False

    def __post_init__(self):
        check_fields(self)

    @property
    def params_over(self) -> str | None:
        """Name of the axis that parameters are spread over, or None."""
        return DATA if self.shard_params else None

    @property
    def moments_over(self) -> str | None:
        """Name of the axis that moments and averages are spread over, always if parameters are."""
        return DATA if self.shard_optimizer or self.shard_params else None


DEFAULT = Layout()


@dataclasses.dataclass(frozen=True)
class MeshConfig(Layout):
    """Devices along each axis, and the `Layout` of what these hold.

    Attributes:
      data: copies of the model, which share the batch.
      pipe: stages of each copy, one above the other.
      model: shards of the matrices of each stage.
    """

    data: PositiveInt = 1
    pipe: PositiveInt = 1
    model: PositiveInt = 1

    def __post_init__(self):
        super().__post_init__()
        require(
            not self.shard_params or self.pipe == 1,
            "MeshConfig.shard_params",
            self.shard_params,
            f"must be False with mesh.pipe = {self.pipe}",
            "Stages would gather their layers again for every microbatch; shard_optimizer spreads "
            "their optimizer state.",
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of the axes (data, pipe, model)."""
        return (self.data, self.pipe, self.model)

    @property
    def size(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.shape)


def make_mesh(
    config: MeshConfig,
    # Type checkers take `jax.Device` for a variable.
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """Return a mesh with axes (data, pipe, model) over the first `config.size` devices.

    Further devices stay unused. Raises `ConfigError` if there are too few.
    """
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) < config.size:
        raise ConfigError(
            f"mesh (data, pipe, model) = {config.shape} needs {config.size} devices, this machine "
            f"has {len(devices)} ({devices[0].device_kind}). Make the mesh smaller, or on a CPU "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={config.size}."
        )
    # Auto, because every computation on the mesh is a fully manual shard_map with types of its own.
    return jax.make_mesh(
        config.shape,
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices[: config.size],
    )


def known_mesh(mesh: MeshConfig | Mesh) -> Mesh:
    """Return the mesh, made if it is a `MeshConfig`. Raises ConfigError for any other mesh."""
    known = isinstance(mesh, MeshConfig | Mesh)
    require(known, "mesh", mesh, "must be a MeshConfig or a jax.sharding.Mesh")
    if isinstance(mesh, MeshConfig):
        return make_mesh(mesh)
    named = mesh.axis_names == MESH_AXES
    require(named, "mesh", mesh, f"must have the axes {MESH_AXES}", "Use sharding.mesh.make_mesh.")
    return mesh


def mesh_axes(mesh: Mesh | AbstractMesh, layout: Layout = DEFAULT) -> Axes:
    """Return the axis names for code inside a `shard_map` over `mesh`, None for axes of size 1.

    An axis of one device needs no communication, so the same program runs without it.
    """
    names = {name: name if mesh.shape[name] > 1 else None for name in MESH_AXES}
    return Axes(**names, sequence=names[MODEL] if layout.sequence else None)


def check_batch(
    batch_size: int, mesh: Mesh | AbstractMesh, microbatches: int = 1, field: str = "batch_size"
):
    """Raise `ConfigError` unless every data shard gets equally many whole microbatches.

    `batch_size` is the global number of sequences of a step.
    """
    shards = mesh.shape[DATA]
    parts = shards * microbatches
    if batch_size % parts or batch_size < parts:
        nearest = max(1, round(batch_size / parts)) * parts
        raise ConfigError(
            f"{field} = {batch_size}: must be a multiple of mesh.data x microbatches = {shards} x "
            f"{microbatches} = {parts}. The nearest is {nearest}."
        )
