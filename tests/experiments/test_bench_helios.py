"""What the benchmark of choosing models counts, worked by hand; and that it runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from controlled import THROUGHPUT, profile
from launchers import functions_of
from tiny_fleets import weights

import eejax
from eejax.checkpoint.manager import Checkpoints
from eejax.checkpoint.model import CHECKPOINTS, PARAMS, TOKENIZER
from eejax.common.errors import ConfigError, DataError
from eejax.data.tokenizers import ByteTokenizer, save_tokenizer
from eejax.experiments import helios_runs
from eejax.experiments.helios_runs import (
    RandomPolicy,
    Stopwatch,
    TimedAnswer,
    drive,
    fitted,
    ordered,
)
from eejax.helios.choices import ControllerOptions, ModelDepth
from eejax.helios.pool import ModelChange
from eejax.helios.repository import Repository
from eejax.inference.request import Token
from eejax.models.config import ExitConfig, ModelConfig
from eejax.train.config import DataConfig, ExitWeights, Experiment

bench_helios = functions_of("eejax.experiments.bench_helios")

A, B = ModelDepth("a", 1), ModelDepth("b", 2)
TASKS = [task for task in range(10) for _ in range(12)]


def tokens(*ids: int, exit: int = 0) -> list[Token]:
    return [Token(i, exit, 0.0, 1.0, 1) for i in ids]


@pytest.mark.parametrize(
    "placed, count, parts",
    [
        ([(A, 0)], 5, [("a", 0, 5)]),
        ([(A, 0), (B, 3)], 5, [("a", 0, 3), ("b", 3, 5)]),
        ([(A, 0), (B, 3), (A, 4)], 5, [("a", 0, 3), ("b", 3, 4), ("a", 4, 5)]),
        # Who had to go before it said anything, or after all was said, has no part in it.
        ([(A, 0), (B, 0)], 5, [("b", 0, 5)]),
        ([(A, 0), (B, 5)], 5, [("a", 0, 5)]),
        ([(A, 0)], 0, []),
    ],
)
def test_parts_of_an_answer_are_its_models(placed, count, parts):
    answer = TimedAnswer(0, 1.0, first=3.5, tokens=tokens(*range(count)), placed=placed)
    assert answer.parts() == parts and answer.ttft == 2.5


@pytest.mark.parametrize("order", helios_runs.ORDERS)
def test_orders_have_every_prompt_once(order):
    got = ordered(TASKS, order)
    assert sorted(got.tolist()) == list(range(len(TASKS)))
    assert got.tolist() == ordered(TASKS, order).tolist()
    assert got.tolist() != ordered(TASKS, order, seed=1).tolist()


def test_orders_are_what_they_are_called():
    """By how many other tasks come between the first and the last prompt of one, at most: none,
    those whose times are within 0.3 of its own, or most of them."""
    others = {}
    for order in helios_runs.ORDERS:
        names = [TASKS[i] for i in ordered(TASKS, order)]
        spans = [names[names.index(t) : len(names) - names[::-1].index(t)] for t in range(10)]
        others[order] = [len({*span}) - 1 for span in spans]
    assert others["blocked"] == [0] * 10
    assert all(1 <= n <= 6 for n in others["drifting"]) and max(others["drifting"]) >= 4
    assert all(n == 9 for n in others["shuffled"])
    names = ["x", "y", "x", "z", "y"]
    blocked = [names[i] for i in ordered(names, "blocked")]
    assert blocked == ["x", "x", "y", "y", "z"]  # in the order in which tasks come first


def test_prompts_keep_their_ends():
    records = [{"prompt": "abcdef"}, {"prompt": "xy"}, {"prompt": "uvwx"}]
    got, cut = fitted(ByteTokenizer(), records, 4)
    assert [bytes(ids).decode() for ids in got] == ["cdef", "xy", "uvwx"] and cut == 1
    with pytest.raises(ConfigError, match="--new: leaves no room for prompts: 0 tokens"):
        fitted(ByteTokenizer(), records, 0)


def test_prompts_are_read_from_the_data(tmp_path, monkeypatch):
    monkeypatch.delenv("EEJAX_DATA", raising=False)
    with pytest.raises(ConfigError, match="EEJAX_DATA"):
        helios_runs.prompts()
    monkeypatch.setenv("EEJAX_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"mixed_prompts\.jsonl: cannot be read"):
        helios_runs.prompts()
    write_prompts(tmp_path, 3)
    assert [r["task"] for r in helios_runs.prompts()] == ["letters", "figures", "letters"]


class Ticks:
    """A clock that is where a script puts it."""

    def __init__(self):
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Script:
    """A server of so many slots: a step takes a second and brings each request in a slot a token;
    the first one takes as many steps as its prompt has tokens."""

    def __init__(self, clock: Ticks, slots: int):
        self.clock, self.slots, self.queue, self.most = clock, slots, [], 0

    def add_request(self, answer, request):
        self.queue.append([request.request_id, len(request.prompt) - 1, request.max_tokens])

    def step(self):
        self.clock.time += 1.0
        self.most = max(self.most, len(self.queue))
        brought = []
        for row in self.queue[: self.slots]:
            number, wait, left = row
            if wait:
                row[1] -= 1
                brought.append((number, [], None))
                continue
            row[2] -= 1
            brought.append((number, tokens(left), "length" if left == 1 else None))
        self.queue = [row for row in self.queue if row[2]]
        return brought


class Settling(Script):
    """One that has two seconds of work left when everybody is answered."""

    def drain(self):
        self.clock.time += 2.0


@pytest.mark.parametrize("kind, more", [(Script, 0.0), (Settling, 2.0)])
def test_seconds_of_answers_that_are_asked_for_at_once(kind, more):
    """Two slots, three prompts of 1, 3 and 1 tokens, two tokens each: the first one has them after
    1 and 2 seconds, the second after 3 and 4, the third, which comes then, after 3 and 4."""
    clock = Ticks()
    clock.time = 50.0
    server = kind(clock, 2)
    seconds, answers = drive(server, {7: [1], 5: [1, 2, 3], 6: [1]}, 2, clock=clock)
    assert seconds == 4.0 + more and server.most == 3
    assert [a.index for a in answers] == [7, 5, 6]
    assert [a.ttft for a in answers] == [1.0, 3.0, 3.0]
    assert [a.done - a.sent for a in answers] == [2.0, 4.0, 4.0]
    assert [[t.id for t in a.tokens] for a in answers] == [[2, 1]] * 3


def test_clients_ask_again_when_they_were_answered():
    """One client: the prompts of the test above take 2, 4 and 2 seconds, one after the other."""
    clock = Ticks()
    server = Script(clock, 2)
    seconds, answers = drive(server, {7: [1], 5: [1, 2, 3], 6: [1]}, 2, clients=1, clock=clock)
    assert seconds == 8.0 and server.most == 1
    assert [a.sent for a in answers] == [0.0, 2.0, 6.0]
    assert [a.ttft for a in answers] == [1.0, 3.0, 1.0]


def test_a_servers_watch_runs_only_while_it_is_driven():
    clock = Ticks()
    server = Settling(clock, 2)
    server.watch = Stopwatch(clock)
    for turn in (1, 2):
        drive(server, {0: [1]}, 3, clock=clock)
        assert server.watch.now() == 5.0 * turn  # three steps, and what is settled
        clock.time += 1000.0  # others take their turn
        assert server.watch.now() == 5.0 * turn


def test_a_stopwatch():
    clock = Ticks()
    watch = Stopwatch(clock)
    clock.time = 3.0
    assert watch.now() == 0.0
    watch.run(True)
    clock.time = 5.0
    assert watch.now() == 2.0
    watch.run(True)  # again, which changes nothing
    clock.time = 6.0
    watch.run(False)
    watch.run(False)
    clock.time = 60.0
    assert watch.now() == 3.0


def test_by_chance_nothing_is_evaluated_and_all_is_taken():
    """A change after each interval, and none before; breaches, of which all tokens are, and what
    is told of answers, change nothing."""
    profiles = {"a": profile(n=3), "b": profile(50.0, n=2)}  # which nobody would take
    options = ControllerOptions(interval=7, window=4, breaches=0)

    def make(seed):
        return RandomPolicy(
            profiles, THROUGHPUT, Repository(), options, clock=lambda: 0.0, seed=seed
        )

    c, wanted = make(0), []
    first = c
    for i in range(8 * 60):
        c.model_loaded(c.wanted)
        given = c.prompt_arrived()
        assert not given.evaluated and not c.state.plan
        c.tokens_emitted(given.choice.model, [True] * 10)
        wanted.append(c.wanted)
        # The interval's prompts and the one with which it is over.
        assert len(c.decisions) == 1 + (i + 1) // 8
    assert {d.kind for d in c.decisions} <= {"serve", "switch"}
    count = {choice: wanted.count(choice) // 8 for choice in wanted}
    assert {*count} == {ModelDepth("a", d) for d in (1, 2, 3)} | {
        ModelDepth("b", d) for d in (1, 2)
    }
    assert min(count.values()) >= 4  # of 60, a fifth each
    again, other = make(0), make(1)
    for c in (again, other):
        for _ in range(8 * 20):
            c.model_loaded(c.wanted)
            c.prompt_arrived()

    def choices(c):
        return [d.choice for d in c.decisions]

    assert choices(again) == choices(first)[: len(choices(again))] != choices(other)


# One layer behind the first exit, two more behind the second, and one at last.
CONFIG = ModelConfig(
    vocab_size=257,
    n_layers=4,
    d_model=8,
    n_heads=2,
    context_length=64,
    exits=(ExitConfig(1), ExitConfig(3)),
)
# Operations of a token: four projections of attention, and three of a gated MLP that is 24 wide.
LAYER = 2 * (4 * 8 * 8 + 3 * 8 * 24)


@pytest.mark.parametrize(
    "placed, exits, layers",
    [
        # Ten tokens of a prompt through all four layers, and two of the answer, of which the last
        # one is not read again.
        ([(ModelDepth("a", 3), 0)], (2, 2, 2), 10 * 4 + 2 * 4),
        # Who leaves early goes through the rest with who comes later,
        ([(ModelDepth("a", 3), 0)], (0, 0, 2), 10 * 4 + 2 * 4),
        # or never: two through the first layer, and one through the others.
        ([(ModelDepth("a", 3), 0)], (0, 2, 0), 10 * 4 + 2 * 1 + 1 * 3),
        ([(ModelDepth("a", 2), 0)], (1, 1, 0), 10 * 3 + 2 * 1 + 1 * 2),
        ([(ModelDepth("a", 1), 0)], (0, 0, 0), 10 * 1 + 2 * 1),
        # The text that is there is read anew by the model in which it goes on.
        ([(ModelDepth("a", 3), 0), (ModelDepth("b", 1), 1)], (2, 0, 0), 10 * 4 + 11 * 1 + 1 * 1),
        # Whoever was given it before it had to go has read it all the same.
        ([(ModelDepth("a", 3), 0), (ModelDepth("b", 1), 0)], (0, 0), 10 * 4 + 10 * 1 + 1 * 1),
        ([(ModelDepth("a", 1), 0)], (), 10 * 1),
    ],
)
def test_operations_of_an_answer(placed, exits, layers, monkeypatch):
    monkeypatch.setattr(helios_runs, "heads", lambda member, exit: 10.0**6 * (exit + 1))
    member = types.SimpleNamespace(config=CONFIG, options=types.SimpleNamespace(cap=16))
    answer = TimedAnswer(0, 0.0, placed=placed, tokens=[tokens(1, exit=e)[0] for e in exits])
    got = helios_runs.answer_flops(dict.fromkeys("ab", member), answer, 10)
    assert got == layers * LAYER + 10.0**6 * sum(e + 1 for e in exits)


def test_operations_of_what_a_fleet_does_beside_answers():
    members = dict.fromkeys("ab", types.SimpleNamespace(config=CONFIG))

    def change(kind, model, depth, tokens=0):
        return ModelChange(0.0, kind, ModelDepth(model, depth), 1.0, 0.0, tokens)

    rows = [
        (change("load", "a", 1), 0),  # nobody is in it yet
        (change("grow", "a", 3, 10), 10 * 3),  # by layers 1 to 3
        (change("load", "b", 2, 5), 0),
        (change("narrow", "b", 2, 7), 7 * 3),  # are read anew, as deep as they were
        (change("grow", "b", 3, 7), 7 * 1),
        (change("shrink", "a", 2, 20), 20 * 3),
        (change("grow", "a", 3, 2), 2 * 1),  # and not from the first segment on
        (change("shrink", "b", 1, 4), 4 * 1),
    ]
    for n in range(len(rows) + 1):
        fleet = types.SimpleNamespace(changes=[row for row, _ in rows[:n]], audited={"a": 0})
        want = sum(layers for _, layers in rows[:n])
        assert helios_runs.fleet_flops(members, fleet) == want * LAYER, n
    fleet = types.SimpleNamespace(changes=[], audited={"a": 30, "b": 2})
    assert helios_runs.fleet_flops(members, fleet) == (30 + 2) * 4 * LAYER


def test_the_frontier_has_the_gain_at_every_quality():
    def row(rate, agreement):
        return dict(tokens_per_s=rate, agreement=agreement)

    rows = {
        "whole": row(30.0, 1.0),
        "part": row(90.0, 0.7),
        "slow part": row(50.0, 0.8),
        "helios": row(100.0, 0.7),
        "helios, 0.9": row(33.0, 0.95),
        "helios, 1": row(1.0, 1.2),
    }
    found = bench_helios.frontier(rows, ["whole", "part", "slow part"])
    assert [(p["policy"], p["static"]) for p in found] == [
        ("helios, 1", None),
        ("helios, 0.9", "whole"),
        ("helios", "part"),
    ]
    ratios = [p["ratio"] for p in found]
    assert ratios == [None, pytest.approx(1.1), pytest.approx(100 / 90)]


def test_equally_good_is_the_fastest_of_those_that_are():
    def row(rate, agreement, judge):
        return dict(
            tokens_per_s=rate,
            agreement=agreement,
            judge_perplexity=judge,
            blocks=[256 / rate, 128 / rate],
        )

    def told(name, ratio):
        return dict(static=name, ratio=pytest.approx(ratio), interval=pytest.approx([ratio, ratio]))

    rows = {
        "helios": row(60.0, 0.80, 10.0),
        "fast": row(100.0, 0.50, 20.0),
        "nearly": row(40.0, 0.795, 10.05),  # by less than samples tell apart
        "good": row(30.0, 0.99, 9.0),
        "not quite": row(50.0, 0.785, 10.2),
    }
    names = ["fast", "nearly", "good", "not quite"]
    assert bench_helios.equal(rows, names) == {
        "at_equal_agreement": told("nearly", 1.5),
        "at_equal_judge": told("nearly", 1.5),
    }
    assert bench_helios.equal(rows, ["good", "fast"])["at_equal_judge"] == told("good", 2.0)
    assert bench_helios.equal(rows, ["fast", "not quite"]) == {
        "at_equal_agreement": None,
        "at_equal_judge": None,
    }
    # As good by one measure alone; helios itself is no static one.
    rows["other"] = row(80.0, 0.9, 50.0)
    got = bench_helios.equal(rows, ["other"])
    assert got == {"at_equal_agreement": told("other", 0.75), "at_equal_judge": None}
    rows["other"]["blocks"].pop()  # a larger model serves in the first blocks alone
    again = bench_helios.equal(rows, ["other"])
    assert again == {"at_equal_agreement": told("other", 0.75), "at_equal_judge": None}


def write_prompts(folder, count: int) -> None:
    (folder / "mixed_prompts").mkdir()
    rng = np.random.default_rng(0)
    with open(folder / "mixed_prompts" / "mixed_prompts.jsonl", "w") as file:
        for i in range(count):
            task, signs = (("letters", "abc "), ("figures", "0123"))[i % 2]
            text = "".join(rng.choice([*signs], rng.integers(3, 40)))
            print(json.dumps({"id": str(i), "task": task, "prompt": text}), file=file)


def write_run(folder, n_layers: int, key: int):
    """A run of a random model over bytes."""
    config = ModelConfig(
        vocab_size=257,
        n_layers=n_layers,
        d_model=16,
        n_heads=2,
        context_length=48,
        exits=(ExitConfig(n_layers - 1),),
    )
    experiment = Experiment(
        model=config, data=DataConfig(length=48), exit_weights=ExitWeights((1.0,))
    )
    tokenizer = ByteTokenizer()
    save_tokenizer(tokenizer, folder / TOKENIZER)
    metadata = {
        "version": eejax.__version__,
        "model": config.to_dict(),
        "experiment": experiment.to_dict(),
        "tokenizer": tokenizer.fingerprint,
        "tokens": 0,
        "averaged": False,
        "data": {},
    }
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    try:
        checkpoints.save(0, {PARAMS: jax.device_put(weights(config, key))}, metadata)
        checkpoints.wait()
    finally:
        checkpoints.close()
    return folder


STATICS = {
    f"{name}{how}"
    for name, cut in (("small", 1), ("large", 2))
    for how in ("", " without exits", f" up to {cut}")
}
CHOOSING = {"helios", "chance"}
FIRST = {
    "helios, agreement 0.5",
    "helios, accuracy",
    "helios, energy",
    "helios, goodput",
    "helios, never below",
}


def is_interval(found: dict) -> bool:
    low, high = found["interval"]
    return 0 < low <= found["ratio"] <= high < float("inf")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_benchmark_runs_to_its_end(tmp_path, one_device):
    """All orders and policies, with two random models and a third one to judge them."""
    for name, layers, key in (("small", 2, 0), ("large", 3, 1), ("judge", 2, 2)):
        write_run(tmp_path / name, layers, key)
    write_prompts(tmp_path, 12)
    runs = [f"--{name}={tmp_path / name}" for name in ("small", "large", "judge")]
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "eejax.experiments.bench_helios",
            *runs,
            "--json",
            "--new=6",
            "--slots=2",
            "--max_slots=3",
            "--blocks=2",
            "--sampled=1",
            "--curve=0.5",
            "--audited=2",
        ],
        capture_output=True,
        text=True,
        timeout=1700,
        env=os.environ | {"EEJAX_DATA": str(tmp_path), "XLA_FLAGS": one_device},
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["prompts"] == 12
    assert {*got["thresholds"]} == {"small", "large"}
    assert all(0 < threshold < 1 for threshold in got["thresholds"].values())
    for name in ("throughput_ratio", "ttft_ratio", "energy_proxy_ratio"):
        assert is_interval(got[name]), name
    assert got["better_static"] in STATICS
    assert {*got["orders"]} == {"shuffled", "blocked", "drifting"}
    first = got["orders"]["shuffled"]
    assert {*first["policies"]} == STATICS | CHOOSING | FIRST
    assert {*first} >= {"regret", "at_equal_agreement", "at_equal_judge"}
    assert first["throughput_ratio"] == got["throughput_ratio"]
    for order in got["orders"].values():
        assert CHOOSING < {*order["policies"]} and {*order["policies"]} & STATICS
        assert is_interval(order["throughput_ratio"]) and is_interval(order["over_chance"])
        for name, row in order["policies"].items():
            assert row["tokens_per_s"] > 0 and row["flops_per_token"] > 0, name
            assert 0 <= row["agreement"] <= 1 and row["judge_perplexity"] > 1
            low, high = row["agreement_interval"]
            assert low <= row["agreement"] <= high and row["bytes_per_token"] > 0
            assert 0 < row["ttft"]["p50"] <= row["ttft"]["p99"]
            if name.endswith("without exits"):
                assert row["agreement"] == 1, name
    rows = first["policies"]
    # The layers of a model alone: fewer up to an exit, and all of them without.
    for name, cut in (("small", 1), ("large", 2)):
        least, most = (rows[f"{name}{how}"] for how in (f" up to {cut}", " without exits"))
        assert least["flops_per_token"] < most["flops_per_token"]
    assert rows["chance"]["timeline"] and rows["helios"]["timeline"][0][1] == "serve"
    assert "evaluate" not in {row[1] for row in rows["chance"]["timeline"]}
    assert {row[3] for row in rows["helios, never below"]["timeline"]} == {2}
    assert rows["helios, never below"]["below_share"] == 0
    assert got["clients"] == got["slots"]["small"][-1] and "helios" in got["response"]
