"""A server in a thread of the tests' process."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import uvicorn
from served import Scripted

from eejax.serving.app import app
from eejax.serving.http import HttpOptions
from eejax.serving.messages import Build
from eejax.serving.metrics import ServerMetrics
from eejax.serving.service import Service, ServiceOptions


@contextlib.contextmanager
def serving(build: Build | None = None, options: HttpOptions | None = None):
    """(address, service) of a server of the model m in a thread of this process."""
    found, begun = {}, threading.Event()

    async def serve() -> None:
        metrics = ServerMetrics()
        service = Service(
            build or Scripted(),
            ServiceOptions(first_pause=1.0, grace=1.0),
            watch=metrics.watch("m"),
        )
        await service.start()
        api = app({"m": service}, options, metrics)
        config = uvicorn.Config(api, port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # signals are the main thread's
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        found.update(address=f"http://127.0.0.1:{port}", service=service, server=server)
        begun.set()
        await running
        await service.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    while not begun.wait(0.1):
        assert thread.is_alive(), "the server did not start"
    try:
        yield found["address"], found["service"]
    finally:
        found["server"].should_exit = True
        thread.join(60)
        assert not thread.is_alive()
