"""Engines on meshes of data and model shards against the same engines on one device."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from near_ties import TIE, assert_same

from eejax.common.errors import ConfigError
from eejax.gates.confidence import GATES
from eejax.inference import AutoGenerator, EngineOptions, Generator
from eejax.inference.engine import SlotEngine
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import Sampling
from eejax.inference.state import Request
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh

# A collective that some shard does not take part in never returns: the test ends with it.
pytestmark = pytest.mark.timeout(600)

CONFIG = ModelConfig(
    vocab_size=61, vocab_multiple=8, n_layers=3, d_model=16, n_heads=4, n_kv_heads=2, head_dim=8,
    d_ff=32, context_length=48, qk_norm="full", qkv_bias=True, sliding_window=(None, 6, None),
    exits=(ExitConfig(1, block=True, norm=True, head="own"), ExitConfig(2, mlp=True)),
)  # fmt: skip
MESHES = {"1x2": (1, 2), "2x2": (2, 2), "1x4": (1, 4)}  # the last has a KV head for two shards
ENGINES = {
    "full": EngineOptions("full"),
    "posthoc": EngineOptions("posthoc"),
    "recompute": EngineOptions("recompute", cap=3, buckets=(1,)),
    "propagate": EngineOptions("propagate"),
    "speculative": EngineOptions("speculative", gamma=2, buckets=(1,)),
}
STEPS = 16


@functools.cache
def weights(config: ModelConfig):
    """Initial values and noise, so that biases and scales are their own and texts vary."""
    noise = lambda a: a + 0.15 * jax.random.normal(jax.random.key(a.size), a.shape)
    return jax.tree.map(noise, params.init(config, jax.random.key(0)))


@functools.cache
def generator(options: EngineOptions, mesh: str | None = None, config=CONFIG) -> Generator:
    devices = mesh and MeshConfig(data=MESHES[mesh][0], model=MESHES[mesh][1])
    return Generator.make(weights(config), config, options, devices)


def prompts(seed: int, lengths) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in lengths]


# The third has but 7 tokens to go when the context is full: data shards end at different steps.
ASKED = prompts(0, [5, 12, 41, 9])
POLICIES = dict(
    threshold=[[0.08, 0.15], [0.02, 0.05], [1.0, 0.1], [0.5, 1.0]],
    gate=["max_probability", "margin", "saturation", "patience"],
)
DRAWN = dict(temperature=[0.0, 0.9, 0.0, 0.0], top_k=[0, 20, 0, 0], seed=3)


@functools.cache
def on_one_device(engine: str):
    return generator(ENGINES[engine]).generate(ASKED, STEPS, **POLICIES, **DRAWN)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_equal_those_of_one_device(engine, mesh):
    want = on_one_device(engine)
    got = generator(ENGINES[engine], mesh).generate(ASKED, STEPS, **POLICIES, **DRAWN)
    if engine == "posthoc":
        assert_same(want, got)
        assert min(want.margins[want.exits >= 0]) > TIE  # equal to the token, in all that follows
        assert len(set(want.exits[want.exits >= 0].tolist())) == 3  # all exits emit
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.exits, want.exits)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    np.testing.assert_allclose(got.confidences, want.confidences, atol=1e-5)
    np.testing.assert_array_equal(got.drafted, want.drafted)
    np.testing.assert_array_equal(got.accepted, want.accepted)
    assert got.finish == want.finish and "context" in got.finish
    if MESHES[mesh][0] == 1:  # otherwise fewer requests share a step
        np.testing.assert_array_equal(got.layers, want.layers)


def test_data_shards_go_their_own_ways():
    """Where those of one leave at once and the other's never do, each runs its own layers."""
    g = generator(ENGINES["recompute"], "2x2")
    threshold = [[0.0, 1.0]] * 2 + [[1.0, 1.0]] * 2
    got = g.generate(ASKED, STEPS, threshold=threshold)
    cap = g.options.cap
    assert got.layers[0, 1:].tolist() == [3 if i % cap == 0 else 1 for i in range(1, STEPS)]
    assert (got.layers[3] == 3).all() and (got.exits[3] == 2).all()
    again = g.generate(ASKED, STEPS, threshold=threshold[::-1])
    assert (again.layers[0] == 3).all() and (again.layers[3, 1:] == 1).any()


