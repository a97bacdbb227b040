"""A server of a random model on this machine, against the same engine without a server.

Only the engine's process holds the device: this one has the server and its clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from eejax.experiments import card_programs
from eejax.experiments.gpu_check.check import StageCheck, missing_module

HOLDS_DEVICE = False
NEEDED = ("fastapi", "uvicorn", "httpx", "prometheus_client")
START = 0.8
"""Maximum share of the remaining time in which an engine may compile."""

BYTES = 257
"""Vocabulary of the tokenizer of bytes."""


@dataclasses.dataclass(frozen=True)
class ServeSizes:
    """Model, clients and requests of the stage.

    Attributes:
      model: the model.
      context: maximum tokens of a request.
      clients: number of concurrent clients, and of slots.
      requests: requests of each client.
      prompt: tokens of prompts, from and to.
      limit: tokens of answers, from and to.
      steps: engine steps between two reads of new requests.
    """

    model: card_programs.ModelSize = dataclasses.replace(card_programs.MEDIUM, vocabulary=BYTES)
    context: int = 1024
    clients: int = 16
    requests: int = 4
    prompt: tuple[int, int] = (64, 512)
    limit: tuple[int, int] = (60, 160)
    steps: int = 4


TINY = card_programs.ModelSize(layers=2, width=64, heads=2, inner=192, vocabulary=BYTES, exits=(1,))
SMALL = ServeSizes(TINY, 64, 2, 1, (4, 16), (4, 8))


@dataclasses.dataclass(frozen=True)
class RandomModelBuilder:
    """Builder of the engine of a model with random weights, in the process that calls it."""

    sizes: ServeSizes

    def __call__(self):
        from eejax.data.tokenizers import ByteTokenizer
        from eejax.experiments.gpu_check.decode import weights
        from eejax.inference.engine import EarlyExitEngine
        from eejax.serving.messages import BuiltEngine

        setup = self.sizes
        config = setup.model.config(setup.context)
        options = engine_options(config)
        engine = EarlyExitEngine.make(weights(config), config, options, slots=setup.clients)
        return BuiltEngine(engine, config, ByteTokenizer())


def sizes(check: StageCheck) -> ServeSizes:
    return SMALL if check.small else ServeSizes()


def run(check: StageCheck) -> None:
    setup = sizes(check)
    if why := missing_module(*NEEDED):
        check.errors["server"] = why
    else:
        by_server(check, setup)
    check.measure("engine", lambda: alone(setup))


def by_server(check: StageCheck, setup: ServeSizes) -> None:
    """Measure the speed and latency that clients of a server see."""
    from eejax.experiments.serving_runs import server_in_thread
    from eejax.serving.service import ServiceOptions

    options, wait = ServiceOptions(steps=setup.steps, grace=1.0), START * check.seconds_left
    with contextlib.ExitStack() as server:
        served = server_in_thread(RandomModelBuilder(setup), options, wait=wait)
        address = check.measure("address", lambda: server.enter_context(served)[0])
        if address is not None:
            for name, threshold in (("no exits", 1.0), ("half leave early", 0.0)):
                check.measure(name, partial(measure_clients, setup, address, threshold))


def programs(check: StageCheck) -> Iterator[tuple[str, Callable]]:
    """Yield the engine's loop."""
    setup = sizes(check)
    config = setup.model.config(setup.context)
    one = dict(
        config=config, slots=setup.clients, cache=setup.context, options=engine_options(config)
    )
    yield f"served {setup.clients} slots", partial(card_programs.slots, **one)


def engine_options(config):
    """Return the options of the engine that is served."""
    from eejax.serving.models import batch_options

    return batch_options(config, None)


def workload(setup: ServeSizes) -> list[list[tuple[tuple[int, ...], int]]]:
    """Draw (prompt, tokens to generate) of each client's requests."""
    rng = np.random.default_rng(0)

    def draw(pair):
        return int(rng.integers(pair[0], pair[1] + 1))

    def ask():
        return (tuple(rng.integers(32, 127, draw(setup.prompt)).tolist()), draw(setup.limit))

    return [[ask() for _ in range(setup.requests)] for _ in range(setup.clients)]


def measure_clients(setup: ServeSizes, address: str, threshold: float) -> dict[str, Any]:
    """Measure a server with as many clients as it has slots.

    At threshold 0 every other client's tokens leave by the first exit, and the others' by none.
    """
    import httpx

    from eejax.experiments.serving_runs import closed_loop, times_of

    clients = workload(setup)

    async def ask():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:
            fields = {"model": "m", "thresholds": threshold}
            whole = {"model": "m", "thresholds": 1.0}
            parts = [(clients[0::2], fields), (clients[1::2], whole)]
            loops = [closed_loop(client, part, rules) for part, rules in parts if part]
            return sum(await asyncio.gather(*loops), [])

    asyncio.run(ask())  # warms up
    begin = time.perf_counter()
    answers = asyncio.run(ask())
    took = time.perf_counter() - begin
    tokens = sum(len(a.times) for a in answers)
    return dict(tokens_per_second=tokens / took, requests=len(answers), **times_of(answers))


def alone(setup: ServeSizes) -> dict[str, float]:
    """Run the same requests through the engine's scheduler without a server."""
    from eejax.experiments.serving_runs import through_scheduler
    from eejax.inference.policy import ExitPolicy
    from eejax.inference.scheduler import Scheduler

    built, clients = RandomModelBuilder(setup)(), workload(setup)
    policy = ExitPolicy.make(built.config, 1)
    tokens = sum(limit for client in clients for _, limit in client)
    for _ in range(2):  # the first one compiles
        scheduler = Scheduler(built.engine, steps=setup.steps)
        seconds, _ = through_scheduler(scheduler, clients, policy)
    return dict(tokens_per_second=tokens / seconds)
