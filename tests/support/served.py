"""Engines for tests of the service, made in processes of their own."""

from __future__ import annotations

import dataclasses
import os
import time

from eejax.data.tokenizers import ByteTokenizer
from eejax.inference.scripted import ScriptedEngine
from eejax.models.config import ExitConfig, ModelConfig
from eejax.serving.messages import Built

CONFIG = ModelConfig(
    vocab_size=257, n_layers=4, d_model=8, n_heads=2, context_length=64,
    exits=(ExitConfig(1), ExitConfig(3)),
)  # fmt: skip
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

    def __call__(self) -> Built:
        if self.broken and os.path.exists(self.broken):
            raise ValueError("the weights are gone")
        engine = ScriptedEngine(script, (1, 3, 4), self.slots, CONFIG.context_length)
        template = None if self.template is None else (self.template, {"bos_token": ""})
        return Built(engine, CONFIG, ByteTokenizer(), template)
