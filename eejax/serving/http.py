"""Shared parts of routes: limits, errors in OpenAI's form, disconnects, and event streams."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import itertools
import json
import logging
import os
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eejax.common.errors import ConfigError, DataError, require
from eejax.common.fields import PositiveInt, check_fields
from eejax.data.chat import ChatTemplate
from eejax.inference.request import EngineRequest, FinishReason
from eejax.serving import protocol as form
from eejax.serving.answers import (
    ChoiceDelta,
    ExitDefaults,
    choice_deltas,
    engine_requests,
    merged,
    rename_field,
)
from eejax.serving.messages import EngineReady
from eejax.serving.metrics import ChoiceMetrics, ServerMetrics
from eejax.serving.service import READY, EngineUnavailable, QueueFull, Service

_log = logging.getLogger(__name__)

FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
    FinishReason.ABORTED: "stop",
    FinishReason.DEADLINE: "timeout",
}
"""OpenAI's finish reasons; timeout is eejax's own. Other finishes are errors."""

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": form.ErrorResponse, "description": text}
    for status, text in {
        400: "The request cannot be answered as it is.",
        401: "No valid key.",
        404: "There is no such model or page.",
        408: "The prompt was not scored in time, or the engine did not start in time.",
        413: "The body is too large.",
        415: "The body is compressed.",
        429: "The queue is full.",
        500: "The model's logits were not finite.",
        503: "The engine is not available, or the server is shutting down.",
    }.items()
}


KEYS = "EEJAX_KEYS"


@dataclasses.dataclass(frozen=True)
class HttpOptions:
    """Options of the HTTP server.

    Attributes:
      keys: API keys; if there are any, clients must send one of them.
      body: maximum bytes of a request body.
      requests: maximum number of requests at a time.
      prompts: maximum number of prompts of a request.
      n: maximum number of choices of a prompt.
      defaults: exit rules by model.
      allow_special: names of special tokens in clients' text, such as <|im_end|>, become these
        tokens. By default they stay text, and only the chat template writes special tokens.
    """

    keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    body: PositiveInt = 4 * 2**20
    requests: PositiveInt = 1024
    prompts: PositiveInt = 64
    n: PositiveInt = 16
    defaults: Mapping[str, ExitDefaults] = dataclasses.field(default_factory=dict)
    allow_special: bool = False

    def __post_init__(self):
        # First, and by itself: an error that names a key would show it in logs.
        good = isinstance(self.keys, tuple | list) and all(isinstance(k, str) for k in self.keys)
        require(good, "HttpOptions.keys", "(hidden)", "must be a tuple of strings")
        allowed = "must be strings of at least one character"
        require(all(self.keys), "HttpOptions.keys", "an empty one", allowed)
        check_fields(self)


def environment_keys() -> tuple[str, ...]:
    """Return the API keys of the environment variable `KEYS`, separated by commas."""
    return tuple(filter(None, map(str.strip, os.environ.get(KEYS, "").split(","))))


class APIError(Exception):
    """An error response in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        after: float | None = None,
    ):
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


def api_error(error: Exception) -> APIError:
    """Return the response that reports an error."""
    match error:
        case APIError():
            return error
        case QueueFull():
            return APIError(429, str(error), code="queue_full", after=error.after)
        case EngineUnavailable():
            return APIError(503, str(error), code="engine_unavailable", after=error.after)
        case ConfigError():
            said = str(rename_field(error))
            param = re.split(r"[.\[]", said.split(" ", 1)[0].rstrip(":"))[0]
            return APIError(400, said, param=param if param.isidentifier() else None)
        case DataError():
            return APIError(400, str(error))
        case TimeoutError():
            return APIError(408, str(error), param="timeout", code="timeout")
    _log.error("internal server error", exc_info=error)
    return APIError(500, "internal server error; the server's log has the cause", code="internal")


