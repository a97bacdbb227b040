"""The FastAPI application: routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

import eejax
from eejax.common.errors import ConfigError, DataError
from eejax.serving import routes
from eejax.serving.http import (
    APIError,
    HttpOptions,
    ModelServer,
    RequestGuard,
    api_error,
    body_too_large,
    validation_error,
)
from eejax.serving.metrics import ServerMetrics
from eejax.serving.responses import ClientDisconnected
from eejax.serving.service import EngineUnavailable, Service


def app(
    services: Mapping[str, Service],
    options: HttpOptions | None = None,
    metrics: ServerMetrics | None = None,
    *,
    lifespan: Callable | None = None,
) -> FastAPI:
    """Return the server's application, for services by the names of their models."""
    options, metrics = options or HttpOptions(), metrics or ServerMetrics()
    server = ModelServer(services, options, metrics)
    api = FastAPI(
        title="eejax",
        version=eejax.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        description="Early-exit language models behind OpenAI's interface.",
    )
    api.state.server = server
    api.include_router(routes.router)

    async def failed(_: Request, error: Exception) -> Response:
        return api_error(error).response

    for kind in (APIError, EngineUnavailable, ConfigError, DataError, TimeoutError):
        api.add_exception_handler(kind, failed)

    @api.exception_handler(ClientDisconnected)
    async def left(_: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=499)  # nginx's code for a closed connection, for the log

    @api.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        if error.status_code == 413:  # from the middleware that counts bodies
            return body_too_large(options.body).response
        message = str(error.detail)
        if message == "There was an error parsing the body":
            message = (
                "the body cannot be read: it is not JSON in UTF-8, is nested too deeply, or has a "
                "number with too many digits."
            )
        response = APIError(error.status_code, message).response
        response.headers.update(error.headers or {})
        return response

    @api.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return validation_error(error.errors()).response

    api.add_middleware(RequestBodyLimitMiddleware, max_body_size=options.body)
    api.add_middleware(RequestGuard, server=server)  # the last one added runs first
    return api
