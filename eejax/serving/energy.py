"""What serving costs: joules, where the machine counts them, and work, which is counted anywhere.

A GPU counts its own energy (NVML), a processor that of its packages (RAPL). Work, operations and
bytes, is no energy and is never called so: it says which of two ways to serve does less.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from eejax.common.errors import require, require_count
from eejax.common.trees import nbytes
from eejax.models import params
from eejax.models.config import ModelConfig

POWERCAP = pathlib.Path("/sys/class/powercap")


class Meter(Protocol):
    """name: "nvml" or "rapl". read(): joules since some moment, never less than before. All that
    the device or the processor does is counted, not this process alone."""

    name: str

    def read(self) -> float: ...


def meter(devices: Sequence[Any] | None = None, root: pathlib.Path = POWERCAP) -> Meter | None:
    """Of these devices of JAX, by default the first, on which engines without a mesh run; None
    where nothing counts what they take, or this process may not read it.

    A GPU's host is not measured in its place. GPUs need the package nvidia-ml-py; processors are
    read from Linux's `root`, which by default is root's alone.
    """
    devices = jax.local_devices()[:1] if devices is None else devices
    platforms = {device.platform for device in devices}
    if platforms == {"gpu"}:
        return _nvml([device.local_hardware_id for device in devices])
    return _rapl(root) if platforms == {"cpu"} else None


class Nvml:
    """Of NVIDIA GPUs, which count millijoules since their driver was loaded (Volta and later)."""

    name = "nvml"

    def __init__(self, library: Any, handles: Sequence[Any]):
        self._library, self._handles = library, handles

    def read(self) -> float:
        count = self._library.nvmlDeviceGetTotalEnergyConsumption
        return sum(count(handle) for handle in self._handles) / 1e3


def _nvml(numbers: Sequence[int]) -> Nvml | None:
    """Of GPUs by their numbers among those that CUDA shows this process."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        found = Nvml(pynvml, [_handle(pynvml, number) for number in numbers])
        found.read()  # older GPUs, and parts of one, do not count
    except (pynvml.NVMLError, IndexError):  # the latter: the variable was changed meanwhile
        return None
    return found


def _handle(pynvml, number: int):
    """NVML knows nothing of CUDA_VISIBLE_DEVICES. Unlike GPUs count as CUDA_DEVICE_ORDER=PCI_BUS_ID
    has them, which is NVML's order; like ones are in that order anyway."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[number].strip() if visible else str(number)
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


class Rapl:
    """Of a processor's packages; cores and memory controllers are parts of them. Counters begin
    anew, at full load after minutes: a `read` has to come more often than that."""

    name = "rapl"

    def __init__(self, packages: Sequence[pathlib.Path]):
        self._packages = packages
        self._ranges = [_microjoules(p / "max_energy_range_uj") for p in packages]
        self._last = self._now()
        self._total = 0

    def _now(self) -> list[int]:
        return [_microjoules(p / "energy_uj") for p in self._packages]

    def read(self) -> float:
        """Raises OSError where a counter is gone."""
        now = self._now()
        for a, b, most in zip(self._last, now, self._ranges, strict=True):
            self._total += b - a if b >= a else b - a + most
        self._last = now
        return self._total / 1e6


def _microjoules(path: pathlib.Path) -> int:
    return int(path.read_text())


def _rapl(root: pathlib.Path) -> Rapl | None:
    """None unless all packages can be read: a part of them would pass for the whole."""
    try:
        # intel-rapl:0:1 is a part of intel-rapl:0; AMD's processors have the same names.
        domains = [p for p in sorted(root.glob("intel-rapl:*")) if p.name.count(":") == 1]
        named = lambda p: (p / "name").read_text().startswith("package")  # "psys" holds them all
        packages = [p for p in domains if named(p)]
        return Rapl(packages) if packages else None
    except (OSError, ValueError):
        return None


class Work(NamedTuple):
    """flops: floating-point operations, a multiplication and an addition being two; bytes: read."""

    flops: float
    bytes: float


@cache  # it traces the model's parameters
def token_work(config: ModelConfig, exit: int, *, batch: int = 1, seen: float = 0.0) -> Work:
    """What one token takes that leaves by an exit (the last number: the final one).

    Its layers; the heads of that exit and of all it passes, as gates of logits read them, and what
    else these exits have of their own, routers aside. Products with weights as
    `train.flops.model_flops_per_token` has them, forward alone. `batch` tokens share what is read
    of weights; `seen` positions of keys and values are read, and multiplied with, for each. Not
    counted: layers run later for its keys and values, when another token of its text goes deeper.
    Raises ConfigError for an exit there is not, and for a batch or a number of positions below 1
    and 0.
    """
    require_count("exit", exit, least=0)
    most = config.n_exits
    require(exit <= most, "exit", exit, f"must be in 0..{most}, the exits of this model")
    require_count("batch", batch)
    require(seen >= 0, "seen", seen, "must be a number of positions from 0 on")
    declared = params.abstract(config)
    factors = params.map_params(lambda p: math.prod(p.shape) if p.decay else 0, declared)
    cast = partial(params.for_compute, dtype=config.dtype)
    held = jax.eval_shape(cast, params.shapes(config))
    own = lambda tree: {k: v for k, v in tree.items() if k not in ("head", "router")}
    passed = [e.name for e in config.exits[: exit + 1]]
    share, itemsize = config.stops[exit] / config.n_layers, jnp.dtype(config.dtype).itemsize

    def each(tree, size) -> float:
        """Of the layers and exits that the token goes through."""
        parts = [size(own(tree["exits"][name])) for name in passed]
        parts += [size(own(tree["final"]))] if exit == most else []
        return size(tree["layers"]) * share + sum(parts)

    heads = (exit + 1) * config.padded_vocab * config.d_model
    weights = heads + each(factors, lambda tree: sum(jax.tree.leaves(tree)))
    windows = [config.window(i) for i in range(config.stops[exit])]
    windows += [config.exit_window(i) for i, e in enumerate(config.exits[: exit + 1]) if e.block]
    looked = sum(seen if w is None else min(seen, w) for w in windows)
    cache = 2 * config.n_kv_heads * config.head_dim * itemsize * looked
    return Work(
        2.0 * weights + 4.0 * config.n_heads * config.head_dim * looked,
        (heads * itemsize + each(held, nbytes)) / batch + cache,
    )


@cache
def layer_flops(config: ModelConfig) -> tuple[float, ...]:
    """Of a token in the layers of each segment, and in nothing else that is there."""
    declared = params.abstract(config)["layers"]
    factors = params.map_params(lambda p: math.prod(p.shape) if p.decay else 0, declared)
    total = 2.0 * sum(jax.tree.leaves(factors))
    return tuple(total * (end - begin) / config.n_layers for begin, end in config.segments)


def segment_rows(exits: Sequence[int], segments: int, cap: int) -> list[int]:
    """Of a text whose tokens behind the first left by these exits: how many go through each segment
    [segments], at the time or later.

    Who goes deeper takes along all that wait, and once `cap` do all of them go (KV recomputation,
    Bae et al. 2023), so that each goes through a segment once, or never where nobody goes there
    after it. Rows of a batch that are there for nothing are not counted.
    """
    filled = [0] * segments
    for position, exit in enumerate(exits):
        if filled[0] - filled[-1] >= cap:
            filled = [position] * segments
        filled = [position + 1 if s <= exit else n for s, n in enumerate(filled)]
    return filled
