"""Installed versions, the card's rates of copies and products, and kernels against float64."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from eejax.experiments.gpu_check import exact, sanitizer
from eejax.experiments.gpu_check.check import (
    StageCheck,
    call_forms,
    copy_rate,
    on_gpu,
    product_rate,
)
from eejax.kernels.specs import OPS

BOUNDS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}
"""Maximum error of a row (`difference`), by the dtype of the states; TF32 is off."""

ROUNDED = {"norm_router": 0.02, "head_confidence": 0.02}
"""Share of an op's integers and booleans that rounding may decide: a likeliest token, or whether a
confidence reaches a threshold. Those of other ops must be equal."""

FARTHER = 2.0
"""Multiple of the error of XLA's own operations at which a kernel counts as wrong."""

MAX_WORK = 2e10
"""Operations of the largest case that the host computes in float64."""

COMPARED_FORMS = ("norm_router", "scatter", "head_confidence")
"""Ops that are called in both forms of the custom call."""

PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "nvidia-ml-py", "fastapi", "eejax")


def run(check: StageCheck) -> None:
    check.measure("versions", versions)
    check.measure("copy_bytes_per_second", lambda: copy_rate(check))
    check.measure("product_flops_per_second", lambda: product_rate(check))
    check.measure("forms", lambda: forms(check))
    for op in OPS:
        check.measure(op, lambda op=op: kernels(check, op))
    check.measure("memcheck", lambda: memcheck(check))


def programs(check: StageCheck) -> Iterator[tuple[str, Callable]]:
    """Yield each kernel in programs of its own, and calls of the older form where there are any."""
    check.figures["call_forms"] = call_forms()
    for op in OPS:
        for spec in specs(op, check.small):
            yield f"{op} {spec.name}", partial(_compiled, spec)
    for op in COMPARED_FORMS if "legacy" in call_forms() else ():
        yield f"{op} in the older form", partial(_compiled, specs(op, True)[0], legacy=True)


