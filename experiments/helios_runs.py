"""Servers of several models in one process, and prompts for them, for benchmarks."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eejax.analysis.intervals import mean_interval
from eejax.common.errors import ConfigError, DataError
from eejax.experiments.helios_simulation.policies import choices_of
from eejax.helios import decisions, prospects
from eejax.helios.choices import Assignment, ModelDepth
from eejax.helios.controller import Controller
from eejax.helios.energy import layer_flops, segment_rows, token_work
from eejax.helios.fleet import Fleet
from eejax.helios.pool import FleetMember, FleetPool, RunningRequest
from eejax.helios.verifier import AnswerVerifier
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy
from eejax.inference.request import EngineRequest

ORDERS = ("blocked", "shuffled", "drifting")
SPREAD = 0.3  # spread of a drifting task's prompts around its time, as a share of all


def prompts() -> list[dict]:
    """Read the records of mixed_prompts in $EEJAX_DATA. Raises `ConfigError` without it."""
    folder = os.environ.get("EEJAX_DATA")
    if not folder:
        raise ConfigError("$EEJAX_DATA: must name the folder of mixed_prompts; it is not set.")
    path = os.path.join(folder, "mixed_prompts", "mixed_prompts.jsonl")
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error


def fitted(tokenizer: Any, records: Sequence[dict], room: int) -> tuple[list[list[int]], int]:
    """Return the ids of each prompt, cut to its last `room` tokens, and how many were cut."""
    if room < 1:
        raise ConfigError(f"--new: leaves no room for prompts: {room} tokens of the context.")
    ids = [tokenizer.encode(record["prompt"]).tolist() for record in records]
    return [i[-room:] for i in ids], sum(len(i) > room for i in ids)


def ordered(tasks: Sequence[str], order: str, seed: int = 0) -> np.ndarray:
    """Return the indices of prompts in an order.

    Prompts come task after task, at random, or so that tasks come and go one after the other with
    much overlap.
    """
    rng = np.random.default_rng(seed)
    names = list(dict.fromkeys(tasks))
    place = np.array([names.index(task) for task in tasks]) / len(names)
    within = rng.random(len(tasks))
    if order == "shuffled":
        return np.argsort(within, kind="stable")
    spread = SPREAD if order == "drifting" else 1e-3
    return np.argsort(place + spread * within, kind="stable")


@dataclasses.dataclass
class TimedAnswer:
    """Times of an answer.

    Attributes:
      index: number of the prompt.
      sent: seconds at which the prompt was sent.
      first: seconds at which the first token came.
      done: seconds at which the last token came.
      tokens: tokens as they came.
      placed: the models that served it, each with its depth and the number of tokens so far.
    """

    index: int
    sent: float
    first: float = 0.0
    done: float = 0.0
    tokens: list = dataclasses.field(default_factory=list)
    placed: list[tuple[ModelDepth, int]] = dataclasses.field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    def parts(self) -> list[tuple[str, int, int]]:
        """Parts (model, from, to) of its tokens."""
        starts = [n for _, n in self.placed] + [len(self.tokens)]
        spans = zip(self.placed, starts, starts[1:], strict=False)
        return [(choice.model, a, b) for (choice, _), a, b in spans if b > a]


class StaticModel:
    """Server of one model at one depth."""

    def __init__(self, name: str, member: FleetMember, depth: int, threshold: Any, **making: Any):
        self.choice = ModelDepth(name, depth)
        rules = {**member.rules, "threshold": threshold}
        self._policy = ExitPolicy.make(member.config, 1, **rules)
        self._part = PartialModel(
            member.params, member.config, member.options, depth=depth, **making
        )
        self.slots = self._part.engine.slots

    def add_request(self, answer: TimedAnswer, request: EngineRequest) -> None:
        answer.placed.append((self.choice, 0))
        self._part.scheduler.add_request(dataclasses.replace(request, policy=self._policy))

    def step(self):
        return self._part.step()


class Stopwatch:
    """Clock of the seconds in which it ran, so that servers that take turns have their own time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._total, self._begin = clock, 0.0, None

    def now(self) -> float:
        return self._total + (0.0 if self._begin is None else self._clock() - self._begin)

    def run(self, on: bool) -> None:
        self._total, self._begin = self.now(), self._clock() if on else None


