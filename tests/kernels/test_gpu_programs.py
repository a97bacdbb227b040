"""Programs compiled for a GPU that is not there hold nothing that would cost time on it."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

LAUNCHES = {"full batch 1": 16, "full batch 8": 14, "full batch 64": 14}
"""The most launches from one layer's attention to the next's."""

DECODING = (*LAUNCHES, "recompute batch 1", "recompute batch 8", "speculative batch 1")
SLOTS = ("batched 8 slots",)
PROMPTS = ("prompts of 512 batch 8",)
TRAINING = tuple(f"training 350M {n} exits" for n in range(4))
ALL = (*DECODING, *SLOTS, *PROMPTS, *TRAINING)

pytestmark = pytest.mark.skipif(
    tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11),
    reason="needs jax 0.11, whose XLA does not copy what a conditional carries: make test-gpu-aot",
)


@pytest.fixture(scope="module", params=["a100", "h100"])
def compiled(request, for_cuda, repo_root):
    """(figures by program, XLA's log of what became CUDA graphs)."""
    folder = pathlib.Path(for_cuda["PYTHONPATH"].split(os.pathsep)[0])
    if not (folder / "jax_plugins").is_dir():
        pytest.skip(f"needs the compiler of JAX's CUDA plugin in {folder}; see `make env`")
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("needs jax-triton")
    environment = for_cuda | {
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "command_buffer_conversion_pass=2",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "experiments.gpu_programs", "--small", "--json",
         f"--card={request.param}", f"--only={','.join(ALL)}"],
        env=environment, cwd=repo_root, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_no_conditional_copies_a_cache(compiled):
    found, _ = compiled
    copied = {name: found[name]["copied_in_conditionals"] for name in (*DECODING, *SLOTS)}
    assert copied == dict.fromkeys(copied, 0)


def test_the_host_decides_nothing_while_decoding(compiled):
    found, log = compiled
    names = (*DECODING, *SLOTS, *PROMPTS)
    assert {name: found[name]["host_decisions"] for name in names} == dict.fromkeys(names, 0)
    graphs = [line for line in log.splitlines() if "Creating command buffer" in line]
    loops = [line for line in graphs if ", while." in line]
    assert len(loops) >= len([*DECODING, *SLOTS])  # each one's loop is a part of a graph


def test_launches_of_a_layer(compiled):
    found, _ = compiled
    for name, most in LAUNCHES.items():
        assert 0 < found[name]["launches_a_layer"] <= most, name


def test_attention_writes_no_scores(compiled):
    found, _ = compiled
    written = {name: found[name]["scores"] for name in (*DECODING, *PROMPTS, *TRAINING)}
    assert written == dict.fromkeys(written, 0)


def test_memory_of_steps(compiled):
    """Decoding: a tenth of weights and caches. Training: each exit adds less than a fifth."""
    found, _ = compiled
    for name in LAUNCHES:
        assert found[name]["temporary"] < 0.1 * found[name]["floor_bytes"], name
    plain, *exits = (found[name]["temporary"] for name in TRAINING)
    for n, size in enumerate(exits, 1):
        assert size < (1 + 0.2 * n) * plain, n


def test_leaving_early_takes_fewer_launches(compiled):
    found, _ = compiled
    for name in ("recompute batch 1", "recompute batch 8"):
        assert found[name]["leaving_launches"] < 0.6 * found[name]["launches"], name
