"""Decoding on pipeline stages against the oracle on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_requests import asked_of
from hypothesis import given, settings
from hypothesis import strategies as st
from near_ties import TIE, assert_same

from eejax.common.errors import ConfigError
from eejax.gates.confidence import GATES
from eejax.inference import EngineOptions, Generator, PipelinedGenerator
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import SamplingParams
from eejax.inference.state import RequestRows
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig


def pipelined(p, config, mesh, cap=16, layers="even", num_segments=None):
    options = EngineOptions("pipelined", cap=cap, num_segments=num_segments)
    mesh = MeshConfig(**mesh) if isinstance(mesh, dict) else mesh
    return PipelinedGenerator.make(p, config, mesh, options, layers=layers)


def compare(oracle, engine, asked, kwargs, n=30):
    """Both engines' results, the same up to near-ties; how many of these were excused."""
    a, b = (g.generate(asked, n, **kwargs) for g in (oracle, engine))
    excused = assert_same(a, b)
    p = engine.stages.partition
    executed = np.maximum(b.boundaries, p.layers[0])
    executed[:, 0] = p.depth  # the prompt's pass
    np.testing.assert_array_equal(b.layers[b.exits >= 0], executed[b.exits >= 0])
    return excused


# (mesh, layers of each stage, cap, boundaries of the exits)
MESHES = {
    "two stages": (dict(pipe=2), "even", 16, (0, 1, 3)),
    "two stages of two shards": (dict(pipe=2, model=2), [2, 3], 4, (0, 1, 2, 3, 4, 5)),
    "three stages of two copies": (dict(pipe=3, data=2), [1, 3, 1], 3, (2, 3)),
    "five stages": (dict(pipe=5), "balanced", 2, (1, 3, 5)),
    "more shards than key heads": (dict(pipe=2, model=4), [4, 1], 16, (2,)),
    # Other tests take these stages too, with as many requests: their programs are compiled once.
    "three stages of two shards": (dict(pipe=3, model=2), [1, 2, 2], 4, (0, 1, 2, 3, 5)),
}


EVERY_DAY = ("three stages of two shards",)
REQUESTS = 2


@pytest.fixture(scope="module")
def staged(subset):
    """(params, config, engine) of every day."""
    mesh, layers, cap, layout = MESHES[EVERY_DAY[0]]
    p, config = subset(layout)
    return p, config, pipelined(p, config, mesh, cap, layers)


@pytest.mark.slow
def test_thresholds_gates_and_sampling_do_not_recompile(staged, prompts, compiled):
    """It comes first: what another test had compiled would not be seen."""
    _, config, engine = staged
    asked = prompts(2, [10, 13])

    def run(**kwargs):
        return [*engine.stream(asked, 12, chunk=4, **kwargs)]

    run(threshold=0.5)
    assert compiled
    compiled.clear()
    for i in range(6):
        exits = config.exit_boundaries[: 1 + i % 2]
        run(threshold=i / 5, gate=GATES[i], exits=exits, temperature=0.1 * i, seed=i)
    assert not compiled


CHOSEN = [pytest.param(m, marks=[] if m in EVERY_DAY else [pytest.mark.slow]) for m in MESHES]


@pytest.mark.parametrize("name", CHOSEN)
def test_pipelined_equals_posthoc(subset, prompts, name):
    """Exits of all kinds: inside stages, between them, at 0 and after all layers."""
    mesh, layers, cap, layout = MESHES[name]
    p, config = subset(layout)
    batch = 2 if "data" in mesh or name in EVERY_DAY else 3
    oracle = Generator.make(p, config, "posthoc")
    engine = pipelined(p, config, mesh, cap, layers)
    excused = []

    @settings(max_examples=6)
    @given(data=st.data())
    def check(data):
        asked, kwargs = asked_of(data.draw, prompts, config, batch)
        excused.append(compare(oracle, engine, asked, kwargs))

    check()
    assert sum(excused) <= 2


def partitions(total, stages):
    cuts = st.sets(st.integers(1, total - 1), min_size=stages - 1, max_size=stages - 1)
    return cuts.map(lambda s: np.diff([0, *sorted(s), total]).tolist())


