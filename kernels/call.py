"""Dispatch of an op to its reference or its Triton kernel.

An op is defined by its reference, a function of JAX. Its Triton kernel takes the reference's place
where a program is compiled for CUDA, and both are traced wherever jax-triton can be imported: what
a program holds is decided when it is compiled and not when it is traced.
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
"""reference: JAX's own operations. triton: the kernel, compiled; for CUDA alone. interpreter: the
kernel in Triton's interpreter, on the host and slowly, for tests (`kernels.interpreter`)."""

FULL = ("highest", "float32", "F32_F32_F32", "F64_F64_F64")
"""Values of `jax_default_matmul_precision` that ask for more than TF32; so do those that end in
_X3, _X6 and _X9."""

SHARED_MEMORY = {80: 166_912, 87: 166_912, 90: 232_448, 100: 232_448, 103: 232_448}
"""Bytes that a block may have, by compute capability; `MIN_SHARED_MEMORY` of all others from
`MIN_CAPABILITY` on (CUDA C++ Programming Guide, technical specifications by compute capability)."""

MIN_SHARED_MEMORY = 101_376

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""JAX's own, of which one is there wherever it finds a GPU of NVIDIA's."""

MIN_CAPABILITY = 80
"""Compute capability from which on GPUs have bfloat16, and the asynchronous copies of A100s."""

VARIABLE = "EEJAX_KERNELS"
"""Environment variable: one of `IMPLEMENTATIONS`, for all ops that are not asked for another."""

_said = os.environ.get(VARIABLE) or None
if _said is not None:
    require_one_of(f"${VARIABLE}", _said, IMPLEMENTATIONS)

_capability = jax.make_user_context(default_value=None)
_default = jax.make_user_context(default_value=_said)
_legacy = jax.make_user_context(default_value=False)


def op(kernel: Callable, reference: Callable, implementation: str | None = None) -> Callable:
    """reference, or the same by kernel(launch, *args), a function of what launches kernels: to be
    made once for each way to run it.

    Without an `implementation` it is the kernel where the program is compiled for CUDA and the
    reference elsewhere. It raises ImportError where there is a GPU and jax-triton cannot be
    imported, RuntimeError where "triton" is asked for and there is no GPU.
    """

    def by(launch: Callable) -> Callable:
        return lambda *args: _vary(kernel(launch, *args), args)

    # Outside of a program the choice is by where the arguments are, which a program goes by.
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
    """Raise RuntimeError where nothing is compiled for a GPU."""
    if not for_gpu():
        raise RuntimeError(
            "implementation = 'triton': there is no GPU of NVIDIA's that JAX can use. Ask for "
            "'reference', or for nothing, which takes what there is; 'interpreter' is for tests."
        )


def chosen(
    name: str, implementation: str | None, covered: bool, what: str, empty: bool = False
) -> str | None:
    """The implementation of op `name` that was asked for, or "reference" where no kernel covers
    `what` it is to run on, with a warning, or that is `empty`. Raises `ConfigError` for one that
    there is not."""
    if implementation is not None:
        require_one_of("implementation", implementation, IMPLEMENTATIONS)
    if empty:  # nothing to launch
        return "reference"
    if covered or implementation == "reference":
        return implementation
    # Told once for each reason, and only where the kernel would have run.
    if (implementation or by_kernels()) and (name, what) not in _warned:
        _warned.add((name, what))
        why = f"{name}: no kernel covers {what}; the reference runs in its place"
        warnings.warn(why, stacklevel=3)
    return "reference"


_warned: set[tuple[str, str]] = set()


def require_floating(name: str, a: jax.Array) -> None:
    """Raise `ConfigError` for anything but floating-point numbers: weights are cast to them."""
    require(jnp.issubdtype(a.dtype, jnp.floating), name, a.dtype, "must be of a floating dtype")


def available() -> bool:
    """Return whether jax-triton can be imported and the GPU, if there is one, runs its kernels.

    Warns of a GPU older than `MIN_CAPABILITY`, which does not.

    Raises:
      ImportError: there is a GPU, and jax-triton cannot be imported.
    """
    return _available(_of_gpu())


@functools.cache
def _available(number: int | None) -> bool:
    """`available` beside a GPU of this compute capability, or none."""
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
    """Compute capability of the default device; None where it is no GPU of NVIDIA's."""
    # jax adds its options to the class of `jax.config` at run time, here and below.
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        if jax.default_backend() != "gpu":
            return None
        device = jax.local_devices()[0]
    elif isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    try:  # AMD's have names, such as gfx942
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
    """Return whether every op is to run by its reference, kernels or not."""
    return _default.value == "reference"


def by_kernels() -> bool:
    """Return whether kernels may run ops that are not asked for an implementation.

    Where not, a program may hold what serves XLA better than an op's reference.
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

    aliases: {number of an argument: number of the result that takes its place}. The kernel's
    pointer to that result may be None, and then is the argument's.
    """
    return triton_call.triton_call(
        *args,
        kernel=kernel,
        grid=grid,
        out=out,
        aliases=aliases or {},
        warps=warps,
        stages=stages,
        capability=_capability.value or _of_gpu(),
        legacy=_legacy.value,
        constants=constants,
    )


# Triton has both of these, typed as constants of a kernel.
def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up, on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n >= 1, on the host."""
    return 1 << (n - 1).bit_length()


def precision(dtype: Any) -> str:
    """Triton's word for how matrices of a dtype are multiplied: by JAX's own setting,
    `jax_default_matmul_precision`, of which float32 is TF32 on a GPU if nothing is said."""
    said = jax.config.jax_default_matmul_precision or ""  # pyright: ignore[reportAttributeAccessIssue]
    full = said in FULL or said.endswith(("_X3", "_X6", "_X9"))
    return "ieee" if jnp.dtype(dtype) == jnp.float32 and full else "tf32"


def shared_memory() -> int:
    """Bytes that a block has on the GPUs that programs are compiled for; an A100's where there is
    none, and nothing is compiled."""
    return SHARED_MEMORY.get(capability() or 80, MIN_SHARED_MEMORY)


def implementation(name: str | None) -> contextlib.AbstractContextManager:
    """Inside of it, ops are run by this one of `IMPLEMENTATIONS` where they are not asked for
    another. Programs that were traced outside are not used inside, nor the other way round."""
    if name is not None:
        require_one_of("implementation", name, IMPLEMENTATIONS)
    return _default(name)


def compute_capability(number: int) -> contextlib.AbstractContextManager:
    """Inside of it, programs are compiled for GPUs of this compute capability (80, 90) whether
    there is one or not."""
    return _capability(number)


def legacy_calls() -> contextlib.AbstractContextManager:
    """Inside of it, kernels are called in the form before XLA's FFI, which CUDA graphs do not take,
    so that the two can be compared. With jax-triton 0.4 launching raises RuntimeError there."""
    return _legacy(True)


def _vary(results: Any, args: Any) -> Any:
    """Results that differ along every axis of a mesh along which some argument does: inside of a
    `shard_map` it is not known of what a kernel makes. They keep their bits: -0 less 0 is -0."""
    zero = varying_zero(args)

    def same(a):
        return a ^ (zero > 0) if a.dtype == bool else a - zero.astype(a.dtype)

    return jax.tree.map(same, results)


def folded(run: Callable, rows: tuple[int, ...]) -> Callable:
    """`run` of arrays, with a rule for `vmap`: a batch of what the arguments `rows` have rows of
    is so many more rows [batch x n, ...]; of anything else it is run one by one."""

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
