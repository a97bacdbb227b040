"""Kernels are called in the form that CUDA graphs take, by every version of jax-triton."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

from eejax.kernels import triton_call

KERNELS = {
    "scatter": ["scatter_kernel"],
    "norm_router": ["norm_router_kernel"],
    "linear_cross_entropy": ["statistics_kernel", "gradient_kernel", "statistics_kernel"],
}


def version(name: str) -> tuple[int, ...]:
    return tuple(map(int, metadata.version(name).split(".")[:3]))


@pytest.fixture(scope="module")
def lowered(for_cuda, repo_root) -> dict[tuple[str, str], dict]:
    script = repo_root / "tests" / "support" / "lower_calls.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script)], env=for_cuda, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {(t["op"], t["form"]): t for t in told}


@pytest.mark.parametrize("op", KERNELS)
def test_calls_are_xla_ffi_calls(op, lowered):
    if version("jaxlib") < (0, 10, 2):
        pytest.skip("JAX's plugin before 0.10.2 runs the older form alone")
    told = lowered[op, "ffi"]
    assert told["targets"] == [[triton_call.FFI]] * len(KERNELS[op])
    assert told["versions"] == [["API_VERSION_TYPED_FFI"]] * len(KERNELS[op])
    assert [name for name, _ in told["kernels"]] == KERNELS[op]


@pytest.mark.parametrize("op", KERNELS)
def test_the_older_form_holds_the_same_kernels(op, lowered):
    told = lowered[op, "legacy"]
    if version("jax-triton") >= (0, 4):
        assert "0.4 writes the FFI form alone" in told["refused"]
        return
    assert told["targets"] == [[triton_call.LEGACY]] * len(KERNELS[op])
    assert told["versions"] == [["API_VERSION_STATUS_RETURNING"]] * len(KERNELS[op])
    for field in ("kernels", "aliases"):
        assert told[field] == lowered[op, "ffi"][field]


def test_results_take_the_place_of_arguments(lowered):
    assert lowered["scatter", "ffi"]["aliases"] == [[["", "0"]]]
    assert lowered["linear_cross_entropy", "ffi"]["aliases"] == [[], [["0", "0"]], []]


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 103, 110, 120, 121])
def test_ptx_is_as_new_as_a_gpu_needs_and_no_newer(capability):
    # NVIDIA's PTX ISA, "Release Notes": the version that introduced a target.
    introduced = {80: 70, 89: 78, 90: 78, 100: 86, 103: 88, 110: 90, 120: 87, 121: 88}
    # CUDA 12.9 reads PTX 8.8. It does not know sm_110, for which CUDA 13.0 reads 9.0.
    assert introduced[capability] <= triton_call.ptx_version(capability)
    assert triton_call.ptx_version(capability) <= (90 if capability == 110 else 88)
