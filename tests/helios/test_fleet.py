"""Models that a controller puts into one another's place, under requests."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import warnings
import weakref

import jax
import numpy as np
import pytest
from adding import add
from controlled import set_state
from fleet_of_one import NEW, OPTIONS, evaluated, fleet_of, profile

from eejax import calibration
from eejax.checkpoint.model import load_run
from eejax.common.errors import ConfigError
from eejax.common.trees import nbytes
from eejax.helios import decisions, verifier
from eejax.helios.choices import ControllerOptions, ModelDepth, ModelProfile
from eejax.helios.controller import Controller
from eejax.helios.fleet import Fleet
from eejax.helios.objectives import ServiceObjective
from eejax.helios.pool import FleetMember
from eejax.helios.profiles import measure
from eejax.helios.repository import Repository
from eejax.inference import Generator, capacity
from eejax.inference.logits_params import LogitsParams
from eejax.inference.partial import PartialModel
from eejax.inference.sampling import SamplingParams


@pytest.fixture(scope="module")
def model(small_run):
    return load_run(small_run)


# Of the larger model: one at a time, or both.
@pytest.mark.slow
@pytest.mark.parametrize("room", [1.0, 10.0])
def test_nobody_is_lost_while_models_and_depths_change(model, room):
    """Two models of the same weights, so that a text goes on alike wherever it goes; all tokens
    leave by the first exit. One counts as slow at first, and then as fast."""
    config, params = model.config, model.params
    profiles = {"a": profile(model, 1.0), "b": profile(model, 2.0)}
    budget = room * profiles["a"].size(3)
    controller = Controller(
        profiles,
        ServiceObjective.of("throughput"),
        Repository(),
        ControllerOptions(prompts=2, interval=8, tokens=NEW, budget=budget),
        clock=lambda: 0.0,
    )
    rules = dict(threshold=0.0, prefill_exit=True)
    members = {name: FleetMember(params, config, rules, OPTIONS) for name in profiles}
    fleet = Fleet(members, controller, slots=3, context=96, steps=2)
    texts = [model.tokenizer.encode(f"def f{i}(" + "x" * i).tolist() for i in range(40)]
    want = Generator.make(params, config, "posthoc").generate(
        texts, NEW, threshold=0.0, prefill_exit=True
    )
    left, found, ends, served = [*enumerate(texts)], {}, {}, []
    for turn in range(3000):
        while left and len(found) - len(ends) < 6:
            i, text = left.pop(0)
            found[add(fleet, text, NEW)] = (i, [])
        if served.count(ModelDepth("a", 1)) == 5:
            controller.change_rules(profiles=profiles | {"b": profile(model, 0.2)})
        if turn == 12:
            dropped = max(found)
            assert fleet.abort(dropped)
        for number, tokens, finish in fleet.step():
            found[number][1].extend(t.id for t in tokens)
            if finish:
                assert number not in ends
                ends[number] = finish
        served.append(controller.current)
        assert len(fleet.parts) <= (1 if room == 1.0 else 2)
        assert sum(part.total_bytes for part in fleet.parts.values()) <= budget
        if not left and fleet.idle:
            break
    assert ends.pop(dropped) == "aborted"
    assert {*ends.values()} == {"length"} and len(ends) == len(texts) - 1
    for number in ends:
        i, text = found[number]
        tied = np.flatnonzero(want.margins[i] < 1e-3)
        n = int(tied[0]) if len(tied) else NEW
        assert len(text) == NEW and text[:n] == want.tokens[i, :n].tolist()
    depths = {(c.model, c.depth) for c in served if c is not None}
    assert {("a", 1), ("b", 1), ("a", 3), ("b", 3)} <= depths
    assert (fleet.dispatcher.moved > 0) == (room == 1.0)
    assert controller.state.below == 0 and controller.state.emitted > 0


@pytest.mark.parametrize("room, seed", [(1.0, 0), pytest.param(1.6, 1, marks=pytest.mark.slow)])
def test_whatever_is_wanted_nobody_is_lost_and_the_budget_holds(model, room, seed, monkeypatch):
    """Models and depths at random, with more slots where less is loaded: at no step, nor while an
    answer is looked at again, is there more on the device than may be, and every text is what one
    model by itself says."""
    config, rng, slots = model.config, np.random.default_rng(seed), (3, 2, 1)
    options = dataclasses.replace(OPTIONS, can_deepen=True).resolved(config, slots[0])
    sizes = [capacity.weight_bytes(config, d) for d in (1, 2, 3)]
    whole = [capacity.engine_bytes(config, options, d, 96, slots[d - 1]) for d in (1, 2, 3)]
    state = tuple(w - s for w, s in zip(whole, sizes, strict=True))
    own = dict.fromkeys(("seconds", "prefill", "load", "rebuild", "energy"), (1.0,) * 3)
    measured = ModelProfile(
        bytes=tuple(np.diff([0, *sizes]).tolist()),
        state=state,
        slots=slots,
        sure=(1.0,) * 3,
        unsure=(0.9,) * 3,
        **own,
    )
    beside = [capacity.audit_bytes(config, d) for d in (1, 2, 3)]
    budget = room * max(w + b for w, b in zip(whole, beside, strict=True))
    controller = Controller(
        {"a": measured, "b": measured},
        ServiceObjective.of("throughput"),
        Repository(),
        ControllerOptions(interval=10**6, budget=budget),
        clock=lambda: 0.0,
    )
    set_state(controller, plan=(), shares=dict.fromkeys("ab", (1.0, 0.0, 0.0)))
    member = FleetMember(model.params, config, dict(threshold=0.0, prefill_exit=True), OPTIONS)
    fleet = Fleet(
        {"a": member, "b": member}, controller, slots={"a": slots, "b": slots}, context=96, steps=2
    )
    audited, brings = [], verifier._brought

    def brought(tree):
        assert not audited or all(ref() is None for ref in audited[-1][1])  # what came before it
        found = brings(tree)
        held = sum(part.total_bytes for part in fleet.parts.values()) + nbytes(found)
        audited.append((held, [weakref.ref(a) for a in jax.tree.leaves(found)]))
        return found

    monkeypatch.setattr(verifier, "_brought", brought)
    texts = [model.tokenizer.encode(f"class C{i}(" + "y" * i).tolist() for i in range(16)]
    want = Generator.make(model.params, config, "posthoc").generate(
        texts, NEW, threshold=0.0, prefill_exit=True
    )
    numbers = {
        add(fleet, text, NEW, priority=int(rng.integers(3))): i for i, text in enumerate(texts)
    }
    dropped, found, ends = set(), {n: [] for n in numbers}, {}
    for turn in range(5000):
        if fleet.idle:
            break
        if turn % 7 == 3:
            choice = ModelDepth("ab"[rng.integers(2)], int(rng.integers(1, 4)))
            controller.apply(decisions.want, "switch", choice, "drawn")
        if turn % 40 == 20 and (left := sorted(numbers.keys() - ends.keys())):
            dropped.add(left[rng.integers(len(left))])
            fleet.abort(max(dropped))
        if turn % 5 == 1:  # whatever is there then, and on its way
            for job in [job for job in fleet._jobs.values() if job.model and job.tokens][:1]:
                fleet.pool.judge(job)
        for number, tokens, finish in fleet.step():
            found[number] += [t.id for t in tokens]
            if finish:
                assert ends.setdefault(number, finish) == finish
        held = sum(part.total_bytes for part in fleet.parts.values())
        assert held <= budget, (turn, fleet.changes[-3:])
    assert ends.keys() == numbers.keys()
    assert {n for n, finish in ends.items() if finish == "aborted"} <= dropped
    for number in ends.keys() - dropped:
        i, text = numbers[number], found[number]
        tied = np.flatnonzero(want.margins[i] < 1e-3)
        n = int(tied[0]) if len(tied) else NEW
        assert len(text) == NEW and text[:n] == want.tokens[i, :n].tolist()
    kinds = {change.kind for change in fleet.changes}
    assert {"load", "grow", "shrink", "free"} <= kinds
    assert audited and max(held for held, _ in audited) <= budget


def test_who_cancels_is_not_taken_along(model):
    """A model that has to go, with a request that was aborted and not yet told."""
    profiles = {name: profile(model, 1.0) for name in "ab"}
    controller = Controller(
        profiles,
        ServiceObjective.of("throughput"),
        Repository(),
        ControllerOptions(prompts=2),
        clock=lambda: 0.0,
    )
    members = {name: FleetMember(model.params, model.config, {}, OPTIONS) for name in profiles}
    fleet = Fleet(members, controller, slots=2, context=96, steps=2)
    first, second = (add(fleet, model.tokenizer.encode("import x").tolist(), NEW) for _ in "ab")
    while len(fleet.running) < 2:
        fleet.step()
    assert fleet.abort(first)
    fleet.dispatcher.free("a")
    assert fleet.waiting == [second] and fleet.dispatcher.moved == 1
    outputs = fleet.run()
    assert [o.finish for o in outputs if o.request_id == first] == ["aborted"]
    assert [o.finish for o in outputs if o.request_id == second and o.finish] == ["length"]
    for wrong in (1.5, True):
        with pytest.raises(ConfigError, match="priority = .*: must be an integer"):
            add(fleet, [1], 2, priority=wrong)


def test_tokens_below_their_threshold_are_told(model):
    """A model that is loaded up to an exit at which few tokens are sure grows."""
    config = model.config
    profiles = {"m": profile(model, 1.0)}
    controller = Controller(
        profiles,
        ServiceObjective.of("throughput"),
        Repository(),
        ControllerOptions(prompts=2, window=20, breaches=8, interval=1000),
        clock=lambda: 0.0,
    )
    rules = dict(threshold=0.999, prefill_exit=True)
    fleet = Fleet(
        {"m": FleetMember(model.params, config, rules, OPTIONS)}, controller, slots=2, context=96
    )
    for i in range(4):
        add(fleet, model.tokenizer.encode(f"class A{i}").tolist(), NEW)
    fleet.run()
    # As if most tokens had left by the first exit.
    set_state(controller, shares={"m": (0.9, 0.05, 0.05)})
    controller.apply(decisions.serve)
    for i in range(4):
        add(fleet, model.tokenizer.encode(f"import {i}").tolist(), NEW)
    fleet.run()
    kinds = [(d.kind, d.choice.depth) for d in controller.decisions]
    # All tokens that were counted were below it: one exit more would not do.
    assert kinds[-2:] == [("serve", 1), ("grow", 3)]
    assert 8 < controller.state.below < controller.state.emitted


def test_a_measured_profile(model):
    rng = np.random.default_rng(0)
    tokens = rng.integers(97, 120, (8, 33)).astype(np.int32)
    batches = [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}]
    member = FleetMember(model.params, model.config, dict(threshold=0.5), OPTIONS)
    ticks = itertools.count()
    texts = [tokens[i, : 8 + i].tolist() for i in range(4)]
    found = measure(
        member, texts, batches, slots=2, context=96, new=8, clock=lambda: next(ticks) / 8
    )
    n = model.config.n_exits + 1
    part = PartialModel(model.params, model.config, OPTIONS, slots=2, depth=n, context=96)

    def held():
        return part.weight_bytes + nbytes(part.scheduler.state)

    assert found.size(n) == held() and found.slots == (2,) * n
    part.shrink(1)
    assert found.size(1) == held()
    # By a clock that counts how often it is asked: two times for each of these.
    assert found.load[1:] == (1 / 8,) * (n - 1) and all(r > 0 for r in found.rebuild[1:])
    scores = calibration.score(model.params, model.config, batches)
    same = (scores.tokens == scores.tokens[-1]).mean(1)
    first = scores.confidences["max_probability"][0] >= 0.5
    assert found.agrees == pytest.approx(same)
    parts = first.mean() * found.sure[0] + (1 - first.mean()) * found.unsure[0]
    assert parts == pytest.approx(same[0]) and found.sure[-1] == found.unsure[-1] == 1.0
    told = found.serving((0.5, 0.25, 0.25), n)
    assert told.memory == found.size(n) and 0 < told.accuracy <= 1


def test_a_sampled_or_shaped_answer_is_not_audited(model):
    """What is drawn by chance, or shaped, is not what the whole model finds most likely."""
    controller = Controller(
        {"m": profile(model, 1.0)},
        ServiceObjective.of("throughput", accuracy=0.9),
        Repository(),
        ControllerOptions(prompts=2, interval=1000),
        clock=lambda: 0.0,
    )
    options = dataclasses.replace(OPTIONS, logits_params=True)
    member = FleetMember(model.params, model.config, {}, options)
    # By this clock an audit takes no time, of which audits have a share.
    fleet = Fleet({"m": member}, controller, slots=1, context=96, audits=1.0, clock=lambda: 0.0)
    for i in range(9):
        text = model.tokenizer.encode(f"def f{i}").tolist()
        add(fleet, text, NEW, sampling=SamplingParams.make(1, 1.5, seed=i))
    fleet.run()
    assert not fleet.dispatcher.audits and not controller.state.plan
    assert [d.kind for d in controller.decisions] == ["evaluate", "serve"]
    for asked in (dict(), dict(presence=0.5), dict(biases={5: 1.0}), dict(top_logprobs=3)):
        # Nothing of what only tells more is another text.
        logits_params = LogitsParams.make(model.config.vocab_size, **asked)
        plain = {*asked} <= {"top_logprobs"}
        for i in range(5 if plain else 3):
            text = model.tokenizer.encode(f"def f{i}").tolist()
            add(fleet, text, NEW, logits_params=logits_params if asked or i else None)
        fleet.run()
    (audit,) = fleet.dispatcher.audits.values()
    assert audit.count == 10 and audit.share == 0.0
    assert [d.kind for d in controller.decisions] == ["evaluate", "serve"]


def test_joules_are_counted_where_something_counts_them(model):
    """Two for every token that the fleet has told, whoever asked for it. A reading may fail, but
    not the server."""
    told, reads = [0], itertools.count()

    class Counter:
        name = "rapl"

        def read(self):
            if next(reads) == 3:
                raise OSError("not now")
            return 2.0 * told[0]

    member, history = FleetMember(model.params, model.config, {}, OPTIONS), {}
    for meter in (Counter(), None):
        controller = Controller(
            {"m": profile(model, 1.0)},
            ServiceObjective.of("energy"),
            Repository(),
            ControllerOptions(prompts=2),
            clock=lambda: 0.0,
        )
        fleet = Fleet({"m": member}, controller, slots=2, context=96, steps=1, meter=meter)
        for i in range(2):
            add(fleet, model.tokenizer.encode(f"def f{i}").tolist(), NEW)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            while not fleet.idle:
                told[0] += sum(len(output.tokens) for output in fleet.step())
        failed = [str(w.message) for w in warned if "counted later" in str(w.message)]
        assert failed == ["energy is counted later: not now"] * (meter is not None)
        (row,) = controller.repository.history("m")
        history[row.counted] = row.telemetry.energy
        assert fleet.report().counted == row.counted
    # Those of the step that ends an answer are counted behind it.
    assert history["rapl"] == pytest.approx(2.0, rel=2 / NEW)
    by_exit = np.cumsum(profile(model, 1.0).energy)
    assert by_exit[0] <= history["operations"] <= by_exit[-1]


def test_members_that_do_not_fit(model):
    controller = Controller(
        {"a": profile(model, 1.0)},
        ServiceObjective.of("throughput"),
        Repository(),
        clock=lambda: 0.0,
    )
    other = model.config.replace(vocab_size=300)
    members = {"a": FleetMember(model.params, model.config), "b": FleetMember(model.params, other)}
    with pytest.raises(ConfigError, match="must have vocabularies of one size"):
        Fleet(members, controller, slots=2)
    for wrong in (0, 2.5, {"a": (3, 3)}, {"a": (1, 2, 3)}, {}):
        with pytest.raises(ConfigError, match=r"slots.*: must be 3 whole numbers above 0"):
            Fleet({"a": members["a"]}, controller, slots=wrong)
    short = dataclasses.replace(members["a"], config=model.config.replace(context_length=40))
    two = Controller(
        {name: profile(model, 1.0) for name in "ab"},
        ServiceObjective.of("throughput"),
        Repository(),
        clock=lambda: 0.0,
    )
    assert Fleet({"a": members["a"], "b": short}, two, slots=2).context == 40
    with pytest.raises(ConfigError, match=r"members = \['x'\]: must be those of the controller"):
        Fleet({"x": members["a"]}, controller, slots=2)


def test_who_runs_while_a_model_shrinks_goes_on_before_who_comes(model):
    fleet, controller = fleet_of(model, prompts=2, interval=1000)
    evaluated(fleet, model)
    controller.apply(decisions.want, "grow", ModelDepth("m", 3), "for the test")
    while controller.current != controller.wanted:
        fleet.step()
    first = [add(fleet, model.tokenizer.encode(f"a{i}").tolist(), NEW) for i in range(3)]
    for _ in range(3):
        fleet.step()
    later = [add(fleet, model.tokenizer.encode(f"b{i}").tolist(), NEW) for i in range(6)]
    controller.apply(decisions.want, "serve", ModelDepth("m", 1), "for the test")
    gap, since, ends = 0, dict.fromkeys(first, 0), []
    while not fleet.idle:
        outputs = fleet.step()
        came = {output.request_id for output in outputs if output.tokens}
        ends += [output.request_id for output in outputs if output.finish]
        since = {n: 0 if n in came else k + 1 for n, k in since.items() if n not in ends}
        gap = max(gap, *since.values(), 0)
    assert sorted(ends[:3]) == first and sorted(ends) == first + later
    assert gap <= 4  # a call under way, and the text that is read anew
    (change,) = [c for c in fleet.changes if c.kind == "shrink" and c.tokens]
    assert change.tokens > 3 * 2 and change.choice == ModelDepth("m", 1)


def test_nobody_waits_for_a_model_while_another_one_serves(model):
    """At light load too, when there is nothing else to do but to wait."""
    fleet, controller = fleet_of(model, "ab", prompts=2, interval=1000, budget=1e9)
    evaluated(fleet, model)
    serves = controller.current.model
    (other,) = {"a", "b"} - {serves}
    fleet.dispatcher.free(other)
    made, hold = fleet.pool.make, threading.Event()
    fleet.pool.make = lambda choice: (hold.wait(60), made(choice))[1]
    controller.apply(decisions.want, "evaluate", ModelDepth(other, 3), "for the test")
    number = add(fleet, model.tokenizer.encode("import x").tolist(), NEW)
    outputs = fleet.run()
    assert not hold.is_set() and other not in fleet.parts
    assert [o.finish for o in outputs if o.request_id == number and o.finish] == ["length"]
    hold.set()
    while other not in fleet.parts:
        fleet.step()
    assert controller.current == ModelDepth(other, 3)


def test_a_request_with_an_objective_of_its_own_shows_nothing_of_the_models(model):
    """One that no exit may leave would say of an evaluation that all tokens need all layers."""
    fleet, controller = fleet_of(model, prompts=2, rules=dict(threshold=0.0, prefill_exit=True))
    for i in range(4):
        add(fleet, model.tokenizer.encode(f"x{i}").tolist(), NEW, objective="accuracy")
    outputs = fleet.run()
    assert {t.exit for o in outputs for t in o.tokens} == {2}
    assert controller.state.plan and not controller.state.shares
    evaluated(fleet, model)
    assert controller.state.shares["m"] == (1.0, 0.0, 0.0)
    assert controller.wanted == ModelDepth("m", 1)


def test_a_model_whose_answers_are_no_numbers_is_left_alone(model):
    fleet, controller = fleet_of(model, "ab", prompts=2, interval=8)
    broken = jax.tree.map(lambda a: np.full_like(a, np.nan), jax.device_get(model.params))
    fleet.pool.members["a"] = dataclasses.replace(fleet.pool.members["a"], params=broken)
    ends, made = [], fleet.pool.make
    fleet.pool.make = lambda choice: (time.sleep(2.0), made(choice))[1]  # as if it were large
    with pytest.warns(UserWarning, match="'a' is no longer served: its answers end in errors"):
        for i in range(30):
            add(fleet, model.tokenizer.encode(f"y{i}").tolist(), NEW)
        ends += [o.finish for o in fleet.run() if o.finish]
    # Beside the two that are looked at, who came with them, and calls under way.
    assert 2 <= ends.count("error") < 10 and "length" not in ends[: ends.count("error")]
    assert {*ends} == {"error", "length"} and len(ends) == 30
    assert controller.current.model == "b" and controller.state.failing == {"a"}


@pytest.mark.parametrize("lost", "ab")  # the first one that is evaluated, and the second
def test_a_model_that_cannot_be_loaded_is_left_alone(model, lost):
    """As where there is less room on the device than was thought."""
    fleet, controller = fleet_of(model, "ab", prompts=2, interval=8)
    made = fleet.pool.make

    def fails(choice):
        if choice.model in (lost, "m"):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return made(choice)

    fleet.pool.make = fails
    with pytest.warns(UserWarning, match=f"'{lost}' is no longer served: it cannot be loaded"):
        for i in range(20):
            add(fleet, model.tokenizer.encode(f"w{i}").tolist(), NEW)
        ends = [o.finish for o in fleet.run() if o.finish]
    assert ends == ["length"] * 20 and controller.state.failing == {lost}
    assert {change.choice.model for change in fleet.changes} == {"a", "b"} - {lost}
    fleet, _ = fleet_of(model)
    fleet.pool.make = fails
    add(fleet, [1, 2], NEW)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):  # there is no other
        fleet.run()


def test_shaping_that_no_member_takes_is_told_at_once(model):
    fleet, _ = fleet_of(model)
    with pytest.raises(ConfigError, match="logits_params = .*: must be None: m takes none"):
        add(fleet, [1], 2, logits_params=LogitsParams.make(257, top_logprobs=1))
    assert fleet.idle


def test_stop_tokens_that_no_slot_takes_are_told_at_once(model):
    fleet, _ = fleet_of(model)
    with pytest.raises(ConfigError, match="stop_token_ids = .*: must be at most 8 of them"):
        add(fleet, [1, 2], NEW, stop_token_ids=tuple(range(9)))
    assert fleet.idle
