"""Lowers kernels for CUDA in both forms of the custom call: JSON, a line for each program.

Needs jax-triton and JAX's CUDA plugin, and no GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re

import compiled_kernels as compiled
import jax

from eejax.kernels import call

FORMS = {"ffi": contextlib.nullcontext, "legacy": call.legacy_calls}


def main() -> None:
    for op in ("scatter", "linear_cross_entropy", "norm_router"):
        spec = importlib.import_module(f"eejax.kernels.{op}.arg_specs").SPECS[0]

        def run(*args, spec=spec):
            return spec.run(*args, implementation="triton")

        for form, context in FORMS.items():
            with context():
                try:
                    found = tell(run, spec.shapes)
                except RuntimeError as error:
                    found = dict(refused=str(error))
            print(json.dumps(dict(op=op, form=form) | found), flush=True)


def tell(run, shapes) -> dict:
    """A program's custom calls as XLA reads them, and its kernels."""
    with call.compute_capability(80):
        text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text("hlo")
    lines = [line for line in text.splitlines() if 'custom_call_target="triton' in line]

    def field(pattern):
        return [re.findall(pattern, line) for line in lines]

    return dict(
        targets=field(r'custom_call_target="(\w+)"'),
        versions=field(r"api_version=(\w+)"),
        aliases=field(r"output_to_operand_aliasing=\{\{(\d*)\}: \((\d+), \{\}\)\}"),
        kernels=[(k.name, k.ptx) for k in compiled.kernels(run, *shapes, capability=80)],
    )


if __name__ == "__main__":
    main()
