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
from eejax.inference import AutoGenerator, EngineOptions, Generator, posthoc
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.policy import ExitPolicy, available_gates
from eejax.inference.sampling import SamplingParams
from eejax.inference.state import RequestRows
from eejax.kernels import call as kernels
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh

CONFIG = ModelConfig(
    vocab_size=61,
    vocab_multiple=8,
    n_layers=2,
    d_model=16,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=32,
    context_length=48,
    qk_norm="full",
    qkv_bias=True,
    sliding_window=(6, None),
    exits=(ExitConfig(1, mlp=True, block=True, norm=True, head="own", router=6),),
)
MESHES = {"1x2": (1, 2), "2x2": (2, 2), "1x4": (1, 4)}  # the last has a KV head for two shards
ENGINES = {  # of one row count, as each is compiled for every segment
    "full": EngineOptions("full"),
    "posthoc": EngineOptions("posthoc"),
    "recompute": EngineOptions("recompute", cap=3, buckets=(3,)),
    "propagate": EngineOptions("propagate"),
    "speculative": EngineOptions("speculative", cap=3, drafts=2, buckets=(3,)),
}
STEPS = 16


@functools.cache
def weights(config: ModelConfig):
    """Parameters whose biases and scales are their own, and whose texts vary."""
    rng = np.random.default_rng(0)

    def draw(p):
        return np.float32(p.fill + (p.std or 0.1) * 1.5 * rng.standard_normal(p.shape))

    return params.map_params(draw, params.abstract(config))


@functools.cache
def generator(options: EngineOptions, mesh: str | None = None, config=CONFIG) -> Generator:
    devices = mesh and MeshConfig(data=MESHES[mesh][0], model=MESHES[mesh][1])
    return Generator.make(weights(config), config, options, devices)


def prompts(seed: int, lengths) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in lengths]


# The second has but 7 tokens to go when the context is full: data shards end at different steps.
ASKED = prompts(0, [12, 41])
CALLS = (
    dict(threshold=[[0.12], [0.05]], gate=["max_probability", "margin"], seed=3),
    dict(threshold=[[0.3], [0.2]], gate=["saturation", "entropy"], temperature=[0.9, 0.0]),
)


@functools.cache
def on_one_device(engine: str):
    return [generator(ENGINES[engine]).generate(ASKED, STEPS, **call) for call in CALLS]


# All pairs of engine and mesh, of which some are enough for every day: each is a compilation.
SOME = (("recompute", "2x2"), ("propagate", "1x4"), ("speculative", "1x2"))
PAIRS = [
    pytest.param(engine, mesh, marks=[] if (engine, mesh) in SOME else [pytest.mark.slow])
    for engine in ENGINES
    for mesh in MESHES
]


def prefill_in_chunks(monkeypatch):
    """Run prompts in chunks of 16 positions, as many as the longest one of a data shard needs.

    Programs that were compiled before stay as they are.
    """
    for device in posthoc.PREFILL_CHUNKS:
        monkeypatch.setitem(posthoc.PREFILL_CHUNKS, device, 16)


@pytest.mark.parametrize("engine, mesh", PAIRS)
def test_engines_equal_those_of_one_device(engine, mesh, monkeypatch):
    g, exits = generator(ENGINES[engine], mesh), set()
    same = "posthoc" if engine == "recompute" else engine  # which has the margins, too
    wanted = on_one_device(same)  # whose prompts run in one chunk
    prefill_in_chunks(monkeypatch)
    for call, want in zip(CALLS, wanted, strict=True):
        got = g.generate(ASKED, STEPS, **call)
        exits |= set(want.exits[want.exits >= 0].tolist())
        assert min(want.margins[want.exits >= 0]) > TIE  # equal to the token: there are no ties
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_array_equal(got.exits, want.exits)
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
        np.testing.assert_allclose(got.confidences, want.confidences, atol=1e-5)
        np.testing.assert_array_equal(got.drafted, want.drafted)
        np.testing.assert_array_equal(got.accepted, want.accepted)
        assert got.finish == want.finish == ("length", "context")
        if MESHES[mesh][0] == 1 and same == engine:  # otherwise fewer requests share a step
            np.testing.assert_array_equal(got.layers, want.layers)
    assert exits == ({0, 1} if ENGINES[engine].leaves_early else {g.config.n_exits})


@pytest.mark.parametrize("mesh", [pytest.param("1x2", marks=pytest.mark.slow), "1x4"])
def test_forms_for_a_gpu_equal_those_of_one_cpu(mesh, monkeypatch):
    """On the second mesh, exits' blocks and layers take the KV head that a shard needs."""
    want = on_one_device("posthoc")[0]
    prefill_in_chunks(monkeypatch)
    shape = MeshConfig(data=MESHES[mesh][0], model=MESHES[mesh][1])
    with kernels.compute_capability(90), kernels.implementation("reference"):
        g = Generator.make(weights(CONFIG), CONFIG, ENGINES["recompute"], shape)
        got = g.generate(ASKED, STEPS, **CALLS[0])
    exit_ = next(iter(g.weights.params["exits"].values()))
    assert "qkv" in exit_["block"]["attn"] and "gate_up" in exit_["mlp"]
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.exits, want.exits)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


