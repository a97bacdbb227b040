"""Compilation of programs for a GPU that is not present, with the compiler in JAX's CUDA plugin.

The plugin (`jax-cuda12-pjrt`, or 13) must be importable. `JAX_PLATFORMS=cpu` may be set: nothing
here starts a device. XLA does not try variants of matrix products, as it would on a card, so it may
choose other kernels there.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from eejax.common.errors import ConfigError
from eejax.common.trees import Tree
from eejax.kernels import call

OPTIONS = {"xla_gpu_autotune_level": "0"}
"""Options that let XLA compile without a device."""

MIN_JAX = (0, 11)
"""The first JAX whose XLA does not copy the carry of a conditional on a GPU."""

CUDNN = 91200
"""Version of cuDNN that programs are compiled for, in its library's form."""


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU to compile for, by its data sheet.

    Attributes:
      name: its name.
      capability: compute capability, such as 90.
      multiprocessors: number of multiprocessors.
      shared: bytes of shared memory of a multiprocessor.
      units: float32 units of a multiprocessor.
      clock: GHz.
      l2: bytes of the second-level cache.
      memory: bytes of device memory.
      bandwidth: bytes a second to and from device memory.
      flops: operations a second in dense matrix products of bfloat16.
    """

    name: str
    capability: int
    multiprocessors: int
    shared: int
    units: int
    clock: float
    l2: int
    memory: int
    bandwidth: float
    flops: float

    @property
    def description(self) -> str:
        """The description for XLA's compiler: a GpuTargetConfigProto as text."""
        major, minor = divmod(self.capability, 10)
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared}
  threads_per_core_limit: 2048
  core_count: {self.multiprocessors}
  fpus_per_core: {self.units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth:.0f}
  l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  shared_memory_per_block_optin: {call.SHARED_MEMORY[self.capability]}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  kernel_mode_driver_version: "580.159.4"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{self.name}"
"""


A100 = Card(
    "NVIDIA A100-SXM4-80GB",
    80,
    multiprocessors=108,
    shared=167_936,
    units=64,
    clock=1.41,
    l2=41_943_040,
    memory=85_045_149_696,
    bandwidth=2.039e12,
    flops=312e12,
)
H100 = Card(
    "NVIDIA H100 80GB HBM3",
    90,
    multiprocessors=132,
    shared=233_472,
    units=128,
    clock=1.98,
    l2=52_428_800,
    memory=84_929_347_584,
    bandwidth=3.35e12,
    flops=989e12,
)
CARDS = {"a100": A100, "h100": H100}


@functools.cache
def device(card: Card) -> Any:
    """Return a device of the card to place shapes on.

    Raises:
      ConfigError: if JAX's CUDA plugin cannot be found, or does not start.
    """
    needed = f"jax-cuda12-pjrt or jax-cuda13-pjrt of JAX's own version, {jax.__version__}"
    if not has_compiler():
        raise ConfigError(
            f"the compiler for GPUs is missing: it comes with {needed}. `make env` puts them into "
            ".venv/lowering; elsewhere, name their folder in PYTHONPATH."
        )
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=card.description, topology="1x1x1"
        ).devices[0]
    except Exception as error:  # the plugin's own errors have no common class
        raise ConfigError(
            f"the compiler for GPUs does not start: {error}. It must be {needed}."
        ) from error


def has_compiler() -> bool:
    """Return whether JAX's plugin for CUDA, which has the compiler, can be imported."""
    with contextlib.suppress(ModuleNotFoundError):
        return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13))
    return False


def versions() -> dict[str, str]:
    """Return the versions of JAX and its CUDA plugin, by package."""
    found = {"jax": jax.__version__}
    for name in ("jax-cuda12-pjrt", "jax-cuda13-pjrt"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def complaint() -> str | None:
    """Return why programs of this JAX should not run on a GPU, or None if they should."""
    if tuple(map(int, jax.__version__.split(".")[:2])) >= MIN_JAX:
        return None
    return (
        f"jax {jax.__version__} copies the KV caches that a conditional carries, and a GPU should "
        "run jax 0.11 or newer: compile by that one (docs/GPU.md)."
    )


def shapes(card: Card, tree: Tree) -> Tree:
    """Replace a tree's arrays by their shapes, placed on the card."""
    sharding = SingleDeviceSharding(device(card))

    def one(a: Any) -> jax.ShapeDtypeStruct:
        a = a if hasattr(a, "dtype") else np.asarray(a)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    return jax.tree.map(one, tree)


def mesh(card: Card, like: Mesh) -> Mesh:
    """Make a mesh of one such card with the axes of another mesh."""
    devices = np.array([device(card)]).reshape((1,) * len(like.axis_names))
    return Mesh(devices, like.axis_names, axis_types=like.axis_types)


@contextlib.contextmanager
def _cudnn(card: Card) -> Iterator[None]:
    """Answer for the card the questions that JAX asks a device before it lowers cuDNN's
    attention."""
    asked = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    own = divmod(card.capability, 10)

    def least(text):
        return own >= tuple(map(int, text.split(".")))

    def equal(text):
        return own == tuple(map(int, text.split(".")))

    with (
        mock.patch.object(asked, "check_cudnn_version", lambda: CUDNN),
        mock.patch.object(asked, "check_compute_capability", least),
        mock.patch.object(asked, "is_cuda_compute_capability_equal", equal),
    ):
        yield


@functools.cache
def _toolkit() -> dict[str, str]:
    """Point XLA to an assembler and to libdevice, by compiler options.

    Triton has both. A CUDA toolkit is not required, as most machines without a GPU have none.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return {}
    own = pathlib.Path(spec.origin).parent / "backends" / "nvidia"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="eejax-cuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for place, source in (("bin", own / "bin"), ("nvvm/libdevice", own / "lib")):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).symlink_to(source, target_is_directory=True)
    return {"xla_gpu_cuda_data_dir": str(folder)}


def compiled(
    card: Card,
    run: jax.stages.Wrapped,
    *args: Any,
    compiler_options: Mapping[str, str | bool] | None = None,
    **static: Any,
) -> jax.stages.Compiled:
    """Compile a jitted function for the card.

    Args:
      card: the card to compile for.
      run: a function made by `jax.jit`.
      args: shapes with shardings on the card.
      compiler_options: more of XLA's flags, without their dashes.
      static: keyword arguments of `run`.
    """
    with call.compute_capability(card.capability), _cudnn(card):
        lowered = run.trace(*args, **static).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options={**OPTIONS, **_toolkit(), **(compiler_options or {})})