def test_other_requests_do_not_recompile(compiled):
    g = generator(ENGINES["recompute"], "2x2")
    g.generate(ASKED, STEPS, **POLICIES)
    compiled.clear()
    for i in range(4):
        g.generate(ASKED, STEPS, threshold=0.1 * i, gate=GATES[i], temperature=0.5 * i, seed=i)
    assert not compiled


def test_bfloat16_equals_but_for_near_ties():
    """A sum over shards rounds to 8 bits: margins below some of their steps are ties."""
    config = CONFIG.replace(dtype="bfloat16")
    want, got = (
        generator(ENGINES["posthoc"], mesh, config).generate(ASKED, STEPS, **POLICIES)
        for mesh in (None, "2x2")
    )
    compared = 0
    for i, n in enumerate(want.lengths):
        same = (got.tokens[i] == want.tokens[i]) & (got.exits[i] == want.exits[i])
        differs = np.flatnonzero(~same[:n])
        if len(differs):
            n = differs[0]
            assert want.margins[i, n] < 0.1
        compared += n
        np.testing.assert_allclose(got.logprobs[i, :n], want.logprobs[i, :n], atol=0.1)
    assert compared > 20


def test_a_part_of_the_model():
    options = EngineOptions("recompute", max_depth=1)
    # Parameters above the first exit need not be there.
    p = weights(CONFIG)
    name = CONFIG.exits[0].name
    part = {"embed": p["embed"], "exits": {name: p["exits"][name]}}
    part["layers"] = jax.tree.map(lambda a: a[:1], p["layers"])
    make = lambda *mesh: Generator.make(part, CONFIG, options, *mesh).generate(ASKED, STEPS)
    want, got = make(), make(make_mesh(MeshConfig(data=2, model=2)))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert (got.layers[got.exits >= 0] == 1).all()


def test_auto_on_a_mesh():
    g = AutoGenerator.make(
        weights(CONFIG), CONFIG, ENGINES["recompute"], mesh=MeshConfig(data=2, model=2)
    )
    got = g.generate(ASKED, STEPS, threshold=1.0)
    want = generator(ENGINES["full"]).generate(ASKED, STEPS)
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_slots_on_a_mesh():
    """Requests in slots of both data shards get what they get alone, one in another's old slot."""
    mesh = MeshConfig(data=2, model=2)
    options = ENGINES["recompute"]
    slots = SlotEngine.make(weights(CONFIG), CONFIG, options, slots=4, context=32, mesh=mesh)
    asked, threshold = prompts(1, [3, 10, 6]), [0.08, 0.15]

    def admit(state, i, slot):
        request = Request.make(
            CONFIG, [len(asked[i])], [12], ExitPolicy.make(CONFIG, 1, threshold), Sampling.make(1)
        )
        rows, first = slots.prefill([asked[i]], request)
        got[i] += list(zip(first.token.tolist(), first.exit.tolist(), strict=True))
        return slots.insert(state, rows, [slot])

    def run(state, where, n):
        state, record = slots.generate(state, n)
        for slot in range(4):
            pairs = zip(record.token[:, slot].tolist(), record.exit[:, slot].tolist(), strict=True)
            new = [pair for pair in pairs if pair[1] >= 0]
            assert new or slot not in where
            if slot in where:
                got[where[slot]] += new
            else:
                assert not new
        return state

    got = [[], [], []]
    state = admit(slots.start(), 0, 3)
    state = run(state, {3: 0}, 5)
    state = admit(state, 1, 0)
    state = run(state, {3: 0, 0: 1}, 5)
    state = admit(slots.free(state, [3]), 2, 3)
    state = run(run(state, {3: 2, 0: 1}, 5), {3: 2, 0: 1}, 5)
    counts = [11, 12, 11]
    for i, n in enumerate(counts):
        want = generator(ENGINES["posthoc"]).generate([asked[i]], STEPS, threshold=threshold)
        pairs = list(zip(want.tokens[0].tolist(), want.exits[0].tolist(), strict=True))
        assert got[i] == pairs[:n]


