"""The engine's own process: requests come through a pipe, and tokens go back through it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

from eejax.common import progress
from eejax.common.errors import CheckpointError, ConfigError, DataError, require
from eejax.inference.engine import CALL
from eejax.inference.scheduler import Output, Scheduler
from eejax.inference.scoring import lengths, score
from eejax.serving.choices import Choice
from eejax.serving.messages import (
    CHOOSES,
    LOG,
    Ask,
    Build,
    Built,
    Cancel,
    Failed,
    FleetReport,
    Load,
    Progress,
    Ready,
    Refused,
    Scored,
    ScoreRequest,
    Starting,
    Submit,
)

LONG = 1.0  # seconds of a compilation that is told of
IDLE = 0.5  # seconds between two signs of life of an engine that has nothing to do


def main(pipe: Connection, build: Build, steps: int = CALL) -> None:
    """Until the other end closes the pipe, or the engine fails, which is told."""
    # Signals go to whole groups of processes: what is to end is said by the one that answers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    # They are for who runs a server: where in the code they come from is nothing to them.
    warnings.formatwarning = lambda message, *about, **more: " ".join(str(message).split()) + "\n"
    tell = _Tell(pipe)
    log = logging.getLogger(LOG)
    log.addHandler(tell)
    log.setLevel(logging.INFO)
    log.propagate = False  # some library may have made a handler for everything
    try:
        begin = time.perf_counter()
        say = logging.getLogger(LOG).info
        with progress.compilations(_log_compilation), progress.reports(say):
            built = build()
            worker = Worker(built, steps)
            worker.warm_up()
        log.removeHandler(tell)
        pipe.send(worker.ready(built, time.perf_counter() - begin))
        while True:
            # An engine that runs only looks whether there is anything; one that does not waits.
            while pipe.poll(IDLE if worker.idle else 0):
                worker.take(pipe.recv())
            for told in worker.step():
                pipe.send(told)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except (ConfigError, DataError, CheckpointError, OSError) as error:  # they say what is wrong
        pipe.send(Failed(str(error)))
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))


def _log_compilation(program: str, seconds: float) -> None:
    if seconds >= LONG:
        logging.getLogger(LOG).info("compiled %s in %.0f s", program, seconds)


class _Tell(logging.Handler):
    """What is logged goes to the other end of the pipe."""

    def __init__(self, pipe: Connection):
        super().__init__(logging.INFO)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self._pipe.send(Starting(record.getMessage()))


def end_with_parent() -> None:
    """What loads or compiles does not see that the other end of its pipe has gone."""
    multiprocessing.parent_process().join()
    os._exit(1)


class Worker:
    """A scheduler, or a fleet, whose requests go by the numbers of those who asked."""

    def __init__(self, built: Built, steps: int = CALL):
        self.engine, self.config = built.engine, built.config
        self.fleet = None if built.fleet is None else built.fleet(steps)
        self.scheduler = self.fleet or Scheduler(built.engine, built.config, steps=steps)
        self._asked: dict[int, int] = {}  # by the scheduler's number
        self._own: dict[int, int] = {}  # the scheduler's, by who asked
        self._scores: list[ScoreRequest] = []
        self._told: list[Refused] = []
        self._decisions = self._points = 0  # of the fleet, that were told
        self._missing: set[Choice] = set()  # choices of which it was said that they miss limits

    @property
    def slots(self) -> int:
        return (self.fleet or self.engine).slots

    @property
    def context(self) -> int:
        return (self.fleet or self.engine).context

    def ready(self, built: Built, seconds: float) -> Ready:
        depth, models = self.config.n_exits + 1, None
        if self.fleet is None:
            depth = self.engine.max_depth
        else:
            models = {name: member.config for name, member in self.fleet.members.items()}
        return Ready(
            built.config, built.tokenizer, built.template, self.slots, self.context, depth, seconds,
            models,
        )  # fmt: skip

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._scores and not self._told

    def warm_up(self) -> None:
        """Compiles what requests may need: prompts join, and texts are scored, in powers of two. A
        fleet is compiled already."""
        if self.fleet is not None:
            return
        joined(self.scheduler, self.slots)
        if hasattr(self.engine, "weights"):  # else it scores nothing
            for n in lengths(self.engine.context):
                self._scored(ScoreRequest(0, (0,) * n, None, False))

    def take(self, message: Any) -> None:
        """What is asked; the steps that follow do it."""
        match message:
            case Submit(number, ask):
                self._submit(number, ask)
            case Cancel(number):
                # Who ended meanwhile has been told.
                if number in self._own:
                    self.scheduler.cancel(self._own[number])
                self._scores = [asked for asked in self._scores if asked.number != number]
            case ScoreRequest():
                self._scores.append(message)

    def _submit(self, number: int, ask: Ask) -> None:
        try:
            if self.fleet is None:
                told = "must be None: there is one model, and nothing to choose"
                require(ask.objective is None, "objective", ask.objective, told)
                more = dict(policy=ask.policy)
            else:
                require(ask.policy is None, "policy", ask.policy, f"must be None: {CHOOSES}")
                more = dict(objective=ask.objective)
            own = self.scheduler.submit(
                ask.prompt, ask.limit, sampling=ask.sampling, stop_tokens=ask.stop_tokens,
                shaping=ask.shaping, priority=ask.priority, **more,
            )  # fmt: skip
        except ConfigError as error:
            self._told.append(Refused(number, str(error)))
            return
        self._asked[own], self._own[number] = number, own

    def _scored(self, asked: ScoreRequest) -> Refused | Scored:
        try:
            require(self.fleet is None, "prompt", "to be scored", f"cannot be: {CHOOSES}")
            # Of one program, whether the most likely ones are asked for or not.
            scores = score(
                self.engine.weights, self.config, list(asked.tokens), exit=asked.exit, likely=True,
                mesh=self.engine.mesh,
            )  # fmt: skip
        except ConfigError as error:
            return Refused(asked.number, str(error))
        return Scored(asked.number, scores if asked.likely else scores._replace(likely=None))

    def step(self) -> list[Refused | Scored | Progress]:
        """What is to be told. One text is scored at most, so that requests in slots go on."""
        told, self._told = self._told, []
        if self._scores:
            told.append(self._scored(self._scores.pop(0)))
        outputs = []
        # A fleet loads what is wanted while nobody asks, too.
        steps = self.fleet is not None or not self.idle
        for own, tokens, finish in self.scheduler.step() if steps else []:
            number = self._asked[own]
            outputs.append(Output(number, tokens, finish))
            if finish:
                del self._asked[own], self._own[number]
        scheduler, room = self.scheduler, self.slots * self.context
        load = Load(len(scheduler.running), len(scheduler.waiting), min(scheduler.held, room), room)
        return [*told, Progress(tuple(outputs), load, self._report())]

    def _report(self) -> FleetReport | None:
        if self.fleet is None:
            return None
        report = self.fleet.report(self._decisions, self._points)
        for decision in report.decisions:
            if decision.told is None or decision.choice in self._missing:
                continue
            if missed := self.fleet.controller.objective.missed(decision.told):
                self._missing.add(decision.choice)
                (model, depth), told = decision.choice, f"is chosen, though it misses {missed}"
                warnings.warn(f"{model!r} with {depth} of its exits {told}", stacklevel=2)
        self._decisions += len(report.decisions)
        self._points += len(report.points)
        return report


def joined(scheduler: Scheduler, slots: int) -> None:
    """Compiles what it takes when one, two, four and so on up to all slots are taken at once."""
    for n in sorted({slots, *(2**i for i in range(slots.bit_length()))}):
        for _ in range(n):
            scheduler.submit([0], 2)
        scheduler.run()
