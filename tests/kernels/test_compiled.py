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


def compiled(op, *how, repo_root, environment) -> list[dict]:
    script = repo_root / "tests" / "support" / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), op, *how],
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


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
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
