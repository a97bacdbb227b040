"""Batches: every request gets the oracle's tokens and exits, whoever shares its batch."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from adding import add
from hypothesis import given, settings
from hypothesis import strategies as st
from near_ties import TIE

from eejax.common.errors import ConfigError
from eejax.inference import EngineOptions, Generator
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.policy import ExitPolicy, available_gates
from eejax.inference.sampling import SamplingParams
from eejax.inference.schedule import BatchPlan
from eejax.inference.scheduler import Scheduler
from eejax.inference.state import RequestRows
from eejax.models import attention
from eejax.sharding.mesh import MeshConfig

CONTEXT = 64
LONG = [32] * 33
# Of one row count, as each is compiled for every segment. Tests of these options, and of the only
# slot's, share what is compiled.
SMALL, SLOTS = EngineOptions(cap=4, drafts=2, chunk=7, buckets=(9,)), 3
# A run of so many rows, which are more than may wait, would not fit behind the context's last ones.
ALONE = EngineOptions(cap=4, drafts=3, chunk=7, buckets=(24,))


@pytest.fixture(scope="module")
def model(subset):
    """(params, config) with two exits, whose heads and the final one are each their own."""
    p, config = subset((1, 3))
    config = config.replace(
        head="own",
        exits=tuple(dataclasses.replace(e, head="own", block=False) for e in config.exits),
    )
    table = {"head": p["embed"]["tokens"]}
    exits = {e.name: table | p["exits"][e.name] for e in config.exits}
    return p | {"final": p["final"] | table, "exits": exits}, config


def oracle_of(p, config) -> Generator:
    # With such a cap all of its caches have one length.
    return Generator.make(p, config, EngineOptions("posthoc", cap=CONTEXT))


@dataclasses.dataclass
class Asked:
    """A request, and what it got: (token, exit, log-probability)."""

    prompt: list[int]
    limit: int
    policy: dict
    sampling: dict
    drafts: int
    stops: tuple[int, ...]
    got: list = dataclasses.field(default_factory=list)

    def request(self, config) -> RequestRows:
        return RequestRows.make(
            config,
            [len(self.prompt)],
            [self.limit],
            ExitPolicy.make(config, 1, drafts=self.drafts, **self.policy),
            SamplingParams.make(1, **self.sampling),
            self.stops,
        )

    @property
    def done(self) -> bool:
        most = min(self.limit, CONTEXT - len(self.prompt))
        return len(self.got) >= most or bool(self.got) and self.got[-1][0] in self.stops


def drive(engine, asked, steps, draw):
    """Runs requests through an engine's slots, in an order of events that `draw(n)` decides;
    returns the last state."""
    state, free, waiting, holder = engine.start(), list(range(engine.slots)), list(asked), {}
    while waiting or holder:
        for _ in range(draw(3)):
            if waiting and free:
                slot, one = free.pop(draw(len(free))), waiting.pop(0)
                # Who had been generating before brings along what it has.
                prompt = one.prompt + [t for t, *_ in one.got]
                rows, first = engine.prefill([prompt], one.request(engine.config))
                assert (np.asarray(first.exit) == -1).all()
                state, holder[slot] = engine.insert(state, rows, [slot]), one
        state, record = engine.generate(state, steps)
        for slot, one in list(holder.items()):
            columns = (np.asarray(a)[:, slot] for a in (record.token, record.exit, record.logprob))
            rows = zip(*columns, strict=True)
            one.got += [(int(t), int(e), float(p)) for t, e, p in rows if e >= 0]
            if one.done or draw(8) == 0:  # else: put back
                if not one.done:
                    waiting.insert(draw(len(waiting) + 1), one)
                state = engine.free(state, [slot])
                free.append(slot)
                del holder[slot]
        assert not holder or len({*holder} | {*free}) == engine.slots
    return state


def check(oracle, asked):
    """How many of the oracle's tokens were compared, and how many there are."""
    compared = all_of = 0
    for one in asked:
        # Beside a long one, so that all are padded to one length: each other is a program's own.
        want = oracle.generate(
            [one.prompt, LONG],
            one.limit,
            stop_token_ids=one.stops,
            **one.policy,
            **one.sampling,
        )
        length = min(int(want.lengths[0]), CONTEXT - len(one.prompt))
        tied = np.flatnonzero(want.margins[0] < TIE)
        n = min(int(tied[0]) if len(tied) else length, length)
        pairs = list(zip(want.tokens[0].tolist(), want.exits[0].tolist(), strict=True))[:n]
        assert [g[:2] for g in one.got][:n] == pairs
        np.testing.assert_allclose([g[2] for g in one.got][:n], want.logprobs[0, :n], atol=2e-4)
        if not len(tied):
            assert len(one.got) == length
        compared, all_of = compared + n, all_of + length
    return compared, all_of


