"""Engines whose ops are run by their kernels, in Triton's interpreter."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from near_ties import TIE, assert_same

from eejax.inference import Generator
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.options import EngineOptions
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import SamplingParams
from eejax.inference.state import RequestRows
from eejax.kernels import call
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig

CONFIG = ModelConfig(
    vocab_size=61,
    n_layers=3,
    d_model=32,
    n_heads=2,
    context_length=64,
    norm="layernorm",
    logit_softcap=20.0,
    head="own",
    vocab_multiple=8,
    exits=(ExitConfig(1, router=8, head="own"), ExitConfig(2, router=8, mlp=True, head="own")),
)


@pytest.fixture(scope="module")
def model():
    key = jax.random.key(5)
    p = params.init(CONFIG, key)
    # Heads and routers that say something, so that exits fire and do not.
    return jax.tree.map_with_path(
        lambda path, a: a * 6.0 if "head" in jax.tree_util.keystr(path) else a, p
    )


@pytest.fixture
def by_kernels(interpreted):
    with call.implementation("interpreter"):
        yield


NEW = 4
# Few row counts, as each one's kernels are interpreted by programs of their own.
RECOMPUTE = EngineOptions("recompute", cap=2, buckets=(8,))
PROMPTS = [
    np.random.default_rng(i).integers(0, 61, n).tolist() for i, n in enumerate((3, 9, 5, 7, 6))
]
RULES = dict(
    gate=["max_probability", "margin", "entropy", "patience", "router"],
    threshold=[[0.3, 0.4], [0.1, 0.2], [0.2, 0.3], [0.4, 0.9], [0.5, 0.5]],
)


@pytest.fixture(scope="module")
def want(model):
    """What the oracle says, of logits that XLA makes."""
    with call.implementation("reference"):
        result = Generator.make(model, CONFIG, "posthoc").generate(PROMPTS, NEW, **RULES)
    assert {0, 1, 2} <= set(np.asarray(result.exits)[:, 1:].ravel().tolist())
    return result


@pytest.mark.slow  # test_one_who_samples has the same gates
@pytest.mark.parametrize("engine", ["recompute", "propagate"])
def test_tokens_and_exits_are_those_without_kernels(engine, model, want, by_kernels):
    if engine == "propagate":  # its own, as its keys and values are approximations
        with call.implementation("reference"):
            want = Generator.make(model, CONFIG, engine).generate(PROMPTS, NEW, **RULES)
    options = RECOMPUTE if engine == "recompute" else engine
    got = Generator.make(model, CONFIG, options).generate(PROMPTS, NEW, **RULES)
    assert assert_same(want, got) <= 1


@pytest.mark.slow
def test_batches_are_those_without_kernels(model, want, by_kernels):
    options = EngineOptions(cap=2, buckets=(8,), chunk=16, drafts=1)
    engine = EarlyExitEngine.make(model, CONFIG, options, slots=5, context=64)
    n = len(PROMPTS)
    policy = ExitPolicy.make(CONFIG, n, drafts=[0, 1, 1, 0, 1], **RULES)
    request = RequestRows.make(
        CONFIG, [len(p) for p in PROMPTS], [NEW] * n, policy, SamplingParams.make(n)
    )
    rows, _ = engine.prefill(PROMPTS, request)
    state, got = engine.insert(engine.start(), rows, range(n)), [[] for _ in PROMPTS]
    for _ in range(40):
        state, record = engine.generate(state, 1)
        for token, exit_ in zip(np.asarray(record.token), np.asarray(record.exit), strict=True):
            for i in range(n):
                if exit_[i] >= 0:
                    got[i].append((int(token[i]), int(exit_[i])))
    for i, one in enumerate(got):
        assert len(one) == NEW
        told = list(zip(want.tokens[i].tolist(), want.exits[i].tolist(), strict=True))
        near = next((j for j, m in enumerate(want.margins[i]) if m < TIE), NEW)
        assert one[:near] == told[:near]


def test_one_who_samples_gets_the_same_beside_those_who_do_not(model, by_kernels):
    sampled = dict(temperature=[0.0, 0.9, 0.0, 1.5, 0.0], seed=[1, 2, 3, 4, 5], **RULES)
    with call.implementation("reference"):
        want = Generator.make(model, CONFIG, "posthoc").generate(PROMPTS, NEW, **sampled)
    got = Generator.make(model, CONFIG, RECOMPUTE).generate(PROMPTS, NEW, **sampled)
    assert assert_same(want, got) <= 1
