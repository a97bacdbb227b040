"""Scripted engines for tests of the service, made in processes of their own.

Each such process imports this file, so it imports little.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time

from scripted import ScriptedEngine

from eejax.common.progress import LOG
from eejax.data.tokenizers import ByteTokenizer, Tokenizer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.serving.messages import BuiltEngine

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
class LateEngine(ScriptedEngine):
    """A scripted engine that does not run before there is a file `until`."""

    until: str

    def generate(self, state, n: int):
        wait_for(self.until)
        return super().generate(state, n)


def wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Builds a `ScriptedEngine`; once there is a file `broken`, it cannot.

    It waits for a file `until`: with slots of a `first` engine the engine of all slots does, else
    the build.
    """

    slots: int = 4
    first: int = 0
    until: str = ""
    broken: str = ""
    template: str | None = None
    tokenizer: Tokenizer = ByteTokenizer()

    def __call__(self) -> BuiltEngine:
        if self.broken and os.path.exists(self.broken):
            raise ValueError("the weights are gone")
        logging.getLogger(LOG).info("%d slots", self.slots)
        if self.until and not self.first:
            wait_for(self.until)
        own = (script, CONFIG, self.slots, CONFIG.context_length)
        engine = LateEngine(*own, self.until) if self.first else ScriptedEngine(*own)
        first = dataclasses.replace(ScriptedEngine(*own), slots=self.first) if self.first else None
        template = None if self.template is None else (self.template, {"bos_token": ""})
        return BuiltEngine(engine, CONFIG, self.tokenizer, template, first=first)
