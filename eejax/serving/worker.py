"""Engine process: requests come through a pipe, and tokens go back through it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import jax

from eejax.common import progress
from eejax.common.errors import CheckpointError, ConfigError, DataError, require
from eejax.common.progress import LOG
from eejax.helios.choices import ModelDepth
from eejax.helios.report import CHOOSES, FleetReport
from eejax.inference.request import EngineRequest, RequestOutput
from eejax.inference.scheduler import Scheduler, compile_joins
from eejax.inference.scoring import score, score_lengths
from eejax.inference.slot_engine import STEPS_PER_CALL
from eejax.serving.messages import (
    AbortRequest,
    Build,
    BuiltEngine,
    EngineCompiled,
    EngineFailed,
    EngineLoad,
    EngineReady,
    EngineStarting,
    RequestRefused,
    ScoreReply,
    ScoreRequest,
    StepReport,
)

LONG = 1.0  # minimum seconds of a compilation that is logged
IDLE = 0.5  # seconds between two signs of life of an idle engine


def main(pipe: Connection, build: Build, steps: int = STEPS_PER_CALL) -> None:
    """Serve until the other end closes the pipe, or until the engine fails, which is reported."""
    # Signals go to whole groups of processes: only the HTTP process decides what ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    # Warnings are for operators, who do not need the line of code that they come from.
    warnings.formatwarning = lambda message, *about, **more: " ".join(str(message).split()) + "\n"
    begin, sender = time.perf_counter(), _Sender(pipe)
    log = logging.getLogger(LOG)
    log.addHandler(forwarder := _LogForwarder(sender))
    log.setLevel(logging.INFO)
    log.propagate = False  # a library may have added a handler to the root logger
    try:
        with _reported():
            built = build()
            worker = EngineWorker(built, steps)
            worker.warm_up()
        sender.send(worker.ready(built, time.perf_counter() - begin))
        rest = _CompileRest(worker)
        rest.start()
        compiled = False
        while True:
            # A running engine only checks for messages; an idle one waits for them.
            while pipe.poll(IDLE if worker.idle else 0):
                worker.handle(pipe.recv())
            if not compiled and not rest.is_alive():
                rest.raise_error()
                worker.serve_with_all_slots()
                log.removeHandler(forwarder)
                sender.send(EngineCompiled(time.perf_counter() - begin))
                compiled = True
            for outgoing in worker.step():
                sender.send(outgoing)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except (ConfigError, DataError, CheckpointError, OSError) as error:  # their messages suffice
        sender.send(EngineFailed(str(error)))
    except BaseException:
        sender.send(EngineFailed(traceback.format_exc()))


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Log what JAX compiles in the block."""
    say = logging.getLogger(LOG).info
    with progress.compilations(_log_compilation), progress.reports(say):
        yield


def _log_compilation(program: str, seconds: float) -> None:
    if seconds >= LONG:
        logging.getLogger(LOG).info("compiled %s in %.0f s", program, seconds)


class _Sender:
    """A pipe to which threads send in turn."""

    def __init__(self, pipe: Connection):
        self._pipe, self._lock = pipe, threading.Lock()

    def send(self, message: Any) -> None:
        with self._lock:
            self._pipe.send(message)


class _LogForwarder(logging.Handler):
    """Logging handler that sends records to the other end of the pipe."""

    def __init__(self, sender: _Sender):
        super().__init__(logging.INFO)
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the engine's own thread sees that nobody reads
            self._sender.send(EngineStarting(record.getMessage()))


