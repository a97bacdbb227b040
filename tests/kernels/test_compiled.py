"""Every specialisation of every kernel compiles for A100, H100 and smaller chips, and fits them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from eejax.kernels.specs import OPS

SHARED = {80: 166_912, 89: 101_376, 90: 232_448}
"""Bytes of shared memory that a block may have: CUDA C++ Programming Guide, table of technical
specifications by compute capability (163, 99 and 227 KiB)."""

PTX = (8, 7)  # the newest that the assembler beside JAX's CUDA 12 plugin takes


# Those with the largest tiles, the most shared memory and the most registers, and every way in
# which an op divides its work into kernels.
CHOSEN = {
    "compact": ("4096-0.9", "3000000-0.5"),
    "decode_attention": (
        "bfloat16-7x4096-8x4x128-511by64",
        "bfloat16-7x2048-4x2x256-511by64-softcap-window",
    ),
    "head_confidence": (
        "float32-1x4096x128256-rmsnorm",
        "bfloat16-64x4096x128256-layernorm-bias-head_bias-softcap-temperature",
    ),
    "linear_cross_entropy": (
        "float32-8192x2304x256000-softcap-temperature-z_loss-confidence_weighted",
        "bfloat16-2048x2880x50257-temperature-z_loss-bias",
    ),
    "norm_router": (
        "float32-64x8192x512-layernorm-bias",
        "float16-32768x4096x128-layernorm-bias",
        "bfloat16-32768x8192x512-rmsnorm+1",
    ),
    "scatter": ("bfloat16-300x768-into-512-as-they-are",),
}


def compiled(*how, repo_root, environment) -> list[dict]:
    script = repo_root / "tests" / "support" / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), *how],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [t for t in told if t["doubles"]] == []
    assert [t for t in told if t["shared"] > SHARED[t["capability"]]] == []
    assert [t for t in told if tuple(t["version"]) > PTX] == []
    return told


def covered(told) -> set[tuple[str, int]]:
    return {(t["spec"], t["capability"]) for t in told}


def test_the_largest_kernels_of_every_op_compile_and_fit(for_cuda, repo_root):
    assert set(CHOSEN) == set(OPS)
    chosen = {(op, name) for op, names in CHOSEN.items() for name in names}
    words = [f"{op}:{name}" for op, name in sorted(chosen)]
    told = compiled(*words, "80", repo_root=repo_root, environment=for_cuda)
    assert {(t["op"], t["spec"]) for t in told} == chosen
    assert [t for t in told if t["spilled"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_and_fit(op, capability, for_cuda, repo_root):
    told = compiled(op, str(capability), repo_root=repo_root, environment=for_cuda)
    specs = importlib.import_module(f"eejax.kernels.{op}.arg_specs").SPECS
    assert covered(told) == {(s.name, capability) for s in specs}
    assert [t for t in told if t["spilled"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_they_fit_chips_with_less_memory(op, for_cuda, repo_root):
    told = compiled(op, "89", repo_root=repo_root, environment=for_cuda)
    specs = importlib.import_module(f"eejax.kernels.{op}.arg_specs").SPECS
    assert covered(told) == {(s.name, 89) for s in specs}


@pytest.mark.slow
@pytest.mark.parametrize(
    "op", ["decode_attention", "head_confidence", "linear_cross_entropy", "norm_router"]
)
def test_they_compile_and_fit_with_exact_products(op, for_cuda, repo_root):
    told = compiled(op, "80", "90", "--highest", repo_root=repo_root, environment=for_cuda)
    assert told
    # Exact products hold an operand twice, and this op's queries stay in registers.
    most = 128 if op == "decode_attention" else 0
    assert [t for t in told if t["spilled"] > most] == []
