"""Dispatch of an op to its reference or its Triton kernel.

An op is defined by its reference, a function of JAX. Its Triton kernel replaces the reference where
a program is compiled for CUDA. Where one of JAX's CUDA plugins is installed and jax-triton can be
imported (`available`), both are traced, and the choice between them is made when the program is
compiled. Whether a program has another form around its kernels is decided when it is traced
(`by_kernels`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.errors import require, require_one_of
from eejax.common.trees import varying_zero
from eejax.kernels import triton_call

IMPLEMENTATIONS = ("reference", "triton", "interpreter")
"""reference: JAX's own operations. triton: the compiled kernel, only for CUDA. interpreter: the
kernel in Triton's interpreter, slow and on the host, for tests (`kernels.interpreter`)."""

FULL = ("highest", "float32", "F32_F32_F32", "F64_F64_F64")
"""Values of `jax_default_matmul_precision` that require more than TF32; so do those that end in
_X3, _X6 and _X9."""

SHARED_MEMORY = {80: 166_912, 87: 166_912, 90: 232_448, 100: 232_448, 103: 232_448}
"""Maximum bytes of a block, by compute capability; others from `MIN_CAPABILITY` on have
`MIN_SHARED_MEMORY` (CUDA C++ Programming Guide, technical specifications)."""

MIN_SHARED_MEMORY = 101_376

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""JAX's own plugins, of which one is installed wherever it finds an NVIDIA GPU."""

MIN_CAPABILITY = 80
"""First compute capability with bfloat16 and the asynchronous copies of A100s."""

VARIABLE = "EEJAX_KERNELS"
"""Environment variable with the default among `IMPLEMENTATIONS`."""

_said = os.environ.get(VARIABLE) or None
if _said is not None:
    require_one_of(f"${VARIABLE}", _said, IMPLEMENTATIONS)

_capability = jax.make_user_context(default_value=None)
_default = jax.make_user_context(default_value=_said)
_legacy = jax.make_user_context(default_value=False)


def op(kernel: Callable, reference: Callable, implementation: str | None = None) -> Callable:
    """Return a function that runs an op by its reference or by its kernel.

    It should be made once for each way to run the op. Without an `implementation` it is the kernel
    where the program is compiled for CUDA and the reference elsewhere.

    Args:
      kernel: (launch, *args) -> results, where launch launches kernels.
      reference: (*args) -> results.
      implementation: one of `IMPLEMENTATIONS`, or None.

    Raises:
      ImportError: if there is a GPU and jax-triton cannot be imported.
      RuntimeError: if "triton" is requested and there is no GPU.
    """

    def by(launch: Callable) -> Callable:
        return lambda *args: _vary(kernel(launch, *args), args)

    # Outside a program the arguments' device decides, so this runs as a program too.
    def either(*args):
        return lax.platform_dependent(*args, cuda=by(launch), default=reference)

    either = jax.jit(either, inline=True)

    def run(*args: Any) -> Any:
        which = implementation or _default.value
        if which == "reference" or (which is None and not available()):
            return reference(*args)
        if which == "interpreter":
            from eejax.kernels import interpreter

            return by(interpreter.launch)(*args)
        if which == "triton":
            require_gpu()
            return by(launch)(*args)
        return either(*args)

    return run


def require_gpu() -> None:
    """Raise RuntimeError if there is no GPU to compile for."""
    if not for_gpu():
        raise RuntimeError(
            "implementation = 'triton': there is no NVIDIA GPU that JAX can use. Choose "
            "'reference', or leave it out for the default; 'interpreter' is for tests."
        )


def chosen(
    name: str, implementation: str | None, covered: bool, what: str, empty: bool = False
) -> str | None:
    """Return the implementation with which op `name` should run.

    It is the requested one, or "reference" if the arguments are `empty` or no kernel covers them
    (`what` describes them), with a warning. Raises `ConfigError` for an unknown one.
    """
    if implementation is not None:
        require_one_of("implementation", implementation, IMPLEMENTATIONS)
    if empty:  # nothing to launch
        return "reference"
    if covered or implementation == "reference":
        return implementation
    # Warn once for each reason, and only if the kernel would have run.
    if (implementation or by_kernels()) and (name, what) not in _warned:
        _warned.add((name, what))
        why = f"{name}: no kernel covers {what}; the reference runs instead"
        warnings.warn(why, stacklevel=3)
    return "reference"


_warned: set[tuple[str, str]] = set()


def require_floating(name: str, a: jax.Array) -> None:
    """Raise `ConfigError` for anything but floating-point numbers: weights are cast to them."""
    require(jnp.issubdtype(a.dtype, jnp.floating), name, a.dtype, "must be of a floating dtype")


def available() -> bool:
    """Return whether kernels are traced beside the references of ops.

    They are if one of `PLUGINS` is installed, jax-triton can be imported, and the GPU, if there is
    one, runs its kernels. Warns of a GPU older than `MIN_CAPABILITY`, which does not.

    Raises:
      ImportError: there is a GPU, and jax-triton cannot be imported.
    """
    return _available(_of_gpu())


@functools.cache
def _available(number: int | None) -> bool:
    """Return `available` beside a GPU of this compute capability, or none."""
    if not any(map(importlib.util.find_spec, PLUGINS)):  # no GPU, and Triton takes long to import
        return False
    try:
        triton_call.load()
    except ImportError as error:
        if number is not None:
            extra = "gpu13" if importlib.util.find_spec("jax_cuda13_plugin") else "gpu"
            raise ImportError(
                f"there is a GPU, and jax-triton cannot be imported ({error}). Install it, with "
                f"pip install 'eejax[{extra}]', or set {VARIABLE}=reference."
            ) from error
        return False
    if number is not None and number < MIN_CAPABILITY:
        warnings.warn(
            f"the GPU's compute capability is {number // 10}.{number % 10}: kernels need "
            f"{MIN_CAPABILITY // 10}.0, and XLA's own operations take their place",
            stacklevel=3,
        )
        return False
    return True