class ControlledFleet:
    """Server of a fleet under its controller; `watch` is the clock of both."""

    def __init__(
        self,
        members: Mapping[str, FleetMember],
        controller: Controller,
        watch: Stopwatch,
        **making: Any,
    ):
        self.watch, self.controller = watch, controller
        self._answers: dict[str, TimedAnswer] = {}
        self.fleet = Fleet(members, controller, clock=watch.now, **making)
        self._start, self.fleet.pool.start = self.fleet.pool.start, self._placed

    def _placed(self, job: RunningRequest) -> None:
        """Start a request, and record its model."""
        self._start(job)
        choice = ModelDepth(job.model, self.fleet.parts[job.model].depth)
        self._answers[job.request_id].placed.append((choice, len(job.tokens)))

    def add_request(self, answer: TimedAnswer, request: EngineRequest) -> None:
        self._answers[request.request_id] = answer
        self.fleet.add_request(request)

    def step(self):
        return self.fleet.step()

    def drain(self) -> None:
        """Finish changes that have begun in this server's own time, not in the next one's."""
        while not is_settled(self.fleet):
            self.fleet.step()


def is_settled(fleet: Fleet) -> bool:
    """Return whether a fleet is idle, and nothing is on its way to the device."""
    growing = any(part.target_segments > part.depth for part in fleet.parts.values())
    return fleet.idle and fleet.dispatcher.loading is None and not growing


class RandomPolicy(Controller):
    """Policy of a random model and depth after every interval."""

    def __init__(self, *args: Any, seed: int = 0, **own: Any):
        super().__init__(*args, **own)
        self._drawn = np.random.default_rng(seed)
        self._choices = choices_of(self.state.rules.profiles)
        self.decisions.clear()
        self._draw()

    def _draw(self) -> None:
        self.state = dataclasses.replace(self.state, plan=(), prompts=0)
        choice = self._choices[self._drawn.integers(len(self._choices))]
        self.apply(decisions.want, "serve", choice, "by chance")

    def prompt_arrived(self) -> Assignment:
        prompts = self.state.prompts + 1
        self.state = dataclasses.replace(self.state, prompts=prompts)
        if prompts > prospects.interval(self.state) and self.wanted == self.current:
            self._draw()
        return Assignment(self.current or self.wanted, False)

    def tokens_emitted(self, model: str, below: Sequence[bool], own: bool = False) -> None:
        super().tokens_emitted(model, below, own=True)  # counted, but without effect on decisions

    def answer_failed(self, model: str) -> None:
        pass


def drive(
    server: Any,
    texts: Mapping[int, Sequence[int]],
    limit: int,
    clients: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, list[TimedAnswer]]:
    """Serve prompts by their indices, in this order; return (seconds, answers).

    `clients` prompts run at a time; with None all come at once.
    """
    left, answers, open_ = [*texts][::-1], [], {}
    most = len(left) if clients is None else clients
    watch = getattr(server, "watch", None) or Stopwatch()
    watch.run(True)
    begin = clock()
    while left or open_:
        while left and len(open_) < most:
            answer = TimedAnswer(left.pop(), clock())
            id_ = str(len(answers))
            server.add_request(answer, EngineRequest(id_, texts[answer.index], limit))
            open_[id_] = answer
            answers.append(answer)
        for id_, tokens, finish in server.step():
            answer, now = open_[id_], clock()
            if tokens:
                answer.first = answer.first or now
                answer.tokens += tokens
            if finish:
                open_.pop(id_).done = now
    if hasattr(server, "drain"):
        server.drain()
    seconds = clock() - begin
    watch.run(False)
    return seconds, answers


def answer_flops(members: Mapping[str, FleetMember], answer: TimedAnswer, prompt_len: int) -> float:
    """Return the executed floating-point operations of layers and heads for an answer.

    They are those of a prompt of `prompt_len` tokens, and of a text that continues in another
    model, through all loaded layers; and of the answer's tokens, at the time or later
    (`energy.segment_rows`). Padding rows of a batch are not counted.
    """
    total = 0.0
    ends = [*(there for _, there in answer.placed[1:]), len(answer.tokens)]
    for (choice, there), end in zip(answer.placed, ends, strict=True):
        member = members[choice.model]
        layers = np.array(layer_flops(member.config))
        total += (prompt_len + there) * layers[: choice.depth].sum()
        exits = [token.exit for token in answer.tokens[there:end]]
        # The first token comes from the pass that read the prompt.
        loaded = max([choice.depth, *(e + 1 for e in exits)])
        total += segment_rows(exits[1:], loaded, member.options.cap) @ layers[:loaded]
        total += sum(heads(member, e) for e in exits)
    return float(total)


