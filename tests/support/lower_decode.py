"""Lowers decoding steps for CUDA and tells what kernels they hold: JSON, a line for each program.

Its arguments are compute capabilities. Needs jax-triton and JAX's CUDA plugin, and no GPU.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import collections  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from functools import partial  # noqa: E402

import compiled_kernels as compiled  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402

from eejax.inference import decoding, generate, sharded  # noqa: E402
from eejax.inference.options import EngineOptions  # noqa: E402
from eejax.inference.policy import ExitPolicy  # noqa: E402
from eejax.inference.sampling import SamplingParams  # noqa: E402
from eejax.inference.state import RequestRows, blank  # noqa: E402
from eejax.inference.weights import prepare  # noqa: E402
from eejax.models import params  # noqa: E402
from eejax.models.config import ExitConfig, ModelConfig  # noqa: E402
from eejax.sharding.mesh import MeshConfig, known_mesh  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=512,
    n_layers=4,
    d_model=128,
    n_heads=4,
    context_length=64,
    dtype="bfloat16",
    exits=(ExitConfig(1, router=16), ExitConfig(3, router=16)),
)
BATCH = 8
OPTIONS = EngineOptions(cap=2, buckets=(1, 2)).resolved(CONFIG, BATCH)


def request() -> RequestRows:
    policy = ExitPolicy.make(CONFIG, BATCH, 0.5, gate="router")
    return RequestRows.make(CONFIG, [4] * BATCH, [8] * BATCH, policy, SamplingParams.make(BATCH))


def programs():
    """(name, function, arguments) of each program."""
    own = jax.eval_shape(partial(params.init, CONFIG), jax.random.key(0))
    weights = jax.eval_shape(partial(prepare, config=CONFIG), own)
    plan = decoding.default_plan(CONFIG, OPTIONS, BATCH)
    prefill = partial(generate.prefill, config=CONFIG, options=OPTIONS, length=64)
    tokens = np.zeros((BATCH, 16), np.int32)
    state, _ = jax.eval_shape(prefill, weights, plan, tokens, request())
    step = partial(decoding.step, config=CONFIG, options=OPTIONS, prompts=False)
    yield "step", step, (weights, state)
    yield "loop", partial(decoding.loop, step, 4, n=4), (weights, state)

    def scan(w, s):
        return jax.lax.scan(lambda s, _: step(w, s), s, length=4)

    yield "scan", scan, (weights, state)

    mesh = known_mesh(MeshConfig(data=2, model=2))
    zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), own)
    placed = sharded.place(zeros, CONFIG, None, mesh)
    own = OPTIONS.resolved(CONFIG, BATCH // 2)
    prefill = partial(generate.prefill, config=CONFIG, options=own, length=64)
    plan = decoding.default_plan(CONFIG, own, BATCH // 2)
    split, _ = jax.eval_shape(prefill, placed, plan, tokens, request())
    decode = partial(decoding.decode, config=CONFIG, options=own, size=4)
    yield "mesh", decode, (placed, split, np.int32(4))

    options = EngineOptions(cap=2, buckets=(2, 8), chunk=16).resolved(CONFIG, BATCH)
    plan = decoding.default_plan(CONFIG, options, BATCH)
    sizes = dict(config=CONFIG, options=options, slots=BATCH, length=64, context=64)
    slots = jax.eval_shape(partial(blank, plan=plan, **sizes), weights)
    serve = partial(decoding.step, config=CONFIG, options=options, prompts=True)
    yield "beside prompts", serve, (weights, slots)


def main() -> None:
    for name, run, args in programs():
        for capability in map(int, sys.argv[1:]):
            found = collections.Counter(
                k.name for k in compiled.kernels(run, *args, capability=capability)
            )
            print(json.dumps(dict(program=name, capability=capability, kernels=found)), flush=True)


if __name__ == "__main__":
    main()
