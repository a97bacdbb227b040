"""Windows of a text's bytes, of one length, for models whose tokens are bytes."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import numpy as np

from eejax.common.errors import ConfigError

LENGTH, BATCH = 256, 16


def divided(text: bytes, unseen: int) -> tuple[bytes, bytes]:
    """Divide a text into its beginning and its last `unseen` bytes.

    Raises:
      ConfigError: if the beginning is shorter than the rest.
    """
    if len(text) < 2 * unseen:
        raise ConfigError(f"--unseen = {unseen}: the text has only {len(text)} bytes.")
    return text[:-unseen], text[-unseen:]


def model_and_text(model: str | None, text: str | None) -> tuple[pathlib.Path, pathlib.Path]:
    """Return a checkpoint of bytes and its text; by default tinylm and its text of $EEJAX_DATA."""
    if (model is None or text is None) and "EEJAX_DATA" not in os.environ:
        raise ConfigError("--model and --text: are required if $EEJAX_DATA is not set.")
    root = pathlib.Path(os.environ.get("EEJAX_DATA", "."))
    return (
        pathlib.Path(model or root / "models" / "tinylm"),
        pathlib.Path(text or root / "tinyshakespeare" / "train.txt"),
    )


def cut(text: bytes, most: int | None = None) -> np.ndarray:
    """Return evenly spaced windows [n, LENGTH + 1] of a text.

    Each begins with the last token of the one before.
    """
    ids = np.frombuffer(text, np.uint8).astype(np.int32)
    n = (len(ids) - 1) // LENGTH
    rows = np.arange(n) if most is None else np.linspace(0, n - 1, min(n, most)).astype(int)
    return np.stack([ids[r * LENGTH : r * LENGTH + LENGTH + 1] for r in rows])


def batches(windows: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    """Yield tokens and labels [BATCH, LENGTH]; the last batch is padded with ignored labels."""
    for begin in range(0, len(windows), BATCH):
        part = windows[begin : begin + BATCH]
        tokens, labels = part[:, :-1], part[:, 1:]
        more = ((0, BATCH - len(part)), (0, 0))
        yield {"tokens": np.pad(tokens, more), "labels": np.pad(labels, more, constant_values=-1)}


def prompts(text: bytes, size: int) -> list[list[int]]:
    """Return the first `size` tokens of every third window."""
    return [list(text[i : i + size]) for i in range(0, len(text) - LENGTH, 3 * LENGTH)]
