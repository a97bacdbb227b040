"""The engine's own process: requests come through a pipe, and tokens go back through it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from eejax.common.errors import CheckpointError, ConfigError, DataError
from eejax.inference.engine import CALL
from eejax.inference.scheduler import Output, Scheduler
from eejax.inference.scoring import lengths, score
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
    threading.Thread(target=end_with_parent, daemon=True).start()
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
                worker.take(pipe.recv())
            for told in worker.step():
                pipe.send(told)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except (ConfigError, DataError, CheckpointError, OSError) as error:  # they say what is wrong
        pipe.send(Failed(str(error)))
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))


def end_with_parent() -> None:
    """What loads or compiles does not see that the other end of its pipe has gone."""
    multiprocessing.parent_process().join()
    os._exit(1)


class Worker:
    """A scheduler whose requests go by the numbers of those who asked."""

    def __init__(self, built: Built, steps: int = CALL):
        self.engine, self.config = built.engine, built.config
        self.scheduler = Scheduler(built.engine, built.config, steps=steps)
        self._asked: dict[int, int] = {}  # by the scheduler's number
        self._own: dict[int, int] = {}  # the scheduler's, by who asked
        self._scores: list[Score] = []
        self._told: list[Refused] = []

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._scores and not self._told

    def warm_up(self) -> None:
        """Compiles what requests may need: prompts join, and texts are scored, in powers of two."""
        slots = self.engine.slots
        for n in sorted({slots, *(2**i for i in range(slots.bit_length()))}):
            for _ in range(n):
                self.scheduler.submit([0], 2)
            self.scheduler.run()
        if hasattr(self.engine, "weights"):  # else it scores nothing
            for n in lengths(self.engine.context):
                self._scored(Score(0, (0,) * n, None, False))

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
            case Score():
                self._scores.append(message)

    def _submit(self, number: int, ask: Ask) -> None:
        try:
            own = self.scheduler.submit(
                ask.prompt, ask.limit, policy=ask.policy, sampling=ask.sampling,
                stop_tokens=ask.stop_tokens, shaping=ask.shaping, priority=ask.priority,
            )  # fmt: skip
        except ConfigError as error:
            self._told.append(Refused(number, str(error)))
            return
        self._asked[own], self._own[number] = number, own

    def _scored(self, asked: Score) -> Refused | Scored:
        try:
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
        for own, tokens, finish in [] if self.idle else self.scheduler.step():
            number = self._asked[own]
            outputs.append(Output(number, tokens, finish))
            if finish:
                del self._asked[own], self._own[number]
        scheduler, room = self.scheduler, self.engine.slots * self.engine.context
        load = Load(len(scheduler.running), len(scheduler.waiting), min(scheduler.held, room), room)
        return [*told, Progress(tuple(outputs), load)]