class ModelServer:
    """Models by name, and their responses.

    Attributes:
      created: Unix time of the server's start in seconds.
      under_way: number of requests that are being answered.
      draining: whether new requests are refused.
    """

    def __init__(
        self, services: Mapping[str, Service], options: HttpOptions, metrics: ServerMetrics
    ):
        self.services, self.options, self.metrics = dict(services), options, metrics
        self.created = int(time.time())
        self.under_way, self.draining = 0, False
        self._templates: dict[str, ChatTemplate | None] = {}
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as being answered until the context ends."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self._changed.set()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait for the running ones, at most this many seconds."""
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
        """Return a model's service; without a name that of the only model.

        Raises:
          APIError: if there is no such model, or several and no name.
        """
        if model is None and len(self.services) == 1:
            return next(iter(self.services.values()))
        if model not in self.services:
            known = ", ".join(map(repr, self.services))
            if model is None:
                raise APIError(400, f"model: is required; there are {known}.", param="model")
            message = f"model = {model!r}: there is none of this name; there are {known}."
            for name, service in self.services.items():
                if service.ready is not None and model in (service.ready.models or ()):
                    message = (
                        f"model = {model!r}: is one of those that {name!r} chooses from: "
                        f"request {name!r}."
                    )
            raise APIError(404, message, param="model", code="model_not_found")
        return self.services[model]

    async def until_ready(self, model: str | None, timeout: float | None = None) -> EngineReady:
        """Return what a model's engine reported when it was ready; wait for one that starts.

        Raises:
          APIError: as `service`.
          EngineUnavailable: if no engine was ready yet and none starts.
          TimeoutError: if it takes longer than `timeout` seconds.
        """
        service = self.service(model)
        try:
            async with asyncio.timeout(timeout):
                await service.until_started()
        except TimeoutError as error:
            raise TimeoutError("the engine was not ready in time") from error
        return service.require_ready()

    def template(self, model: str) -> ChatTemplate:
        """Return a model's chat template. Raises `APIError` if it has none."""
        if model not in self._templates:
            ready = self.service(model).require_ready()
            found = ready.template
            # Where users' text may hold special tokens, nothing in it is marked.
            names = () if self.options.allow_special else tuple(ready.tokenizer.control)
            self._templates[model] = None if found is None else ChatTemplate(*found, names)
        template = self._templates[model]
        if template is None:
            chooses = self.service(model).require_ready().chooses
            where = "the folders of its models" if chooses else "its folder"
            message = (
                f"model = {model!r}: has no chat template; use /v1/completions, or put a "
                f"chat_template.jinja into {where} and restart the server."
            )
            raise APIError(400, message, param="model", code="no_chat_template")
        return template

    def engine_requests(
        self,
        request_id: str,
        body: form.GenerationRequest,
        prompts: Sequence[Sequence[int]],
        limit: int | None,
        top_logprobs: int,
    ) -> list[EngineRequest]:
        """Return the engine requests of all choices, n for each prompt; none where limit is 0.

        Their ids consist of the response's id and the index of the choice.

        Raises:
          APIError: for a request that could never be accepted, however idle the engine is.
        """
        service = self.service(body.model)
        ready = service.require_ready()
        defaults = self.options.defaults.get(body.model, ExitDefaults())
        n, count, most = body.n, len(prompts), self.options.prompts
        if n > self.options.n:
            raise APIError(400, f"n = {n}: must be at most {self.options.n}.", param="n")
        if not 0 < count <= most:
            message = f"prompt = {count} prompts: must be 1 to {most} prompts."
            raise APIError(400, message, param="prompt")
        # A server that chooses has fewer slots at times; those who do not fit then get 429.
        most = ready.slots + service.options.waiting
        if count * n > most:
            message = f"n = {n}: with {count} prompts must be at most {most} choices."
            raise APIError(400, message, param="n")
        made = (
            engine_requests(
                [f"{request_id}-{index}" for index in range(i * n, i * n + n)],
                body,
                ready,
                prompt,
                limit,
                top_logprobs,
                defaults,
            )
            for i, prompt in enumerate(prompts)
        )
        return list(itertools.chain.from_iterable(made))

    def choices(
        self, body: form.GenerationRequest, requests: Sequence[EngineRequest], begin: float
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield the deltas of all choices; `begin` is the request's arrival by `time.monotonic`."""
        service = self.service(body.model)

        def one(index: int, request: EngineRequest) -> AsyncGenerator[ChoiceDelta, None]:
            prompt = 0 if index % body.n else len(request.prompt)
            seen = ChoiceMetrics(self.metrics, body.model, begin, prompt)
            left = remaining(body.timeout, begin)
            return choice_deltas(service, request, index, body.stop_strings, seen, left)

        return merged([one(index, request) for index, request in enumerate(requests)])


def remaining(timeout: float | None, begin: float) -> float | None:
    """Return the seconds that are left of a request's timeout; None without one.

    Args:
      timeout: seconds that the request may take.
      begin: its arrival by `time.monotonic`.
    """
    return None if timeout is None else timeout - (time.monotonic() - begin)


def not_finite() -> APIError:
    """Return the error of a model whose logits are not finite."""
    return APIError(500, "the model's logits are not finite", code="not_finite")


def finish_reason(finish: FinishReason) -> str:
    """Return OpenAI's name of a finish. Raises `APIError` where no answer ends that way."""
    if finish == FinishReason.ERROR:
        raise not_finite()
    if finish == FinishReason.LOST:
        raise APIError(
            503, "the engine ended before the answer", code="engine_unavailable", after=1
        )
    return FINISH[finish]


def usage(prompts: Sequence[Sequence[int]], counts: Mapping[int, int]) -> dict[str, int]:
    """Return OpenAI's usage of prompts and of numbers of generated tokens by choice."""
    given, made = sum(map(len, prompts)), sum(counts.values())
    return dict(prompt_tokens=given, completion_tokens=made, total_tokens=given + made)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Return the error of a body that does not match its model."""

    # A union reports an error for each of its forms. Those of another type are least helpful.
    def near(e):
        return (not e["type"].endswith("_type"), sum(isinstance(p, int) for p in e["loc"]))

    def of(e):
        return e["loc"][1:2]

    first = max((e for e in errors if of(e) == of(errors[0])), key=near)
    # The location names forms of a union between the fields.
    location = first["loc"][1:]
    names = {*NAMES, *(location[-1:] if first["type"] == "extra_forbidden" else ())}
    parts = [p for i, p in enumerate(location) if not i or isinstance(p, int) or p in names]
    where, param = ".".join(map(str, parts)), str(parts[0]) if parts else None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return APIError(400, "the body is not JSON: " + str(first.get("ctx", {}).get("error", "")))
    if first["type"] == "value_error":
        return APIError(400, message, param=re.split("[ :]", message)[0])
    if not where:
        message = (
            "the body must be a JSON object, with Content-Type: application/json and valid Unicode "
            "field names."
        )
        return APIError(400, message)
    if first["type"] == "missing":
        return APIError(400, f"{where}: is required.", param=param)
    if first["type"] == "extra_forbidden":
        return APIError(400, f"{where}: is not a field of this request.", param=param)
    value = json.dumps(first.get("input"), default=str)
    value = value if len(value) <= 80 else value[:77] + "..."
    return APIError(400, f"{where} = {value}: {message}.", param=param)


NAMES = {*form.ChatMessage.model_fields, *form.StreamOptions.model_fields}


def body_too_large(limit: int) -> APIError:
    """Return the error of a body of more than `limit` bytes."""
    return APIError(413, f"the body is larger than {limit} bytes", code="body_too_large")


class RequestGuard:
    """Middleware that gives each request an id and refuses requests that are not allowed.

    It checks keys, the number of requests, and the headers. Bodies without a stated length are
    counted by the middleware behind it.
    """

    OPEN = ("/", "/dashboard", "/health", "/version", "/metrics", "/openapi.json")

    def __init__(self, inner: ASGIApp, server: ModelServer):
        self._inner, self._server, self._options = inner, server, server.options
        self._keys = [key.encode() for key in server.options.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._inner(scope, receive, send)
        headers = {k.lower(): v for k, v in scope["headers"]}
        given = headers.get(b"x-request-id", b"")
        plain = 0 < len(given) <= 128 and all(33 <= c < 127 for c in given)
        header_id = given if plain else uuid.uuid4().hex.encode()
        response_started = False

        async def named(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", header_id)]
                response_started = True
            await send(message)

        # Under a prefix, as in Ray Serve's routes, the path includes it.
        if scope["path"].removeprefix(scope.get("root_path", "")) in self.OPEN:
            return await self._inner(scope, receive, named)
        if (refused := self._refused(headers)) is not None:
            return await refused.response(scope, receive, named)
        with self._server.answering():
            try:
                await self._inner(scope, receive, named)
            except Exception as error:
                message = api_error(error)  # which logs it
                if not response_started:
                    await message.response(scope, receive, named)

    def _refused(self, headers: Mapping[bytes, bytes]) -> APIError | None:
        if self._keys and not self._known(headers):
            message = "send one of the server's keys: Authorization: Bearer KEY"
            return APIError(401, message, code="invalid_api_key")
        if self._server.draining:
            return APIError(503, "the server is shutting down", code="engine_unavailable", after=1)
        if self._server.under_way >= self._options.requests:
            message = f"{self._options.requests} requests are under way"
            return APIError(429, message, code="queue_full", after=1)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self._options.body:
            return body_too_large(self._options.body)
        coding = headers.get(b"content-encoding", b"identity")
        if coding.lower() != b"identity":
            return APIError(415, f"Content-Encoding = {coding.decode('latin-1')!r}: must be none.")
        return None

    def _known(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # Compare all keys, so that the time reveals nothing.
        same = [hmac.compare_digest(key.strip(), own) for own in self._keys]
        return scheme.lower() == b"bearer" and any(same)
