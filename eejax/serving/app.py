"""A server that clients of OpenAI's can be pointed at: completions, conversations, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import eejax
from eejax.common.errors import ConfigError, DataError
from eejax.serving import routes
from eejax.serving.http import Failure, Guard, HttpOptions, Left, Server, failure, misshapen
from eejax.serving.metrics import Metrics
from eejax.serving.service import Service, Unavailable


def app(
    services: Mapping[str, Service],
    options: HttpOptions | None = None,
    metrics: Metrics | None = None,
    *,
    lifespan: Callable | None = None,
) -> FastAPI:
    """The server's application, of services by the names of their models."""
    options, metrics = options or HttpOptions(), metrics or Metrics()
    server = Server(services, options, metrics)
    api = FastAPI(
        title="eejax", version=eejax.__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        description="Early-exit language models behind OpenAI's interface.",
    )  # fmt: skip
    api.state.server = server
    api.include_router(routes.router)

    async def failed(_: Request, error: Exception) -> Response:
        return failure(error).response

    for kind in (Failure, Unavailable, ConfigError, DataError, TimeoutError):
        api.add_exception_handler(kind, failed)

    @api.exception_handler(Left)
    async def left(_: Request, error: Left) -> Response:
        return Response(status_code=499)  # as nginx has it; nobody sees it

    @api.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        told = str(error.detail)
        if told == "There was an error parsing the body":
            told = "the body cannot be read as JSON in UTF-8."
        response = Failure(error.status_code, told).response
        response.headers.update(error.headers or {})
        return response

    @api.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return misshapen(error.errors()).response

    api.add_middleware(Guard, server=server)
    return api