def test_data_shards_go_their_own_ways():
    """Where the request of one always leaves and the other's never does, each runs its own."""
    g, asked = generator(ENGINES["recompute"], "2x2"), prompts(2, [9, 4])
    for threshold in ([[0.0], [1.0]], [[1.0], [0.0]]):
        got = g.generate(asked, STEPS, threshold=threshold)
        leaves = threshold.index([0.0])
        # No token comes behind the last one, which therefore need not go deeper.
        forced = [2 if i % g.options.cap == 0 else 1 for i in range(1, STEPS - 1)] + [1]
        assert got.layers[leaves, 1:].tolist() == forced
        assert (got.layers[1 - leaves] == 2).all() and (got.exits[1 - leaves] == 1).all()


def test_other_requests_do_not_recompile(compiled):
    g = generator(ENGINES["recompute"], "2x2")
    g.generate(ASKED, STEPS, **CALLS[0])
    compiled.clear()
    for i in range(4):
        g.generate(ASKED, STEPS, threshold=0.1 * i, gate=GATES[i], temperature=0.5 * i, seed=i)
    assert not compiled


@pytest.mark.slow
def test_bfloat16_equals_but_for_near_ties():
    """A sum over shards rounds to 8 bits: margins below some of their steps are ties, and it is as
    far from float32 as one device is."""
    half, asked = CONFIG.replace(dtype="bfloat16"), prompts(0, [12, 5])
    exact, want, got = (
        generator(ENGINES["posthoc"], mesh, config).generate(asked, STEPS, **CALLS[0])
        for mesh, config in ((None, CONFIG), (None, half), ("1x2", half))
    )
    compared, errors = 0, {"one": [], "mesh": []}
    for i, n in enumerate(want.lengths):
        same = (got.tokens[i] == want.tokens[i]) & (got.exits[i] == want.exits[i])
        if not same.all():
            n = np.argmin(same)
            assert want.margins[i, n] < 0.05
        compared += n
        same = (exact.tokens[i, :n] == want.tokens[i, :n]) & (
            exact.exits[i, :n] == want.exits[i, :n]
        )
        n = n if same.all() else np.argmin(same)
        for name, run in (("one", want), ("mesh", got)):
            errors[name] += (run.logprobs[i, :n] - exact.logprobs[i, :n]).tolist()
    assert compared > 8 and len(errors["one"]) > 8
    one, mesh = (np.sqrt(np.mean(np.square(errors[name]))) for name in ("one", "mesh"))
    assert mesh < 2 * one < 0.1, (one, mesh)


def test_a_part_of_the_model():
    options = EngineOptions("recompute", num_segments=1)
    # Parameters above the first exit need not be there.
    p = weights(CONFIG)
    part = {"embed": p["embed"], "exits": p["exits"]}
    part["layers"] = jax.tree.map(lambda a: a[:1], p["layers"])
    g = Generator.make(part, CONFIG, options, make_mesh(MeshConfig(data=2, model=2)))
    got = g.generate(ASKED, STEPS, threshold=1.0)
    # As the whole model, whose first exit lets everybody go.
    want = generator(ENGINES["posthoc"]).generate(ASKED, STEPS, threshold=0.0, prefill_exit=True)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert (got.layers[got.exits >= 0] == 1).all()


@pytest.mark.slow
def test_auto_on_a_mesh():
    mesh = MeshConfig(data=2, model=2)
    g = AutoGenerator.make(weights(CONFIG), CONFIG, ENGINES["recompute"], mesh=mesh)
    got = g.generate(ASKED, STEPS, threshold=1.0)
    want = generator(ENGINES["full"]).generate(ASKED, STEPS)
    np.testing.assert_array_equal(got.tokens, want.tokens)


