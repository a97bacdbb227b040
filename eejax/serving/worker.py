"""The engine's own process: requests come through a pipe, and tokens go back through it."""

from __future__ import annotations

import signal
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from eejax.common.errors import CheckpointError, ConfigError, DataError
from eejax.inference.engine import CALL
from eejax.inference.scheduler import Output, Scheduler
from eejax.inference.scoring import score
from eejax.serving.messages import (
    Ask,
    Build,
    Built,
    Cancel,
    Failed,
    Load,
    Progress,
    Ready,
    Refused,
    Score,
    Scored,
    Submit,
)

IDLE = 0.5  # seconds between two signs of life of an engine that has nothing to do


def main(pipe: Connection, build: Build, steps: int = CALL) -> None:
    """Until the other end closes the pipe, or the engine fails, which is told."""
    # Signals go to whole groups of processes: what is to end is said by the one that answers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        begin = time.perf_counter()
        built = build()
        worker = Worker(built, steps)
        worker.warm_up()
        engine = built.engine
        seconds = time.perf_counter() - begin
        pipe.send(Ready(
            built.config, built.tokenizer, built.template, engine.slots, engine.context,
            engine.max_depth, seconds,
        ))  # fmt: skip
        while True:
            # An engine that runs only looks whether there is anything; one that does not waits.
            while pipe.poll(IDLE if worker.idle else 0):
                for told in worker.take(pipe.recv()):
                    pipe.send(told)
            pipe.send(worker.step())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except (ConfigError, DataError, CheckpointError, OSError) as error:  # they say what is wrong
        pipe.send(Failed(str(error)))
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))


class Worker:
    """A scheduler whose requests go by the numbers of those who asked."""

    def __init__(self, built: Built, steps: int = CALL):
        self.engine, self.config = built.engine, built.config
        self.scheduler = Scheduler(built.engine, built.config, steps=steps)
        self._asked: dict[int, int] = {}  # by the scheduler's number
        self._own: dict[int, int] = {}  # the scheduler's, by who asked

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def warm_up(self) -> None:
        """Compiles what requests may need: prompts join in powers of two."""
        n = 1
        while n <= self.engine.slots:
            for _ in range(n):
                self.scheduler.submit([0], 2)
            self.scheduler.run()
            n *= 2

    def take(self, message: Any) -> list[Refused | Scored]:
        """Does what is asked, and says what is to be told at once."""
        match message:
            case Submit(number, ask):
                return self._submit(number, ask)
            case Cancel(number):
                # Who ended meanwhile has been told.
                if number in self._own:
                    self.scheduler.cancel(self._own[number])
            case Score():
                return [self._score(message)]
        return []

    def _submit(self, number: int, ask: Ask) -> list[Refused]:
        try:
            own = self.scheduler.submit(
                ask.prompt, ask.limit, policy=ask.policy, sampling=ask.sampling,
                stop_tokens=ask.stop_tokens, shaping=ask.shaping, priority=ask.priority,
            )  # fmt: skip
        except ConfigError as error:
            return [Refused(number, str(error))]
        self._asked[own], self._own[number] = number, own
        return []

    def _score(self, asked: Score) -> Refused | Scored:
        try:
            scores = score(
                self.engine.weights, self.config, list(asked.tokens), exit=asked.exit,
                likely=asked.likely, mesh=self.engine.mesh,
            )  # fmt: skip
        except ConfigError as error:
            return Refused(asked.number, str(error))
        return Scored(asked.number, scores)

    def step(self) -> Progress:
        outputs = []
        for own, tokens, finish in [] if self.idle else self.scheduler.step():
            number = self._asked[own]
            outputs.append(Output(number, tokens, finish))
            if finish:
                del self._asked[own], self._own[number]
        scheduler, room = self.scheduler, self.engine.slots * self.engine.context
        load = Load(len(scheduler.running), len(scheduler.waiting), min(scheduler.held, room), room)
        return Progress(tuple(outputs), load)
