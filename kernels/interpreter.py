"""Triton's interpreter for JAX arrays: kernels run on the host, in numpy, for tests.

Set TRITON_INTERPRET=1 before Triton is imported. The interpreter cannot show races, nor the error
of TF32. Four faults are corrected here. Triton 3.6 multiplies bfloat16 matrices as if they were
integers, and truncates float32 when it converts to bfloat16. Its loops take no bound that is known
only at run time, since numpy 2.4 makes an integer only of an array without axes. Triton 3.9 takes a
scalar's comparison, broadcast to a block, for numbers and not for a mask.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

_one = threading.Lock()  # the interpreter runs one program at a time, but devices run in parallel


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
        """Do nothing: what the interpreter takes for the device's memory is the host's."""

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
    """Run a kernel as `call.launch`. Raises RuntimeError unless TRITON_INTERPRET is set."""
    aliases = aliases or {}
    patch()

    def run(*arrays):
        # Unlike a GPU's buffers these are not aligned or shared. Unwritten elements are marked.
        results = [np.full(o.shape, _unset(o.dtype), o.dtype) for o in out]
        for i, o in aliases.items():
            results[o] = np.array(arrays[i])
        given = [
            results[aliases[i]] if i in aliases else np.array(a, order="C")
            for i, a in enumerate(arrays)
        ]
        with _one, np.errstate(all="ignore"):  # a GPU does not warn about infinities and NaN
            kernel[grid](*map(Tensor, [*given, *results]), **constants)
        return results

    return jax.pure_callback(run, list(out), *args, vmap_method="sequential")


def _unset(dtype: Any) -> Any:
    """Return NaN, or the largest number of a dtype without one, which marks elements left out."""
    dtype = np.dtype(dtype)
    return np.iinfo(dtype).max if dtype.kind in "iu" else dtype.type(np.nan)


@functools.cache
def patch() -> None:
    """Correct the interpreter's bfloat16, loops and masks. Raises RuntimeError if Triton
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
