"""Slots are given and taken without losing, doubling or starving anybody."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from adding import add
from near_ties import TIE
from scripted import ScriptedEngine

from eejax.common.errors import ConfigError
from eejax.inference import Generator
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.options import EngineOptions
from eejax.inference.payoff import Payoff
from eejax.inference.policy import ExitPolicy
from eejax.inference.request import EngineRequest
from eejax.inference.sampling import SamplingParams
from eejax.inference.schedule import BatchPlan
from eejax.inference.scheduler import Scheduler
from eejax.inference.slot_engine import policy_for
from eejax.inference.state import RequestRows
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig

CONFIG = ModelConfig(
    vocab_size=1000, n_layers=4, d_model=8, n_heads=2, context_length=64, exits=(ExitConfig(2),)
)


def said(prompt, i):
    """The i-th token of a prompt, by which anybody's mix-up is seen."""
    return (sum(prompt) * 31 + len(prompt) * 7 + i * 13) % 1000, (prompt[0] + i) % 2


def wanted(prompt, limit, stops, context):
    tokens, most = [], min(limit, context - len(prompt))
    for i in range(most):
        tokens.append(said(tuple(prompt), i)[0])
        if tokens[-1] in stops:
            return tokens, "stop"
    return tokens, "length" if most == limit else "context"


def random_operations(engine, operations, rng, submit):
    """Joins, leaves, cancels and put-backs at random; (what was asked, what was told)."""
    scheduler = Scheduler(engine, steps=int(rng.integers(1, 5)))
    asked, told, ends, order = {}, {}, {}, []
    aborted, done = set(), 0
    while done < operations:
        done += 1
        what = rng.random()
        if what < 0.3:
            number, request = submit(scheduler, rng)
            assert number not in asked
            asked[number], told[number] = request, []
        elif what < 0.38 and asked:
            going = [n for n in asked if n not in ends]
            number = str(rng.choice(going if going and rng.random() < 0.5 else [*asked]))
            alive = number not in ends and not scheduler._jobs[number].finish
            assert scheduler.abort(number) == alive
            if alive:
                aborted.add(number)
        elif what < 0.5 and scheduler.running:
            scheduler.preempt(str(rng.choice(scheduler.running)))
        else:
            listen(scheduler.step(), told, ends, order)
        held = scheduler.running
        assert len(held) == len({*held}) <= engine.slots
        assert not {*held} & {*scheduler.waiting}
    for _ in range(10_000):
        if scheduler.idle:
            break
        listen(scheduler.step(), told, ends, order)
    assert scheduler.idle and not scheduler.running and not scheduler.waiting
    scheduler.step()  # frees what the last ones left
    return scheduler, asked, told, ends, aborted


def listen(outputs, told, ends, order):
    for number, tokens, finish in outputs:
        assert number not in ends, "told something after its end"
        told[number] += [t.id for t in tokens]
        if finish:
            ends[number] = finish
            order.append(number)


