"""Text and interruptions for runs that take seconds."""

from __future__ import annotations

import random
import signal

from eejax.data import Loader


def write_text(folder):
    rng = random.Random(0)
    words = ["exit", "layer", "token", "early", "depth", "gate", "loss", "head", "state"]
    for i in range(40):
        text = " ".join(rng.choice(words) for _ in range(150))
        (folder / f"{i:02}.txt").write_text(text + ".\n")


def stop_at(monkeypatch, step, number=signal.SIGTERM):
    """Sends this process a signal while it fetches the batch of a step."""
    original = Loader.__next__

    def fetch(loader):
        if loader.step == step:
            signal.raise_signal(number)
        return original(loader)

    monkeypatch.setattr(Loader, "__next__", fetch)
