"""Triton kernels of a program that is lowered for CUDA: their PTX, registers and memory.

It needs no GPU, but jax-triton and with it JAX's CUDA plugin.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from eejax.kernels import call, triton_call


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a program.

    Attributes:
      name: its name.
      warps: number of warps.
      shared: bytes of shared memory.
      grid: numbers of programs.
      ptx: its PTX.
    """

    name: str
    warps: int
    shared: int
    grid: tuple[int, int, int]
    ptx: str

    @property
    def version(self) -> tuple[int, int]:
        """Version of the PTX."""
        found = _found(r"\.version (\d+)\.(\d+)", self.ptx)
        return int(found[1]), int(found[2])

    @property
    def doubles(self) -> bool:
        """True if the kernel computes in float64, which happens if a Python number slips in."""
        return ".f64" in self.ptx

    def usage(self) -> tuple[int, int]:
        """Return (registers per thread, bytes spilled), by the assembler that comes with Triton."""
        from triton.backends.nvidia.compiler import get_ptxas

        target = _found(r"\.target (sm_(\d+)\w*)", self.ptx)
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(self.ptx)
            file.flush()
            said = subprocess.run(
                [
                    get_ptxas(int(target[2])).path,
                    "-v",
                    f"--gpu-name={target[1]}",
                    file.name,
                    "-o",
                    "/dev/null",
                ],
                capture_output=True,
                text=True,
                check=True,
            ).stderr
        spilled = _found(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
        return int(_found(r"Used (\d+) registers", said)[1]), sum(map(int, spilled.groups()))


def _found(pattern: str, text: str) -> re.Match[str]:
    """Search an assembler's input or output; raise ValueError if the pattern is not in it."""
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"nothing matches {pattern!r} in {reprlib.repr(text)}")
    return found


def kernels(run: Callable, *args: Any, capability: int) -> list[Kernel]:
    """Return the kernels of jax.jit(run)(*args) on a GPU of a compute capability (80, 90).

    They are in the order of the program; a kernel in a loop or a branch is listed once for each
    place that calls it.
    """
    with call.compute_capability(capability):
        traced = jax.jit(run).trace(*args)
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    assert module is not None  # lowering to StableHLO always has one
    found = []
    for op in _operations(module):
        if (packed := _packed(op)) is not None:
            found.append(_kernel(zlib.decompress(packed)))
    return found


def _packed(op: Any) -> bytes | None:
    """Kernel of a custom call of either form, or None for another operation."""
    if op.name != "stablehlo.custom_call":
        return None
    target, config = op.attributes["call_target_name"].value, op.attributes["backend_config"]
    if target == triton_call.FFI:
        # JAX keeps these attributes separate, as StableHLO's verifier expects a string.
        apart = "mhlo.backend_config"
        config = op.attributes[apart] if apart in op.attributes else config
        return config["opaque"].value_bytes
    return config.value_bytes if target == triton_call.LEGACY else None


def _operations(module: Any) -> Iterator[Any]:
    """Operations of `main`, with those of a function at each place that calls it."""
    functions = {op.attributes["sym_name"].value: op.operation for op in module.body.operations}

    def walk(op: Any) -> Iterator[Any]:
        for inner in (o.operation for region in op.regions for block in region for o in block):
            yield inner
            called = inner.name == "func.call"
            yield from walk(functions[inner.attributes["callee"].value] if called else inner)

    return walk(functions["main"])


def _kernel(message: bytes) -> Kernel:
    """Parse a serialized jaxlib `TritonAnyKernelCall`.

    Its fields are (kernel_call = 1: (kernel = 1: (name = 1, warps = 2, shared = 3, ptx = 4), grid =
    2, 3, 4)).
    """
    launched = dict(_fields(dict(_fields(message))[1]))
    own = dict(_fields(launched[1]))
    return Kernel(
        own[1].decode(),
        own[2],
        own.get(3, 0),
        tuple(launched[i] for i in (2, 3, 4)),
        own[4].decode(),
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a protocol buffer's fields: integers, and bytes if they have a
    length."""
    i = 0

    def integer() -> int:
        nonlocal i
        value = shift = 0
        while True:
            byte = message[i]
            i, value, shift = i + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while i < len(message):
        key = integer()
        if key & 7 == 0:
            yield key >> 3, integer()
        elif key & 7 == 2:
            size = integer()
            yield key >> 3, message[i : i + size]
            i += size
        else:
            size = {1: 8, 5: 4}[key & 7]
            yield key >> 3, message[i : i + size]
            i += size