@pytest.mark.parametrize("operations", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_operations_lose_nobody(operations):
    engine = ScriptedEngine(said, CONFIG, slots=5, context=64)
    rng = np.random.default_rng(0)

    def submit(scheduler, rng):
        prompt = rng.integers(0, 1000, int(rng.integers(1, 60))).tolist()
        limit = int(rng.integers(1, 30))
        stops = tuple(int(t) for t in rng.integers(0, 1000, int(rng.integers(0, 8))))
        number = add(
            scheduler, prompt, limit, stop_token_ids=stops, priority=int(rng.integers(0, 3))
        )
        return number, (prompt, limit, stops)

    scheduler, asked, told, ends, aborted = random_operations(engine, operations, rng, submit)
    assert len(asked) > operations / 5 and len(aborted) > operations / 100
    assert {*ends} == {*asked}
    for number, (prompt, limit, stops) in asked.items():
        tokens, finish = wanted(prompt, limit, stops, 64)
        if ends[number] == "aborted":
            assert number in aborted
            assert told[number] == tokens[: len(told[number])]
        else:
            assert (told[number], ends[number]) == (tokens, finish)
    assert {n for n, e in ends.items() if e == "aborted"} == aborted
    assert all(row is None for row in scheduler.state)
    assert sorted(scheduler._free) == list(range(5))


def test_nobody_starves_and_priority_goes_first():
    engine = ScriptedEngine(said, CONFIG, slots=2, context=64)
    scheduler = Scheduler(engine, steps=2)
    usual = [add(scheduler, [1, i], 6) for i in range(6)]
    urgent = add(scheduler, [9, 9], 6, priority=1)
    assert scheduler.waiting == [urgent, *usual]
    ends, order = {}, []
    told = {n: [] for n in [*usual, urgent]}
    for _ in range(3):
        listen(scheduler.step(), told, ends, order)
        for number in scheduler.running:  # whoever runs is put back: everybody still gets on
            scheduler.preempt(number)
    while not scheduler.idle:
        listen(scheduler.step(), told, ends, order)
    assert {*ends} == {*usual, urgent}
    assert order.index(urgent) <= 1 and order[-1] == usual[-1]


def test_a_stream_of_later_requests_does_not_hold_an_earlier_one_up():
    engine = ScriptedEngine(said, CONFIG, slots=2, context=64)
    scheduler = Scheduler(engine, steps=1)
    first = add(scheduler, [5], 3)
    scheduler.step()
    scheduler.preempt(first)
    ended = {}
    for i in range(20):
        add(scheduler, [i + 1, i], 2)
        ended |= {o.request_id: i for o in scheduler.step() if o.finish}
    assert ended[first] < 10


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["batched", pytest.param("recompute", marks=pytest.mark.slow)])
def test_real_requests_that_come_and_go(subset, prompts, compiled, engine):
    """Random operations on the real engine: everybody's own text, memory that stays what it is, and
    nothing compiled after the first requests."""
    p, config = subset((1, 3))
    if engine == "batched":
        options = EngineOptions(cap=4, drafts=2, chunk=8, buckets=(9,))
        slots = EarlyExitEngine.make(p, config, options, slots=3, context=48)
    else:
        slots = EarlyExitEngine.make(p, config, engine, slots=3, context=48)
    oracle = Generator.make(p, config, "posthoc")
    rng = np.random.default_rng(3)
    texts = prompts(4, rng.integers(1, 30, 10).tolist())
    scheduler = Scheduler(slots, steps=3)
    told, ends, asked = {}, {}, {}

    def some(n, operations):
        for _ in range(n):
            i = int(rng.integers(len(texts)))
            threshold = float(rng.choice([0.1, 0.3, 1.0]))
            policy = ExitPolicy.make(config, 1, threshold, drafts=int(rng.integers(3)))
            number = add(scheduler, texts[i], 12, policy=policy)
            asked[number], told[number] = (i, threshold), []
        while not scheduler.idle:
            if operations and scheduler.running and rng.random() < 0.3:
                number = str(rng.choice(scheduler.running))
                if engine == "batched" and rng.random() < 0.7:
                    scheduler.preempt(number)
                else:
                    scheduler.abort(number)
            listen(scheduler.step(), told, ends, [])

    for n in (1, 2, 4):  # every number of prompts that is padded to another
        some(n, False)
    some(3, True)
    bytes_before = sum(a.nbytes for a in jax.live_arrays())
    compiled.clear()
    if engine == "batched":  # another plan is no other program
        plan = BatchPlan.make(3, 3, slots.options.buckets, fill=3, patience=1)
        scheduler.state = scheduler.state.replace(plan=plan)
    some(12, True)
    assert not compiled
    assert sum(a.nbytes for a in jax.live_arrays()) == bytes_before
    assert {*ends} == {*asked} and "aborted" in ends.values()
    compared = 0
    for number, (i, threshold) in asked.items():
        want = oracle.generate([texts[i]], 12, threshold=threshold)
        tied = np.flatnonzero(want.margins[0] < TIE)
        n = min(len(told[number]), int(tied[0]) if len(tied) else 12)
        assert told[number][:n] == want.tokens[0, :n].tolist()
        if ends[number] != "aborted" and not len(tied):
            assert len(told[number]) == 12
        compared += n
    assert compared > 60


