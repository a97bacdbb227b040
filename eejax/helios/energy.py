"""Cost of serving: joules, where the machine counts them, and compute work.

A GPU counts its own energy (NVML), a processor that of its packages (RAPL). Compute work,
operations and bytes, is not energy and is never called so: it only shows which of two
configurations does less work.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from eejax.common.errors import require, require_count
from eejax.common.trees import nbytes
from eejax.models import params, work
from eejax.models.config import ModelConfig

POWERCAP = pathlib.Path("/sys/class/powercap")


class EnergyMeter(Protocol):
    """A counter of energy.

    It counts all work of the device or the processor, not this process alone.

    Attributes:
      name: "nvml" or "rapl".
      read: returns joules since a fixed moment; they never decrease. Raises OSError.
    """

    name: str

    def read(self) -> float: ...


def meter(
    devices: Sequence[Any] | None = None, root: pathlib.Path = POWERCAP
) -> EnergyMeter | None:
    """Return the meter of JAX devices, by default the first, on which engines without a mesh run.

    The result is None if nothing counts their energy, or this process may not read it. A GPU's host
    is not measured instead. GPUs need the package nvidia-ml-py; processors are read from Linux's
    `root`, which only the user root may read by default.
    """
    devices = jax.local_devices()[:1] if devices is None else devices
    platforms = {device.platform for device in devices}
    if platforms == {"gpu"}:
        return _nvml([device.local_hardware_id for device in devices])
    return _rapl(root) if platforms == {"cpu"} else None


class NvmlMeter:
    """Meter of NVIDIA GPUs (Volta and later), which count millijoules themselves."""

    name = "nvml"

    def __init__(self, library: Any, handles: Sequence[Any]):
        self._library, self._handles = library, handles

    def read(self) -> float:
        count = self._library.nvmlDeviceGetTotalEnergyConsumption
        try:
            return sum(count(handle) for handle in self._handles) / 1e3
        except self._library.NVMLError as error:
            raise OSError(f"NVML cannot read the energy of a GPU ({error})") from error


def _nvml(numbers: Sequence[int]) -> NvmlMeter | None:
    """Return the meter of GPUs, by their numbers among those that CUDA shows this process."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  # an optional package
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        found = NvmlMeter(pynvml, [_handle(pynvml, number) for number in numbers])
        found.read()  # older GPUs, and parts of one, do not count
    except (pynvml.NVMLError, OSError, IndexError):
        return None  # IndexError: the variable was changed meanwhile
    return found


