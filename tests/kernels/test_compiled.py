"""Every specialisation of every kernel compiles for both chips, and fits them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from eejax.kernels.specs import OPS

SHARED = {80: 166_912, 90: 232_448}
"""Bytes of shared memory that a block may have: CUDA C++ Programming Guide, table of technical
specifications by compute capability (163 KiB, 227 KiB)."""

PTX = (8, 7)  # the newest that the assembler beside JAX's CUDA 12 plugin takes


@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_and_fit(op, for_cuda, repo_root):
    script = repo_root / "tests" / "support" / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), op], env=for_cuda, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    specs = {s.name for s in importlib.import_module(f"eejax.kernels.{op}.arg_specs").SPECS}
    assert {(t["spec"], t["capability"]) for t in told} == {(s, c) for s in specs for c in SHARED}
    assert [t for t in told if t["spilled"]] == []
    assert [t for t in told if t["doubles"]] == []
    assert [t for t in told if t["shared"] > SHARED[t["capability"]]] == []
    assert [t for t in told if tuple(t["version"]) > PTX] == []
