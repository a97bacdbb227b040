"""Routes of the server: each takes a request and returns its response."""

from __future__ import annotations

import asyncio
import importlib.resources
import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

import eejax
from eejax.helios.fleet import OWN
from eejax.helios.report import FleetReport
from eejax.models.config import ModelConfig
from eejax.serving import history
from eejax.serving import protocol as form
from eejax.serving.completions import (
    ChatResponse,
    CompletionResponse,
    ResponseBuilder,
    check_tokens,
    encode,
)
from eejax.serving.http import ERRORS, ModelServer
from eejax.serving.messages import EngineReady
from eejax.serving.responses import streamed, while_connected
from eejax.serving.service import DRAINING

router = APIRouter()


async def server_of(request: Request) -> ModelServer:
    return request.app.state.server


Server = Annotated[ModelServer, Depends(server_of)]


PAGE = importlib.resources.files("eejax.serving").joinpath("dashboard.html")
# The page is self-contained; the policy blocks every other origin.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/", response_class=HTMLResponse)
async def page() -> Response:
    """Return the dashboard's page."""
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)


@router.get("/dashboard")
async def dashboard(server: Server) -> dict:
    """Return the dashboard's data: states, and spans of the last minutes (`history.summary`)."""
    fields = {name: shown(server, name) for name in server.services}
    now = time.time()
    return dict(
        now=now, span=history.SECONDS, seconds=history.SECONDS * history.KEEP, models=fields
    )


def shown(server: ModelServer, name: str) -> dict:
    """Return the dashboard's fields of a model."""
    service, load = server.services[name], server.services[name].load
    fields: dict[str, Any] = dict(
        state=service.state,
        doing=service.doing,
        restarts=service.restarts,
        running=load.running,
        waiting=load.waiting,
        cache_use=load.num_cached_tokens / max(load.capacity, 1),
        spans=server.metrics.histories[name].spans,
    )
    if service.ready is not None:
        ready = service.ready
        fields |= dict(
            layers=ready.config.n_layers,
            exit_boundaries=ready.exit_boundaries,
            loaded=loaded_layers(ready, service.report),
            slots=ready.slots,
            context=ready.context,
        )
        if ready.models is not None:
            fields["fleet"] = fleet_state(server, name, ready.models)
    return fields


def loaded_layers(ready: EngineReady, report: FleetReport | None) -> int:
    """Return the number of loaded layers of the serving model."""
    if report is not None:
        return report.layers
    return ready.config.exit_boundaries[ready.num_segments - 1]


def fleet_state(server: ModelServer, name: str, models: Mapping[str, ModelConfig]) -> dict:
    """Return a fleet's models, the serving model, and the last decisions, the newest last."""
    service = server.services[name]
    decisions = [
        dict(
            time=d.time,
            kind=d.kind,
            model=d.choice.model,
            why=d.why,
            seconds=d.seconds,
            layers=models[d.choice.model].exit_boundaries[d.choice.depth - 1],
        )
        for d in server.metrics.histories[name].decisions
    ]
    timeline = server.metrics.histories[name].timeline.curves()
    fields = dict(
        members=fleet_members(models), objectives=OWN, decisions=decisions, timeline=timeline
    )
    if service.report is not None:
        report = service.report._asdict()
        fields |= {k: v for k, v in report.items() if k not in ("decisions", "points")}
    return fields


def fleet_members(models: Mapping[str, ModelConfig]) -> dict[str, dict]:
    """Return layers and exits of a fleet's models."""
    return {
        name: dict(layers=config.n_layers, exits=[e.boundary for e in config.exits])
        for name, config in models.items()
    }


@router.get("/health", responses={503: ERRORS[503]})
async def health(server: Server) -> Response:
    """Return 200 if every engine answers, else 503, and what engines do until all is compiled."""
    states = {}
    for name, service in server.services.items():
        states[name] = {"state": DRAINING if server.draining else service.state}
        if service.doing:
            states[name]["doing"] = service.doing
    return JSONResponse(states, 200 if server.healthy else 503)


