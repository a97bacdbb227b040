"""Requests to an engine in a process of its own: admitted, streamed, cancelled, never mixed up.

One `Service` has one engine process, and starts another where that one ends. A request is told
everything by events; whatever becomes of the engine, the last one says how it ended.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import multiprocessing
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

from eejax.common.children import block_signals
from eejax.common.errors import ConfigError, require, require_count
from eejax.inference.engine import CALL
from eejax.inference.scheduler import Token
from eejax.inference.scoring import Scores
from eejax.serving import worker
from eejax.serving.messages import (
    Ask,
    Build,
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

LATE = 0.5  # seconds in which an engine may tell of a request whose time is over
STARTING, READY, DRAINING, DEAD, STOPPED = "starting", "ready", "draining", "dead", "stopped"
"""States of a service; dead: the engine ended, and another will be started."""


class Unavailable(Exception):
    """The engine is not there to ask; `after`: seconds until it may be."""

    def __init__(self, why: str, after: float):
        super().__init__(why)
        self.after = after


class Full(Unavailable):
    """As many requests wait as may."""


@dataclasses.dataclass(frozen=True)
class ServiceOptions:
    """waiting: most requests without a slot; steps: of the engine between two looks at what comes;
    first_pause, longest_pause: seconds before a new engine is started, doubled each time; grace:
    seconds that requests have to end once the service is told to; silence: seconds without a sign
    of life after which an engine is ended, and another started."""

    waiting: int = 256
    steps: int = CALL
    first_pause: float = 1.0
    longest_pause: float = 60.0
    grace: float = 30.0
    silence: float = 600.0

    def __post_init__(self):
        require_count("waiting", self.waiting, least=0)
        require_count("steps", self.steps)
        for name in ("first_pause", "longest_pause", "grace"):
            value = getattr(self, name)
            require(value >= 0, name, value, "must be at least 0")
        require(self.silence > 0, "silence", self.silence, "must be more than 0")


class Event(NamedTuple):
    """What came for a request: tokens, and how it ended: as `scheduler.Output.finish`, "deadline",
    or "lost", where the engine ended before it; "" while it goes on."""

    tokens: tuple[Token, ...]
    finish: str = ""


@dataclasses.dataclass
class _Request:
    number: int
    events: asyncio.Queue
    deadline: asyncio.TimerHandle | None = None
    late: bool = False


class Service:
    """An engine that many ask at once.

    `build` makes the engine in its own process, and has to be picklable. All methods belong to the
    event loop in which `start` was called. `watch(name, value)` is told of what happens, for
    metrics: "load" with a `Load`, "report" with a `FleetReport`, which is also `report`, "state"
    with a state, "restart" with a reason, "starting" with what an engine does until it is ready.
    """

    def __init__(
        self,
        build: Build,
        options: ServiceOptions | None = None,
        *,
        watch: Callable[[str, Any], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.options = options or ServiceOptions()
        self.state, self.ready, self.load = STOPPED, None, Load(0, 0, 0, 0)
        self.report: FleetReport | None = None  # the last one
        self.failure = ""  # why the last engine ended
        self._pause = self.options.first_pause  # seconds before the next start
        self.restarts = 0
        self._build, self._clock = build, clock
        self._watch = watch or (lambda name, value: None)
        self._requests: dict[int, _Request] = {}
        self._number, self._engine = 0, None
        self._changed = asyncio.Event()
        self._supervisor: asyncio.Task | None = None

    async def start(self) -> Ready:
        """Starts the engine and waits until it is ready. Raises RuntimeError where it is not to be
        had, with the reason."""
        self._set(STARTING)
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise())
        return self.ready

    async def stop(self, grace: float | None = None) -> None:
        """Takes no more requests, gives those there are their `grace`, and ends the engine."""
        if self.state == STOPPED:
            return
        self._set(DRAINING)
        end = self._clock() + (self.options.grace if grace is None else grace)
        while self._requests and self._engine is not None and self._clock() < end:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), end - self._clock())
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
            self._engine = None
        self._lose()
        self._set(STOPPED)

    @property
    def pause(self) -> float:
        """Seconds after which to ask again, as far as known: an engine that is started takes as
        long as the last one did."""
        return self._pause + (0.0 if self.ready is None else self.ready.seconds)

    @property
    def most(self) -> int:
        """Requests that there may be at a time."""
        slots = self.ready.slots if self.report is None else self.report.slots
        return slots + self.options.waiting

    @property
    def active(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    async def ask(self, ask: Ask, *, seconds: float | None = None) -> AsyncIterator[Event]:
        """The events of a request, the last of which has a `finish`. Whoever leaves the iteration
        cancels the request. seconds: after which it ends with "deadline".

        Raises Unavailable where there is no engine, Full where too many wait, and ConfigError for
        what the engine refuses, all before the first event.
        """
        request = self._admit(lambda number: Submit(number, ask), seconds)
        try:
            while True:
                event = await request.events.get()
                if isinstance(event, Refused):
                    raise ConfigError(event.why)
                yield event
                if event.finish:
                    return
        finally:
            self._leave(request)

    async def score(
        self, tokens: Sequence[int], *, exit: int | None = None, likely: bool = False,
        seconds: float | None = None,
    ) -> Scores:  # fmt: skip
        """`inference.scoring.score` of a text. Raises as `ask`, Unavailable where the engine ends
        before it is done, and TimeoutError where it takes longer than `seconds`."""
        asked = lambda number: ScoreRequest(number, tuple(tokens), exit, likely)
        request = self._admit(asked, seconds)
        try:
            told = await request.events.get()
        finally:
            self._leave(request)
        if isinstance(told, Refused):
            raise ConfigError(told.why)
        if isinstance(told, Event):
            if told.finish == "deadline":
                raise TimeoutError("the text was not scored in time")
            raise Unavailable("the engine ended", self.pause)
        return told.scores

    def _admit(self, message: Callable[[int], Any], seconds: float | None) -> _Request:
        if self.state != READY:
            raise Unavailable(f"the engine is {self.state}", self.pause)
        if len(self._requests) >= self.most:
            raise Full(f"{self.most} requests are under way", 1.0)
        self._number += 1
        request = _Request(self._number, asyncio.Queue())
        self._requests[request.number] = request
        if seconds is not None:
            loop = asyncio.get_running_loop()
            request.deadline = loop.call_later(max(seconds, 0), self._expire, request)
        self._engine.send(message(request.number))
        return request

    def _expire(self, request: _Request) -> None:
        request.late = True
        if self._engine is not None:
            self._engine.send(Cancel(request.number))
        # An engine that is busy with something else may take long to answer.
        told = lambda: self._tell(request.number, Event((), "deadline"))
        request.deadline = asyncio.get_running_loop().call_later(LATE, told)

    def _leave(self, request: _Request) -> None:
        """Nobody listens any more: ends the request wherever it is."""
        if request.deadline is not None:
            request.deadline.cancel()
        if self._requests.pop(request.number, None) is not None:
            if self._engine is not None:
                self._engine.send(Cancel(request.number))
        self._changed.set()

    def _tell(self, number: int, event: Any) -> None:
        """An event for a request, if it is still there."""
        request = self._requests.get(number)
        if request is None:  # it left, and its end was on the way
            return
        if isinstance(event, Refused | Scored) or event.finish:
            del self._requests[number]
            self._changed.set()
            if request.late and getattr(event, "finish", "") == "cancelled":
                event = event._replace(finish="deadline")
        request.events.put_nowait(event)

    def _heard(self, engine: _Engine, message: Any) -> None:
        if engine is not self._engine:
            return
        match message:
            case Progress(outputs, load, report):
                self.load = load
                self._watch("load", load)
                if report is not None:
                    self.report = report
                    self._watch("report", report)
                for number, tokens, finish in outputs:
                    self._tell(number, Event(tokens, finish))
            case Refused(number, _) | Scored(number, _):
                self._tell(number, message)

    def _lose(self) -> None:
        """Requests of an engine that ended."""
        for number in [*self._requests]:
            self._tell(number, Event((), "lost"))
        self.load = Load(0, 0, 0, self.load.room)
        self._watch("load", self.load)

    def _set(self, state: str) -> None:
        self.state = state
        self._watch("state", state)

    async def _launch(self) -> None:
        engine = _Engine(self._build, self.options.steps)
        self._engine, self.report = engine, None
        loop = asyncio.get_running_loop()
        first, ended = loop.create_future(), loop.create_future()

        def hear(message: Any) -> None:
            """In the loop; None where the engine has ended."""
            engine.heard = self._clock()
            if isinstance(message, Starting):
                self._watch("starting", message.what)
            elif isinstance(message, Ready) and not first.done():
                first.set_result(message)
            elif message is None or isinstance(message, Failed):
                if isinstance(message, Failed):
                    engine.failure = message.why
                    return
                for future in (first, ended):
                    if not future.done():
                        future.set_result(None)
            else:
                self._heard(engine, message)

        engine.listen(lambda message: loop.call_soon_threadsafe(hear, message))
        try:
            ready = await first
        except asyncio.CancelledError:
            await asyncio.to_thread(engine.close)
            raise
        if ready is None:
            self.failure = await asyncio.to_thread(engine.end)
            self._engine = None
            raise RuntimeError(f"the engine did not start: {self.failure}")
        self.ready, self._ended = ready, ended
        if self.state != DRAINING:
            self._set(READY)

    async def _supervise(self) -> None:
        """Starts another engine whenever one ends."""
        first, longest = self.options.first_pause, self.options.longest_pause
        while True:
            began = self._clock()
            await self._end_of(self._engine)
            engine, self._engine = self._engine, None
            if self.state != DRAINING:
                self._set(DEAD)
            self.failure = await asyncio.to_thread(engine.end)
            self._lose()
            if self.state == DRAINING:
                return
            if self._clock() - began > longest:
                self._pause = first  # it ran well for a while
            while True:
                self.restarts += 1
                self._watch("restart", self.failure)
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, longest)
                try:
                    await self._launch()
                    break
                except RuntimeError:
                    continue  # `failure` says why
                except OSError as error:  # no process, or no pipe, is to be had now
                    self.failure = str(error)

    async def _end_of(self, engine: _Engine) -> None:
        """Waits until an engine ends, and ends one that hangs."""
        while not self._ended.done():
            left = engine.heard + self.options.silence - self._clock()
            if left <= 0:
                engine.failure = f"it gave no sign of life for {self.options.silence:g} seconds"
                engine.process.kill()
                await self._ended
                return
            await asyncio.wait({self._ended}, timeout=left)


class _Engine:
    """An engine's process, and the threads that write to it and read from it; heard: when it last
    gave a sign of life."""

    def __init__(self, build: Build, steps: int):
        context = multiprocessing.get_context("spawn")  # JAX does not survive a fork
        self._pipe, theirs = context.Pipe()
        self.failure, self.heard = "", 0.0
        self.process = context.Process(
            target=worker.main, args=(theirs, build, steps), name="eejax-engine", daemon=True
        )
        resource_tracker.ensure_running()  # its start would let signals through again
        with block_signals():
            self.process.start()
        # It ignores signals: who forgot to stop a service would wait for it at their own end.
        atexit.register(self.process.kill)
        theirs.close()
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, message: Any) -> None:
        self._outbox.put(message)

    def listen(self, hear: Callable[[Any], None]) -> None:
        """hear(message) in a thread, for each that comes, and hear(None) once none will."""

        def read() -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                with contextlib.suppress(EOFError, OSError):
                    while True:
                        hear(self._pipe.recv())
                hear(None)

        threading.Thread(target=read, daemon=True).start()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._pipe.send(message)

    def end(self) -> str:
        """Waits for a process that ends, and says why it does."""
        self._outbox.put(None)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._pipe.close()
        atexit.unregister(self.process.kill)
        return self.failure or f"its process ended with status {self.process.exitcode}"

    def close(self) -> None:
        """Ends the process."""
        self._outbox.put(None)
        self.process.kill()
        self.process.join()
        self._pipe.close()
        atexit.unregister(self.process.kill)