def heads(member: FleetMember, exit: int) -> float:
    """Return the operations of the heads that read a token which leaves by an exit."""
    return token_work(member.config, exit).flops - sum(layer_flops(member.config)[: exit + 1])


def answer_bytes(
    members: Mapping[str, FleetMember], answer: TimedAnswer, slots: Mapping[str, Sequence[int]]
) -> float:
    """Return the bytes of weights that were read for the tokens of an answer.

    They are those up to the exits of the tokens, which all slots share.
    """
    total, places = 0.0, [choice for choice, _ in answer.placed]
    ends = [*(there for _, there in answer.placed[1:]), len(answer.tokens)]
    for choice, a, b in zip(places, [there for _, there in answer.placed], ends, strict=True):
        config, batch = members[choice.model].config, slots[choice.model][choice.depth - 1]
        total += sum(token_work(config, t.exit, batch=batch).bytes for t in answer.tokens[a:b])
    return total


def fleet_flops(members: Mapping[str, FleetMember], pool: FleetPool) -> float:
    """Return the operations of a fleet's pool for filling in, running anew, and audits."""
    layers = {n: np.cumsum(layer_flops(m.config)).tolist() for n, m in members.items()}
    total, before = 0.0, {}
    for change in pool.changes:
        (model, depth), there = change.choice, before.get(change.choice.model, 0)
        if change.kind == "shrink":
            total += change.tokens * layers[model][depth - 1]
        elif change.kind == "narrow":
            total += change.tokens * layers[model][depth - 1]
            continue  # its depth has not changed
        elif change.kind == "grow" and there:
            total += change.tokens * (layers[model][depth - 1] - layers[model][there - 1])
        before[model] = depth
    for model, tokens in pool.audited.items():
        total += tokens * layers[model][-1]
    return total


@dataclasses.dataclass
class JudgedAnswers:
    """Verdicts on answers, token by token.

    Attributes:
      same: whether the whole model that gave the token would have chosen it.
      own: log-probability by that model.
      other: log-probability by a model that does not serve.
      counts: tokens of each answer, in order.
    """

    same: np.ndarray
    own: np.ndarray
    other: np.ndarray
    counts: np.ndarray

    def summary(self) -> dict[str, Any]:
        each = np.split(self.same, np.cumsum(self.counts)[:-1])
        mean = mean_interval(np.array([a.sum() for a in each]), self.counts)

        def perplexity(a):
            return float(np.exp(-a.mean())) if a.size else float("nan")

        return {
            "agreement": mean.score,
            "agreement_interval": [mean.low, mean.high],
            "perplexity": perplexity(self.own),
            "judge_perplexity": perplexity(self.other),
        }


class Judges:
    """Whole models that judge answers again."""

    def __init__(self, members: Mapping[str, FleetMember], other: FleetMember | None = None):
        everybody = dict(members) | ({} if other is None else {None: other})
        self._parts = {
            name: PartialModel(m.params, m.config, m.options, slots=1, depth=m.config.n_exits + 1)
            for name, m in everybody.items()
        }
        self._verifiers = {n: AnswerVerifier(p.host, p.config) for n, p in self._parts.items()}

    def _judge(self, name, prompt, tokens):
        return self._verifiers[name].judge(self._parts[name].engine.weights, prompt, tokens)

    def judge(self, answers: Sequence[TimedAnswer], texts) -> JudgedAnswers:
        same, own, other, counts = [], [], [], []
        for answer in answers:
            text, ids = [*texts[answer.index]], [t.id for t in answer.tokens]
            counts.append(len(ids))
            verdicts = {m: self._judge(m, text, ids) for m in {m for m, *_ in answer.parts()}}
            for model, a, b in answer.parts():
                same.append(verdicts[model].same[a:b])
                own.append(verdicts[model].logprob[a:b])
            if None in self._parts and ids:
                other.append(self._judge(None, text, ids).logprob)

        def joined(parts):
            return np.concatenate(parts) if parts else np.zeros(0)

        return JudgedAnswers(joined(same), joined(own), joined(other), np.array(counts))
