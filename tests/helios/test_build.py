"""How a fleet is built: what goes together, how many requests have room, what is compiled."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
import types

import jax
import numpy as np
import pytest
from adding import add
from tiny_fleets import FLEET, TinyFleet, weights

from eejax.common.errors import ConfigError, DataError
from eejax.common.progress import LOG
from eejax.data.tokenizers import ByteTokenizer
from eejax.helios import build, measurements, profiles
from eejax.helios.choices import ControllerOptions
from eejax.helios.loading import ModelLoad
from eejax.helios.objectives import ServiceObjective
from eejax.inference import capacity
from eejax.inference.partial import PartialModel
from eejax.models.config import ExitConfig, ModelConfig


def test_nothing_is_compiled_once_it_is_ready(compiled, caplog, monkeypatch):
    """Models have fewer slots the more of them is loaded, and loading takes a while. What is asked
    for changes with every choice: the exits save time, and the last one is the most accurate."""
    monkeypatch.setattr(build, "room", lambda *args: (4, 2))
    ticks = itertools.count()

    def clock():  # what is chosen depends on no other work of this machine
        return next(ticks) / 1000

    def measure(*args, **kwargs):
        found = profiles.measure(*args, **kwargs, clock=clock)
        times = dict.fromkeys(("seconds", "prefill", "load", "rebuild"), (0.002, 0.002))
        return dataclasses.replace(found, **times)

    monkeypatch.setattr(measurements, "measure", measure)
    monkeypatch.setattr(build, "Fleet", functools.partial(build.Fleet, clock=clock))
    monkeypatch.setattr(build, "time", types.SimpleNamespace(time=clock))
    passes = [f"{what} depth {d} of 2" for what in ("compiling", "measuring") for d in (1, 2)]
    with caplog.at_level("INFO", LOG):
        made = TinyFleet(alike=True)().fleet(4)
    told = [record.getMessage() for record in caplog.records if record.name == LOG]
    numbered = [f"{name}, model {i} of 2" for i, name in enumerate(FLEET, 1)]
    assert [re.sub(r"(perplexity) [0-9.]+", r"\1", text) for text in told] == [
        "small: writing texts to measure models on",
        *itertools.chain.from_iterable(
            [f"{at}: measuring it at 2 depths, as it was not measured before", *passes]
            for at in numbered
        ),
        *(f"{name}: quality 1.000 (best), perplexity" for name in FLEET),
        *(
            f"{at}: compiling part {part}"
            for at in numbered
            for part in ("1 of 3, depth 1", "2 of 3, depth 1, and on to 2", "3 of 3, depth 2")
        ),
    ]

    def ask(i):
        return (add(made, [65 + i % 9] * (1 + i % 12), 1 + i % 19), 1 + i % 19)

    def late(part):
        part.looks = getattr(part, "looks", 0) + 1 if part.target_segments > part.depth else 0
        return part.looks > 4

    monkeypatch.setattr(PartialModel, "growth_ready", property(late))
    monkeypatch.setattr(ModelLoad, "done", lambda load: load.result() is not None)  # waits
    before, wanted = len(compiled), dict(map(ask, range(66)))
    found: collections.Counter = collections.Counter()
    objectives = itertools.cycle(map(ServiceObjective.of, ("accuracy", "throughput")))
    decisions, known = made.controller.decisions, len(made.controller.decisions)
    while not made.idle:
        for number, tokens, _ in made.step():
            found[number] += len(tokens)
        if any(d.kind in ("serve", "switch") for d in decisions[known:]):
            made.controller.change_rules(objective=next(objectives))
        known = len(decisions)
    assert found == wanted
    served = [d.choice for d in decisions if d.kind in ("serve", "switch")]
    assert {choice.depth for choice in served} == {1, 2}
    assert {d.choice.model for d in decisions} == {*FLEET}
    assert {"load", "narrow", "grow"} <= {change.kind for change in made.changes}
    assert len(compiled) == before


@pytest.mark.slow
def test_nothing_is_compiled_while_more_of_a_model_is_on_its_way(compiled):
    """Requests end and join, still more is asked for, and it is called off."""
    config = FLEET["large"].replace(exits=(ExitConfig(1), ExitConfig(2)))
    own = dataclasses.replace(
        TinyFleet().members()["large"], params=weights(config, 0), config=config
    )
    making = dict(slots=(4, 2, 1), context=32, steps=2)
    build.warm_up(own, **making)
    part = PartialModel(own.params, config, own.options, depth=1, **making)
    before, ends = len(compiled), 0

    def serves(*limits: int, steps: int = 12) -> int:
        """How many ended; nothing comes meanwhile."""
        for limit in limits:
            add(part.scheduler, [65] * 3, limit)
        return sum(bool(o.finish) for _ in range(steps) for o in part.scheduler.step())

    serves(12, 24, 24, 24, steps=2)
    for depth in (2, 3):
        part.grow(depth)
        ends += serves(2, 3)
        assert part.engine.slots == part.slots[depth - 1] and part.depth == 1 < ends
    part.cancel_growth()
    assert part.target_segments == 1 and part.engine.slots == 4
    ends += serves(2, 3, 9, 9, steps=3)
    for depth in (3, 2, 3):
        if depth < part.target_segments:
            part.cancel_growth()
        part.grow(depth)
        ends += serves(2, 20, steps=4)
    part.adopt_growth()
    ends += sum(bool(o.finish) for o in part.run())
    assert ends == 4 + 2 * 2 + 4 + 3 * 2 and len(compiled) == before


def test_slots_by_what_a_budget_holds():
    member = TinyFleet().members()["large"]
    context = member.config.context_length

    def room(budget):
        return build.room(member, 64, context, budget)

    assert room(float("inf")) == (64, 64)
    whole = capacity.engine_bytes(
        member.config, dataclasses.replace(member.options, can_deepen=True), 2, context, 4
    )
    few = room(whole)
    assert few[0] > few[1] == 4
    # At any depth there is room for an audit, too.
    three = ModelConfig(
        vocab_size=64,
        n_layers=6,
        d_model=16,
        n_heads=4,
        n_kv_heads=1,
        context_length=64,
        head="own",
        exits=(ExitConfig(2), ExitConfig(5)),
    )
    for config, budget in ((member.config, whole), (three, 2e5), (three, 1e5)):
        own = dataclasses.replace(member, config=config)
        slots = build.room(own, 64, 32, budget)
        options = dataclasses.replace(own.options, can_deepen=True).resolved(config, slots[0])
        for depth, n in enumerate(slots, 1):
            held = capacity.engine_bytes(config, options, depth, 32, n)
            assert held + capacity.audit_bytes(config, depth) <= budget
        assert capacity.audit_bytes(config, 1) > capacity.audit_bytes(config, len(slots)) == 0
    assert build.room(own, 64, 32, build.min_bytes(own, 32))[-1] == 1
    with pytest.raises(ConfigError, match="bytes at least"):
        build.room(own, 64, 32, build.min_bytes(own, 32) - 1)
    with pytest.raises(
        ConfigError, match="budget = 1000: must be .* which the whole of model"
    ) as e:
        room(1000.0)
    least = int(re.search(r"must be (\S+) bytes", str(e.value))[1])
    assert room(least)[-1] == 1


def test_a_budget_too_small_is_told_what_all_models_need():
    members = {name: m for name, m in reversed(TinyFleet().members().items())}
    needs = {name: build.min_bytes(m, 32) for name, m in members.items()}
    config = build.FleetConfig(options=ControllerOptions(budget=1000))
    with pytest.raises(ConfigError, match="budget = 1000: must be .* bytes at least") as error:
        build.build_fleet(members, ByteTokenizer(), config, slots=2, context=32)
    least = int(re.search(r"must be (\d+) bytes", str(error.value))[1])
    # Audits bring layers of the best model, which may be more than a model's own missing ones.
    assert least >= max(needs.values())
    for member in members.values():
        assert build.room(member, 2, 32, least)[-1] >= 1
    largest = max(needs, key=needs.get)
    with pytest.raises(ConfigError, match="bytes at least"):
        build.room(members[largest], 2, 32, needs[largest] - 1)


@pytest.mark.parametrize("counts", [False, True])
def test_what_stands_for_energy_is_told(monkeypatch, caplog, counts):
    """Before anything is measured."""
    monkeypatch.setattr(build, "meter", lambda: object() if counts else None)
    options = ControllerOptions(budget=1000)  # too small, which is told next

    def built(objective, **limits):
        caplog.clear()
        config = build.FleetConfig(objective, limits, options)
        with caplog.at_level("INFO", LOG), pytest.raises(ConfigError) as refused:
            build.build_fleet(TinyFleet().members(), ByteTokenizer(), config, slots=2)
        return str(refused.value)

    assert built("throughput").startswith("budget = 1000") and not caplog.messages
    assert built("energy").startswith("budget = 1000")
    told = "nothing counts joules here, neither NVML nor RAPL: operations of the layers and heads"
    assert [text.startswith(told) for text in caplog.messages] == ([] if counts else [True])
    for objective in ("throughput", "energy"):
        refused = built(objective, energy=5.0)
        limited = "limits.energy = 5.0: must be left out where nothing counts joules"
        assert refused.startswith("budget = 1000" if counts else limited)


def test_a_member_whose_answers_are_no_numbers_is_named():
    members = TinyFleet().members()
    broken = jax.tree.map(
        lambda a: np.full_like(a, np.nan), jax.device_get(members["small"].params)
    )
    members["small"] = dataclasses.replace(members["small"], params=broken)
    with pytest.raises(DataError, match="small: its logits are not finite"):
        build.build_fleet(
            members, ByteTokenizer(), build.FleetConfig(), slots=2, prompts=("hello there",)
        )


def test_texts_are_cut_into_windows():
    texts = [[*range(i, i + 30)] for i in range(9)]
    for context in (16, 300):
        batches = measurements.windows(texts, context)
        (shape,) = {b["tokens"].shape for b in batches}
        assert shape[1] == min(context, 128)
        for batch in batches:
            assert (batch["tokens"][:, 1:] == batch["labels"][:, :-1]).all()
    assert measurements.windows([[1, 2, 3]], 99)[0]["labels"].tolist() == [[2, 3]]
    with pytest.raises(DataError, match="have 1 tokens"):
        measurements.windows([[1]], 99)
