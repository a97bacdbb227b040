"""What pages of the server share: limits, errors in OpenAI's form, and streams of events."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eejax.common.errors import ConfigError, DataError, require, require_count
from eejax.serving import protocol as form
from eejax.serving.answers import Defaults, Piece, asks, merged, pieces, renamed, watched
from eejax.serving.chat import Template
from eejax.serving.messages import Ready
from eejax.serving.metrics import Metrics
from eejax.serving.service import READY, Full, Service, Unavailable

FINISH = {"context": "length", "cancelled": "stop", "deadline": "timeout"}
"""What ends are called by OpenAI, where that is another name; timeout is eejax's own."""

ERRORS = {
    status: {"model": form.Error, "description": text}
    for status, text in {
        400: "The request cannot be answered as it is.", 401: "No valid key.",
        404: "There is no such model, or page.", 413: "The body is too large.",
        429: "As many requests wait as may.", 500: "The model's logits were not finite.",
        503: "The engine is not there.",
    }.items()
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class HttpOptions:
    """keys: of which clients must bring one, if there are any; body: most bytes of one; prompts:
    most of a request; n: most choices of a prompt; defaults: of models, how tokens leave."""

    keys: tuple[str, ...] = ()
    body: int = 4 * 2**20
    prompts: int = 64
    n: int = 16
    defaults: Mapping[str, Defaults] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name in ("body", "prompts", "n"):
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
        case ConfigError() | DataError():
            field = str(renamed(error) if isinstance(error, ConfigError) else error)
            param = field.split(" ", 1)[0].rstrip(":")
            return Failure(400, field, param=param if param.isidentifier() else None)
    return Failure(500, "something is wrong with the server; its log says what", code="internal")


class Server:
    """Models by name, and the answers of each."""

    def __init__(self, services: Mapping[str, Service], options: HttpOptions, metrics: Metrics):
        self.services, self.options, self.metrics = dict(services), options, metrics
        self.begun = int(time.time())
        self._templates: dict[str, Template | None] = {}

    def service(self, model: str | None) -> Service:
        if model is None and len(self.services) == 1:
            return next(iter(self.services.values()))
        if model not in self.services:
            known = ", ".join(map(repr, self.services))
            told = f"model = {model!r}: there is none of this name, but {known}."
            raise Failure(404, told, param="model", code="model_not_found")
        return self.services[model]

    def ready(self, service: Service) -> Ready:
        if service.ready is None:
            raise Unavailable(f"the engine is {service.state}", service.options.first_pause)
        return service.ready

    def template(self, model: str) -> Template:
        """A model's chat template. Raises Failure where it has none."""
        if model not in self._templates:
            found = self.ready(self.service(model)).template
            self._templates[model] = None if found is None else Template(*found)
        if self._templates[model] is None:
            told = f"model = {model!r}: has no chat template; ask /v1/completions."
            raise Failure(400, told, param="model", code="no_chat_template")
        return self._templates[model]

    def choices(
        self, wishes: form.Wishes, prompts: Sequence[Sequence[int]], limit: int | None, likely: int
    ) -> AsyncIterator[Piece]:
        """Pieces of all choices, prompt by prompt n of them."""
        service = self.service(wishes.model)
        ready, defaults = self.ready(service), self.options.defaults.get(wishes.model, Defaults())
        self._limited("n", wishes.n, self.options.n)
        self._limited("prompt", len(prompts), self.options.prompts)
        streams = []
        for prompt in prompts:
            for ask in asks(wishes, ready, prompt, limit, likely, defaults):
                seen = watched(self.metrics, wishes.model, ready, len(prompt))
                index = len(streams)
                streams.append(pieces(service, ask, index, wishes.stops, seen, wishes.timeout))
        return merged(streams)

    def _limited(self, field: str, value: int, most: int) -> None:
        if value > most:
            raise Failure(400, f"{field} = {value}: must be at most {most}.", param=field)


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
    first = errors[0]
    # A union tells what is wrong with each of its forms: the first is as good as another.
    where = [str(part) for part in first["loc"][1:] if not str(part).endswith("]")]
    param = where[0] if where else None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return Failure(400, "the body is not JSON: " + str(first.get("ctx", {}).get("error", "")))
    if first["type"] == "value_error":
        return Failure(400, message, param=message.split(":", 1)[0])
    if not where:
        told = "the body must be a JSON object, with Content-Type: application/json."
        return Failure(400, told)
    if first["type"] == "extra_forbidden":
        return Failure(400, f"{'.'.join(where)}: is no field of this request.", param=param)
    value = json.dumps(first.get("input"), default=str)
    value = value if len(value) <= 80 else value[:77] + "..."
    return Failure(400, f"{'.'.join(where) or 'body'} = {value}: {message}.", param=param)


class Guard:
    """What every request passes first: its id, its key, and how large it is."""

    OPEN = ("/", "/dashboard", "/health", "/version", "/metrics", "/openapi.json")

    def __init__(self, inner: ASGIApp, options: HttpOptions):
        self._inner, self._options = inner, options
        self._keys = [key.encode() for key in options.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._inner(scope, receive, send)
        headers = {k.lower(): v for k, v in scope["headers"]}
        given = headers.get(b"x-request-id", b"")
        plain = 0 < len(given) <= 128 and all(33 <= c < 127 for c in given)
        number = given if plain else uuid.uuid4().hex.encode()

        over = False

        async def named(message: Message) -> None:
            if over:  # what is made of a body that was cut off is no answer
                return
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", number)]
            await send(message)

        if self._keys and scope["path"] not in self.OPEN and not self._known(headers):
            told = "bring one of the server's keys: Authorization: Bearer KEY"
            refused = Failure(401, told, code="invalid_api_key").response
            return await refused(scope, receive, named)
        most, seen = self._options.body, 0
        large = Failure(413, f"the body is larger than {most} bytes", code="body_too_large")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > most:
            return await large.response(scope, receive, named)

        async def limited() -> Message:
            nonlocal seen, over
            message = await receive()
            seen += len(message.get("body", b""))
            over = over or seen > most
            return {"type": "http.disconnect"} if over else message

        await self._inner(scope, limited, named)
        if over:
            over = False
            await large.response(scope, receive, named)

    def _known(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # All of them, so that how long it takes tells nothing.
        same = [hmac.compare_digest(key.strip(), own) for own in self._keys]
        return scheme.lower() == b"bearer" and any(same)


async def while_connected(request: Request, work: Any) -> Any:
    """The result of `work`, a coroutine, which ends where the client leaves."""
    task = asyncio.ensure_future(work)

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise asyncio.CancelledError
        return task.result()
    finally:
        for other in (task, leaving):
            other.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def streamed(chunks: AsyncIterator[dict]) -> Response:
    """Server-sent events of chunks, then [DONE]; an error before the first is a plain answer."""
    first = await anext(chunks)

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
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def healthy(services: Mapping[str, Service]) -> bool:
    return all(service.state == READY for service in services.values())