@pytest.mark.parametrize("engine", ["full", "speculative"])
def test_layers_are_those_of_the_engines_own_exits(engine):
    """Neither emits from an early exit, and neither has both exits of the model."""
    config = CONFIG.replace(n_layers=3, exits=(ExitConfig(1), ExitConfig(2)))
    p = params.init(config, jax.random.key(0))
    drafts = 2 if engine == "speculative" else 0
    options = EngineOptions(engine, cap=4, drafts=drafts, chunk=8, buckets=(3,))
    scheduler = Scheduler(EarlyExitEngine.make(p, config, options, slots=2, context=48), steps=2)
    text = [*range(9)]
    add(scheduler, text, 6)
    add(scheduler, text, 6, policy=ExitPolicy.make(scheduler.engine.config, 1, 0.0, drafts=9))
    outputs = scheduler.step()
    limits = np.asarray(scheduler.state.request.policy.drafts).tolist()
    assert limits == [drafts, drafts]
    outputs += scheduler.run()
    tokens = [t for o in outputs for t in o.tokens]
    assert len(tokens) == 12 and {t.layers for t in tokens} == {config.n_layers}
    with pytest.raises(ConfigError, match="policy = 'thresholds of 2 exits'"):
        add(scheduler, text, 6, policy=ExitPolicy.make(config, 1))


def test_a_request_may_have_fewer_drafts_than_the_engine(subset):
    p, config = subset((1, 3))
    options = EngineOptions("speculative", cap=4, drafts=3, chunk=8, buckets=(4,))
    engine = EarlyExitEngine.make(p, config, options, slots=2, context=48)

    def policy_of(policy):
        scheduler = Scheduler(engine)
        scheduler.add_request(EngineRequest("a", [1, 2], 3, policy))
        policy = scheduler._jobs["a"].row.policy
        return policy.drafts.tolist(), policy.can_leave.tolist(), policy.thresholds.tolist()

    assert policy_of(None) == ([3], [True], [[1.0]])
    assert policy_of(ExitPolicy.make(engine.config, 1, 0.5, drafts=1)) == ([1], [True], [[1.0]])
    assert policy_of(ExitPolicy.make(engine.config, 1, 0.5)) == ([0], [False], [[1.0]])
    rows = RequestRows.make(
        engine.config,
        [2],
        [3],
        ExitPolicy.make(engine.config, 1, drafts=1),
        SamplingParams.make(1),
    )
    assert engine.prefill([[1, 2]], rows)[0].state.request.policy.drafts.tolist() == [1]
    # Drafts that an engine cannot make are no reason to measure what exits save.
    few = EarlyExitEngine.make(p, config, EngineOptions(cap=4, drafts=0), slots=2, context=48)
    policy = policy_for(ExitPolicy.make(config, 1, drafts=3), few)
    assert policy.drafts.tolist() == [0] and not policy.can_leave.any()


def timed(now, exits):
    """Engines whose calls take so many seconds of the clock `now` with exits, and one without."""

    class Timed(EarlyExitEngine):
        def generate(self, state, n):
            now[0] += 1.0 if bool(np.asarray(state.request.policy.paused)[0]) else exits
            return super().generate(state, n)

    return Timed


@pytest.mark.slow
def test_exits_are_turned_off_where_they_do_not_pay(subset, prompts):
    """With exits calls are told as slow: it goes on without, and tokens are the full model's."""
    p, config = subset((1, 3))
    now = [0.0]
    engine = timed(now, 6.0).make(p, config, EngineOptions(cap=4, drafts=0), slots=2, context=160)
    payoff = Payoff(pairs=2, calls=100)
    scheduler = Scheduler(engine, steps=4, payoff=payoff, clock=lambda: now[0])
    texts = prompts(1, [9, 12])
    for text in texts:
        add(scheduler, text, 140, policy=ExitPolicy.make(config, 1, 0.0))
    exits: list[int] = []
    while not scheduler.idle:
        exits += [t.exit for o in scheduler.step() for t in o.tokens]
    assert abs(payoff.ratio - 1 / 6) < 0.05  # of tokens: a call may bring one less
    assert set(exits[-40:]) == {config.n_exits} and 0 in exits