def plan_of(draw, engine) -> BatchPlan:
    """Any fill, patience and costs: decisions change no text."""
    segments, buckets = engine.num_segments, engine.options.buckets

    def number(most):
        return [draw(most) for _ in range(segments)]

    def cost(*shape):
        return np.array([draw(9) + 1 for _ in range(int(np.prod(shape)))]).reshape(shape)

    seconds = cost(segments), cost(segments, len(buckets)), cost(segments)
    return BatchPlan.make(segments, engine.slots, buckets, number(6), number(6), seconds)


def drawn(draw, prompts, config, n, drafts) -> list[Asked]:
    asked, gates = [], available_gates(config)
    for prompt in prompts(draw(99), [1 + draw(40) for _ in range(n)]):
        levels = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)
        policy = dict(
            threshold=[levels[draw(len(levels))] for _ in range(config.n_exits)],
            gate=gates[draw(len(gates))],
            min_exit_layer=draw(3),
            prefill_exit=bool(draw(2)),
            decay=(None, 0.0, 4.0)[draw(3)],
        )
        sampling = dict(temperature=(0.0, 0.0, 0.8)[draw(3)], seed=draw(99))
        stops = ((), (32,), (101, 116))[draw(3)]
        asked.append(Asked(prompt, 1 + draw(24), policy, sampling, draw(drafts + 3), stops))
    return asked


def run_drawn(p, config, prompts, options, slots, seed):
    def draw(n):
        return int(rng.integers(n))

    rng = np.random.default_rng(seed)
    engine = EarlyExitEngine.make(p, config, options, slots=slots, context=CONTEXT)
    engine = dataclasses.replace(engine, plan=plan_of(draw, engine))
    asked = drawn(draw, prompts, config, 7, options.draft_rows)
    drive(engine, asked, 1 + draw(5), draw)
    compared, all_of = check(oracle_of(p, config), asked)
    assert compared >= all_of / 2


GEOMETRY = dict(
    layout=st.sets(st.integers(0, 5), min_size=1, max_size=3).map(sorted).map(tuple),
    cap=st.integers(1, 9),
    drafts=st.integers(0, 4),
    lookup=st.integers(0, 6),
    slots=st.integers(1, 5),
    chunk=st.sampled_from([1, 7, 40]),
    buckets=st.sampled_from([(), (9,), (3, 12)]),
    seed=st.integers(0, 2**31),
)


@settings(max_examples=3)
@given(seed=st.integers(0, 2**31))
def test_batched_equals_posthoc(model, prompts, seed):
    run_drawn(*model, prompts, SMALL, SLOTS, seed)


@settings(max_examples=3)
@given(seed=st.integers(0, 2**31))
def test_drafts_of_texts_change_none(model, prompts, seed):
    run_drawn(*model, prompts, dataclasses.replace(SMALL, lookup=3), SLOTS, seed)


