"""Engines traced for a GPU and run on a CPU: other forms with the same tokens."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from adding import add
from near_ties import assert_same

from eejax.inference import EngineOptions, Generator
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.policy import ExitPolicy
from eejax.inference.scheduler import Scheduler
from eejax.kernels import call
from eejax.models import attention, exits, fusion, layers, params
from eejax.models.config import ExitConfig, ModelConfig

# A feed-forward width of no multiple of 64, and windows and fewer heads of keys in some layers.
CONFIG = ModelConfig(
    vocab_size=61,
    n_layers=3,
    d_model=32,
    n_heads=4,
    n_kv_heads=2,
    d_ff=40,
    context_length=64,
    sliding_window=(None, 6, None),
    head="own",
    exits=(ExitConfig(1, head="own"), ExitConfig(2, mlp=True, block=True, head="own")),
)
NEW = 8
PROMPTS = [np.random.default_rng(i).integers(0, 61, n).tolist() for i, n in enumerate((3, 9, 5))]
BUCKETS = (1, 16)  # one row, which is multiplied as two, and all that may wait
NEVER = dict(threshold=1.0)
RULES = dict(gate="max_probability", threshold=[0.3, 0.2])


@pytest.fixture(scope="module")
def model():
    p = params.init(CONFIG, jax.random.key(5))
    return jax.tree.map_with_path(
        lambda path, a: a * 6.0 if "head" in jax.tree_util.keystr(path) else a, p
    )


@pytest.fixture
def for_gpu(request, monkeypatch, want):
    """Forms for a GPU, with XLA's attention or that of the kernel, by its reference here."""
    traced, own = [], attention.kernel_attention
    monkeypatch.setattr(
        attention, "kernel_attention", lambda *a, **k: traced.append(1) or own(*a, **k)
    )
    monkeypatch.setattr(call, "by_kernels", lambda: request.param == "kernels")
    jax.clear_caches()  # programs are told apart by contexts, and not by what a test replaces
    with call.compute_capability(90), call.implementation("reference"):
        yield
    jax.clear_caches()
    assert bool(traced) == (request.param == "kernels")


def run(model, engine: str, prompts=PROMPTS, **rules):
    own = NEVER if engine in ("full", "speculative") else RULES | rules
    options = EngineOptions(engine, cap=4, buckets=BUCKETS[-1:])
    return Generator.make(model, CONFIG, options).generate(prompts, NEW, **own)


@pytest.fixture(scope="module")
def want(model):
    """What the oracle says where exits fire, and where none does: the full model's text."""
    return {name: run(model, "posthoc", **own) for name, own in (("posthoc", {}), ("full", NEVER))}


@pytest.fixture(scope="module")
def propagated(model):
    return run(model, "propagate")


FORMS = ("operations", "kernels")


def with_forms(*fast: tuple[str, str], engines: tuple[str, ...]):
    """Every engine by XLA's attention and by the kernel's, of which some are fast."""
    return pytest.mark.parametrize(
        "for_gpu, engine",
        [
            pytest.param(form, engine, marks=[] if (form, engine) in fast else pytest.mark.slow)
            for form in FORMS
            for engine in engines
        ],
        indirect=["for_gpu"],
    )


# Of recompute by the kernel's attention, the tests below have one row and slots.
@with_forms(
    ("kernels", "speculative"),
    ("operations", "recompute"),
    engines=("full", "recompute", "speculative"),
)
def test_tokens_are_those_of_a_cpu(engine, model, want, for_gpu):
    got = run(model, engine)
    if engine == "recompute":
        assert assert_same(want["posthoc"], got) <= 1
    else:
        np.testing.assert_array_equal(got.tokens, want["full"].tokens)


@pytest.mark.slow
@pytest.mark.parametrize("for_gpu", FORMS, indirect=True)
def test_tokens_of_propagate_are_those_of_a_cpu(model, propagated, for_gpu):
    np.testing.assert_array_equal(run(model, "propagate").tokens, propagated.tokens)


