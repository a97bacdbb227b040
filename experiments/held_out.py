"""Text that experiments score: batches of a run's held-out text, and of one text in each row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from eejax.experiments import launch

BATCH = 16


def batches(run, tokens: int) -> Iterator[Mapping[str, np.ndarray]]:
    """Return batches of about `tokens` tokens of a run's held-out text, spread evenly."""
    from eejax.train import inputs

    config = run.experiment.data
    launch.require_text(config.source, run.workdir, flag=None)
    parts = inputs.held_out(config, run.dataset(), BATCH, max(1, tokens // (BATCH * config.length)))
    return itertools.chain.from_iterable(batches for _, batches in parts)


def of_source(
    source, tokenizer, folder: str, tokens: int, length: int, *, document_masks: bool = False
) -> Iterator[Mapping[str, np.ndarray]]:
    """Return batches of about `tokens` tokens of a source, spread evenly and packed in `folder`."""
    from eejax import data
    from eejax.train import inputs

    packed = data.pack(source, tokenizer, folder, validation_fraction=0.0)
    limit = max(1, tokens // (BATCH * length))
    batches = data.batches(
        packed.split("train"), BATCH, length, document_masks=document_masks, limit=limit
    )
    return (inputs.strip(batch, document_masks) for batch in batches)


def padded(
    texts: Sequence[tuple[Sequence[int], int]], length: int
) -> Iterator[dict[str, np.ndarray]]:
    """Pad texts (ids, the first that counts, from 1), each cut to `length` tokens to predict."""
    for begin in range(0, len(texts), BATCH):
        tokens = np.zeros((BATCH, length), np.int32)
        labels = np.full((BATCH, length), -1, np.int32)
        for i, (ids, first) in enumerate(texts[begin : begin + BATCH]):
            ids = np.asarray(ids)[: length + 1]
            tokens[i, : len(ids) - 1] = ids[:-1]
            labels[i, first - 1 : len(ids) - 1] = ids[first:]
        yield {"tokens": tokens, "labels": labels}
