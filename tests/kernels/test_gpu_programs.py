"""Programs compiled for a GPU that is not there hold nothing that would cost time on it."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from eejax.experiments import aot, card_figures, card_programs

pytestmark = pytest.mark.timeout(3600)  # about 18 programs for each card, which take minutes

LAUNCHES = {"full batch 1": 16, "full batch 8": 14, "full batch 64": 14}
"""The most launches from one layer's attention to the next's."""

PROPAGATE = ("propagate batch 1", "propagate batch 8")
WITH_MLPS = ("recompute with MLPs batch 1", "recompute with MLPs batch 8")
DECODING = (
    *LAUNCHES,
    "recompute batch 1",
    "recompute batch 8",
    "speculative batch 1",
    *PROPAGATE,
    *WITH_MLPS,
)
SLOTS = ("recompute 8 slots",)
PROMPTS = ("prompts of 48 batch 8",)
TRAINING = tuple(f"training 350M {n} exits" for n in range(4))
MASKED = ("training 350M of documents", "training 350M of windows")
ALL = (*DECODING, *SLOTS, *PROMPTS, *TRAINING, *MASKED)


@pytest.fixture(scope="module", params=["a100", "h100"])
def compiled(request, for_cuda, repo_root):
    """(figures by program, the names of what became parts of CUDA graphs by program)."""
    if complaint := aot.complaint():
        pytest.skip(f"{complaint} See make test-gpu-aot.")
    folder = pathlib.Path(for_cuda["PYTHONPATH"].split(os.pathsep)[0])
    if not (folder / "jax_plugins").is_dir():
        pytest.skip(f"needs the compiler of JAX's CUDA plugin in {folder}; see `make env`")
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("needs jax-triton")
    environment = for_cuda | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is taken from it is not logged
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "command_buffer_conversion_pass=2",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "eejax.experiments.gpu_programs",
            "--small",
            "--json",
            f"--card={request.param}",
            f"--only={','.join(ALL)}",
        ],
        env=environment,
        cwd=repo_root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), graphed(done.stderr)


def graphed(log: str) -> dict[str, set[str]]:
    """Read the names of instructions that became parts of CUDA graphs, by program."""
    found: dict[str, set[str]] = {}
    for part in re.split(r"^program: ", log, flags=re.MULTILINE)[1:]:
        name, _, rest = part.partition("\n")
        # From jax 0.12 on, a graph has a name there.
        graph = r"Creating command buffer thunk (?:\S+ )?with the following thunks: (.*)"
        lists = re.findall(graph, rest)
        found[name] = {one for names in lists for one in names.split(", ")}
    return found


@pytest.mark.parametrize("parts", ["conditionals", "loops"])
def test_no_step_copies_a_cache(compiled, parts):
    """Steps are parts of loops, and so is what they run only where a request goes deeper."""
    found, _ = compiled
    copied = {name: found[name][f"copied_in_{parts}"] for name in (*DECODING, *SLOTS)}
    assert copied == dict.fromkeys(copied, 0)


def test_the_host_decides_nothing_while_decoding(compiled):
    found, graphs = compiled
    names = (*DECODING, *SLOTS, *PROMPTS)
    assert {name: found[name]["host_decisions"] for name in names} == dict.fromkeys(names, 0)
    loops = {name: found[name]["loop"] for name in (*DECODING, *SLOTS)}
    assert {name: loop for name, loop in loops.items() if loop not in graphs[name]} == {}


def test_a_log_is_read_by_program():
    log = "program: one\nat: Creating command buffer thunk with the following thunks: a, while.4\n"
    log += "else\nprogram: two\n"
    log += "at: Creating command buffer thunk command_buffer_1 with the following thunks: b\n"
    assert graphed(log) == {"one": {"a", "while.4"}, "two": {"b"}}


def test_launches_of_a_layer(compiled):
    found, _ = compiled
    for name, most in LAUNCHES.items():
        assert 0 < found[name]["launches_a_layer"] <= most, name


def test_attention_writes_no_scores(compiled):
    found, _ = compiled
    written = {name: found[name]["scores"] for name in ALL}
    assert written == dict.fromkeys(written, 0)


@pytest.mark.parametrize(
    "shape, holds",
    [
        ((8, 16, 2048, 2048), True),
        ((8, 16, 512, 2048), True),
        ((128, 512, 1536), True),
        ((24, 5464, 2048), False),  # MLPs' matrices
        ((24, 16, 128, 2048), False),  # attention's
        ((24, 128, 2048, 16), False),
        ((384, 128, 2048), False),
        ((16, 128, 2048), False),
        ((8, 2048, 2048), False),  # states
        ((2048, 2048), False),
    ],
)
def test_scores_are_told_from_parameters(shape, holds):
    config = card_programs.BILLION.config(2048)
    assert card_figures.are_scores(shape, 2048, config) == holds


@pytest.mark.parametrize("shape", [(128, 640), (8, 16, 640), (8, 16, 1, 1, 640)])
def test_scores_of_one_query_have_no_dimension_for_it(shape):
    config = card_programs.BILLION.config(2048)
    assert card_figures.are_scores(shape, 640, config, one_query=True)
    assert not card_figures.are_scores((8, 640), 640, config, one_query=True)


def test_a_step_copies_no_weights(compiled):
    """The MLPs of exits among them, whose width is no multiple of 64 here."""
    found, _ = compiled
    written = {name: found[name]["weights_written"] for name in (*DECODING, *SLOTS)}
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
    for name in ("recompute batch 1", "recompute batch 8", *WITH_MLPS):
        assert found[name]["leaving_launches"] < 0.6 * found[name]["launches"], name