@pytest.mark.parametrize(
    "drafts, seed, buckets",
    [
        (3, 0, ALONE.buckets),
        pytest.param(3, 0, (), marks=pytest.mark.slow),
        pytest.param(0, 1, (), marks=pytest.mark.slow),
    ],
)
def test_the_only_slot_equals_posthoc(model, prompts, drafts, seed, buckets):
    p, config = model
    rng = np.random.default_rng(seed)
    options = dataclasses.replace(ALONE, drafts=drafts, buckets=buckets)
    engine = EarlyExitEngine.make(p, config, options, slots=1, context=CONTEXT)
    segments, buckets = engine.num_segments, engine.options.buckets
    buckets_cheaper = np.ones(segments), np.full((segments, len(buckets)), 0.5), np.zeros(segments)
    for seconds in (None, buckets_cheaper):  # its single row runs in place all the same
        plan = BatchPlan.make(segments, 1, buckets, 2, drafts, seconds)
        asked = drawn(lambda n: int(rng.integers(n)), prompts, config, 5, drafts)
        run_to_the_end(dataclasses.replace(engine, plan=plan), asked, p, config)


def test_the_only_slot_up_to_the_end_of_its_context(model, prompts):
    p, config = model
    engine = EarlyExitEngine.make(p, config, ALONE, slots=1, context=CONTEXT)
    for threshold in (0.2, 0.4, 1.0):
        (prompt,) = prompts(int(10 * threshold), [CONTEXT - 30])
        asked = [Asked(prompt, 30, dict(threshold=threshold), {}, 2, ())]
        run_to_the_end(engine, asked, p, config)


def run_to_the_end(engine, asked, p, config) -> None:
    """Hold requests that are never put back to the oracle.

    A prompt's pass decides tokens too: a slot that stalls is seen where none begins anew.
    """
    calls = itertools.count()

    def never_put_back(n):
        assert next(calls) < 400
        return n - 1

    drive(engine, asked, 8, never_put_back)
    compared, all_of = check(oracle_of(p, config), asked)
    assert compared >= all_of / 2


@pytest.mark.slow
@settings(max_examples=16)
@given(**GEOMETRY)
def test_batched_equals_posthoc_widely(
    subset, prompts, layout, cap, drafts, lookup, slots, chunk, buckets, seed
):
    options = EngineOptions(
        cap=cap, drafts=drafts, lookup=min(lookup, cap - 1), chunk=chunk, buckets=buckets
    )
    run_drawn(*subset(layout), prompts, options, slots, seed)
    jax.clear_caches()


@pytest.mark.slow
def test_a_mesh_of_model_shards(subset, prompts):
    """Heads and matrices cut over two devices: everybody's own text, and decisions as on one."""
    p, config = subset((1, 2, 3))  # the second has an attention block of its own
    options = EngineOptions(cap=4, drafts=2, chunk=9, buckets=(4, 9))
    mesh = MeshConfig(model=2)
    engine = EarlyExitEngine.make(p, config, options, slots=3, context=CONTEXT, mesh=mesh)
    rng = np.random.default_rng(5)

    def draw(n):
        return int(rng.integers(n))

    engine = dataclasses.replace(engine, plan=plan_of(draw, engine))
    asked = drawn(draw, prompts, config, 4, 2)
    drive(engine, asked, 4, draw)
    compared, all_of = check(Generator.make(p, config, "posthoc"), asked)
    assert compared >= all_of / 2


@pytest.mark.parametrize(
    "change, field",
    [
        (dict(mesh=MeshConfig(data=2), slots=3), "slots"),
        (dict(mesh=MeshConfig(pipe=2)), "mesh.pipe"),
        (dict(slots=0), "slots"),
        (dict(context=1000), "context"),
        (dict(options=EngineOptions(num_segments=9)), "num_segments"),
        (dict(options=EngineOptions(cap=1000)), "cap"),
        (dict(options=EngineOptions(chunk=1000)), "chunk"),
        (dict(options="batched"), "engine"),
        (dict(options=4), "options"),
        (dict(options=EngineOptions(drafts=1000)), "drafts"),
        (dict(plan="x"), "plan"),
        (dict(plan=BatchPlan.make(1, 2, (8,)), options=EngineOptions(cap=8, buckets=(8,))), "plan"),
        (
            dict(plan=BatchPlan.make(3, 2, (8, 9)), options=EngineOptions(cap=8, buckets=(8,))),
            "plan",
        ),
    ],
)
def test_engines_that_cannot_be(subset, change, field):
    p, config = subset((1, 3))
    with pytest.raises(ConfigError, match=field):
        EarlyExitEngine.make(p, config, **dict(slots=2) | change)


