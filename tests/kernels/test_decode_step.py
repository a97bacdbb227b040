"""Decoding steps, lowered for CUDA, hold the kernels they are meant to, and no more of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

EXITS, WAYS, BUCKETS = 2, 3, 2  # ways to run a segment: in place, and two buckets
HEADS = EXITS + 1  # the final one's too
LAYERS = 4
STEP = {
    "decode_attention_kernel": LAYERS * WAYS,
    # Each way through a segment looks at the exit above it.
    "norm_router_kernel": EXITS * WAYS,
    "head_statistics_kernel": HEADS * WAYS,
    "head_merge_kernel": HEADS * WAYS,
    # Each way stores the states that wait above a segment.
    "scatter_kernel": EXITS * WAYS,
    # Spans of attention, and pending rows, of packed ways.
    "compact_kernel": HEADS * BUCKETS * 2,
}
BESIDE_PROMPTS = STEP | {  # a chunk of prompts goes through all segments
    "decode_attention_kernel": LAYERS * (WAYS + 1),
    "norm_router_kernel": EXITS * (WAYS + 1),
    "head_statistics_kernel": HEADS * (WAYS + 1),
    "head_merge_kernel": HEADS * (WAYS + 1),
    "compact_kernel": HEADS * BUCKETS * 2 + 1 + HEADS,  # a chunk's spans, and rows by segment
}


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_steps_hold_the_kernels_expected(for_cuda, repo_root, capability):
    script = repo_root / "tests" / "support" / "lower_decode.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(capability)],
        env=for_cuda,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    want = dict.fromkeys(("step", "loop", "scan", "mesh"), STEP) | {
        "beside prompts": BESIDE_PROMPTS
    }
    got = {(t["program"], t["capability"]): t["kernels"] for t in told}
    assert got == {(name, capability): kernels for name, kernels in want.items()}
