"""Triton's interpreter for arrays of JAX: kernels run on the host, in numpy, for tests.

Set TRITON_INTERPRET=1 before Triton is imported. What it cannot show are races, and the error of
TF32. Triton 3.6 multiplies bfloat16 matrices as if they were integers and cuts float32 off where it
makes bfloat16 of it; its loops take no bound that is known at run time, since numpy 2.4 makes an
integer of an array without axes alone; and 3.9 takes a scalar's comparison, made a block, for
numbers and not for a mask. All four are put right here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

_one = threading.Lock()  # the interpreter knows of one program alone; devices call it at once


class Tensor:
    """The part of a CPU torch tensor's interface that the interpreter uses."""

    def __init__(self, array: np.ndarray):
        self.array = array

    dtype = property(lambda self: str(self.array.dtype))

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def copy_(self, other: Tensor) -> None:
        """Nothing: what it calls the device's memory is the host's."""

    def new_empty(self, *_: Any, **__: Any) -> Tensor:
        return Tensor(self.array)

    def set_(self, storage: Tensor, *_: Any) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)


def launch(
    *args: jax.Array,
    kernel: Any,
    grid: tuple[int, ...],
    out: Sequence[jax.ShapeDtypeStruct],
    warps: int = 4,
    stages: int = 3,
    aliases: dict[int, int] | None = None,
    **constants: Any,
) -> list[jax.Array]:
    """Run a kernel as `call.launch`. Raises RuntimeError where TRITON_INTERPRET is not set."""
    aliases = aliases or {}
    patch()

    def run(*arrays):
        # Unlike a GPU's buffers these are not aligned or shared; what no program writes is marked.
        results = [np.full(o.shape, _unset(o.dtype), o.dtype) for o in out]
        for i, o in aliases.items():
            results[o] = np.array(arrays[i])
        given = [
            results[aliases[i]] if i in aliases else np.array(a, order="C")
            for i, a in enumerate(arrays)
        ]
        with _one, np.errstate(all="ignore"):  # a GPU does not warn of what is not finite
            kernel[grid](*map(Tensor, [*given, *results]), **constants)
        return results

    return jax.pure_callback(run, list(out), *args, vmap_method="sequential")


def _unset(dtype: Any) -> Any:
    """NaN, or the largest number of a dtype that has none: what a kernel left out should show."""
    dtype = np.dtype(dtype)
    return np.iinfo(dtype).max if dtype.kind in "iu" else dtype.type(np.nan)


@functools.cache
def patch() -> None:
    """Put the interpreter's bfloat16, loops and masks right. Raises RuntimeError where Triton
    compiles."""
    import triton.language as tl
    from triton import knobs
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:
        raise RuntimeError(
            "set TRITON_INTERPRET=1 before Triton is imported, in the environment that the process "
            "starts with: this one compiles kernels"
        )
    builder = interpreter.InterpreterBuilder
    dot, cast, splat = builder.create_dot, builder.cast_impl, builder.create_splat
    tensor_methods = interpreter._patch_lang_tensor

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            near = np.asarray(src.data, np.float32).astype(ml_dtypes.bfloat16)
            return interpreter.TensorHandle(near.view(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    def patch_tensor(tensor, scope):
        tensor_methods(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor

    def create_splat(self, ret_ty, arg):
        block = splat(self, ret_ty, arg)
        if arg.data.dtype == np.bool_:
            block = interpreter.TensorHandle(block.data.astype(np.bool_), block.dtype)
        return block

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return dot(self, wide(a), wide(b), d, input_precision, max_num_imprecise_acc)

    builder.create_splat = create_splat
    builder.create_dot = create_dot
    builder.cast_impl = cast_impl
