"""Clients of servers in this process, over engines that say what they are told."""

from __future__ import annotations

import contextlib

import httpx
from served import Scripted, said

from eejax.serving.app import app
from eejax.serving.http import HttpOptions
from eejax.serving.metrics import ServerMetrics
from eejax.serving.service import Service, ServiceOptions

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@contextlib.asynccontextmanager
async def client_of(service, options: HttpOptions | None = None, metrics=None):
    """A client of a server of its own with the model m."""
    api = app({"m": service}, options, metrics or ServerMetrics())
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        client.service, client.server = service, api.state.server
        yield client


@contextlib.asynccontextmanager
async def serving(build=None, **kwargs):
    """A client of a server whose engine and metrics are its own, too."""
    metrics = ServerMetrics()
    service = Service(
        build or Scripted(template=TEMPLATE),
        ServiceOptions(first_pause=0.05, **kwargs),
        watch=metrics.watch("m"),
    )
    await service.start()
    try:
        async with client_of(service, metrics=metrics) as client:
            yield client
    finally:
        await service.stop()


def text(prompt: bytes, n: int) -> str:
    return bytes(said(tuple(prompt), i)[0] for i in range(n)).decode()
