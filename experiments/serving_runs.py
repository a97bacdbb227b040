"""Servers in processes of their own or in a thread, and clients that keep them busy."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from eejax.serving.http import HttpOptions
    from eejax.serving.messages import Build
    from eejax.serving.service import Service, ServiceOptions


@contextlib.contextmanager
def server(*flags: str, wait: float = 60.0) -> Iterator[tuple[subprocess.Popen, str]]:
    """Run `eejax serve` at any free port; yield (process, address) when all is compiled.

    At the end it is terminated, and has `wait` seconds for that.

    Raises:
      RuntimeError: if the server does not start, with its output.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "eejax.experiments.serve", "--port=0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    said: collections.deque[str] = collections.deque(maxlen=100)
    address, left = None, set()  # models of which programs are left to compile
    for line in process.stderr:
        said.append(line)
        if found := re.match("(.+): loading ", line):
            left.add(found[1])
        elif found := re.match("(.+): all programs are compiled", line):
            left.discard(found[1])
        elif found := re.match(r"listening at (http://\S+)", line):
            address = found[1]
        if address is not None and not left:
            break

    def read() -> None:
        with process.stderr as rest:
            said.extend(rest)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    try:
        if address is None or left:
            process.wait(wait)
            raise RuntimeError("the server did not start: " + "".join(said))
        yield process, address
    finally:
        process.terminate()
        try:
            process.wait(wait)
        finally:
            process.kill()  # does nothing if it has ended
            process.wait()
            reading.join()


@contextlib.contextmanager
def server_in_thread(
    build: Build,
    options: ServiceOptions,
    http: HttpOptions | None = None,
    wait: float = math.inf,
) -> Iterator[tuple[str, Service]]:
    """Serve a model as "m" in a thread of this process; yield (address, service).

    Its engine has a process of its own.

    Raises:
      RuntimeError: if the server does not start within `wait` seconds, or does not end within 60.
    """
    import uvicorn

    from eejax.serving.app import app
    from eejax.serving.metrics import ServerMetrics
    from eejax.serving.service import Service

    found, begun, failed = {}, threading.Event(), []

    async def serve() -> None:
        metrics = ServerMetrics()
        service = Service(build, options, watch=metrics.watch("m"))
        try:
            await service.start()
            await service.until_compiled()
            api = app({"m": service}, http, metrics)
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
        finally:
            await service.stop()

    def run() -> None:
        try:
            asyncio.run(serve())
        except Exception as error:  # raised in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until = time.monotonic() + wait
    while not begun.wait(0.1):
        if not thread.is_alive():
            raise RuntimeError("the server did not start") from (failed or [None])[0]
        if time.monotonic() > until:
            raise RuntimeError(f"the server did not start within {wait:g} seconds")
    try:
        yield found["address"], found["service"]
    finally:
        found["server"].should_exit = True
        thread.join(60)
    if thread.is_alive():
        raise RuntimeError("the server did not end within 60 seconds")


@dataclasses.dataclass
class AnsweredRequest:
    """An answered request.

    Attributes:
      begin: seconds at which it was sent.
      times: seconds at which each token came.
      text: text of all tokens.
    """

    begin: float
    times: list[float]
    text: str = ""

    @property
    def first(self) -> float:
        return self.times[0] - self.begin

    @property
    def gaps(self) -> np.ndarray:
        return np.diff(self.times)


async def ask(client, wanted, fields: dict) -> AnsweredRequest:
    """Stream a completion through an `httpx.AsyncClient`.

    Raises:
      RuntimeError: for a response that is not an answer.
    """
    prompt, limit = wanted
    asked = fields | dict(
        prompt=list(prompt),
        max_tokens=limit,
        temperature=0,
        ignore_eos=True,
        stream=True,
        return_exits=True,
    )
    answered = AnsweredRequest(time.perf_counter(), [])
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            (choice,) = chunk["choices"]
            answered.text += choice["text"]
            answered.times += [time.perf_counter()] * len(choice["exits"])
    return answered


async def closed_loop(client, clients: Sequence[Sequence], fields: dict) -> list[AnsweredRequest]:
    """Send all requests of all clients, each of which sends one after the other."""

    async def one(own) -> list[AnsweredRequest]:
        return [await ask(client, wanted, fields) for wanted in own]

    return sum(await asyncio.gather(*map(one, clients)), [])


async def arriving(
    client, requests: Sequence, rate: float, seed: int, fields
) -> list[AnsweredRequest]:
    """Send requests at random times, `rate` a second (Poisson), whatever is still running."""
    rng = np.random.default_rng(seed)
    tasks = []
    for wanted in requests:
        tasks.append(asyncio.create_task(ask(client, wanted, fields)))
        await asyncio.sleep(rng.exponential(1 / rate))
    return await asyncio.gather(*tasks)


def through_scheduler(scheduler, clients: Sequence[Sequence], policy) -> tuple[float, list]:
    """Run `closed_loop` without a server.

    Returns (seconds, tokens of every request, client by client).
    """
    from eejax.inference.request import EngineRequest

    left = [collections.deque(enumerate(own)) for own in clients]
    found = [[()] * len(own) for own in clients]

    def ask_next(c: int) -> None:
        if left[c]:
            r, (prompt, limit) = left[c].popleft()
            scheduler.add_request(EngineRequest(f"{c}-{r}", prompt, limit, policy))

    begin = time.perf_counter()
    for c in range(len(clients)):
        ask_next(c)
    while not scheduler.idle:
        for id_, tokens, finish in scheduler.step():
            c, r = map(int, id_.split("-"))
            found[c][r] += tuple(t.id for t in tokens)
            if finish:
                ask_next(c)
    return time.perf_counter() - begin, sum(found, [])


def times_of(answers) -> dict:
    """Return milliseconds, 50th and 99th percentile."""

    def pair(values):
        return [1e3 * float(np.percentile(values, p)) for p in (50, 99)]

    gaps = np.concatenate([a.gaps for a in answers])
    return {
        "first_token_ms": pair([a.first for a in answers]),
        "between_tokens_ms": pair(gaps),
        "between_parts_ms": pair(gaps[gaps > 0]),
    }