SLOTS = [
    "recompute",
    pytest.param("speculative", marks=pytest.mark.slow),
    pytest.param("mask", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("engine", SLOTS)
def test_slots_on_a_mesh(engine):
    """Requests in slots of both data shards get what they get alone, one in another's old slot."""
    options = EngineOptions("propagate", propagate="mask") if engine == "mask" else ENGINES[engine]
    mesh = MeshConfig(data=2, model=2)
    slots = EarlyExitEngine.make(weights(CONFIG), CONFIG, options, slots=4, context=16, mesh=mesh)
    asked, got = prompts(1, [3, 2, 4]), [[], [], []]
    config = slots.config

    def admit(state, i, slot):
        policy, sampling = ExitPolicy.make(config, 1, 0.12), SamplingParams.make(1)
        request = RequestRows.make(config, [len(asked[i])], [12], policy, sampling)
        rows, first = slots.prefill([asked[i]], request)
        assert first.exit[0] < 0  # its prompt runs with the next steps
        return slots.insert(state, rows, [slot])

    def run(state, where):
        state, record = slots.generate(state, 4)
        for slot in range(4):
            new = np.asarray(record.token)[np.asarray(record.exit)[:, slot] >= 0, slot].tolist()
            assert slot in where or not new
            if new:
                got[where[slot]] += new
        return state

    state = run(admit(slots.start(), 0, 3), {3: 0})
    assert int(state.clock) == int(state.work.steps) == 4  # the other shard had nothing to do
    state = run(admit(state, 1, 0), {3: 0, 0: 1})
    state = admit(slots.free(state, [3]), 2, 3)
    run(run(state, {3: 2, 0: 1}), {3: 2, 0: 1})
    alone = generator(ENGINES["posthoc"] if engine == "recompute" else options)  # compiled above
    for i, n in enumerate([8, 12, 8]):
        want = alone.generate([asked[i], asked[i]], STEPS, threshold=0.12)
        assert engine != "recompute" or want.margins[0, :n].min() > TIE
        assert len(got[i]) >= n and got[i] == want.ids(0)[: len(got[i])]


@st.composite
def drawn(draw):
    """(configuration, options of recompute, mesh, prompts, arguments of `generate`)."""

    def choose(*values):
        return draw(st.sampled_from(values))

    heads = ("tied", "own", "shared")
    boundaries = sorted(draw(st.sets(st.integers(0, 2), min_size=1, max_size=2)))
    exits = tuple(
        ExitConfig(
            b,
            block=choose(True, False),
            norm=choose(True, False),
            head=choose(*heads),
            router=6 * (b < 2),
        )
        for b in boundaries
    )
    config = CONFIG.replace(
        exits=exits,
        head=choose(*heads),
        qk_norm=choose("none", "head", "full"),
        qkv_bias=choose(True, False),
        mlp_gated=choose(True, False),
        position=choose("rotary", "learned", "alibi"),
        norm=choose("rmsnorm", "layernorm"),
    )
    options = EngineOptions("recompute", cap=draw(st.integers(1, 4)), buckets=(1,))
    mesh = choose(*MESHES)
    batch = draw(st.integers(1, 2)) if MESHES[mesh][0] == 1 else 2

    def each(kind):
        return draw(st.lists(kind, min_size=batch, max_size=batch))

    some = st.sampled_from([0.0, 0.05, 0.1, 0.2, 1.0])
    kwargs = dict(
        threshold=each(st.lists(some, min_size=len(exits), max_size=len(exits))),
        gate=each(st.sampled_from(available_gates(config))),
        prefill_exit=choose(True, False),
    )
    asked = prompts(draw(st.integers(0, 99)), each(st.integers(1, 16)))
    return config, options, mesh, asked, kwargs


# Of what `CONFIG` has not: an exit below all layers, one head for all, and no gates in MLPs.
OTHER = CONFIG.replace(
    exits=(ExitConfig(0, head="shared", router=6), ExitConfig(1, norm=True, head="shared")),
    head="own",
    qk_norm="head",
    qkv_bias=False,
    mlp_gated=False,
    position="alibi",
    norm="layernorm",
)


@pytest.mark.slow
def test_another_model_on_a_mesh_equals_posthoc_on_one_device():
    kwargs = dict(threshold=[[0.2, 0.1]], gate=["max_probability"])
    check_any_model(OTHER, ENGINES["recompute"], "1x4", prompts(0, [12]), kwargs)


@pytest.mark.slow
@settings(max_examples=12)
@given(drawn())
def test_any_model_on_a_mesh_equals_posthoc_on_one_device_widely(case):
    check_any_model(*case)


def check_any_model(config, options, mesh, asked, kwargs):
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

    def auto(p, c, name, mesh):
        return AutoGenerator.make(p, c, EngineOptions(name), mesh=mesh)

    for make in (Generator.make, functools.partial(EarlyExitEngine.make, slots=8), auto):
        with pytest.raises(ConfigError, match=message):
            make(p, CONFIG, "recompute", mesh=mesh)


def test_other_meshes_and_batches_are_named():
    devices = np.array(jax.devices()[:4]).reshape(2, 1, 2)
    p = params.shapes(CONFIG)
    with pytest.raises(ConfigError, match=r"mesh = .*'c'.*must have the axes"):
        Generator.make(p, CONFIG, "full", Mesh(devices, ("a", "b", "c")))
    with pytest.raises(ConfigError, match=r"mesh.pipe = 2: .*'full'"):
        Generator.make(p, CONFIG, "full", make_mesh(MeshConfig(pipe=2)))
    with pytest.raises(ConfigError, match=r"slots = 3: must be a multiple of mesh.data"):
        EarlyExitEngine.make(p, CONFIG, "full", slots=3, mesh=MeshConfig(data=2))
    g = generator(ENGINES["recompute"], "2x2")
    with pytest.raises(ConfigError, match=r"prompts = 3: must be a multiple of mesh.data"):
        g.generate([[1, 2]] * 3, 4)
