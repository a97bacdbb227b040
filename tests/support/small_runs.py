"""Text and interruptions for runs that take seconds."""

from __future__ import annotations

import random
import signal

from eejax.data import Loader, Prefetch

STEPS = 14


def write_text(folder):
    rng = random.Random(0)
    words = ["exit", "layer", "token", "early", "depth", "gate", "loss", "head", "state"]
    for i in range(40):
        text = " ".join(rng.choice(words) for _ in range(150))
        (folder / f"{i:02}.txt").write_text(text + ".\n")


def config(folder, **train):
    """A run on the texts in `folder`, as `Experiment.from_dict` takes it."""
    return {
        "model": {
            "vocab_size": 257,
            "n_layers": 2,
            "d_model": 16,
            "n_heads": 2,
            "context_length": 16,
            "dropout": 0.1,
            "head": "tied",
            "exits": [{"boundary": 1}],
        },
        "exit_weights": {"weights": [0.5]},
        "data": {
            "source": str(folder / "*.txt"),
            "length": 16,
            "validation_fraction": 0.2,
            "document_masks": True,
        },
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 4},
        "train": {
            "steps": STEPS,
            "batch_size": 4,
            "microbatches": 2,
            "log_every": 1,
            "eval_every": 7,
            "eval_batches": 2,
            "checkpoint_every": 4,
        }
        | train,
    }


def stop_at(monkeypatch, step, number=signal.SIGTERM):
    """Sends this process a signal while it fetches the batch of a step."""
    for kind in (Loader, Prefetch):
        monkeypatch.setattr(kind, "__next__", _signalling(kind.__next__, step, number))


def _signalling(original, step, number):
    def fetch(loader):
        if loader.step == step:
            signal.raise_signal(number)
        return original(loader)

    return fetch