GEOMETRY = dict(
    layout=st.sets(st.integers(0, 5), min_size=1, max_size=3).map(sorted).map(tuple),
    layers=st.integers(2, 4).flatmap(functools.partial(partitions, 5)),
    shards=st.sampled_from([1, 2]),
    batch=st.integers(1, 3),
    cap=st.integers(1, 9),
    data=st.data(),
)


@pytest.mark.slow
@settings(max_examples=2)
@given(**GEOMETRY)
def test_any_stages_equal_posthoc(
    trained, subset, prompts, layout, layers, shards, batch, cap, data
):
    check_any_stages(subset, prompts, layout, layers, shards, batch, cap, data)


@pytest.mark.slow
@settings(max_examples=40)
@given(**GEOMETRY)
def test_any_stages_equal_posthoc_widely(
    trained, subset, prompts, layout, layers, shards, batch, cap, data
):
    check_any_stages(subset, prompts, layout, layers, shards, batch, cap, data)
    jax.clear_caches()  # see test_engines


def check_any_stages(subset, prompts, layout, layers, shards, batch, cap, data):
    p, config = subset(layout)
    oracle = Generator.make(p, config, "posthoc")
    engine = pipelined(p, config, dict(pipe=len(layers), model=shards), cap, layers)
    excused = 0
    for _ in range(4):
        asked, kwargs = asked_of(data.draw, prompts, config, batch)
        excused += compare(oracle, engine, asked, kwargs)
    assert excused <= 2


@pytest.mark.slow
def test_sampling_and_stop_strings_equal_posthoc(subset, prompts):
    p, config = subset((1, 3))
    asked = prompts(0, [5, 12, 7])

    def text(ids):
        return bytes(i for i in ids if i < 256).decode("latin-1")

    drawn = dict(
        threshold=0.3,
        temperature=[0.0, 0.8, 1.5],
        top_k=[0, 20, 0],
        top_p=[1.0, 0.9, 1.0],
        min_p=[0.0, 0.0, 0.05],
        seed=[1, 2, 3],
    )
    oracle = Generator.make(p, config, "posthoc")
    engine = pipelined(p, config, dict(pipe=2, model=2))
    a, b = (g.generate(asked, 40, **drawn) for g in (oracle, engine))
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.exits, b.exits)
    target = text(a.ids(1))[8:11]
    strings = dict(stop_strings=[target], decode_text=text)
    a, b = (g.generate(asked, 40, **drawn, **strings) for g in (oracle, engine))
    np.testing.assert_array_equal(a.tokens, b.tokens)
    assert a.finish == b.finish and "stop" in b.finish
    pieces = list(engine.stream(asked, 20, threshold=0.3, chunk=16))
    assert [r.tokens.shape[1] for r in pieces] == [1, 17, 20]
    assert pieces[-1].ids(0) == engine.generate(asked, 20, threshold=0.3).ids(0)


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_batch_mates(subset, prompts):
    """Its tokens take their way alone: only rounding knows how many rows a product has."""
    p, config = subset((1, 2, 4))
    asked = prompts(7, [3, 14, 9])
    engine = pipelined(p, config, dict(pipe=2), cap=3)
    together = engine.generate(asked, 25, threshold=0.35)
    oracle = Generator.make(p, config, "posthoc").generate(asked, 25, threshold=0.35)
    compared = 0
    for i, one in enumerate(asked):
        alone = engine.generate([one], 25, threshold=0.35)
        tied = np.flatnonzero(oracle.margins[i] < TIE)
        n = tied[0] if len(tied) else 25
        compared += n
        assert alone.ids(0)[:n] == together.ids(i)[:n]
        assert alone.exits[0, :n].tolist() == together.exits[i, :n].tolist()
    assert compared >= 40


