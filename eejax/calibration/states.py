"""Hidden states of a frozen model at its boundaries, from one pass; routers learn from them."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eejax.calibration import frontier, memory
from eejax.checkpoint.arrays import read_arrays, write_arrays
from eejax.checkpoint.files import write_text
from eejax.common import progress
from eejax.common.errors import CheckpointError, DataError
from eejax.common.trees import Tree, map_chunks
from eejax.gates.confidence import cosine
from eejax.inference.sampling import argmax
from eejax.losses.cross_entropy import IGNORE
from eejax.models import exits, layers, transformer
from eejax.models.config import ModelConfig

PART = 16_384  # tokens of a part; a complete part is written and not computed again
POSITIONS_FILE = "held.json"  # in a folder of parts: the maximum number of positions


class States(NamedTuple):
    """States of n counted positions at every early exit e (e + 1: the final exit too).

    Attributes:
      boundary: [e, n, d] the state at the boundary, in the dtype of computation, or None where it
        was discarded.
      cosine: [e, n] cosine of that state and the last layer's, both under the final norm.
      kl: [e, n] KL(final || exit) of their distributions, in nats.
      tokens: [e + 1, n] the most likely token.
      nlls: [e + 1, n] -log p of the label, in nats.
      labels: [n] the token to be predicted.
      units: [n] number of the position's window.
    """

    boundary: Any
    cosine: np.ndarray
    kl: np.ndarray
    tokens: np.ndarray
    nlls: np.ndarray
    labels: np.ndarray
    units: np.ndarray

    @property
    def n(self) -> int:
        return self.labels.size

    @classmethod
    def joined(cls, parts: Sequence[States]) -> States:
        """Concatenate parts in their order."""

        def join(*a):
            return np.concatenate(a, 1 if a[0].ndim > 1 else 0)

        return cls(*(join(*leaves) for leaves in zip(*parts, strict=True)))

    def first(self, n: int) -> States:
        """Return the first n positions."""
        return States(*(a[:, :n] if a.ndim > 1 else a[:n] for a in self))


def max_positions_in_memory(config: ModelConfig) -> int:
    """Return the number of positions that fit into a quarter of the free memory.

    It is the lesser of the host's and the first device's. On a CPU the two are one memory, and
    while parts are joined there are two copies.
    """
    free = memory.free()
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        free = min(free, stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    position = config.n_exits * (config.d_model * jnp.dtype(config.dtype).itemsize + 16) + 16
    return max(int(free // (4 * position)), 1)


def collect(
    params: Tree,
    config: ModelConfig,
    batches: Iterable[Mapping[str, Any]],
    max_positions: int,
    *,
    folder: str | os.PathLike | None = None,
    watch: Callable[[str], None] | None = None,
) -> States:
    """Collect the states of the first `max_positions` counted positions, or of as many as fit.

    Every window is a unit.

    Args:
      params: the model's parameters.
      config: its configuration.
      batches: batches of text (as `data.batches` gives).
      max_positions: maximum number of positions.
      folder: where parts are saved, and the number of positions that fit, whatever memory is free
        later. Parts that are there already are read from it: the caller ensures that they are of
        this model, these batches and this `max_positions`.
      watch: called with the number of positions so far, and where memory cuts the text off.

    Raises:
      DataError: where no position counts.
      FloatingPointError: for states that are not finite.
    """
    done, n, asked = [], 0, max_positions
    max_positions = _held(max_positions, config, folder)
    watch = watch or (lambda text: None)
    with progress.steps("running the model over text", max_positions, "token") as seen:
        for part in _parts(params, config, batches, folder, seen):
            done.append(part)
            n += part.n
            watch(f"{min(n, max_positions)} of {asked} tokens seen")
            if n >= max_positions:
                break
    if max_positions < asked and n >= max_positions:
        watch(
            f"the first {max_positions} of {asked} tokens: no more fit into a quarter of the free "
            "memory"
        )
    if not n:
        raise DataError("no token to calibrate on: the text is empty, or too short for a label.")
    whole = States.joined(done).first(max_positions)
    for name in ("cosine", "kl", "nlls"):
        if not np.isfinite(getattr(whole, name)).all():
            raise FloatingPointError(f"{name} is not finite: check the model's parameters.")
    return whole


def _held(max_positions: int, config: ModelConfig, folder: str | os.PathLike | None) -> int:
    """Return `max_positions`, or the number that fits into memory.

    A folder keeps its first answer. With another one windows would be divided differently, and
    routers would be judged on some that they were trained on.
    """
    file = None if folder is None else pathlib.Path(folder) / POSITIONS_FILE
    if file is not None and file.is_file():
        try:
            return int(json.loads(file.read_text(encoding="utf-8"))["most"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"{file}: cannot be read ({error!r}): remove {folder}."
            raise CheckpointError(message) from error
    max_positions = min(max_positions, max_positions_in_memory(config))
    if file is not None:
        write_text(file, json.dumps({"most": max_positions}) + "\n")
    return max_positions


def _parts(params, config, batches, folder, advance: Callable[[int], object]) -> Iterator[States]:
    """Yield parts of at least `PART` positions, of consecutive batches."""
    iterator, held, number, unit = iter(batches), [], 0, 0

    def file(i):
        return None if folder is None else pathlib.Path(folder) / f"states-{i:05d}.safetensors"

    while (path := file(number)) is not None and path.is_file():
        arrays, about = read_arrays(path)
        for _ in range(int(about["batches"])):
            unit += len(next(iterator)["labels"])
        number += 1
        advance(arrays["labels"].size)
        yield States(**arrays)
    for seen in _seen(params, config, iterator, unit):
        held.append(seen)
        advance(seen.n)
        if sum(part.n for part in held) >= PART:
            yield _kept(held, file(number))
            held, number = [], number + 1
    if held:
        yield _kept(held, file(number))


def _kept(held: list[States], file: pathlib.Path | None) -> States:
    part = States.joined(held)
    if file is not None:
        write_arrays(file, part._asdict(), {"batches": str(len(held))})
    return part


def _seen(params: Tree, config: ModelConfig, batches, unit: int) -> Iterator[States]:
    """Yield the states of every batch while the next one runs; `unit` numbers the first window."""
    before = None
    for batch in batches:
        inputs = {k: a for k, a in batch.items() if k != "units"}
        running = _pass(params, config, inputs), np.asarray(batch["labels"]), unit
        unit += len(batch["labels"])
        if before is not None:
            yield _fetched(*before)
        before = running
    if before is not None:
        yield _fetched(*before)


def _fetched(running, labels: np.ndarray, unit: int) -> States:
    counted = labels.reshape(-1) != IGNORE
    units = np.repeat(unit + np.arange(len(labels)), labels.shape[1])[counted]
    boundary, cosine, kl, tokens, nlls = (a[:, counted] for a in jax.device_get(running))
    own = labels.reshape(-1)[counted]
    return States(boundary, cosine, kl, tokens, nlls, own, units.astype(np.int32))


@partial(jax.jit, static_argnames="config")
def _pass(params: Tree, config: ModelConfig, batch: Mapping[str, jax.Array]):
    """Return (boundary, cosine, kl, tokens, nlls) of all positions [b * t]."""
    reached = []

    def tap(e, x):
        reached.append(x.reshape(-1, x.shape[-1]))
        return x

    states = transformer.exit_states(
        params,
        config,
        batch["tokens"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        tap=tap,
    )
    states = [h.reshape(-1, h.shape[-1]) for h in states]

    def normed(x):
        return layers.norm(params["final"]["norm"], x, config) if config.final_norm else x

    last = normed(reached[-1])
    cosines = [cosine(normed(x), last) for x in reached[:-1]]
    rows = states, batch["labels"].reshape(-1)
    outs = map_chunks(partial(_of_logits, params, config), rows, frontier.CHUNK)
    return jnp.stack(reached[:-1]), jnp.stack(cosines), *(a.T for a in outs)


def _of_logits(params: Tree, config: ModelConfig, rows):
    """Return (kl [n, e], tokens, nlls [n, e + 1]) for states [e + 1] of [n, d] and labels [n].

    Logits exist for one exit at a time, beside the final one's: at [n, v] they are by far the
    largest arrays. XLA cannot reorder a loop over a conditional, and no head is copied.
    """
    states, label = rows
    heads = [exits.head(params, config, e) for e in range(config.n_exits + 1)]

    def logp(e):
        head = heads[e]._replace(table=heads[e].table.astype(states[e].dtype))
        return jax.nn.log_softmax(exits.logits(head, states[e]))

    def seen(y):
        # Padded tokens have no probability, and differences there mean nothing.
        kl = jnp.sum(jnp.where(final > -1e4, jnp.exp(final) * (final - y), 0.0), -1)
        picked = jnp.take_along_axis(y, jnp.maximum(label, 0)[:, None], 1)[:, 0]
        return kl, argmax(y), -picked

    final = logp(config.n_exits)
    early = [lambda e=e: seen(logp(e)) for e in range(config.n_exits)]
    last = jax.tree.map(lambda a: a[None], seen(final))
    if early:
        found = lax.map(lambda e: lax.switch(e, early), jnp.arange(len(early)))
        last = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), found, last)
    kl, tokens, nlls = last
    return kl[:-1].T, tokens.T, nlls.T
