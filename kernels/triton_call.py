"""Calls of Triton kernels from JAX: the one module that touches jax-triton, 0.3 or 0.4.

The two versions differ in three ways:

- A result that reuses an argument's memory. 0.3 passes its memory twice, as the argument and as the
  result. 0.4 passes it once, and the kernel's parameter for the result is None.
  Kernels with such a result therefore begin with `if out_ptr is None: out_ptr = in_ptr`.
- The form of XLA's custom call. 0.4 writes the FFI form, 0.3 the one before it. XLA's CUDA graphs
  take only the FFI form, so 0.3's calls are rewritten where JAX's plugin can run it.
- The version of PTX. Triton from 3.7 on writes newer PTX than the assembler beside JAX's plugin may
  read; 0.4 can ask for an older one. 0.3 cannot, so it goes with Triton 3.6, which writes 8.7.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir, partial_eval
from jaxlib import plugin_support

LEGACY, FFI = "triton_kernel_call", "triton_kernel_call_ffi"
"""Targets of the two forms of the custom call."""


def load() -> ModuleType:
    """Import jax-triton. Raises ImportError if that fails, as it may without JAX's plugin."""
    import jax_triton

    return jax_triton


def knows_legacy() -> bool:
    """Return whether jax-triton can write the older form of the custom call, as 0.3 can.

    The result is False if jax-triton cannot be imported.
    """
    try:
        return not _takes_out_type()
    except ImportError:
        return False


def triton_call(
    *args: jax.Array,
    kernel: Any,
    grid: tuple[int, ...],
    out: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int],
    warps: int,
    stages: int,
    capability: int | None,
    legacy: bool,
    constants: Mapping[str, Any],
) -> list[jax.Array]:
    """Call a kernel that takes `args`, then pointers to its results `out`, then `constants`.

    Args:
      aliases: {number of an argument: number of the result that reuses its memory}.
      capability: compute capability (80, 90) to compile for; None for that of the first GPU.
      legacy: whether to write the form of the custom call before FFI.

    Raises:
      RuntimeError: for `legacy` with a jax-triton that does not have that form.
    """
    call = _by_out_type if _takes_out_type() else _by_pairs
    return call(
        args,
        out,
        aliases,
        legacy,
        kernel=kernel,
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        compute_capability=capability,
        **constants,
    )


def _takes_out_type() -> bool:
    """Return whether this is jax-triton 0.4."""
    return hasattr(load(), "TensorDescriptor")


def _by_pairs(args, out, aliases, legacy, **how) -> list[jax.Array]:
    """Call by jax-triton 0.3."""
    target = LEGACY if legacy or not _rewritten() else FFI
    return load().triton_call(
        *args,
        out_shape=list(out),
        input_output_aliases=dict(aliases),
        custom_call_target_name=target,
        **how,
    )


def _by_out_type(args, out, aliases, legacy, *, compute_capability, **how) -> list[jax.Array]:
    """Call by jax-triton 0.4."""
    if legacy:
        raise RuntimeError("jax-triton 0.4 writes the FFI form alone; 0.3 knows both")
    pointers = [p.name for p in how["kernel"].params if not p.is_constexpr]
    passed = {pointers[len(args) + o]: None for o in aliases.values()}
    options: dict[str, bool | int] = {"enable_fp_fusion": True}  # as 0.3
    if compute_capability is not None:
        options["ptx_version"] = ptx_version(compute_capability)
    _let_unused_results_go()
    with warnings.catch_warnings():
        # It recommends JAX's references instead of aliases. But inside a `shard_map`, a kernel's
        # writes to one do not vary along a mesh's axes, as jax 0.12 requires.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return load().triton_call(
            *args,
            out_type=list(out),
            input_output_aliases=dict(aliases),
            compute_capability=compute_capability,
            backend_options=options,
            **passed,
            **how,
        )


@functools.cache
def _let_unused_results_go() -> None:
    """Let jax 0.12 look for unused results of calls by jax-triton 0.4.

    That jax passes a rule two lists and the equation, but 0.4.1's rule takes one list. The rule
    here accepts both: a call uses all of its arguments.
    """
    from jax_triton import triton_lib

    def keep(*given):
        return ([True] * len(given[-1].invars), given[-1])

    partial_eval.dce_rules[triton_lib.triton_kernel_call_p] = keep


def ptx_version(capability: int) -> int:
    """Version of PTX to write for GPUs of a compute capability: 87 is 8.7.

    CUDA 12.8's assembler reads 8.7, which covers A100 and H100; 12.9's reads 8.8, which covers all
    of Blackwell except sm_110, which came with CUDA 13.0 and PTX 9.0.
    """
    if capability < 100:
        return 87
    return 90 if 110 <= capability < 120 else 88


@functools.cache
def _rewritten() -> bool:
    """Return whether calls with the target `FFI` are written in the FFI form, from now on.

    jax-triton 0.3 lets the caller name the target but always writes the older form. Its own
    lowering runs here unchanged, and the call that it made is then replaced by one from
    `jax.ffi.ffi_lowering`, as in 0.4. Nothing of JAX or jax-triton is patched, and other calls,
    which have another target, are lowered as before. A new version can only break a name below,
    when the rule is registered or first used, never a result.
    """
    plugin = plugin_support.import_from_plugin("cuda", "_triton")
    if plugin is None or FFI not in plugin.registrations():  # before jaxlib 0.10.2
        return False
    from jax_triton import triton_lib

    before = functools.partial(triton_lib.triton_kernel_call_lowering, triton_lib.get_cuda_backend)

    def lower(ctx, *args, **params):
        results = before(ctx, *args, **params)
        if params["custom_call_target_name"] != FFI:
            return results
        first = results[0]
        assert isinstance(first, ir.Value)  # no kernel has tuples as results
        old = ir.OpResult(first).owner
        kernel = ir.StringAttr(old.attributes["backend_config"]).value_bytes
        rule = jax.ffi.ffi_lowering(
            FFI, api_version=4, operand_output_aliases=dict(params["input_output_aliases"])
        )
        results = rule(ctx, *args, opaque=kernel)
        old.erase()
        return results

    mlir.register_lowering(triton_lib.triton_kernel_call_p, lower, platform="cuda")
    return True