def specs(op: str, small: bool) -> list:
    """Return the cases of an op; one of each dtype if `small`."""
    found = importlib.import_module(f"eejax.kernels.{op}.arg_specs").SPECS
    if not small:
        return list(found)
    by_dtype: dict[Any, list] = {}
    for spec in found:
        if spec.small:
            by_dtype.setdefault(spec.shapes[0].dtype, []).append(spec)
    return [own[len(own) // 2] for own in by_dtype.values()]


def _compiled(spec, card, legacy: bool = False):
    import jax

    from eejax.experiments import aot
    from eejax.kernels import call

    program = jax.jit(partial(spec.run, implementation="triton"))
    with call.legacy_calls() if legacy else contextlib.nullcontext():
        return aot.compiled(card, program, *aot.shapes(card, spec.shapes))


def versions() -> dict[str, Any]:
    import jax

    found: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["devices"] = [d.device_kind for d in jax.devices()]
    found["ptxas"] = shutil.which("ptxas") or "not installed"
    found["platform_version"] = jax.devices()[0].client.platform_version
    for name in ("XLA_FLAGS", "EEJAX_KERNELS"):
        found[name] = os.environ.get(name, "")
    if shutil.which("nvidia-smi"):
        asked = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm"
        command = ["nvidia-smi", asked, "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        found["nvidia-smi"] = (done.stdout or done.stderr).strip()
    return found


def forms(check: StageCheck) -> dict[str, str] | str:
    """Call kernels by FFI and in the older form; both must give the same bits.

    Raises:
      AssertionError: if they do not.
    """
    import jax

    from eejax.kernels import call

    if not on_gpu():
        return "no GPU"
    if "legacy" not in call_forms():
        return "FFI calls only: this jax-triton does not write the form before it"
    found = {}
    for op in COMPARED_FORMS:
        spec = specs(op, True)[0]
        args = spec.args(7)
        by_ffi = jax.device_get(jax.jit(partial(spec.run, implementation="triton"))(*args))
        with call.legacy_calls():
            program = jax.jit(lambda *a, spec=spec: spec.run(*a, implementation="triton"))
            before = jax.device_get(program(*args))
        pairs = zip(*map(jax.tree.leaves, (by_ffi, before)), strict=True)
        same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
        found[op] = "the same bits" if same else "DIFFERENT"
    if "DIFFERENT" in found.values():
        raise AssertionError(f"the two forms of calls differ: {found}")
    return found


def kernels(check: StageCheck, op: str) -> dict[str, Any]:
    """Compare an op's kernel with float64, on inputs drawn anew in each run.

    Raises:
      AssertionError: if a case is wrong, with the cases.
    """
    seed = int.from_bytes(os.urandom(3), "little")
    worst: dict[str, float] = {}
    wrong, larger, cases = [], 0, 0
    for spec in specs(op, check.small):
        if check.seconds_left <= 0:
            check.not_measured.append(f"{op} {spec.name}")
            continue
        dtype = np.dtype(spec.shapes[0].dtype).name
        found = compared(spec, op, seed)
        cases += 1
        larger += found["beside"] == "float32"
        if found["error"] > worst.get(dtype, -1.0):
            worst[dtype] = found["error"]
        bound = max(BOUNDS.get(dtype, 0.0), FARTHER * found["reference_error"])
        # Written so that NaN fails the bound, too.
        unlike = found["reference_unlike"] + ROUNDED[op] if op in ROUNDED else 0.0
        if not (found["error"] <= bound and found["unlike"] <= unlike):
            wrong.append(dict(case=spec.name, bound=bound) | found)
    result = dict(cases=cases, seed=seed, worst=worst, beside_float32=larger)
    if wrong:
        raise AssertionError(f"{len(wrong)} of {cases} cases are wrong: {wrong[:4]}")
    return result


def compared(spec, op: str, seed: int) -> dict[str, Any]:
    """Measure errors of an op by its kernel, and by its definition, on arguments drawn from a seed.

    A case too large for the host has XLA's float32 in float64's place.
    """
    import jax

    def by(which):
        return jax.jit(partial(spec.run, implementation=which))

    args = spec.args(seed)
    host = exact.work(op, args) <= MAX_WORK
    exactly = spec.shapes[0].dtype == np.float32
    with jax.default_matmul_precision("highest" if exactly or not host else None):
        plain = jax.device_get(by("reference")(*args))
        got = jax.device_get(by("triton")(*args)) if on_gpu() else plain
        if not host:

            def floating(a):
                return jax.numpy.issubdtype(a.dtype, jax.numpy.floating)

            def more(a):
                return a.astype("float32") if floating(a) else a

            want = jax.tree.leaves(jax.device_get(by("reference")(*jax.tree.map(more, args))))
    if host:
        want = getattr(exact, op)(spec.options.get("options"), *jax.device_get(args))
    error, unlike = difference(got, want)
    reference_error, reference_unlike = difference(plain, want)
    return dict(
        error=error,
        unlike=unlike,
        reference_error=reference_error,
        reference_unlike=reference_unlike,
        beside="float64" if host else "float32",
    )


def difference(got: Any, want: Any) -> tuple[float, float]:
    """Return the largest error of a row of floating results, and the share of others that differ.

    A row has all of an array's last dimension, and arrays of one dimension have rows of one number.
    Its error is |got - want| over |want|, or over the root mean square of all rows' |want| where
    that is larger, so that one wrong row among many counts as much as if it were alone.
    """
    import jax

    worst, unlike, count = 0.0, 0, 0
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if not np.issubdtype(b.dtype, np.floating) and b.dtype != jax.numpy.bfloat16:
            unlike, count = unlike + int((a != b).sum()), count + a.size
            continue
        width = b.shape[-1] if b.ndim > 1 else 1
        a, b = (x.astype(np.float64).reshape(-1, width) for x in (a, b))
        norms = np.linalg.norm(b, axis=1)
        scale = np.maximum(norms, np.sqrt(np.mean(norms**2))) if norms.any() else 1.0
        error = float(np.max(np.linalg.norm(a - b, axis=1) / scale, initial=0.0))
        worst = error if math.isnan(error) else max(worst, error)
    return worst, unlike / max(1, count)


def memcheck(check: StageCheck) -> str:
    """Run the kernels' small cases under compute-sanitizer.

    Raises:
      AssertionError: if it finds anything, or cannot run.
    """
    if not on_gpu():
        return "no GPU"
    report = sanitizer.run("memcheck", OPS, seconds=max(1.0, check.seconds_left))
    if report is None:
        return "compute-sanitizer: not installed"
    if report.status:
        raise AssertionError(f"status {report.status}: {report.summary}")
    return report.summary
