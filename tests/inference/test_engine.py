"""Slots: requests that join and leave at any time get what they would get alone."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from near_ties import TIE
from scripted import ScriptedEngine

from eejax.common.errors import ConfigError
from eejax.inference import EngineOptions, Generator
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.options import ENGINES, USED_BY
from eejax.inference.pipelined_slots import PipelinedSlotEngine
from eejax.inference.policy import ExitPolicy, available_gates
from eejax.inference.sampling import SamplingParams
from eejax.inference.scheduler import Scheduler
from eejax.inference.state import RequestRows
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh

CONTEXT = 48
MASK = {"propagate": "mask"}
# One row count, as each is compiled for every segment. Tests of these options and slots share what
# is compiled.
SMALL = EngineOptions("recompute", cap=4, buckets=(4,), drafts=3)
SLOTS = 4
TINY = ModelConfig(
    vocab_size=99,
    n_layers=4,
    d_model=8,
    n_heads=2,
    context_length=CONTEXT,
    exits=(ExitConfig(2),),
)


def request(config, prompt, limit, threshold=1.0, stops=(), temperature=0.0, **policy):
    return RequestRows.make(
        config,
        [len(prompt)],
        [limit],
        ExitPolicy.make(config, 1, threshold, **policy),
        SamplingParams.make(1, temperature),
        stops,
    )


def drive(engine, asked, steps, events):
    """Runs `asked` [(prompt, request)] through an engine's slots, each when a slot is free and its
    turn in `events` has come; what every request got: [[(token, exit)]]."""
    state, free = engine.start(), list(range(engine.slots))
    got, holder, waiting = [[] for _ in asked], {}, list(range(len(asked)))
    while waiting or holder:
        for _ in range(next(events)):
            if waiting and free:
                i, slot = waiting.pop(0), free.pop()
                rows, first = engine.prefill([asked[i][0]], asked[i][1])
                if first.exit[0] >= 0:  # of an engine that runs prompts when they come
                    got[i].append((int(first.token[0]), int(first.exit[0])))
                state, holder[slot] = engine.insert(state, rows, [slot]), i
        state, record = engine.generate(state, steps)
        for slot, i in list(holder.items()):
            tokens, exits = np.asarray(record.token)[:, slot], np.asarray(record.exit)[:, slot]
            got[i] += [(int(t), int(e)) for t, e in zip(tokens, exits, strict=True) if e >= 0]
            limit = min(int(asked[i][1].limit[0]), engine.context - len(asked[i][0]))
            stops = np.asarray(asked[i][1].stop_token_ids[0])
            if len(got[i]) >= limit or (got[i] and got[i][-1][0] in stops[stops >= 0]):
                state = engine.free(state, [slot])
                del holder[slot]
                free.append(slot)
    return got


def test_slots_compile_once(subset, prompts, compiled):
    """It comes first: what another test had compiled would not be seen."""
    p, config = subset((1, 3))
    slots = EarlyExitEngine.make(p, config, SMALL, slots=SLOTS, context=CONTEXT)

    def run(seed, lengths):
        return drive(
            slots,
            [(q, request(config, q, 6, 0.1 * seed)) for q in prompts(seed, lengths)],
            5,
            iter(lambda: 1, None),
        )

    run(0, [5, 9])
    jax.jit(lambda a: a + 1)(1)
    assert compiled  # the listener works
    compiled.clear()
    run(3, [1, 30, 17, 44, 9, 2, 33])
    assert not compiled


SIMPLE = [("full", {}), ("posthoc", {}), ("propagate", MASK)]  # of which others are made
SIMPLE += [("speculative", {}), ("propagate", {})]
# Of stages, test_pipelined_slots has requests that share slots.
SIMPLE += [("pipelined", {})]
SHARING = [(e, {}) for e in ENGINES if (e, {}) not in SIMPLE]
SHARING += [pytest.param(*case, marks=pytest.mark.slow) for case in SIMPLE]


@pytest.mark.parametrize("engine, more", SHARING)
@settings(max_examples=2)
@given(data=st.data())
def test_requests_that_share_slots_get_what_they_get_alone(subset, prompts, data, engine, more):
    p, config = subset((1, 3))
    own = SMALL.drafts if engine in USED_BY["drafts"] else None
    options = dataclasses.replace(SMALL, engine=engine, drafts=own, **more)
    if engine == "pipelined":
        slots = PipelinedSlotEngine.make(
            p, config, MeshConfig(pipe=2), options, slots=SLOTS, context=CONTEXT
        )
    else:
        slots = EarlyExitEngine.make(p, config, options, slots=SLOTS, context=CONTEXT)
    # The oracle's tokens, and it knows near-ties.
    exact = engine in ("recompute", "pipelined", "speculative")
    alone = Generator.make(p, slots.config, "posthoc" if exact else options)
    exits = slots.config.n_exits
    drafts = SMALL.drafts if engine == "speculative" else 0
    asked, wanted = [], []
    for prompt in prompts(
        data.draw(st.integers(0, 99)),
        data.draw(st.lists(st.integers(1, 16), min_size=6, max_size=6)),
    ):
        # The simplest example, which is always one of them, is long and leaves here and there.
        limit = 20 - data.draw(st.integers(0, 19))
        threshold = [data.draw(st.sampled_from([0.4, 0.2, 0.0, 1.0])) for _ in range(exits)]
        rules = dict(gate=data.draw(st.sampled_from(available_gates(slots.config))))
        rules |= dict(temperature=data.draw(st.sampled_from([0.0, 0.8])))
        if engine == "speculative":
            threshold = 1.0
        stops = data.draw(st.sampled_from([(), (32,), (101, 116)]))
        made = request(slots.config, prompt, limit, threshold, stops, drafts=drafts, **rules)
        asked.append((prompt, made))
        rules |= {} if engine == "full" else {"threshold": threshold}
        # In chunks of one size: each other one is a program of its own.
        *_, want = alone.stream([prompt], limit, stop_token_ids=stops, chunk=20, **rules)
        wanted.append(want)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    # Three steps at a time: each other number is a program of its own.
    got = drive(slots, asked, 3, iter(lambda: rng.integers(0, 3), None))
    compared, all_of = 0, 0
    for mine, want in zip(got, wanted, strict=True):
        tied = np.flatnonzero(want.margins[0] < TIE)
        n = int(tied[0]) if len(tied) else max(len(mine), int(want.lengths[0]))
        pairs = list(zip(want.tokens[0].tolist(), want.exits[0].tolist(), strict=True))
        assert mine[:n] == pairs[:n]
        compared, all_of = compared + min(n, len(pairs)), all_of + len(pairs)
    assert compared >= all_of / 2


def test_weights_of_a_checkpoint_are_compiled_for_once(compiled):
    """They are restored to a mesh of one device, and new states are not."""
    config, p = TINY, params.init(TINY, jax.random.key(0))
    p = jax.device_put(p, NamedSharding(make_mesh(MeshConfig()), P()))
    options = EngineOptions(cap=2, buckets=(2,), chunk=16)
    slots = EarlyExitEngine.make(p, config, options, slots=2, context=CONTEXT)
    asked = [5, 3, 9, 1, 8]
    rows, _ = slots.prefill([asked], request(config, asked, 20, 0.4))
    state, _ = slots.generate(slots.insert(slots.start(), rows, [0]), 1)
    assert compiled
    compiled.clear()
    for _ in range(2):
        state, _ = slots.generate(state, 1)
    assert not compiled


def test_numbers_of_prompts_and_slots_compile_few_programs(subset, prompts, compiled):
    """Three prompts are run as four are, and any number of slots is freed by one program."""
    p, config = subset((1, 3))
    slots = EarlyExitEngine.make(p, config, SMALL, slots=SLOTS, context=CONTEXT)

    def run(asked, where, freed):
        lengths, n = [len(q) for q in asked], len(asked)
        policy = ExitPolicy.make(config, n, 0.4)
        wanted = RequestRows.make(config, lengths, [6] * n, policy, SamplingParams.make(n))
        rows, _ = slots.prefill(asked, wanted)
        state, record = slots.generate(slots.insert(slots.start(), rows, where), 8)
        state = slots.free(state, freed)
        tokens, exits = np.asarray(record.token), np.asarray(record.exit)
        return [tokens[exits[:, i] >= 0, i].tolist() for i in range(slots.slots)]

    run(prompts(0, [5, 9, 20, 3]), [0, 1, 2, 3], [0])
    asked = prompts(1, [7, 16, 4])
    compiled.clear()
    got = run(asked, [3, 0, 2], [2, 3])
    assert not compiled
    oracle = Generator.make(p, config, "posthoc")
    for one, slot in zip(asked, (3, 0, 2), strict=True):
        *_, want = oracle.stream([one], 6, threshold=0.4, chunk=20)
        assert (want.margins > TIE).all()
        assert got[slot] == want.ids(0)
    assert got[1] == []


def test_nobody_reads_what_was_in_a_slot_that_is_free(subset, prompts):
    """Attention reads as far as the longest text of any slot goes."""
    p, config = subset((1, 3))
    slots = EarlyExitEngine.make(p, config, SMALL, slots=SLOTS, context=CONTEXT)
    asked = prompts(0, [40])
    rows, _ = slots.prefill(asked, request(config, asked[0], 9, 0.4))
    state, _ = slots.generate(slots.insert(slots.start(), rows, [1]), 5)
    assert int(state.position[1]) == 44 and int(state.cache.filled[1].max()) > 0
    state = slots.free(state, [1])
    assert not np.asarray(state.position).any() and not np.asarray(state.cache.filled).any()


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_part_of_the_model_is_a_model_whose_last_exit_always_emits(subset, prompts, depth):
    p, config = subset((1, 3))

    def options(depth):
        return EngineOptions("recompute", cap=4, buckets=(4,), num_segments=depth)

    asked = prompts(3, [7, 12])
    # The whole model, whose exit `depth` - 1 lets everybody go, emits the same.
    threshold = [0.4, 1.0][:depth]
    whole = [*threshold[:-1], 0.0] + [1.0] * (2 - depth)
    oracle = Generator.make(p, config, "posthoc")  # whose program others of one request share
    part = Generator.make(p, config, options(depth))
    # No parameters above are held.
    assert len(part.weights.segments) == depth and "final" not in part.weights.params
    for one in asked:
        want = oracle.generate([one], 20, threshold=whole, prefill_exit=True)
        thresholds = threshold + [1.0] * (2 - depth)
        got = part.generate([one], 20, threshold=thresholds, prefill_exit=True)
        assert (got.layers <= config.exit_boundaries[depth - 1]).all()
        assert got.ids(0) == want.ids(0)
        assert got.exits[0].tolist() == want.exits[0].tolist()
    with pytest.raises(ConfigError, match="num_segments = 4: must be at most the 3 segments"):
        Generator.make(p, config, options(4))


def test_a_scripted_engine_follows_the_protocol():
    config = TINY

    def script(prompt, i):
        return ((prompt[0] * 7 + i) % 90, (prompt[0] + i) % 2)

    engine = ScriptedEngine(script, config, slots=2, context=CONTEXT)
    asked = [([k, 3], request(config, [k, 3], k + 1, stops=(12,))) for k in range(6)]
    got = drive(engine, asked, 2, iter(lambda: 1, None))
    for k, mine in enumerate(got):
        want = [script((k, 3), i) for i in range(k + 1)]
        ends = [i for i, (token, _) in enumerate(want) if token == 12]
        assert mine == want[: ends[0] + 1 if ends else None]


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(slots=0), "slots = 0: must be an integer of at least 1"),
        (dict(slots=2, context=1), "context = 1: must be in 2..160"),
        (dict(slots=2, context=161), "context = 161"),
    ],
)
def test_slots_that_cannot_be_are_named(subset, values, message):
    with pytest.raises(ConfigError, match=message):
        EarlyExitEngine.make(*subset((1,)), "full", **values)


def test_what_does_not_fit_an_engine_is_named(subset):
    p, config = subset((1, 3))
    engine = EarlyExitEngine.make(p, config, SMALL, slots=2, context=CONTEXT)

    def ask(prompt):
        return engine.prefill([prompt], request(config, prompt, 4))

    with pytest.raises(ConfigError, match=r"prompts\[0\] = '0 tokens': must have at least 1"):
        ask([])
    with pytest.raises(ConfigError, match=r"prompts\[0\] = '48 tokens'.*\(48\)"):
        ask([1] * CONTEXT)
    for bad in ([1, 999], [1, -2], [1.5], [True]):
        with pytest.raises(ConfigError, match=r"prompts\[0\] = .*must be integers in 0..256"):
            ask(bad)
    with pytest.raises(ConfigError, match=r"request.start = \[3\]: must be .*\[2\]"):
        engine.prefill([[1, 2]], request(config, [1, 2, 3], 4))
    with pytest.raises(ConfigError, match="policy = 'thresholds of 0 exits'"):
        engine.prefill([[1, 2]], request(config.replace(exits=()), [1, 2], 4))
    two = dict(policy=ExitPolicy.make(config, 2), sampling=SamplingParams.make(2))
    for one in ("policy", "sampling"):
        alone = two | {one: type(two[one]).make(*([config, 1] if one == "policy" else [1]))}
        with pytest.raises(ConfigError, match=r"request = '\[1, 2\] rows': must have 2"):
            engine.prefill([[1], [2]], RequestRows.make(config, [1, 1], [4, 4], **alone))
    with pytest.raises(ConfigError, match="request.stop_token_ids = '16 a row': must be 8 a row"):
        wide = RequestRows.make(config, [1, 1], [4, 4], **two, stop_token_ids=range(9))
        engine.prefill([[1], [2]], wide)
    rows, _ = ask([1, 2])
    for slots in ([2], [0.5], [True], 0, "", np.array(1)):
        with pytest.raises(ConfigError, match="slots = .*must be (in 0..1|a sequence)"):
            engine.insert(engine.start(), rows, slots)
    with pytest.raises(ConfigError, match=r"slots = \[0, 1\]: must be 1 different ones"):
        engine.insert(engine.start(), rows, [0, 1])
    with pytest.raises(ConfigError, match="n = 0: must be"):
        engine.generate(engine.start(), 0)
    host = jax.device_get(p)  # as a checkpoint is read
    other = EarlyExitEngine.make(host, config, SMALL, slots=2, context=CONTEXT // 2)
    with pytest.raises(ConfigError, match="engine.context = 24: must be at least 48"):
        Scheduler(engine).replace_engine(other)
    with pytest.raises(ConfigError, match="logits_params = True: must be False with a Generator"):
        Generator.make(p, config, EngineOptions(logits_params=True))
    with pytest.raises(ConfigError, match="rows.context = 48: must be that of this engine, 24"):
        other.insert(other.start(), rows, [0])
    for limits in ([2.7], [-5], 3, [1, 2]):
        with pytest.raises(ConfigError, match="limits = .*must be (a sequence of|1, one)"):
            RequestRows.make(
                config, [2], limits, ExitPolicy.make(config, 1), SamplingParams.make(1)
            )


@pytest.mark.parametrize("name", ["recompute", pytest.param("speculative", marks=pytest.mark.slow)])
def test_a_limit_beyond_the_context_ends_at_the_context(subset, prompts, name):
    p, config = subset((1, 3))
    options = dataclasses.replace(SMALL, engine=name)
    engine = EarlyExitEngine.make(p, config, options, slots=SLOTS, context=CONTEXT)
    threshold = 0.4 if options.leaves_early else 1.0
    (asked,) = prompts(2, [5])
    drafts = options.max_drafts
    asked_row = request(engine.config, asked, 120, threshold, drafts=drafts)
    rows, _ = engine.prefill([asked], asked_row)
    state, got = engine.insert(engine.start(), rows, [0]), []
    while state.live.any():
        state, record = engine.generate(state, 5)
        got += np.asarray(record.token)[np.asarray(record.exit)[:, 0] >= 0, 0].tolist()
    oracle, room = Generator.make(p, engine.config, "posthoc"), CONTEXT - len(asked)
    *_, want = oracle.stream([asked], room, threshold=threshold, chunk=20)
    tied = np.flatnonzero(want.margins[0] < TIE)
    n = int(tied[0]) if len(tied) else room
    assert n >= room / 2 and got[:n] == want.ids(0)[:n]
    assert len(got) == room