for path, answer in (("/", page), ("/health", health)):  # load balancers may probe with HEAD
    router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": eejax.__version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(server: Server) -> Response:
    """Return Prometheus metrics."""
    for name, service in server.services.items():
        if service.ready is not None:
            server.metrics.depth.labels(name).set(loaded_layers(service.ready, service.report))
    page, kind = server.metrics.exposition()
    return Response(page, headers={"Content-Type": kind})


def about(server: ModelServer, name: str) -> dict:
    """Return OpenAI's description of a model, with its layers and exits."""
    fields = dict(id=name, object="model", created=server.created, owned_by="eejax")
    ready = server.services[name].ready
    if ready is not None:
        exits = [e.boundary for e in ready.config.exits]
        fields |= dict(max_model_len=ready.context, layers=ready.config.n_layers, exits=exits)
        if ready.models is not None:
            members = fleet_members(ready.models)
            fields |= dict(exits=ready.exit_boundaries[:-1], members=members)
    return fields


@router.get("/v1/models", responses={401: ERRORS[401]})
async def models(server: Server) -> dict:
    return {"object": "list", "data": [about(server, name) for name in server.services]}


@router.get("/v1/models/{name:path}", responses={k: ERRORS[k] for k in (401, 404)})
async def model(name: str, server: Server) -> dict:
    server.service(name)
    return about(server, name)


@router.post("/tokenize", responses=ERRORS)
async def tokenize(body: form.TokenizeRequest, request: Request, server: Server) -> dict:
    ready = await while_connected(request, server.until_ready(body.model))
    # Of any length: clients cut documents by their tokens.
    ids = await asyncio.to_thread(
        encode,
        ready,
        body.prompt,
        limited=False,
        begins=body.add_special_tokens,
        allow_special=server.options.allow_special,
    )
    return dict(tokens=ids, count=len(ids), max_model_len=ready.context)


@router.get("/tokenizer_info", responses=ERRORS)
async def tokenizer_info(request: Request, server: Server, model: str | None = None) -> dict:
    """Return the ids of the tokens that begin and end a text.

    Their names are not given: `/tokenize` reads names as plain text, so clients would get other
    ids.
    """
    ready = await while_connected(request, server.until_ready(model))
    return dict(
        bos_token=None,
        bos_token_id=ready.tokenizer.bos_id,
        eos_token=None,
        eos_token_id=ready.tokenizer.eos_id,
        max_model_len=ready.context,
    )


@router.post("/detokenize", responses=ERRORS)
async def detokenize(body: form.DetokenizeRequest, request: Request, server: Server) -> dict:
    ready = await while_connected(request, server.until_ready(body.model))
    check_tokens(ready, body.tokens, "tokens")
    return {"prompt": await asyncio.to_thread(ready.tokenizer.decode, body.tokens)}


@router.post("/v1/completions", responses=ERRORS)
async def completions(body: form.CompletionRequest, request: Request, server: Server) -> Response:
    return await answered(request, server, body, CompletionResponse)


@router.post("/v1/chat/completions", responses=ERRORS)
async def chat(body: form.ChatRequest, request: Request, server: Server) -> Response:
    return await answered(request, server, body, ChatResponse)


async def answered(
    request: Request,
    server: ModelServer,
    body: form.GenerationRequest,
    builder: type[ResponseBuilder],
) -> Response:
    """Return a response, whole or streamed, unless its client disconnects first."""
    begin = time.monotonic()
    await while_connected(request, server.until_ready(body.model, body.timeout))
    answer = builder(server, body, begin)
    await while_connected(request, answer.prepare())
    if answer.body.stream:
        return await streamed(request, answer.chunks())
    return JSONResponse(await while_connected(request, answer.whole()))