def _handle(pynvml, number: int):
    """Return NVML's handle of a GPU.

    NVML ignores CUDA_VISIBLE_DEVICES. GPUs of different kinds are numbered as with
    CUDA_DEVICE_ORDER=PCI_BUS_ID, which is NVML's order; equal ones are in that order anyway.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[number].strip() if visible else str(number)
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


class RaplMeter:
    """Meter of a processor's packages; cores and memory controllers are parts of them.

    Counters wrap around, at full load after minutes: `read` must be called more often than that.
    """

    name = "rapl"

    def __init__(self, packages: Sequence[pathlib.Path]):
        self._packages = packages
        self._ranges = [_microjoules(p / "max_energy_range_uj") for p in packages]
        self._last = self._now()
        self._total = 0

    def _now(self) -> list[int]:
        return [_microjoules(p / "energy_uj") for p in self._packages]

    def read(self) -> float:
        """Return joules since a fixed moment. Raises OSError if a counter is gone."""
        now = self._now()
        for a, b, most in zip(self._last, now, self._ranges, strict=True):
            self._total += b - a if b >= a else b - a + most
        self._last = now
        return self._total / 1e6


def _microjoules(path: pathlib.Path) -> int:
    return int(path.read_text())


def _rapl(root: pathlib.Path) -> RaplMeter | None:
    """Return the meter of all packages, None unless all can be read."""
    try:
        # intel-rapl:0:1 is a part of intel-rapl:0; AMD's processors have the same names.
        domains = [p for p in sorted(root.glob("intel-rapl:*")) if p.name.count(":") == 1]

        def named(p):
            return (p / "name").read_text().startswith("package")  # "psys" includes all of them

        packages = [p for p in domains if named(p)]
        return RaplMeter(packages) if packages else None
    except (OSError, ValueError):
        return None


class ComputeWork(NamedTuple):
    """Compute work.

    Attributes:
      flops: floating-point operations; a multiplication and an addition are two.
      bytes: bytes read.
    """

    flops: float
    bytes: float


@cache  # it traces the model's parameters
def token_work(
    config: ModelConfig, exit: int, *, batch: int = 1, cached: float = 0.0
) -> ComputeWork:
    """Return the work of one token that leaves by an exit (the last number is the final exit).

    It counts the token's layers, the heads of that exit and of all exits below, which gates on
    logits read, and the other parameters of these exits, but not routers. Products with weights are
    those of `train.flops.model_flops_per_token`, forward only, but a low-rank head's are those of
    the two matrices that decoding reads. Layers that run later for its keys
    and values, when another token of its text goes deeper, are not counted.

    Args:
      config: the model's.
      exit: number of the exit.
      batch: tokens that share one read of the weights.
      cached: positions of keys and values that are read, and multiplied with, for each token.

    Raises:
      ConfigError: for an unknown exit, a batch below 1, or a negative number of positions.
    """
    require_count("exit", exit, minimum=0)
    most = config.n_exits
    require(exit <= most, "exit", exit, f"must be in 0..{most}, the exits of this model")
    require_count("batch", batch)
    require(cached >= 0, "cached", cached, "must be a number of positions of at least 0")
    cast = partial(params.for_compute, dtype=config.dtype)
    held = jax.eval_shape(cast, params.shapes(config))

    passed = [e.name for e in config.exits[: exit + 1]]
    share, itemsize = (
        config.exit_boundaries[exit] / config.n_layers,
        jnp.dtype(config.dtype).itemsize,
    )

    def each(tree, size) -> float:
        """Return the sum of `size` over the layers and exits that the token goes through."""
        parts = [size(work.without_head(tree["exits"][name])) for name in passed]
        parts += [size(work.without_head(tree["final"]))] if exit == most else []
        return size(tree["layers"]) * share + sum(parts)

    heads = sum(work.head_weights(config, e, decoding=True) for e in range(exit + 1))
    weights = heads + config.exit_boundaries[exit] * work.layer_weights(config)
    weights += sum(work.exit_weights(config, e) for e in range(len(passed)))
    windows = [config.window(i) for i in range(config.exit_boundaries[exit])]
    windows += [config.exit_window(i) for i, e in enumerate(config.exits[: exit + 1]) if e.block]
    looked = sum(cached if w is None else min(cached, w) for w in windows)
    cache = 2 * config.n_kv_heads * config.head_dim * itemsize * looked
    return ComputeWork(
        2.0 * (weights + work.attention(config, looked)),
        (heads * itemsize + each(held, nbytes)) / batch + cache,
    )


@cache
def layer_flops(config: ModelConfig) -> tuple[float, ...]:
    """Return a token's operations in the layers of each segment."""
    layer = 2.0 * work.layer_weights(config)
    return tuple(layer * (end - begin) for begin, end in config.segments)


def segment_rows(exits: Sequence[int], segments: int, cap: int) -> list[int]:
    """Return [segments], how many rows of a text run each segment, at once or later.

    A token that goes deeper takes along all tokens that wait, and once `cap` wait all of them go
    (KV recomputation, Bae et al. 2023). So each token runs through a segment once, or never if no
    later token goes there. Padding rows of a batch are not counted.

    exits: exits by which the text's tokens after the first left.
    """
    filled = [0] * segments
    for position, exit in enumerate(exits):
        if filled[0] - filled[-1] >= cap:
            filled = [position] * segments
        filled = [position + 1 if s <= exit else n for s, n in enumerate(filled)]
    return filled