def _of_gpu() -> int | None:
    """Return the compute capability of the default device; None if it is not an NVIDIA GPU."""
    # jax adds its options to the class of `jax.config` at run time, here and below.
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        if jax.default_backend() != "gpu":
            return None
        device = jax.local_devices()[0]
    elif isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    try:  # AMD's capabilities are names, such as gfx942
        return int(float(device.compute_capability) * 10 + 0.5)
    except (AttributeError, ValueError):
        return None


def for_gpu() -> bool:
    """Return whether programs that are traced now are compiled for a GPU.

    A program's form follows the default device, not where its arguments lie: on a machine with a
    GPU, work on its CPU within `jax.default_device`.
    """
    return capability() is not None


def capability() -> int | None:
    """Return the compute capability that programs are compiled for, such as 90; None without a
    GPU."""
    return _capability.value or _of_gpu()


def prefers_reference() -> bool:
    """Return whether every op should run by its reference."""
    return _default.value == "reference"


def by_kernels() -> bool:
    """Return whether kernels may run ops without a requested implementation.

    If not, a program may use a form that suits XLA better than an op's reference.
    """
    if _default.value is not None:
        return _default.value != "reference"
    return for_gpu() and available()


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
    """Run a Triton kernel that takes `args`, then pointers to its results `out`, then `constants`.

    aliases: {number of an argument: number of the result that reuses its memory}. The kernel's
    pointer to that result may be None, and then the argument's counts.
    """
    return triton_call.triton_call(
        *args,
        kernel=kernel,
        grid=grid,
        out=out,
        aliases=aliases or {},
        warps=warps,
        stages=stages,
        capability=capability(),
        legacy=_legacy.value,
        constants=constants,
    )


# Triton has this too, but typed as a constant of a kernel.
def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up, on the host."""
    return -(-a // b)


def precision(dtype: Any) -> str:
    """Return Triton's name for the precision of matrix products of a dtype.

    It follows JAX's setting `jax_default_matmul_precision`, by whose default float32 is TF32 on a
    GPU.
    """
    said = jax.config.jax_default_matmul_precision or ""  # pyright: ignore[reportAttributeAccessIssue]
    full = said in FULL or said.endswith(("_X3", "_X6", "_X9"))
    return "ieee" if jnp.dtype(dtype) == jnp.float32 and full else "tf32"


def shared_memory() -> int:
    """Return the shared memory of a block in bytes, on the GPUs that programs are compiled for.

    Without a GPU, where nothing is compiled, it is an A100's.
    """
    return SHARED_MEMORY.get(capability() or 80, MIN_SHARED_MEMORY)


def implementation(name: str | None) -> contextlib.AbstractContextManager:
    """Set the default implementation, one of `IMPLEMENTATIONS`, inside a context.

    Programs that were traced outside are not used inside, and vice versa.
    """
    if name is not None:
        require_one_of("implementation", name, IMPLEMENTATIONS)
    return _default(name)


def compute_capability(number: int) -> contextlib.AbstractContextManager:
    """Compile programs inside a context for GPUs of this compute capability (80, 90).

    It works with and without a GPU.
    """
    return _capability(number)


def legacy_calls() -> contextlib.AbstractContextManager:
    """Call kernels inside a context in the form before XLA's FFI, to compare the two.

    CUDA graphs do not take that form. With jax-triton 0.4 launching raises RuntimeError.
    """
    return _legacy(True)


def _vary(results: Any, args: Any) -> Any:
    """Mark results as varying along every mesh axis along which some argument varies.

    Inside a `shard_map` this is unknown for a kernel's results. They keep their bits: -0 less 0 is
    -0.
    """
    zero = varying_zero(args)

    def same(a):
        return a ^ (zero > 0) if a.dtype == bool else a - zero.astype(a.dtype)

    return jax.tree.map(same, results)


def folded(run: Callable, rows: tuple[int, ...]) -> Callable:
    """Return `run` with a rule for `vmap`.

    A batch of arguments `rows`, which have rows [n, ...], becomes more rows [batch x n, ...]; a
    batch of any other argument runs one by one.
    """

    @jax.custom_batching.custom_vmap
    def batched(*args):
        return run(*args)

    @batched.def_vmap
    def rule(size, is_batched, *args):
        has = [any(jax.tree.leaves(b)) for b in is_batched]
        if not size:

            def row(a, h):
                return jax.ShapeDtypeStruct(a.shape[1:] if h else a.shape, a.dtype)

            single = jax.tree.map(row, args, tuple(is_batched))
            results = jax.tree.map(
                lambda a: jnp.zeros((0, *a.shape), a.dtype), jax.eval_shape(run, *single)
            )
        elif any(h and i not in rows for i, h in enumerate(has)):
            own = {i: a for i, (a, h) in enumerate(zip(args, has, strict=True)) if h}

            def one(own):
                return batched(*(own.get(i, a) for i, a in enumerate(args)))

            results = lax.map(one, own)
        else:

            def fold(a, h):
                return (
                    a.reshape(-1, *a.shape[2:]) if h else jnp.tile(a, (size, *[1] * (a.ndim - 1)))
                )

            args = [
                fold(a, h) if i in rows and a is not None else a
                for i, (a, h) in enumerate(zip(args, has, strict=True))
            ]
            results = batched(*args)
            results = jax.tree.map(lambda a: a.reshape(size, -1, *a.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return batched
