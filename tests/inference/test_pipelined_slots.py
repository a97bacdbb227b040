"""Slots on the stages of a mesh: requests come and go while tokens of others are under way."""

from __future__ import annotations

import numpy as np
import pytest
from near_ties import TIE

from eejax.common.errors import ConfigError
from eejax.inference import EngineOptions, ExitPolicy, Generator, RequestRows, SamplingParams
from eejax.inference.pipelined_slots import PipelinedSlotEngine
from eejax.sharding.mesh import MeshConfig

CONTEXT = 32  # two widths of prompts
MESH = dict(pipe=2, data=2, model=2)  # one for most tests: its programs are compiled once


def engine_of(subset, mesh, cap=4, **kwargs):
    options = EngineOptions("pipelined", cap=cap, num_segments=kwargs.pop("num_segments", None))
    given = dict(slots=4, context=CONTEXT) | kwargs
    return PipelinedSlotEngine.make(*subset((1, 3)), MeshConfig(**mesh), options, **given)


def ask(engine, prompts, limit, threshold):
    policy = ExitPolicy.make(engine.config, len(prompts), threshold)
    sampling = SamplingParams.make(len(prompts))
    lengths = [len(p) for p in prompts]
    return RequestRows.make(engine.config, lengths, [limit] * len(prompts), policy, sampling)


def emitted(record, slot):
    """[(token, exit)] of a record [n, slots]."""
    pairs = zip(np.asarray(record.token)[:, slot], np.asarray(record.exit)[:, slot], strict=True)
    return [(int(token), int(exit)) for token, exit in pairs if exit >= 0]


@pytest.mark.slow
def test_other_requests_compile_nothing(subset, prompts, compiled):
    """It comes first: what another test had compiled would not be seen."""
    engine = engine_of(subset, MESH)

    def run(seed, slot, length, threshold):
        asked = prompts(seed, [length])
        rows, _ = engine.prefill(asked, ask(engine, asked, 9, threshold))
        state = engine.start()
        for _ in range(2):  # the state comes from `start`, then from `free`
            state, _ = engine.generate(engine.insert(state, rows, [slot]), 4)
            state = engine.free(state, [slot])

    run(0, 1, 5, 0.3)
    assert compiled
    compiled.clear()
    for i, length in enumerate((1, 17, 31)):
        run(i, i, length, 0.4 * i)
    assert not compiled


@pytest.mark.slow
@pytest.mark.parametrize("mesh, layers", [(MESH, "even"), (dict(pipe=3, data=2), [1, 3, 1])])
def test_a_slot_that_is_freed_in_the_middle_leaves_nothing_behind(subset, prompts, mesh, layers):
    """Three requests at once into slots of both data shards; one slot is taken over by another
    request while the stages behind still work on its old one's tokens."""
    engine = engine_of(subset, mesh, layers=layers)
    oracle = Generator.make(*subset((1, 3)), "posthoc")
    asked, threshold, slots = prompts(7, [6, 11, 9, 12]), [0.1, 0.2], (3, 0, 1)
    *together, another = asked
    rows, first = engine.prefill(together, ask(engine, together, 60, threshold))
    state = engine.insert(engine.start(), rows, slots)
    got = {slot: [(int(first.token[i]), int(first.exit[i]))] for i, slot in enumerate(slots)}

    state, record = engine.generate(state, 5)
    for slot in slots:
        new = emitted(record, slot)
        assert len(new) == 5
        got[slot] += new
    assert not emitted(record, 2)
    under_way = np.asarray(state.position - state.kept)
    assert (under_way[[3, 0]] > 0).any()  # something there is to leave behind

    last = got[3]
    state = engine.free(state, [3])
    for empty in (state.position, state.kept, state.progress.done[0], state.progress.come[-1]):
        assert not np.asarray(empty)[3]
    state, record = engine.generate(state, 5)
    assert not emitted(record, 3)
    got[0] += emitted(record, 0)
    got[1] += emitted(record, 1)

    rows, first = engine.prefill([another], ask(engine, [another], 60, threshold))
    state = engine.insert(state, rows, [3])
    got[3] = [(int(first.token[0]), int(first.exit[0]))]
    for _ in range(8):
        state, record = engine.generate(state, 5)
        for slot in slots:
            got[slot] += emitted(record, slot)
    assert not np.asarray(state.live).any()  # the context is full

    compared = 0
    for prompt, mine in zip(asked, (last, got[0], got[1], got[3]), strict=True):
        limit = CONTEXT - len(prompt)
        *_, want = oracle.stream([prompt], limit, threshold=threshold, chunk=CONTEXT)
        tied = np.flatnonzero(want.margins[0] < TIE)
        n = min(len(mine), tied[0] if len(tied) else len(mine))
        pairs = list(zip(want.tokens[0].tolist(), want.exits[0].tolist(), strict=True))
        assert mine[:n] == pairs[:n]
        compared += n
    lengths = [len(mine) for mine in (last, got[0], got[1], got[3])]
    assert lengths == [6, CONTEXT - 11, CONTEXT - 9, CONTEXT - 12]
    assert compared >= 30