def test_stages_work_on_different_tokens_and_their_caches_are_exact(staged, prompts):
    """After every token: how far each stage is, and its keys and values."""
    p, config, engine = staged
    asked, steps, cap, length = prompts(5, [6, 11]), 14, engine.options.cap, 64
    oracle = Generator.make(p, config, "posthoc")
    tokens, lengths = engine._pad(asked)
    # Some steps decide alone: all leave by the first exit in 3 to 7, and nobody in 8.
    thresholds = np.random.default_rng(0).choice(
        np.float32([0.0, 0.2, 0.4, 1.0]), (steps, 2, config.n_exits)
    )
    thresholds[3:8], thresholds[8] = 0.0, 1.0
    policy, sampling = ExitPolicy.make(config, 2, 0.2), SamplingParams.make(2)
    request = RequestRows.make(config, lengths, [30, 30], policy, sampling)
    run = {}
    for g in (oracle, engine):
        state, _ = g._prefill(tokens, request, length)
        states = run[g.options.engine] = []
        for step in range(steps):
            changed = state.request.replace(policy=ExitPolicy.make(config, 2, thresholds[step]))
            state, record = g._decode(state.replace(request=changed), 1)
            first = jax.tree.map(lambda a: a[:1], record)  # the call wrote one token of each
            states.append(jax.tree.map(np.asarray, (state, first)))

    def by_layer(a, shards=1):  # the rows of a shard of the heads follow those of another
        heads = config.n_kv_heads
        a = a.reshape(shards, 2, heads // shards, -1, config.head_dim)
        return np.moveaxis(a, 0, 1).reshape(2, heads, -1, config.head_dim)

    deepest = 0
    part = engine.stages.partition
    slots = engine.stages.layout.parts["block"]
    shards = engine.stages.mesh.shape["model"]
    for (a, ra), (b, rb) in zip(run["posthoc"], run["pipelined"], strict=True):
        np.testing.assert_array_equal(ra.token, rb.token)
        np.testing.assert_array_equal(ra.exit, rb.exit)
        done = b.progress.done  # [stages, b]
        assert (np.diff(done, axis=0) <= 0).all() and (b.progress.come - done <= cap).all()
        np.testing.assert_array_equal(b.kept, done[-1])
        deepest = max(deepest, (b.position - done[-1]).max())
        want = [kv for segment in a.cache.segments for kv in segment]
        pairs = [
            (i, want[start + r], b.cache.layers[r])
            for i, (start, n) in enumerate(zip(part.starts, part.layers, strict=True))
            for r in range(n)
        ]
        pairs += [
            (place.stage, a.cache.blocks[place.exit], b.cache.blocks[slots[place.exit]])
            for place in part.places
            if place.exit in slots
        ]
        assert len(pairs) == config.n_layers + 1
        for stage, theirs, ours in pairs:
            for x, y in zip(theirs, ours, strict=True):
                x, y = by_layer(x), by_layer(y[stage], shards)
                for i, n in enumerate(done[stage]):
                    np.testing.assert_allclose(x[i, :, :n], y[i, :, :n], atol=2e-5)
    assert deepest == cap  # the next tokens do not wait for the old one's deeper layers


@pytest.mark.slow
def test_other_architectures_equal_posthoc(prompts):
    """What the trained model lacks: learned positions, biases, norms, and shared heads."""
    config = ModelConfig(
        vocab_size=257,
        vocab_multiple=2,
        n_layers=4,
        d_model=32,
        n_heads=4,
        context_length=80,
        norm="layernorm",
        position="learned",
        qk_norm="full",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        mlp_gated=False,
        activation="gelu",
        embedding_norm=True,
        head="shared",
        head_bias=True,
        logit_softcap=20.0,
        norm_placement="pre_post",
        exits=(
            ExitConfig(1, head="shared", block=True, mlp=True),
            ExitConfig(2, head="own", temperature=1.5),
            ExitConfig(3, head="shared", block=True),
        ),
    )
    p = params.init(config, jax.random.key(1))

    def noise(a):
        return a + 0.05 * jax.random.normal(jax.random.key(a.size), a.shape)

    p = jax.tree.map(noise, p)  # biases and scales of their own
    oracle = Generator.make(p, config, "posthoc")
    engine = pipelined(p, config, dict(pipe=2, model=2))
    asked = prompts(3, [4, 9])
    for threshold in (0.02, 0.1, [0.1, 0.0, 1.0]):
        compare(oracle, engine, asked, dict(threshold=threshold))


@pytest.mark.slow
def test_part_of_the_model_on_stages(trained, prompts):
    p, config = trained
    asked = prompts(2, [9, 5])
    oracle = Generator.make(p, config, EngineOptions("posthoc", num_segments=4))
    engine = pipelined(p, config, dict(pipe=3), num_segments=4)
    assert len(engine.weights.rows) == 1
    a, b = (g.generate(asked, 20, threshold=0.4) for g in (oracle, engine))
    assert_same(a, b)
    assert b.exits.max() == 3 and (b.layers <= 3).all()


@pytest.mark.slow
def test_bfloat16_equals_posthoc_but_for_near_ties(subset, prompts):
    """Both round to bf16 at the same places, but the products of a row are not made in one order;
    so results are compared up to the first token that bf16's 3 digits could tip."""
    p, config = subset((1, 2, 4))
    config = config.replace(dtype="bfloat16")
    oracle = Generator.make(p, config, "posthoc")
    engine = pipelined(p, config, dict(pipe=2, model=2), layers=[2, 3])
    compared = 0
    for seed in range(4):
        asked = prompts(seed, [8, 13])
        a, b = (g.generate(asked, 24, threshold=0.35) for g in (oracle, engine))
        for i in range(2):
            tied = np.flatnonzero(a.margins[i] < 2e-2)
            n = tied[0] if len(tied) else 24
            assert a.ids(i)[:n] == b.ids(i)[:n]
            assert a.exits[i, :n].tolist() == b.exits[i, :n].tolist()
            np.testing.assert_allclose(a.logprobs[i, :n], b.logprobs[i, :n], atol=5e-2)
            compared += n
    assert compared >= 40


def test_a_cap_of_one_is_exact_too_and_ends(subset, staged, prompts):
    asked = prompts(1, [8, 3])
    engine = pipelined(*subset((0, 1)), dict(pipe=5), cap=1)
    rules = dict(threshold=0.0, exits=[1], prefill_exit=True)
    r = engine.generate(asked, 25, **rules)
    assert (r.boundaries == 1).all() and (r.layers[:, 1:] == 1).all()
    p, config, _ = staged  # whose first two exits are these
    assert_same(Generator.make(p, config, "posthoc").generate(asked, 25, **rules), r)


@pytest.mark.parametrize(
    "mesh, kwargs, message",
    [
        ("x", {}, "mesh = 'x': must be a MeshConfig"),
        (dict(pipe=6), {}, r"mesh.pipe = 6: must be at most the 5 layers"),
        (dict(pipe=2, model=3), {}, r"mesh.model = 3"),
        (dict(pipe=4, model=8), {}, "needs 32 devices"),
        (dict(pipe=0), {}, "MeshConfig.pipe = 0"),
        (dict(pipe=2), dict(layers=[2, 2]), "pipeline.layers"),
        (dict(pipe=2), dict(num_segments=4), "num_segments = 4"),
        (dict(pipe=4), dict(num_segments=2), "mesh.pipe = 4: must be at most the 3 layers"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(subset, mesh, kwargs, message):
    p, config = subset((1, 3))
    with pytest.raises(ConfigError, match=message):
        pipelined(p, config, mesh, **kwargs)


def test_engines_of_one_device_and_of_stages_are_told_apart(subset):
    p, config = subset((1,))
    for make in (Generator.make, functools.partial(EarlyExitEngine.make, slots=1)):
        with pytest.raises(ConfigError, match="PipelinedGenerator"):
            make(p, config, "pipelined")
    with pytest.raises(ConfigError, match="engine = 'full'"):
        PipelinedGenerator.make(p, config, MeshConfig(pipe=2), EngineOptions("full"))
    with pytest.raises(ConfigError, match="options = 3: must be EngineOptions, or the name"):
        PipelinedGenerator.make(p, config, MeshConfig(pipe=2), 3)
    g = PipelinedGenerator.make(p, config, MeshConfig(data=2, pipe=2))
    with pytest.raises(ConfigError, match=r"prompts = 3: must be a multiple of mesh.data"):
        g.generate([[1, 2]] * 3, 4)


def test_nan_parameters_are_an_error_and_not_a_token(subset):
    p, config = subset((0, 1))
    broken = p | {"final": {"norm": {"scale": p["final"]["norm"]["scale"] * jnp.nan}}}
    engine = pipelined(broken, config, dict(pipe=5), cap=1)  # as another test's: compiled once
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.generate([[1, 2]] * REQUESTS, 25, threshold=1.0)
