"""Requests to an engine in a process of its own: admission, streaming and cancellation.

A `Service` runs one engine process and restarts it if it ends. All results of a request arrive as
outputs; whatever happens to the engine, the last one says how the request ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from eejax.common.errors import ConfigError
from eejax.common.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_fields,
)
from eejax.helios.report import FleetReport
from eejax.inference.request import EngineRequest, FinishReason, RequestOutput, require_new_id
from eejax.inference.scoring import TextScores
from eejax.serving.engine_process import EngineProcess
from eejax.serving.messages import (
    AbortRequest,
    Build,
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

_log = logging.getLogger(__name__)

LATE = 0.5  # seconds in which an engine may still report a request past its deadline
STARTING, READY, DRAINING, DEAD, STOPPED = "starting", "ready", "draining", "dead", "stopped"
"""States of a service; dead: the engine ended, and another will be started."""


class EngineUnavailable(Exception):
    """The engine does not accept requests.

    Attributes:
      after: seconds until it may accept them.
    """

    def __init__(self, why: str, after: float):
        super().__init__(why)
        self.after = after


class QueueFull(EngineUnavailable):
    """The queue is full."""


@dataclasses.dataclass(frozen=True)
class ServiceOptions:
    """Options of a service.

    Attributes:
      waiting: maximum number of choices and scored prompts beyond those that the slots hold.
      steps: engine steps between two reads of new requests. Fewer steps answer sooner, more give
        more tokens a second.
      first_pause: seconds before the first restart of an engine, doubled each time.
      longest_pause: maximum seconds before a restart.
      grace: seconds in which running requests may finish when the service stops.
      silence: seconds without a sign of life after which an engine is ended and another started.
    """

    waiting: NonNegativeInt = 256
    steps: PositiveInt = 4
    first_pause: NonNegativeFloat = 1.0
    longest_pause: NonNegativeFloat = 60.0
    grace: NonNegativeFloat = 30.0
    silence: PositiveFloat = 600.0

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass
class _PendingRequest:
    message: EngineRequest | ScoreRequest
    replies: asyncio.Queue
    deadline: asyncio.TimerHandle | None = None
    late: bool = False

    @property
    def request_id(self) -> str:
        return self.message.request_id


class Service:
    """An engine that many clients use at once.

    `build` builds the engine in its own process, and must be picklable. All methods belong to the
    event loop in which `start` was called. `watch(name, value)` receives events for metrics: "load"
    with an `EngineLoad`; "report" with a `FleetReport`, which is also `report`; "state" with a
    state; "restart" with a reason; "starting" with what an engine does until all its programs are
    compiled, and "compiled" with the seconds that this took. It may be ready before.
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
        self.state, self.load = STOPPED, EngineLoad(0, 0, 0, 0)
        self.ready: EngineReady | None = None  # report of the last engine that was ready
        self.report: FleetReport | None = None  # the last one
        self.failure = ""  # why the last engine ended
        self.doing = ""  # what the engine does until all its programs are compiled
        self._pause = self.options.first_pause  # seconds before the next start
        self.restarts = 0
        self._build, self._clock = build, clock
        self._watch = watch or (lambda name, value: None)
        self._requests: dict[str, _PendingRequest] = {}
        self._leaving: set[str] = set()  # aborted requests that the engine may still have
        self._engine: EngineProcess | None = None
        self._changed, self._started = asyncio.Event(), asyncio.Event()
        self._compiled = asyncio.Event()  # all programs of the present engine are
        self._supervisor: asyncio.Task | None = None

    def announce(self) -> None:
        """Let requests wait for a `start` that comes later."""
        self._set(STARTING)

    async def start(self) -> EngineReady:
        """Start the engine and wait until it is ready.

        Raises:
          RuntimeError: if it cannot be started, with the reason.
        """
        self._set(STARTING)
        try:
            ready = await self._launch()
        finally:
            self._started.set()
        self._supervisor = asyncio.create_task(self._supervise())
        return ready

    async def stop(self, grace: float | None = None) -> None:
        """Refuse new requests, give running ones their `grace`, and end the engine."""
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
        self._fail_all()
        self._set(STOPPED)
        self._started.set()

    @property
    def retry_after(self) -> float:
        """Seconds after which clients should retry, from how long the last engine took to start."""
        return self._pause + (0.0 if self.ready is None else self.ready.seconds)

    async def until_started(self) -> None:
        """Wait while the first engine starts."""
        if self.state == STARTING:
            await self._started.wait()

    async def until_compiled(self) -> None:
        """Wait until all programs of an engine are compiled, so that measurements hold."""
        await self._compiled.wait()

    def require_ready(self) -> EngineReady:
        """Return `ready`. Raises `EngineUnavailable` if no engine was ready yet."""
        if self.ready is None:
            raise EngineUnavailable(f"the engine is {self.state}", self.retry_after)
        return self.ready

    @property
    def max_requests(self) -> int:
        """Maximum number of requests at a time.

        Raises:
          EngineUnavailable: if no engine was ready yet.
        """
        slots = self.require_ready().slots if self.report is None else self.report.slots
        return slots + self.options.waiting

    @property
    def active(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    async def stream(
        self, request: EngineRequest, *, seconds: float | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request, the last of which has a `finish`.

        Closing the iterator aborts the request. After `seconds` the request ends with "deadline".

        Raises:
          EngineUnavailable: if there is no engine.
          QueueFull: if too many requests wait.
          ConfigError: for a request that the engine refuses. All errors come before the first
            output.
        """
        pending = self._admit(request, seconds)
        try:
            while True:
                reply = await pending.replies.get()
                if isinstance(reply, RequestRefused):
                    raise ConfigError(reply.why)
                yield reply
                if reply.finish:
                    return
        finally:
            self._drop(pending)

    async def score(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        top_logprobs: bool = False,
        seconds: float | None = None,
    ) -> TextScores:
        """Return `inference.scoring.score` of a text.

        Raises as `stream` does, and in addition:

        Raises:
          EngineUnavailable: if the engine ends before it is done.
          TimeoutError: if it takes longer than `seconds`.
        """
        message = ScoreRequest(request_id, tuple(tokens), top_logprobs)
        pending = self._admit(message, seconds)
        try:
            reply = await pending.replies.get()
        finally:
            self._drop(pending)
        if isinstance(reply, RequestRefused):
            raise ConfigError(reply.why)
        if isinstance(reply, RequestOutput):
            if reply.finish == FinishReason.DEADLINE:
                raise TimeoutError("the text was not scored in time")
            raise EngineUnavailable("the engine ended", self.retry_after)
        return reply.scores

    def _admit(
        self, message: EngineRequest | ScoreRequest, seconds: float | None
    ) -> _PendingRequest:
        engine = self._engine
        if self.state != READY or engine is None:
            raise EngineUnavailable(f"the engine is {self.state}", self.retry_after)
        if len(self._requests) >= self.max_requests:
            raise QueueFull(f"{self.max_requests} requests are under way", 1.0)
        for taken in (self._requests, self._leaving):
            require_new_id(message.request_id, taken)
        pending = _PendingRequest(message, asyncio.Queue())
        self._requests[message.request_id] = pending
        if seconds is not None:
            loop = asyncio.get_running_loop()
            pending.deadline = loop.call_later(max(seconds, 0), self._expire, pending)
        engine.send(message)
        return pending

    def _expire(self, request: _PendingRequest) -> None:
        if self._requests.get(request.request_id) is not request:  # its end is already queued
            return
        request.late = True
        if self._engine is not None:
            self._engine.send(AbortRequest(request.request_id))
        # A busy engine may take long to answer.

        def expire() -> None:
            if self._requests.get(request.request_id) is request:
                self._reserve_id(request)
                self._deliver(RequestOutput(request.request_id, (), FinishReason.DEADLINE))

        request.deadline = asyncio.get_running_loop().call_later(LATE, expire)

    def _drop(self, request: _PendingRequest) -> None:
        """End a request that no client waits for any more, in whatever state it is."""
        if request.deadline is not None:
            request.deadline.cancel()
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
            self._reserve_id(request)
            if self._engine is not None:
                self._engine.send(AbortRequest(request.request_id))
        self._changed.set()

    def _reserve_id(self, request: _PendingRequest) -> None:
        """Reserve the id of a request that the engine may still have."""
        if isinstance(request.message, EngineRequest):  # the engine does not report dropped scores
            self._leaving.add(request.request_id)

    def _deliver(self, reply: RequestOutput | RequestRefused | ScoreReply) -> None:
        """Send a reply to its request, if that is still there."""
        request = self._requests.get(reply.request_id)
        if request is None:  # it was abandoned before this reply arrived
            return
        if isinstance(reply, RequestRefused | ScoreReply) or reply.finish:
            del self._requests[reply.request_id]
            self._changed.set()
            if request.late and getattr(reply, "finish", None) == FinishReason.ABORTED:
                reply = reply._replace(finish=FinishReason.DEADLINE)
        request.replies.put_nowait(reply)

    def _on_message(self, engine: EngineProcess, message: Any) -> None:
        if engine is not self._engine:
            return
        match message:
            case StepReport(outputs, load, report):
                self.load = load
                for output in outputs:
                    self._deliver(output)
                    if output.finish:
                        self._leaving.discard(output.request_id)
                self._notify("load", load)
                if report is not None:
                    self.report = report
                    self._notify("report", report)
            case RequestRefused() | ScoreReply():
                self._deliver(message)
                self._leaving.discard(message.request_id)

    def _fail_all(self) -> None:
        """End the requests of an engine that ended."""
        for id_ in [*self._requests]:
            self._deliver(RequestOutput(id_, (), FinishReason.LOST))
        self._leaving.clear()
        self.load = EngineLoad(0, 0, 0, self.load.capacity)
        self._notify("load", self.load)

    def _notify(self, name: str, value: Any) -> None:
        """Call `watch`; what fails there, such as a print to a closed terminal, stops nothing."""
        try:
            self._watch(name, value)
        except Exception:
            _log.exception("the callback watch failed for %r", name)

    def _set(self, state: str) -> None:
        self.state = state
        self._notify("state", state)

    async def _launch(self) -> EngineReady:
        engine = EngineProcess(self._build, self.options.steps)
        self._engine, self.report, self.doing = engine, None, ""
        self._compiled.clear()
        loop = asyncio.get_running_loop()
        first, ended = loop.create_future(), loop.create_future()

        def receive(message: Any) -> None:
            """Handle a message in the event loop; None means that the engine has ended."""
            engine.heard = self._clock()
            if isinstance(message, EngineStarting):
                self.doing = message.what
                self._notify("starting", message.what)
            elif isinstance(message, EngineCompiled):
                self.doing = ""
                self._compiled.set()
                self._notify("compiled", message.seconds)
            elif isinstance(message, EngineReady) and not first.done():
                first.set_result(message)
            elif message is None or isinstance(message, EngineFailed):
                if isinstance(message, EngineFailed):
                    engine.failure = message.why
                    return
                for future in (first, ended):
                    if not future.done():
                        future.set_result(None)
            else:
                self._on_message(engine, message)

        engine.listen(lambda message: loop.call_soon_threadsafe(receive, message))
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
        return ready

    async def _supervise(self) -> None:
        """Start another engine whenever one ends."""
        first, longest = self.options.first_pause, self.options.longest_pause
        while True:
            began = self._clock()
            engine = self._engine
            assert engine is not None  # `_launch` set it
            await self._end_of(engine)
            self._engine = None
            if self.state != DRAINING:
                self.doing = ""
                self._set(DEAD)
            self.failure = await asyncio.to_thread(engine.end)
            self._fail_all()
            if self.state == DRAINING:
                return
            if self._clock() - began > longest:
                self._pause = first  # it ran well for a while
            while True:
                self.restarts += 1
                self._notify("restart", self.failure)
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, longest)
                try:
                    await self._launch()
                    break
                except RuntimeError:
                    continue  # `failure` says why
                except OSError as error:  # no process or pipe can be created now
                    self.failure = str(error)

    async def _end_of(self, engine: EngineProcess) -> None:
        """Wait until an engine ends, and end it if it hangs."""
        while not self._ended.done():
            left = engine.heard + self.options.silence - self._clock()
            if left <= 0:
                engine.failure = f"it gave no sign of life for {self.options.silence:g} seconds"
                engine.process.kill()
                await self._ended
                return
            await asyncio.wait({self._ended}, timeout=left)
