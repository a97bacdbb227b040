"""The benchmarks run to their end and report what they promise (figures are not judged here)."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def run(module: str, *flags: str) -> dict:
    command = [sys.executable, "-P", "-m", f"experiments.{module}", "--json", "--pairs=2", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_bench_train():
    pytest.importorskip("transformers")
    got = run("bench_train", "--warmup=1", "--max_exits=1")
    low, high = got["train_vs_transformers_interval"]
    assert 0 < low <= got["train_vs_transformers"] <= high
    assert got["exit_temp_bytes_ratio"] <= 0.125  # bytes, not seconds: the same everywhere


def test_bench_decode():
    pytest.importorskip("transformers")
    got = run("bench_decode")
    low, high = got["decode_vs_transformers_interval"]
    assert 0 < low <= got["decode_vs_transformers"] <= high
    assert got["exit_efficiency"] > 0
