"""Latencies that are simulated for the engines' exits are what the engines count."""

import jax.numpy as jnp
import numpy as np
import pytest

from eejax.experiments.latency import ForwardTimes, pipelined, recompute
from eejax.inference import EngineOptions, Generator, PipelinedGenerator
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import SamplingParams
from eejax.inference.state import RequestRows
from eejax.sharding.mesh import MeshConfig


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cap", [2, 16])
def test_ticks_of_the_engine_are_those_of_stages_with_parts_of_one_length(subset, prompts, cap):
    p, config = subset((1, 2, 4))
    mesh, layers, n = MeshConfig(pipe=2), [1, 4], 40
    options = EngineOptions("pipelined", cap=cap)
    g = PipelinedGenerator.make(p, config, mesh, options, layers=layers)
    tokens, lengths = g._pad(prompts(3, [7]))
    # Thresholds that decide alone, by turns: the way is drawn here, whatever the model says.
    firing = np.random.default_rng(1).integers(0, 4, n)
    request = RequestRows(
        ExitPolicy.make(config, 1),
        SamplingParams.make(1),
        jnp.full((1, 1), -1),
        jnp.asarray(lengths),
        jnp.array([n + 1]),
    )
    state, _ = g._prefill(tokens, request, 128)
    ticks, trace = [], []
    for e in firing:
        policy = ExitPolicy.make(config, 1, [0.0 if e == i else 1.0 for i in range(3)])
        state = state.replace(request=state.request.replace(policy=policy))
        state, record = g._decode(state, 1)
        ticks.append(int(state.ticks))
        trace.append(int(record.exit[0, 0]))
    assert trace == firing.tolist()
    # Parts of one length: layers 0, 1, 2-3 and 4.
    times = ForwardTimes((1.0, 1.0, 1.0, 0.0, 1.0), (0.0,) * 4)
    part = g.stages.partition
    assert ticks == pipelined(trace, part, times, cap=cap).tolist()
    assert ticks != pipelined(trace, part, times, cap=1).tolist()


@pytest.mark.parametrize("cap", [3, pytest.param(16, marks=pytest.mark.slow)])
def test_recomputing_takes_the_layers_that_the_engine_reports(subset, prompts, cap):
    p, config = subset((1, 3))
    g = Generator.make(p, config, EngineOptions("recompute", cap=cap, buckets=(2,)))
    r = g.generate(prompts(3, [7]), 41, threshold=0.3)
    times = ForwardTimes((1.0,) * config.n_layers, (0.0,) * 3)
    got = recompute(r.exits[0, 1:], config, times, cap=cap)
    # Nobody waits for the layers above the last token, which the engine leaves out.
    assert got.tolist()[:-1] == np.cumsum(r.layers[0, 1:]).tolist()[:-1]