@pytest.mark.parametrize(
    "change, field",
    [
        (dict(cap=0), "cap"),
        (dict(drafts=-1), "drafts"),
        (dict(chunk=1.5), "chunk"),
        (dict(buckets=8), "buckets"),
        (dict(buckets=(0, 32)), "buckets"),
    ],
)
def test_options_that_cannot_be(change, field):
    with pytest.raises(ConfigError, match=field):
        EngineOptions(**change)


@pytest.mark.slow
def test_drafts_without_exits_write_what_the_full_model_does(subset, prompts):
    """The first exit drafts and no exit decides: in full batches, before and after a time without
    drafts in the middle of a text."""
    p, config = subset((1, 3))
    options = EngineOptions(cap=5, drafts=3, buckets=(5, 12))
    engine = EarlyExitEngine.make(p, config, options, slots=3, context=CONTEXT)
    hold = BatchPlan.make(3, 3, engine.options.buckets, fill=4, patience=3)
    engine = dataclasses.replace(engine, plan=hold)
    texts = prompts(3, [6, 11, 17])
    policy = ExitPolicy.make(config, 3, drafts=3)
    lengths = [len(text) for text in texts]
    rows, _ = engine.prefill(
        texts, RequestRows.make(config, lengths, [40, 40, 40], policy, SamplingParams.make(3))
    )
    state, got = engine.insert(engine.start(), rows, [0, 1, 2]), [[], [], []]
    accepted = 0
    for call in range(80):
        policy = state.request.policy.replace(paused=np.full((3,), call % 4 in (1, 2)))
        state = state.replace(request=state.request.replace(policy=policy))
        state, record = engine.generate(state, 2)
        token, left = np.asarray(record.token), np.asarray(record.exit)
        accepted += int(np.asarray(record.accepted).sum())
        for i in range(3):
            got[i] += token[left[:, i] >= 0, i].tolist()
    assert not np.asarray(state.live).any() and accepted > 0
    want = Generator.make(p, config, "full").generate(texts, 40)
    for i in range(3):
        tied = np.flatnonzero(want.margins[i] < TIE)
        n = int(tied[0]) if len(tied) else 40
        assert n > 10 and got[i][:n] == want.tokens[i, :n].tolist()
        assert len(got[i]) == 40