@pytest.mark.slow
def test_exits_are_measured_while_requests_come_and_go(subset, prompts):
    """Nobody joins between the calls of a pair; between pairs those do who have waited."""
    p, config = subset((1, 3))
    now = [0.0]
    options = EngineOptions(cap=4, drafts=0, buckets=(4,))
    engine = timed(now, 2.0).make(p, config, options, slots=3, context=48)
    payoff = Payoff(pairs=2, calls=100)
    scheduler = Scheduler(engine, steps=2, payoff=payoff, clock=lambda: now[0])
    policy = ExitPolicy.make(config, 1, 0.3)
    numbers = [add(scheduler, text, 9, policy=policy) for text in prompts(6, [5] * 40)]
    ends, step = [], 0
    while payoff.ratio is None:
        ends += [o for o in scheduler.step() if o.finish]
        step += 1
        if step % 5 == 0 and scheduler.running:  # in the middle of a pair too
            scheduler.preempt(scheduler.running[0])
    assert len(scheduler.waiting) > 5 and payoff.ratio < 1  # long before the queue is empty
    ends += [o for o in scheduler.run() if o.finish]
    assert sorted(o.request_id for o in ends) == numbers and scheduler.idle


@pytest.mark.parametrize("slots, limits", [(1, [16] * 30), (3, [8, 24, *[40] * 20])])
def test_exits_are_measured_where_a_request_joins_after_every_other_call(
    subset, prompts, slots, limits
):
    p, config = subset((1, 3))
    now = [0.0]
    options = EngineOptions(cap=4, drafts=0, chunk=16, buckets=(4,))
    engine = timed(now, 2.0).make(p, config, options, slots=slots, context=64)
    payoff = Payoff(pairs=1, calls=100)
    scheduler = Scheduler(engine, steps=8, payoff=payoff, clock=lambda: now[0])
    policy = ExitPolicy.make(config, 1, 0.999)
    for text, limit in zip(prompts(6, [5] * len(limits)), limits, strict=True):
        add(scheduler, text, limit, policy=policy)
    while payoff.ratio is None:
        assert not scheduler.idle
        scheduler.step()
    assert len(scheduler.waiting) > 5


def test_calls_in_which_nobody_can_leave_do_not_count_towards_the_next_measurement(subset, prompts):
    p, config = subset((1, 3))
    options = EngineOptions(cap=4, drafts=0, chunk=16, buckets=(4,))
    engine = EarlyExitEngine.make(p, config, options, slots=1, context=64)
    payoff = Payoff(pairs=1, calls=8)
    for _ in range(4):
        payoff.add(1.0, 1)
    scheduler = Scheduler(engine, steps=2, payoff=payoff, clock=lambda: 0.0)
    (text,) = prompts(6, [5])
    for threshold, measuring in ((1.0, False), (0.5, True)):
        add(scheduler, text, 30, policy=ExitPolicy.make(config, 1, threshold))
        scheduler.run()
        assert payoff.measuring == measuring