@st.composite
def drawn(draw):
    """(configuration, options of recompute, mesh, prompts, arguments of `generate`)."""
    choose = lambda *values: draw(st.sampled_from(values))
    heads = ("tied", "own", "shared")
    boundaries = sorted(draw(st.sets(st.integers(0, 3), min_size=1, max_size=2)))
    exits = tuple(
        ExitConfig(b, block=choose(True, False), norm=choose(True, False), head=choose(*heads))
        for b in boundaries
    )
    config = CONFIG.replace(
        exits=exits, head=choose(*heads), qk_norm=choose("none", "head", "full"),
        qkv_bias=choose(True, False), mlp_gated=choose(True, False),
        position=choose("rotary", "learned", "alibi"), norm=choose("rmsnorm", "layernorm"),
    )  # fmt: skip
    options = EngineOptions("recompute", cap=draw(st.integers(1, 5)), buckets=(1,))
    mesh = choose(*MESHES)
    batch = MESHES[mesh][0] * draw(st.integers(1, 2))
    each = lambda kind: draw(st.lists(kind, min_size=batch, max_size=batch))
    some = st.sampled_from([0.0, 0.05, 0.1, 0.2, 1.0])
    kwargs = dict(
        threshold=each(st.lists(some, min_size=len(exits), max_size=len(exits))),
        gate=each(st.sampled_from(GATES)), prefill_exit=choose(True, False),
    )  # fmt: skip
    asked = prompts(draw(st.integers(0, 99)), each(st.integers(1, 16)))
    return config, options, mesh, asked, kwargs


@settings(max_examples=4)
@given(drawn())
def test_any_model_on_a_mesh_equals_posthoc_on_one_device(case):
    config, options, mesh, asked, kwargs = case
    want = generator(ENGINES["posthoc"], None, config).generate(asked, STEPS, **kwargs)
    got = generator(options, mesh, config).generate(asked, STEPS, **kwargs)
    assert assert_same(want, got) <= 1


@pytest.mark.parametrize(
    "mesh, message",
    [
        (MeshConfig(pipe=2), r"mesh.pipe = 2: must be 1 with the engine 'recompute'.*'pipelined'"),
        (MeshConfig(model=8), r"'n' of size 4 does not divide by mesh.model = 8.*model.n_heads"),
        (MeshConfig(model=3), r"mesh.model = 3"),
        (MeshConfig(data=8, model=4), "needs 32 devices"),
        ((2, 2), r"mesh = \(2, 2\): must be a MeshConfig"),
    ],
)
def test_meshes_that_do_not_fit_are_named(mesh, message):
    p = params.shapes(CONFIG)
    for make in (Generator.make, functools.partial(SlotEngine.make, slots=8)):
        with pytest.raises(ConfigError, match=message):
            make(p, CONFIG, "recompute", mesh=mesh)


def test_other_meshes_and_batches_are_named():
    devices = np.array(jax.devices()[:4]).reshape(2, 1, 2)
    p = params.shapes(CONFIG)
    with pytest.raises(ConfigError, match=r"mesh = \('a', 'b', 'c'\): must have the axes"):
        Generator.make(p, CONFIG, "full", Mesh(devices, ("a", "b", "c")))
    with pytest.raises(ConfigError, match=r"mesh.pipe = 2: .*'full'"):
        Generator.make(p, CONFIG, "full", make_mesh(MeshConfig(pipe=2)))
    with pytest.raises(ConfigError, match=r"slots = 3: must be a multiple of mesh.data"):
        SlotEngine.make(p, CONFIG, "full", slots=3, mesh=MeshConfig(data=2))
    g = generator(ENGINES["recompute"], "2x2")
    with pytest.raises(ConfigError, match=r"prompts = 3: must be a multiple of mesh.data"):
        g.generate(ASKED[:3], 4)
