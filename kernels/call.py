"""Where an op runs, and the one module that touches jax-triton.

An op is defined by its reference, a function of JAX. Its Triton kernel takes the reference's place
where a program is compiled for CUDA, and both are traced wherever jax-triton can be imported: what
a program holds is decided when it is compiled and not when it is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.errors import require_one_of
from eejax.common.trees import varying_zero

IMPLEMENTATIONS = ("reference", "triton", "interpreter")
"""reference: JAX's own operations. triton: the kernel, compiled; for CUDA alone. interpreter: the
kernel in Triton's interpreter, on the host and slowly, for tests (`kernels.interpreter`)."""

FULL = ("highest", "float32", "F32_F32_F32")
"""Values of `jax_default_matmul_precision` that ask for more than TF32; so do those that end in
_X3, _X6 and _X9."""

SHARED_MEMORY = {80: 166_912, 87: 166_912, 90: 232_448, 100: 232_448, 103: 232_448}
"""Bytes that a block may have, by compute capability; `LEAST_SHARED_MEMORY` of all others since
8.0 (CUDA C++ Programming Guide, technical specifications by compute capability)."""

LEAST_SHARED_MEMORY = 101_376

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""JAX's own, of which one is there wherever it finds a GPU of NVIDIA's."""

_capability = contextvars.ContextVar("compute capability", default=None)
_default = contextvars.ContextVar("implementation", default=None)


def dispatch(
    kernel: Callable, reference: Callable, *args: Any, implementation: str | None = None
) -> Any:
    """reference(*args), or the same by kernel(launch, *args), a function of what launches kernels.

    Without an `implementation` it is the kernel where the program is compiled for CUDA and the
    reference elsewhere. Raises `ConfigError` for an unknown one, ImportError where there is a GPU
    and jax-triton cannot be imported.
    """
    implementation = implementation or _default.get()
    if implementation is not None:
        require_one_of("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "reference" or (implementation is None and not available()):
        return reference(*args)
    if implementation == "interpreter":
        from eejax.kernels import interpreter

        return _vary(kernel(interpreter.launch, *args), args)
    run = lambda *a: _vary(kernel(launch, *a), a)
    if implementation == "triton":
        return run(*args)
    # Outside of a program the choice is by where the arguments are, which a program goes by.
    either = lambda *a: lax.platform_dependent(*a, cuda=run, default=reference)
    return jax.jit(either, inline=True)(*args)


@functools.cache
def available() -> bool:
    """Whether jax-triton can be imported. Raises ImportError where it cannot and there is a GPU."""
    if not any(map(importlib.util.find_spec, PLUGINS)):  # no GPU, and Triton takes long to import
        return False
    try:
        import jax_triton  # noqa: F401
    except ImportError as error:
        if jax.default_backend() == "gpu":
            raise ImportError(
                f"there is a GPU, and jax-triton cannot be imported ({error}). Install it with "
                "pip install 'eejax[gpu]', or ask ops for implementation='reference'."
            ) from error
        return False
    return True


def by_kernels() -> bool:
    """Whether ops that are not asked for an implementation may be run by their kernels. Where not,
    a program may hold what serves XLA better than an op's reference."""
    name = _default.get()
    if name is not None:
        return name != "reference"
    return (_capability.get() is not None or jax.default_backend() == "gpu") and available()


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
    """Runs a Triton kernel that takes `args`, then pointers to what is `out`, then `constants`.

    aliases: {number of an argument: number of the result that takes its place}.
    """
    import jax_triton

    return jax_triton.triton_call(
        *args, kernel=kernel, grid=grid, out_shape=list(out), num_warps=warps, num_stages=stages,
        compute_capability=_capability.get(), input_output_aliases=aliases or {}, **constants,
    )  # fmt: skip


def precision(dtype: Any) -> str:
    """Triton's word for how matrices of a dtype are multiplied: by JAX's own setting,
    `jax_default_matmul_precision`, of which float32 is TF32 on a GPU if nothing is said."""
    said = jax.config.jax_default_matmul_precision or ""
    full = said in FULL or said.endswith(("_X3", "_X6", "_X9"))
    return "ieee" if jnp.dtype(dtype) == jnp.float32 and full else "tf32"


def shared_memory() -> int:
    """Bytes that a block has on the GPUs that programs are compiled for; an A100's where there is
    none, and nothing is compiled."""
    number = _capability.get()
    if number is None and jax.default_backend() == "gpu":
        number = int(jax.local_devices()[0].compute_capability.replace(".", ""))
    return SHARED_MEMORY.get(number or 80, LEAST_SHARED_MEMORY)


@contextlib.contextmanager
def implementation(name: str | None):
    """Inside of it, ops are run by this one of `IMPLEMENTATIONS` where they are not asked for
    another. It is taken as programs are traced, so JAX forgets those that it keeps."""
    with _traced_anew(_default, name):
        yield


@contextlib.contextmanager
def compute_capability(number: int):
    """Inside of it, programs are compiled for GPUs of this compute capability (80, 90) whether
    there is one or not. It is taken as they are traced, so JAX forgets those that it keeps."""
    with _traced_anew(_capability, number):
        yield


@contextlib.contextmanager
def _traced_anew(variable: contextvars.ContextVar, value: Any):
    token = variable.set(value)
    jax.clear_caches()  # parts of a program are kept too, as functions with their own gradients
    try:
        yield
    finally:
        variable.reset(token)
        jax.clear_caches()


def _vary(results: Any, args: Any) -> Any:
    """Results that differ along every axis of a mesh along which some argument does: inside of a
    `shard_map` it is not known of what a kernel makes."""
    zero = varying_zero(args)
    return jax.tree.map(lambda a: a + zero.astype(a.dtype), results)


def folded(run: Callable, rows: tuple[int, ...]) -> Callable:
    """`run` of arrays, with a rule for `vmap`: a batch of what the arguments `rows` have rows of
    is so many more rows [batch x n, ...]; of anything else it is run one by one."""

    @jax.custom_batching.custom_vmap
    def batched(*args):
        return run(*args)

    @batched.def_vmap
    def rule(size, is_batched, *args):
        has = [any(jax.tree.leaves(b)) for b in is_batched]
        if any(h and i not in rows for i, h in enumerate(has)):
            own = {i: a for i, (a, h) in enumerate(zip(args, has, strict=True)) if h}
            one = lambda own: batched(*(own.get(i, a) for i, a in enumerate(args)))
            results = lax.map(one, own)
        else:
            fold = lambda a, h: (
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


_said = set()


def fall_back(op: str, why: str, implementation: str | None) -> None:
    """Warns, once for each reason, that an op's reference runs in place of its kernel, where that
    would have run."""
    if (implementation or by_kernels()) and (op, why) not in _said:
        _said.add((op, why))
        warnings.warn(f"{op}: {why}; the reference runs in place of the kernel", stacklevel=3)
