"""Compiles an op's kernels for both chips and tells what they are: JSON, a line for each spec.

python compile_kernels.py OP     # needs jax-triton and JAX's CUDA plugin, and no GPU
"""

from __future__ import annotations

import importlib
import json
import sys

from eejax.kernels import compiled

CAPABILITIES = (80, 90)


def main(op: str) -> None:
    for spec in importlib.import_module(f"eejax.kernels.{op}.arg_specs").SPECS:
        for capability in CAPABILITIES:
            run = lambda *args, spec=spec: spec.run(*args, implementation="triton")
            for kernel in compiled.kernels(run, *spec.shapes, capability=capability):
                registers, spilled = kernel.usage()
                told = dict(
                    spec=spec.name, capability=capability, kernel=kernel.name, registers=registers,
                    spilled=spilled, shared=kernel.shared, doubles=kernel.doubles,
                    version=kernel.version,
                )  # fmt: skip
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
