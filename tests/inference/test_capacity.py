"""Bytes said from shapes are those that engines hold."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from eejax.common.errors import ConfigError
from eejax.inference import capacity
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.options import EngineOptions
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig

CONTEXT = 24
SMALL = dict(vocab_size=50, vocab_multiple=8, n_layers=4, d_model=16, n_heads=4, context_length=64)
TIED = ModelConfig(
    **SMALL,
    n_kv_heads=2,
    head="tied",
    position="learned",
    norm="layernorm",
    qkv_bias=True,
    exits=(ExitConfig(1), ExitConfig(3, norm=False)),
)
OWN = ModelConfig(
    **SMALL,
    head="own",
    dtype="bfloat16",
    exits=(ExitConfig(0), ExitConfig(2, mlp=True, head="own"), ExitConfig(3, block=True)),
)
SHARED = ModelConfig(**SMALL, head="shared", exits=(ExitConfig(2, head="shared", router=3),))


def held(tree) -> int:
    return sum(a.nbytes for a in jax.tree.leaves(tree))


def engine(config, options, depth, slots):
    options = dataclasses.replace(options, num_segments=depth)
    p = jax.eval_shape(lambda: params.init(config, jax.random.key(0)))
    p = jax.tree.map(lambda a: jax.numpy.zeros(a.shape, a.dtype), p)
    return EarlyExitEngine.make(p, config, options, slots=slots, context=CONTEXT)


@pytest.mark.parametrize(
    "config, depth, options, another",
    [
        (TIED, 1, EngineOptions(cap=4, drafts=0, can_deepen=True), False),
        (
            TIED,
            3,
            EngineOptions(cap=4, drafts=2, logits_params=True, can_deepen=True),
            True,
        ),  # nothing to add
        (OWN, 1, EngineOptions(cap=9, buckets=(9, 12), chunk=8, can_deepen=True), True),
        (OWN, 4, EngineOptions(), False),
        (SHARED, 1, EngineOptions(), False),
    ],
)
def test_bytes_are_those_of_engines(config, depth, options, another):
    five = engine(config, options, depth, 5)
    weights, state = held(five.weights), held(five.start())
    assert capacity.weight_bytes(config, depth) == weights
    assert capacity.engine_bytes(config, options, depth, CONTEXT, 5) == weights + state
    if another:
        same = dataclasses.replace(options, buckets=five.options.buckets)
        six = held(engine(config, same, depth, 6).start())
        assert capacity.request_bytes(config, options, depth, CONTEXT) == six - state


@pytest.mark.parametrize("config", [TIED, OWN, SHARED])
def test_an_audit_needs_room_for_the_largest_of_what_it_brings(config):
    layers, d, f = 4 * 16 * 16, 16, config.d_ff
    whole = engine(config, EngineOptions(), config.n_exits + 1, 1).weights
    final, layer = held(whole.params["final"]), held(whole.segments[1][0])
    assert layer > layers + 2 * d * f and (final > 50 * d) == (config.head == "own")
    for depth in range(1, config.n_exits + 1):
        assert capacity.audit_bytes(config, depth) == max(final, layer)
    assert capacity.audit_bytes(config, config.n_exits + 1) == 0


def test_a_request_by_hand():
    """Keys and values of two layers, waiting rows of one boundary, states behind the last layer."""
    options = EngineOptions(cap=4, drafts=0, chunk=8, buckets=(4,), can_deepen=True)
    plain = TIED.replace(exits=(ExitConfig(1), ExitConfig(2)), n_kv_heads=4)
    length, d = CONTEXT + 8, 16
    more = capacity.request_bytes(plain, options, 2, CONTEXT) - capacity.request_bytes(
        plain, options, 1, CONTEXT
    )
    assert more == 4 * (2 * length * d + 4 * d) + 4  # and `filled`
    still = dataclasses.replace(options, can_deepen=False)
    without = capacity.request_bytes(plain, still, 2, CONTEXT)
    assert capacity.request_bytes(plain, options, 2, CONTEXT) == without + 4 * length * d


@pytest.mark.parametrize("options", [EngineOptions(), EngineOptions(cap=4, buckets=(4,))])
def test_slots_are_the_most_that_fit(options):
    def size(n):
        return capacity.engine_bytes(TIED, options, 2, CONTEXT, n)

    def count(budget, **kw):
        return capacity.slots(TIED, options, 2, CONTEXT, budget, **kw)

    for n in (1, 40):
        assert count(size(n)) == n and count(size(n) - 1) == n - 1
        assert count(size(n) + 0.5, max_slots=3) == min(n, 3)
    assert count(0) == count(-1e9) == 0 and count(float("inf"), max_slots=5) == 5
    assert count(capacity.weight_bytes(TIED, 2)) == 0


@pytest.mark.parametrize(
    "call, names",
    [
        (lambda: capacity.weight_bytes(TIED, 4), "depth = 4: must be in 1..3"),
        (lambda: capacity.weight_bytes(TIED, 0), "depth = 0"),
        (lambda: capacity.slots(TIED, EngineOptions(), 1, 65, 1e9), "context = 65"),
        (lambda: capacity.slots(TIED, EngineOptions(), 1, 24, float("inf")), "budget = inf"),
        (lambda: capacity.slots(TIED, EngineOptions(), 1, 24, float("nan"), 3), "budget = nan"),
        (lambda: capacity.slots(TIED, EngineOptions(), 1, 24, "40", 3), "budget = '40'"),
        (lambda: capacity.request_bytes(TIED, EngineOptions(cap=65), 1, 24), "cap = 65"),
        (lambda: capacity.engine_bytes(TIED, EngineOptions(), 1, 24, 0), "slots = 0"),
    ],
)
def test_what_cannot_be_is_named(call, names):
    with pytest.raises(ConfigError, match=names):
        call()
