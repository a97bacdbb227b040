"""Compiles an op's kernels for GPUs and tells what they are: JSON, a line for each spec.

python compile_kernels.py OP 80 90             # needs jax-triton and JAX's CUDA plugin, and no GPU
python compile_kernels.py OP 80 --highest      # float32 specs alone, with exact products
"""

from __future__ import annotations

import importlib
import json
import sys

import compiled_kernels as compiled
import jax


def main(op: str, *given: str) -> None:
    exact = "--highest" in given
    for spec in importlib.import_module(f"eejax.kernels.{op}.arg_specs").SPECS:
        if exact and spec.shapes[0].dtype != "float32":
            continue
        with jax.default_matmul_precision("highest" if exact else None):
            for capability in map(int, filter(str.isdecimal, given)):
                tell(spec, capability)


def tell(spec, capability: int) -> None:
    def run(*args):
        return spec.run(*args, implementation="triton")

    for kernel in compiled.kernels(run, *spec.shapes, capability=capability):
        registers, spilled = kernel.usage()
        told = dict(
            spec=spec.name,
            capability=capability,
            kernel=kernel.name,
            registers=registers,
            spilled=spilled,
            shared=kernel.shared,
            doubles=kernel.doubles,
            version=kernel.version,
        )
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
