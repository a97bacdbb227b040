"""Compiles kernels of ops for GPUs and tells what they are: JSON, a line for each kernel.

python compile_kernels.py OP 80 90             # needs jax-triton and JAX's CUDA plugin, and no GPU
python compile_kernels.py OP 80 --highest      # float32 specs alone, with exact products
python compile_kernels.py OP:SPEC OP:SPEC 80   # these specs alone
"""

from __future__ import annotations

import importlib
import json
import sys

import compiled_kernels as compiled
import jax

from eejax.kernels.specs import OPS


def main(*given: str) -> None:
    exact = "--highest" in given
    capabilities = [int(word) for word in given if word.isdecimal()]
    for word in given:
        op, _, name = word.partition(":")
        if op not in OPS:
            continue
        for spec in importlib.import_module(f"eejax.kernels.{op}.arg_specs").SPECS:
            if name not in ("", spec.name) or (exact and spec.shapes[0].dtype != "float32"):
                continue
            with jax.default_matmul_precision("highest" if exact else None):
                for capability in capabilities:
                    tell(op, spec, capability)


def tell(op: str, spec, capability: int) -> None:
    def run(*args):
        return spec.run(*args, implementation="triton")

    for kernel in compiled.kernels(run, *spec.shapes, capability=capability):
        registers, spilled = kernel.usage()
        told = dict(
            op=op,
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