@pytest.fixture
def new_traces():
    """Traces of layers made in a test alone: JAX keeps them, whatever a test replaces."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
def test_drafts_that_are_not_finite_and_not_right_change_nothing(
    subset, prompts, monkeypatch, new_traces
):
    """Keys and values of a rejected draft lie in its own request's cache, as those of the request
    before lie there: whatever they are, nobody reads them. Attention is that of programs for a GPU
    (`_at_once`), in an engine of options that no other test has compiled."""
    p, config = subset((1, 3))
    bad = 8  # a byte that no text has, which the first exit drafts all the time
    table = p["embed"]["tokens"]
    config = config.replace(
        head="own",
        exits=tuple(dataclasses.replace(e, head="own", block=False) for e in config.exits),
    )
    first = config.exits[0].name
    heads = {e.name: p["exits"][e.name] | {"head": table} for e in config.exits}
    clean = p | {
        "embed": dict(p["embed"], tokens=table.at[bad].set(np.nan)),
        "final": p["final"] | {"head": table.at[bad].set(0)},
        "exits": heads | {first: heads[first] | {"head": table.at[bad].set(40 * table[32])}},
    }
    options = EngineOptions(cap=8, drafts=3, chunk=16, buckets=(8,))
    engine = EarlyExitEngine.make(clean, config, options, slots=2, context=CONTEXT)
    hold = BatchPlan.make(3, 2, (8,), fill=3, patience=4)
    ways, by_span = [], attention._by_span

    def elsewhere(*args, packed, **kwargs):
        ways.append(by_span if packed.max_rows is None else attention._at_once)
        return ways[-1](*args, packed=packed, **kwargs)

    monkeypatch.setattr(attention, "_by_span", elsewhere)
    scheduler = Scheduler(dataclasses.replace(engine, plan=hold), steps=3)
    policy = ExitPolicy.make(config, 1, drafts=3)
    texts = prompts(4, [9, 14, 11])
    numbers = [add(scheduler, text, 20, policy=policy) for text in texts]
    outputs = scheduler.run()
    assert attention._at_once in ways
    oracle = Generator.make(clean, config, "posthoc")
    for number, text in zip(numbers, texts, strict=True):
        assert [o.finish for o in outputs if o.request_id == number and o.finish] == ["length"]
        got = [t.id for o in outputs if o.request_id == number for t in o.tokens]
        want = oracle.generate([text], 20)
        tied = np.flatnonzero(want.margins[0] < TIE)
        n = int(tied[0]) if len(tied) else 20
        assert n > 5 and got[:n] == want.tokens[0, :n].tolist()


@pytest.mark.slow
def test_part_of_a_model(subset, prompts):
    """Two segments of four are loaded: what no gate let go leaves by the exit on top of them."""
    p, config = subset((1, 2, 3))
    options = EngineOptions(cap=3, drafts=2, num_segments=2)
    engine = EarlyExitEngine.make(p, config, options, slots=2, context=CONTEXT)
    assert engine.num_segments == 2 and "final" not in engine.weights.params
    rng = np.random.default_rng(1)

    def draw(n):
        return int(rng.integers(n))

    engine = dataclasses.replace(engine, plan=plan_of(draw, engine))
    asked = drawn(draw, prompts, config, 4, 2)
    drive(engine, asked, 3, draw)
    oracle = Generator.make(p, config, EngineOptions("posthoc", num_segments=2))
    compared, all_of = check(oracle, asked)
    assert compared >= all_of / 2


@pytest.mark.slow
def test_a_half_precision_model(subset, prompts):
    """Everybody gets on to the end; rounding may decide otherwise than alone."""
    p, config = subset((1, 3))
    options = EngineOptions(cap=4, drafts=2, buckets=(4,))
    half = config.replace(dtype="bfloat16")
    engine = EarlyExitEngine.make(p, half, options, slots=2, context=CONTEXT)
    asked = [Asked(prompt, 12, dict(threshold=0.3), {}, 2, ()) for prompt in prompts(1, [9, 12])]
    state = drive(engine, asked, 3, lambda n: n - 1)
    assert [len(one.got) for one in asked] == [12, 12]
    assert state.cache.segments[0][0][0].dtype == state.waiting[0].dtype == "bfloat16"


def test_logits_that_are_not_finite_are_their_own_requests_alone(model, prompts):
    """A token whose embedding is no number: its request ends in an error, those beside it do not,
    and nor does the next one in its slot."""
    clean, config = model
    bad = 7
    own = dict(clean["embed"], tokens=clean["embed"]["tokens"].at[bad].set(np.nan))
    broken = clean | {"embed": own}
    engine = EarlyExitEngine.make(broken, config, SMALL, slots=SLOTS, context=CONTEXT)
    hold = BatchPlan.make(3, SLOTS, engine.options.buckets, fill=3, patience=2)
    scheduler = Scheduler(dataclasses.replace(engine, plan=hold), steps=2)
    policy = ExitPolicy.make(config, 1, 0.3, drafts=2)
    texts = prompts(2, [9, 30, 12, 5])
    texts[1] = [*texts[1][:25], bad]
    numbers = [add(scheduler, text, 15, policy=policy) for text in texts]
    outputs = scheduler.run()
    ends = {o.request_id: o.finish for o in outputs if o.finish}
    assert [ends[n] for n in numbers] == ["length", "error", "length", "length"]
    oracle = oracle_of(clean, config)
    for i in (0, 2, 3):
        got = [t.id for o in outputs if o.request_id == numbers[i] for t in o.tokens]
        want = oracle.generate([texts[i], LONG], 15, threshold=0.3)
        tied = np.flatnonzero(want.margins[0] < TIE)
        n = int(tied[0]) if len(tied) else 15
        assert got[:n] == want.tokens[0, :n].tolist() and len(got) == 15