@with_forms(("kernels", "recompute"), engines=("full", "recompute"))
def test_one_row_is_multiplied_as_two(engine, model, want, for_gpu):
    got = run(model, engine, PROMPTS[:1])
    tokens = want["full" if engine == "full" else "posthoc"].tokens[:1]
    np.testing.assert_array_equal(got.tokens, tokens)


@pytest.mark.parametrize(
    "for_gpu", ["kernels", pytest.param("operations", marks=pytest.mark.slow)], indirect=True
)
def test_slots(model, want, for_gpu):
    short = EarlyExitEngine.make(model, CONFIG, slots=2, context=16)
    assert short.options.chunk == CONFIG.context_length  # of several requests, and at most 512
    engine = EarlyExitEngine.make(model, CONFIG, EngineOptions(cap=4, buckets=BUCKETS), slots=2)
    scheduler = Scheduler(engine)
    policy = ExitPolicy.make(CONFIG, 1, [RULES["threshold"]], gate=RULES["gate"])
    numbers = [add(scheduler, prompt, NEW, policy=policy) for prompt in PROMPTS]
    outputs = scheduler.run()
    got = [[t.id for o in outputs if o.request_id == n for t in o.tokens] for n in numbers]
    assert got == want["posthoc"].tokens.tolist()


def test_a_wider_mlp_says_the_same(model):
    p = jax.tree.map(lambda a: a[0], model["layers"])["mlp"]
    assert fusion.padded(p) is p
    with call.compute_capability(80):
        wide = fusion.padded(p)
        block = exits.fuse(model["exits"], CONFIG)[CONFIG.exits[1].name]["block"]
    assert block["mlp"]["down"].shape[0] == 64
    assert wide["down"].shape[0] == wide["gate"].shape[1] == 64
    x = jax.random.normal(jax.random.key(0), (2, 3, CONFIG.d_model))
    np.testing.assert_array_equal(layers.mlp(wide, x, CONFIG), layers.mlp(p, x, CONFIG))


@pytest.mark.parametrize(
    "capability, dtype, width, t, masked, softcap, wanted",
    [
        (80, "bfloat16", 128, 7, False, None, True),
        (90, "float16", 256, 8, True, None, True),
        (75, "bfloat16", 128, 8, False, None, False),
        (None, "bfloat16", 128, 8, False, None, False),
        (80, "bfloat16", 256, 8, False, None, False),
        (80, "float32", 128, 8, False, None, False),
        (80, "bfloat16", 128, 7, True, None, False),
        (80, "bfloat16", 128, 8, False, 30.0, False),
        (80, "bfloat16", 20, 8, False, None, False),
    ],
)
def test_the_library_attends_where_it_can(capability, dtype, width, t, masked, softcap, wanted):
    q = jax.ShapeDtypeStruct((1, t, 2, 2, width), dtype)
    config = CONFIG.replace(attention_softcap=softcap)
    with call.compute_capability(capability):
        assert attention.use_library(q, None, masked, config) == wanted
        assert not attention.use_library(q, np.ones((2, 2)), masked, config)
        with call.implementation("reference"):
            assert not attention.use_library(q, None, masked, config)


def test_the_kernel_attends_where_it_can(monkeypatch):
    monkeypatch.setattr(call, "by_kernels", lambda: True)
    assert attention.use_kernel(CONFIG)
    with pytest.warns(UserWarning, match="decode_attention: no kernel covers .* heads of 512"):
        assert not attention.use_kernel(CONFIG.replace(head_dim=512))


def test_spans_cover_every_row():
    packed = attention.spans(np.array([5, 0], np.int32), 100)
    assert packed.width == 64 and packed.first.tolist() == [0, 64, 100, 164]
    assert packed.slot.tolist() == [0] * 100 + [1] * 100
    assert packed.position.tolist() == [*range(5, 105), *range(100)]