def test_what_cannot_be_scheduled():
    scheduler = Scheduler(ScriptedEngine(said, CONFIG, slots=2, context=16))
    for prompt, limit, more, field in [
        ([], 1, {}, "prompts"),
        ([1] * 16, 1, {}, "prompts"),
        ([1000], 1, {}, "prompts"),
        ([1], 0, {}, "max_tokens"),
        ([1], 1, dict(priority=0.5), "priority"),
        ([1], 1, dict(stop_token_ids=[1000]), "stop_token_ids"),
        ([1], 1, dict(stop_token_ids=[*range(9)]), "stop_token_ids"),
        ([1], 1, dict(stop_token_ids=[[1], [1, 2]]), "stop_token_ids"),
        ([1], 1, dict(policy=0.5), "policy"),
        ([1], 1, dict(sampling=0.5), "sampling"),
        ([1], 1, dict(policy=ExitPolicy.make(CONFIG, 2)), "policy"),
        ([1], 1, dict(policy=ExitPolicy.make(CONFIG.replace(exits=()), 1)), "policy"),
    ]:
        with pytest.raises(ConfigError, match=field):
            add(scheduler, prompt, limit, **more)
    assert scheduler.idle and not scheduler.abort("0") and not scheduler.preempt("3")
    with pytest.raises(ConfigError, match="payoff"):
        Scheduler(ScriptedEngine(said, CONFIG, slots=2, context=16), payoff=Payoff())

    @dataclasses.dataclass(frozen=True)
    class Forgetful(ScriptedEngine):
        resumes = False

    with pytest.raises(ConfigError, match="resumes"):
        Scheduler(Forgetful(said, CONFIG, slots=2, context=16)).preempt("0")


def test_a_request_goes_on_in_another_scheduler():
    """What it has is not told again, and counts."""

    def make():
        return Scheduler(ScriptedEngine(said, CONFIG, 2, 64), steps=2)

    prompt, limit = [5, 6, 7], 17
    first = make()
    number = add(first, prompt, limit)
    had = []
    while len(had) < 6:
        had += [t for o in first.step() if o.request_id == number for t in o.tokens]
    second = make()
    number = add(second, prompt, limit, tokens=had)
    outputs = second.run()
    rest = [t.id for o in outputs for t in o.tokens]
    assert [t.id for t in had] + rest == wanted(prompt, limit, (), 64)[0]
    assert outputs[-1].finish == "length" and len(rest) == limit - len(had)
    with pytest.raises(ConfigError, match=r"tokens = '17': must be fewer than 17"):
        add(make(), prompt, limit, tokens=[had[0]] * limit)
    engine = dataclasses.replace(ScriptedEngine(said, CONFIG, 2, 64))
    object.__setattr__(engine, "resumes", False)
    with pytest.raises(ConfigError, match="the engine cannot resume"):
        add(Scheduler(engine), prompt, limit, tokens=had)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(request_id=""), "request_id = '': must be a nonempty string"),
        (dict(request_id=3), "request_id = 3"),
        (dict(prompt="def"), "prompt = 'def': must be a sequence of token ids"),
        (dict(prompt=[1.5]), "prompt"),
        (dict(prompt=5), "prompt = 5"),
        (dict(stop_token_ids=5), "stop_token_ids = 5"),
        (dict(max_tokens=0), "max_tokens = 0: must be an integer of at least 1"),
    ],
)
def test_a_malformed_request_is_refused(change, match):
    with pytest.raises(ConfigError, match=match):
        EngineRequest(**(dict(request_id="a", prompt=[1], max_tokens=1) | change))


def test_a_request_holds_plain_numbers():
    made = EngineRequest("a", np.array([1, 2], np.uint8), 1, stop_token_ids=[np.int64(3)])
    assert made.prompt == (1, 2) and made.stop_token_ids == (3,)
    assert {*map(type, (*made.prompt, *made.stop_token_ids))} == {int}


def test_an_id_is_free_once_its_end_was_reported():
    scheduler = Scheduler(ScriptedEngine(said, CONFIG, slots=1, context=16))
    scheduler.add_request(EngineRequest("a", [1], 3))
    with pytest.raises(ConfigError, match="request_id = 'a': must not be the id of an unfinished"):
        scheduler.add_request(EngineRequest("a", [2], 3))
    assert scheduler.abort("a") and not scheduler.abort("a")
    with pytest.raises(ConfigError, match="request_id"):
        scheduler.add_request(EngineRequest("a", [2], 3))
    assert scheduler.step()[-1].finish == "aborted"
    scheduler.add_request(EngineRequest("a", [2], 3))
    outputs = scheduler.run()
    assert [t.id for o in outputs for t in o.tokens] == wanted([2], 3, (), 16)[0]
    assert [o.finish for o in outputs if o.finish] == ["length"]
