"""Engines for tests of the service, made in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import threading
import time

import jax
import numpy as np
import uvicorn
from controlled import controller_with
from scripted import ScriptedEngine

from eejax.common.progress import LOG
from eejax.data.tokenizers import ByteTokenizer, Tokenizer
from eejax.helios.choices import ControllerOptions
from eejax.helios.pool import FleetMember
from eejax.inference.options import EngineOptions
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.serving import fleets
from eejax.serving.app import app
from eejax.serving.http import HttpOptions
from eejax.serving.messages import Build, BuiltEngine
from eejax.serving.metrics import ServerMetrics
from eejax.serving.service import Service, ServiceOptions

CONFIG = ModelConfig(
    vocab_size=257,
    n_layers=4,
    d_model=8,
    n_heads=2,
    context_length=64,
    exits=(ExitConfig(1), ExitConfig(3)),
)
DIE, STALL = 250, 251  # prompts that begin with these end the engine, or keep it busy


def said(prompt: tuple[int, ...], i: int) -> tuple[int, int]:
    """The i-th token of a prompt, as no other prompt has it, and its exit."""
    return (sum(prompt) * 7 + len(prompt) * 13 + i * 5) % 95 + 32, (sum(prompt) + i) % 3


def script(prompt, i):
    if prompt[0] == DIE:
        os._exit(3)
    if prompt[0] == STALL:
        time.sleep(0.05)
    return said(prompt, i)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Builds a `ScriptedEngine`; once there is a file `broken`, it cannot."""

    slots: int = 4
    broken: str = ""
    template: str | None = None
    tokenizer: Tokenizer = ByteTokenizer()

    def __call__(self) -> BuiltEngine:
        if self.broken and os.path.exists(self.broken):
            raise ValueError("the weights are gone")
        logging.getLogger(LOG).info("%d slots", self.slots)
        engine = ScriptedEngine(script, CONFIG, self.slots, CONFIG.context_length)
        template = None if self.template is None else (self.template, {"bos_token": ""})
        return BuiltEngine(engine, CONFIG, self.tokenizer, template)


# As few programs as can be, as all of them are compiled.
FLEET = {
    name: ModelConfig(
        vocab_size=257,
        n_layers=n,
        d_model=16,
        n_heads=2,
        context_length=context,
        exits=(ExitConfig(n - 1),),
    )
    for name, n, context in (("small", 2, 48), ("large", 3, 32))
}


# Assesses all models again and again, whether or not that could change anything.
Restless = controller_with(is_settled=lambda state: False, may_be_better=lambda state, model: True)


@dataclasses.dataclass(frozen=True)
class TinyFleet:
    """Builds a fleet of random models, which is never content for long. alike: two models of the
    same weights, all of whose tokens leave by the first exit, so that a text is the same wherever
    it goes on."""

    alike: bool = False
    slots: int = 2

    def members(self) -> dict[str, FleetMember]:
        configs = dict.fromkeys(FLEET, FLEET["large"]) if self.alike else FLEET
        keys = (0, 0) if self.alike else (0, 1)
        # Most of what random models say is surer than this, and not by far.
        rules = dict(threshold=0.0, prefill_exit=True) if self.alike else dict(threshold=0.2)
        options = EngineOptions(cap=4, buckets=(4,), chunk=16, logits_params=True)
        return {
            name: FleetMember(weights(config, key), config, rules, options)
            for (name, config), key in zip(configs.items(), keys, strict=True)
        }

    def __call__(self) -> BuiltEngine:
        fleets.Controller = Restless  # in the engine's own process
        options = ControllerOptions(prompts=2, interval=6, window=20, breaches=6, tokens=16)
        return fleets.built(
            self.members(), ByteTokenizer(), fleets.FleetConfig(options=options), slots=self.slots
        )


def weights(config: ModelConfig, key: int):
    """Random ones, larger than those that training begins with: nearly tied logits are rare."""

    def large(a):
        return np.float32(6) * np.asarray(a)

    return jax.tree.map(large, params.init(config, jax.random.key(key)))


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