class _CompileRest(threading.Thread):
    """Thread that compiles what the first requests do not need, while they are answered."""

    def __init__(self, worker: EngineWorker):
        super().__init__(daemon=True)
        self._worker, self._error = worker, None

    def run(self) -> None:
        try:
            with _reported():
                self._worker.compile_rest()
        except BaseException as error:
            self._error = error

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def end_with_parent() -> None:
    """End this process when its parent ends, even while it loads or compiles."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class EngineWorker:
    """A scheduler, or a fleet, behind a pipe.

    Attributes:
      engine: the engine of one model, with all slots.
      scheduler: its scheduler, which may begin with `BuiltEngine.first`.
      fleet: the scheduler, if it is one of several models.
    """

    def __init__(self, built: BuiltEngine, steps: int = STEPS_PER_CALL):
        self.engine, self.config, self._steps = built.engine, built.config, steps
        self.fleet = None if built.fleet is None else built.fleet(steps)
        first = built.engine if built.first is None else built.first
        self.scheduler = self.fleet or Scheduler(first, steps=steps)
        self._scores: list[ScoreRequest] = []
        self._refused: list[RequestRefused] = []
        self._decisions = self._points = 0  # of the fleet, already reported
        self._missing: set[ModelDepth] = set()  # choices reported as missing limits
        self._outputs: list[RequestOutput] = []  # not yet reported
        # Texts wait until their programs are compiled: meanwhile the slots go on.
        self._can_score = threading.Event()
        if not hasattr(self.engine, "weights"):  # it scores nothing
            self._can_score.set()

    @property
    def slots(self) -> int:
        return (self.fleet or self.engine).slots

    @property
    def context(self) -> int:
        return (self.fleet or self.engine).context

    def ready(self, built: BuiltEngine, seconds: float) -> EngineReady:
        num_segments, models = self.config.n_exits + 1, None
        if self.fleet is None:
            num_segments = self.engine.num_segments
        else:
            models = {name: member.config for name, member in self.fleet.members.items()}
        return EngineReady(
            built.config,
            built.tokenizer,
            built.template,
            self.slots,
            self.context,
            num_segments,
            seconds,
            models,
        )

    @property
    def idle(self) -> bool:
        scores = self._scores and self._can_score.is_set()
        return self.scheduler.idle and not (scores or self._refused or self._outputs)

    def warm_up(self) -> None:
        """Compile the programs that the first requests need. Those of a fleet are compiled.

        It fails at once where there is no memory for all slots.
        """
        if self.fleet is not None:
            return
        if self.scheduler.engine is not self.engine:
            jax.block_until_ready(self.engine.start())
        compile_joins(self.scheduler, self.scheduler.engine.slots)

    def compile_rest(self) -> None:
        """Compile the programs that score texts, and those of all slots.

        Another thread may run steps meanwhile.
        """
        if self.fleet is not None:
            return
        if not self._can_score.is_set():
            shorter = 1  # the shortest text of each length takes the least time
            for length in score_lengths(self.config.context_length):
                if shorter < self.engine.context:
                    self._scored(ScoreRequest("warm-up", (0,) * (shorter + 1), False))
                shorter = length
            self._can_score.set()
        if self.scheduler.engine is not self.engine:
            compile_joins(Scheduler(self.engine, steps=self._steps), self.slots)

    def serve_with_all_slots(self) -> None:
        """Continue with `engine`, all of whose programs are compiled, if another served first.

        Running requests keep their tokens, and run through the model once more to go on.
        """
        if self.fleet is None and self.scheduler.engine is not self.engine:
            self._outputs += self.scheduler.preempt_all()
            self.scheduler.replace_engine(self.engine, rows=[-1] * self.engine.slots)

    def handle(self, message: Any) -> None:
        """Apply a message; the following steps act on it."""
        match message:
            case EngineRequest(request_id):
                try:
                    self.scheduler.add_request(message)
                except ConfigError as error:
                    self._refused.append(RequestRefused(request_id, str(error)))
            case AbortRequest(request_id):
                self.scheduler.abort(request_id)  # does nothing if it ended meanwhile
                self._scores = [r for r in self._scores if r.request_id != request_id]
            case ScoreRequest():
                self._scores.append(message)

    def _scored(self, asked: ScoreRequest) -> RequestRefused | ScoreReply:
        try:
            require(self.fleet is None, "prompt", "to be scored", f"cannot be: {CHOOSES}")
            # One program serves requests with and without the most likely tokens.
            tokens = list(asked.tokens)
            scores = score(self.engine.weights, self.config, tokens, top_logprobs=True)
        except ConfigError as error:
            return RequestRefused(asked.request_id, str(error))
        return ScoreReply(
            asked.request_id, scores if asked.top_logprobs else scores._replace(top_logprobs=None)
        )

    def step(self) -> list[RequestRefused | ScoreReply | StepReport]:
        """Run a step, score at most one text so that slots go on, and return messages."""
        outgoing: list[RequestRefused | ScoreReply] = [*self._refused]
        self._refused = []
        if self._scores and self._can_score.is_set():
            outgoing.append(self._scored(self._scores.pop(0)))
        # A fleet also loads models while there are no requests.
        steps = self.fleet is not None or not self.idle
        outputs, self._outputs = self._outputs, []
        outputs += self.scheduler.step() if steps else []
        scheduler, room = self.scheduler, self.slots * self.context
        load = EngineLoad(
            len(scheduler.running),
            len(scheduler.waiting),
            min(scheduler.num_cached_tokens, room),
            room,
        )
        return [*outgoing, StepReport(tuple(outputs), load, self._report())]

    def _report(self) -> FleetReport | None:
        if self.fleet is None:
            return None
        report = self.fleet.report(self._decisions, self._points)
        for decision in report.decisions:
            if decision.expected is None or decision.choice in self._missing:
                continue
            if missed := self.fleet.controller.objective.missed(decision.expected):
                self._missing.add(decision.choice)
                (model, depth), why = decision.choice, f"is chosen, though it misses {missed}"
                warnings.warn(f"{model!r} with {depth} of its exits {why}", stacklevel=2)
        self._decisions += len(report.decisions)
        self._points += len(report.points)
        return report