def test_prompts_of_one_call_are_many_or_few(subset, prompts):
    """Three go through as four do; the fourth is nobody's."""
    engine = engine_of(subset, MESH)
    asked = prompts(5, [4, 20, 9])
    rows, first = engine.prefill(asked, ask(engine, asked, 6, 0.3))
    assert (np.asarray(first.exit)[:3] >= 0).all() and (np.asarray(first.exit)[3:] == -1).all()
    state, got = engine.insert(engine.start(), rows, [2, 0, 1]), [[], [], [], []]
    for _ in range(2):
        state, record = engine.generate(state, 4)
        got = [old + emitted(record, slot) for slot, old in enumerate(got)]
    assert not got[3]
    oracle = Generator.make(*subset((1, 3)), "posthoc")
    for i, slot in enumerate((2, 0, 1)):
        want = oracle.generate(asked[i : i + 1], 6, threshold=0.3)
        assert (want.margins > TIE).all()
        assert [int(first.token[i]), *(token for token, _ in got[slot])] == want.ids(0)


@pytest.mark.slow
def test_a_part_of_the_model(subset, prompts):
    engine = engine_of(subset, dict(pipe=2), num_segments=2)
    assert engine.num_segments == 2
    asked = prompts(3, [7])
    rows, first = engine.prefill(asked, ask(engine, asked, 12, [0.4, 1.0]))
    _, record = engine.generate(engine.insert(engine.start(), rows, [0]), 11)
    want = Generator.make(*subset((1, 3)), EngineOptions("posthoc", num_segments=2)).generate(
        asked, 12, threshold=[0.4, 1.0]
    )
    assert (want.margins > TIE).all()
    got = [(int(first.token[0]), int(first.exit[0])), *emitted(record, 0)]
    assert got == list(zip(want.tokens[0].tolist(), want.exits[0].tolist(), strict=True))


def test_what_cannot_be_is_named(subset):
    with pytest.raises(ConfigError, match="slots = 3: must be a multiple of mesh.data"):
        engine_of(subset, dict(pipe=2, data=2), slots=3)
    with pytest.raises(ConfigError, match="context = 161: must be in 2..160"):
        engine_of(subset, dict(pipe=2), context=161)
    engine = engine_of(subset, MESH)
    with pytest.raises(ConfigError, match=r"prompts\[0\] = '32 tokens'"):
        engine.prefill([[1] * CONTEXT], ask(engine, [[1] * CONTEXT], 4, 1.0))
    rows, _ = engine.prefill([[1, 2]], ask(engine, [[1, 2]], 4, 1.0))
    with pytest.raises(ConfigError, match=r"slots = \[0, 1\]: must be 1 different ones"):
        engine.insert(engine.start(), rows, [0, 1])
    with pytest.raises(ConfigError, match=r"slots = \[4\]: must be in 0..3"):
        engine.free(engine.start(), [4])
    with pytest.raises(ConfigError, match="n = 0: must be"):
        engine.generate(engine.start(), 0)
