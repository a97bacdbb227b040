"""What pages of the server share: limits, errors in OpenAI's form, and streams of events."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import itertools
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eejax.common.errors import ConfigError, DataError, require, require_count
from eejax.data.chat import Template
from eejax.serving import protocol as form
from eejax.serving.answers import Defaults, Piece, asks, merged, pieces, renamed
from eejax.serving.messages import Ask, Ready
from eejax.serving.metrics import Metrics, Watched
from eejax.serving.service import READY, Full, Service, Unavailable

_log = logging.getLogger(__name__)

FINISH = {"context": "length", "cancelled": "stop", "deadline": "timeout"}
"""What ends are called by OpenAI, where that is another name; timeout is eejax's own."""

ERRORS = {
    status: {"model": form.Error, "description": text}
    for status, text in {
        400: "The request cannot be answered as it is.", 401: "No valid key.",
        404: "There is no such model, or page.", 408: "The prompt was not scored in time.",
        413: "The body is too large.", 415: "The body is compressed.",
        429: "As many requests wait as may.", 500: "The model's logits were not finite.",
        503: "The engine is not there, or the server ends.",
    }.items()
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class HttpOptions:
    """keys: of which clients must bring one, if there are any; body: most bytes of one; requests:
    most at a time, whatever they ask; prompts: most of a request; n: most choices of a prompt;
    defaults: of models, how tokens leave; allow_special: names of special tokens in text of clients
    are these tokens, where otherwise they are text."""

    keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    body: int = 4 * 2**20
    requests: int = 1024
    prompts: int = 64
    n: int = 16
    defaults: Mapping[str, Defaults] = dataclasses.field(default_factory=dict)
    allow_special: bool = False

    def __post_init__(self):
        for name in ("body", "requests", "prompts", "n"):
            require_count(name, getattr(self, name))
        require(all(self.keys), "keys", "an empty one", "must be texts of a character at least")


class Failure(Exception):
    """An answer in OpenAI's form of an error."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        after: float | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.after = status, param, code, after

    @property
    def body(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": dict(message=str(self), type=kind, param=self.param, code=self.code)}

    @property
    def response(self) -> JSONResponse:
        headers = {} if self.after is None else {"Retry-After": str(max(1, round(self.after)))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def failure(error: Exception) -> Failure:
    """The answer to an error."""
    match error:
        case Failure():
            return error
        case Full():
            return Failure(429, str(error), code="queue_full", after=error.after)
        case Unavailable():
            return Failure(503, str(error), code="engine_unavailable", after=error.after)
        case ConfigError():
            said = str(renamed(error))
            param = re.split(r"[.\[]", said.split(" ", 1)[0].rstrip(":"))[0]
            return Failure(400, said, param=param if param.isidentifier() else None)
        case DataError():
            return Failure(400, str(error))
        case TimeoutError():
            return Failure(408, str(error), param="timeout", code="timeout")
    _log.error("an error of the server's own", exc_info=error)
    return Failure(500, "something is wrong with the server; its log says what", code="internal")


class Left(Exception):
    """Nobody waits for the answer any more."""


class Server:
    """Models by name, and the answers of each.

    under_way: requests that are being answered; draining: no more are taken.
    """

    def __init__(self, services: Mapping[str, Service], options: HttpOptions, metrics: Metrics):
        self.services, self.options, self.metrics = dict(services), options, metrics
        self.begun = int(time.time())
        self.under_way, self.draining = 0, False
        self._templates: dict[str, Template | None] = {}
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self._changed.set()

    async def drain(self, seconds: float) -> None:
        """Takes no more requests, and waits until those under way are answered, or so long."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.under_way:
                    self._changed.clear()
                    await self._changed.wait()

    @property
    def healthy(self) -> bool:
        engines = all(service.state == READY for service in self.services.values())
        return engines and not self.draining

    def service(self, model: str | None) -> Service:
        if model is None and len(self.services) == 1:
            return next(iter(self.services.values()))
        if model not in self.services:
            known = ", ".join(map(repr, self.services))
            if model is None:
                raise Failure(400, f"model: is required; there are {known}.", param="model")
            told = f"model = {model!r}: there is none of this name, but {known}."
            for name, service in self.services.items():
                if service.ready is not None and model in (service.ready.models or ()):
                    told = f"model = {model!r}: is one of those that {name!r} chooses from: ask it."
            raise Failure(404, told, param="model", code="model_not_found")
        return self.services[model]

    def ready(self, service: Service) -> Ready:
        if service.ready is None:
            raise Unavailable(f"the engine is {service.state}", service.pause)
        return service.ready

    def template(self, model: str) -> Template:
        """A model's chat template. Raises Failure where it has none."""
        if model not in self._templates:
            found = self.ready(self.service(model)).template
            # Where text of users may hold special tokens, nothing in it is marked.
            tokenizer = self.ready(self.service(model)).tokenizer
            names = () if self.options.allow_special else tokenizer.control
            self._templates[model] = None if found is None else Template(*found, names)
        if self._templates[model] is None:
            chooses = self.ready(self.service(model)).chooses
            where = "the folders of its models" if chooses else "its folder"
            told = (
                f"model = {model!r}: has no chat template; ask /v1/completions, or put a "
                f"chat_template.jinja into {where} and start the server again."
            )
            raise Failure(400, told, param="model", code="no_chat_template")
        return self._templates[model]

    def asks(
        self, wishes: form.Wishes, prompts: Sequence[Sequence[int]], limit: int | None, likely: int
    ) -> list[Ask]:
        """Of all choices, prompt by prompt n of them. Raises for what cannot be asked, however idle
        the engine is."""
        service = self.service(wishes.model)
        ready, defaults = self.ready(service), self.options.defaults.get(wishes.model, Defaults())
        n, count, most = wishes.n, len(prompts), self.options.prompts
        if n > self.options.n:
            raise Failure(400, f"n = {n}: must be at most {self.options.n}.", param="n")
        if not 0 < count <= most:
            told = f"prompt = {count} prompts: must be 1 to {most} of them."
            raise Failure(400, told, param="prompt")
        if count * n > service.most:
            told = f"n = {n}: with {count} prompts must be at most {service.most} choices."
            raise Failure(400, told, param="n")
        made = (asks(wishes, ready, prompt, limit, likely, defaults) for prompt in prompts)
        return list(itertools.chain.from_iterable(made))

    def choices(
        self, wishes: form.Wishes, asked: Sequence[Ask], begin: float
    ) -> AsyncIterator[Piece]:
        """Pieces of all choices. begin: when the request came, by `time.monotonic`."""
        service = self.service(wishes.model)

        def one(index: int, ask: Ask) -> AsyncIterator[Piece]:
            prompt = 0 if index % wishes.n else len(ask.prompt)
            seen = Watched(self.metrics, wishes.model, begin, prompt)
            return pieces(service, ask, index, wishes.stops, seen, wishes.timeout)

        return merged([one(index, ask) for index, ask in enumerate(asked)])


def ended(finish: str) -> str:
    """A finish in OpenAI's words. Raises Failure for an end that is none of an answer."""
    if finish == "error":
        raise Failure(500, "the model's logits are not finite", code="not_finite")
    if finish == "lost":
        raise Failure(503, "the engine ended before the answer", code="engine_unavailable", after=1)
    return FINISH.get(finish, finish)


def usage(prompts: Sequence[Sequence[int]], counts: Mapping[int, int]) -> dict[str, int]:
    given, made = sum(map(len, prompts)), sum(counts.values())
    return dict(prompt_tokens=given, completion_tokens=made, total_tokens=given + made)


def misshapen(errors: Sequence[Mapping[str, Any]]) -> Failure:
    """What to say of a body that is not of its form."""
    # A union tells what is wrong with each of its forms. Those of another type say least.
    near = lambda e: (not e["type"].endswith("_type"), sum(isinstance(p, int) for p in e["loc"]))
    of = lambda e: e["loc"][1:2]
    first = max((e for e in errors if of(e) == of(errors[0])), key=near)
    # Forms of a union are named in places between the fields.
    parts = [p for i, p in enumerate(first["loc"][1:]) if not i or isinstance(p, int) or p in NAMES]
    where, param = ".".join(map(str, parts)), str(parts[0]) if parts else None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return Failure(400, "the body is not JSON: " + str(first.get("ctx", {}).get("error", "")))
    if first["type"] == "value_error":
        return Failure(400, message, param=re.split("[ :]", message)[0])
    if first["type"] == "missing":
        return Failure(400, f"{where}: is required.", param=param)
    if not where:
        told = "the body must be a JSON object, with Content-Type: application/json."
        return Failure(400, told)
    if first["type"] == "extra_forbidden":
        return Failure(400, f"{where}: is no field of this request.", param=param)
    value = json.dumps(first.get("input"), default=str)
    value = value if len(value) <= 80 else value[:77] + "..."
    return Failure(400, f"{where} = {value}: {message}.", param=param)


NAMES = {*form.Message.model_fields, *form.StreamOptions.model_fields}


class Guard:
    """What every request passes first: its id, its key, how large it is, and how many there are."""

    OPEN = ("/", "/dashboard", "/health", "/version", "/metrics", "/openapi.json")

    def __init__(self, inner: ASGIApp, server: Server):
        self._inner, self._server, self._options = inner, server, server.options
        self._keys = [key.encode() for key in server.options.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._inner(scope, receive, send)
        headers = {k.lower(): v for k, v in scope["headers"]}
        given = headers.get(b"x-request-id", b"")
        plain = 0 < len(given) <= 128 and all(33 <= c < 127 for c in given)
        number = given if plain else uuid.uuid4().hex.encode()
        over = begun = False

        async def named(message: Message) -> None:
            nonlocal begun
            if over:  # what is made of a body that was cut off is no answer
                return
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", number)]
                begun = True
            await send(message)

        # Under a prefix, as Ray Serve's routes, the path has it too.
        if scope["path"].removeprefix(scope.get("root_path", "")) in self.OPEN:
            return await self._inner(scope, receive, named)
        if (refused := self._refused(headers)) is not None:
            return await refused.response(scope, receive, named)
        most, seen = self._options.body, 0

        async def limited() -> Message:
            nonlocal seen, over
            message = await receive()
            seen += len(message.get("body", b""))
            over = over or seen > most
            return {"type": "http.disconnect"} if over else message

        with self._server.answering():
            try:
                await self._inner(scope, limited, named)
            except Exception as error:
                told = failure(error)  # which logs it
                if not begun and not over:
                    await told.response(scope, receive, named)
            if over:
                over = False
                await self._large.response(scope, receive, named)

    @property
    def _large(self) -> Failure:
        most = self._options.body
        return Failure(413, f"the body is larger than {most} bytes", code="body_too_large")

    def _refused(self, headers: Mapping[bytes, bytes]) -> Failure | None:
        if self._keys and not self._known(headers):
            told = "bring one of the server's keys: Authorization: Bearer KEY"
            return Failure(401, told, code="invalid_api_key")
        if self._server.draining:
            return Failure(503, "the server ends", code="engine_unavailable", after=1)
        if self._server.under_way >= self._options.requests:
            told = f"{self._options.requests} requests are under way"
            return Failure(429, told, code="queue_full", after=1)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self._options.body:
            return self._large
        coding = headers.get(b"content-encoding", b"identity")
        if coding.lower() != b"identity":
            return Failure(415, f"Content-Encoding = {coding.decode('latin-1')!r}: must be none.")
        return None

    def _known(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # All of them, so that how long it takes tells nothing.
        same = [hmac.compare_digest(key.strip(), own) for own in self._keys]
        return scheme.lower() == b"bearer" and any(same)


async def while_connected(request: Request, work: Coroutine) -> Any:
    """The result of `work`, which ends where the client leaves. Raises Left there."""
    task = asyncio.ensure_future(work)

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Left
        return task.result()
    finally:
        for other in (task, leaving):
            other.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def streamed(request: Request, chunks: AsyncIterator[dict]) -> Response:
    """Server-sent events of chunks, then [DONE]; an error before the first is a plain answer."""

    async def one() -> dict:
        return await anext(chunks)

    try:
        first = await while_connected(request, one())
    except BaseException:
        await chunks.aclose()
        raise

    async def events() -> AsyncIterator[str]:
        async with contextlib.aclosing(chunks):
            try:
                yield event(first)
                async for chunk in chunks:
                    yield event(chunk)
            except Exception as error:
                yield event(failure(error).body)
            yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def event(chunk: dict) -> str:
    # In ASCII: some clients take U+2028 for the end of a line.
    return f"data: {json.dumps(chunk, allow_nan=False, separators=(',', ':'))}\n\n"
