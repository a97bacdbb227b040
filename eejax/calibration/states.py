"""What a frozen model makes of text at its boundaries: one pass, from which routers learn."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eejax.calibration.frontier import CHUNK
from eejax.checkpoint.arrays import read_arrays, write_arrays
from eejax.common.errors import DataError
from eejax.common.trees import Tree
from eejax.gates.confidence import cosine
from eejax.inference.sampling import argmax
from eejax.losses.cross_entropy import IGNORE
from eejax.models import exits, layers, transformer
from eejax.models.config import ModelConfig

PART = 16_384  # tokens of a part, which is written, and so not made again, once it is whole


class States(NamedTuple):
    """Of n counted positions, at every early exit e (and where it says e + 1, the final one too).

    boundary [e, n, d]: the state at its boundary, in the dtype of computation. cosine [e, n]: of
    that and the last layer's state, both under the final norm. kl [e, n]: KL(final || exit) of
    their distributions, in nats. tokens, nlls [e + 1, n]: the most likely token, and -log p of the
    label in nats. labels, units [n]: the token to be predicted, and the number of its window.
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
        """Parts in a row."""
        join = lambda *a: np.concatenate(a, 1 if a[0].ndim > 1 else 0)
        return cls(*(join(*leaves) for leaves in zip(*parts, strict=True)))

    def first(self, n: int) -> States:
        """The first n positions."""
        return States(*(a[:, :n] if a.ndim > 1 else a[:n] for a in self))


def most_that_fit(config: ModelConfig) -> int:
    """Positions that a quarter of the free memory holds, of the host and of the first device: on a
    CPU the two are one, and while parts are joined there are two copies."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        free = min(free, stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    position = config.n_exits * (config.d_model * jnp.dtype(config.dtype).itemsize + 16) + 16
    return max(int(free // (4 * position)), 1)


def collect(
    params: Tree,
    config: ModelConfig,
    batches: Iterable[Mapping[str, Any]],
    most: int,
    *,
    folder: str | os.PathLike | None = None,
    watch: Callable[[int], None] | None = None,
) -> States:
    """The states of the first `most` counted positions of batches (as `data.batches` gives), or of
    as many as fit into memory.

    Every window is a unit. With a `folder` parts are kept there, and those that are there already
    are taken from it: the caller sees to it that they are of this model and these batches. watch:
    is told the positions so far. Raises DataError where no position counts, FloatingPointError for
    states that are not finite.
    """
    done, n, most = [], 0, min(most, most_that_fit(config))
    for part in _parts(params, config, batches, folder):
        done.append(part)
        n += part.n
        if watch is not None:
            watch(min(n, most))
        if n >= most:
            break
    if not n:
        raise DataError("no token to calibrate on: the text is empty, or too short for a label.")
    whole = States.joined(done).first(most)
    for name in ("cosine", "kl", "nlls"):
        if not np.isfinite(getattr(whole, name)).all():
            raise FloatingPointError(f"{name} is not finite: check the model's parameters.")
    return whole


def _parts(params, config, batches, folder) -> Iterator[States]:
    """Parts of `PART` positions or some more, of batches in a row."""
    iterator, held, number, unit = iter(batches), [], 0, 0
    file = lambda i: (
        None if folder is None else pathlib.Path(folder) / f"states-{i:05d}.safetensors"
    )
    while file(number) is not None and file(number).is_file():
        arrays, about = read_arrays(file(number))
        for _ in range(int(about["batches"])):
            unit += len(next(iterator)["labels"])
        number += 1
        yield States(**arrays)
    for seen in _seen(params, config, iterator, unit):
        held.append(seen)
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
    """Of every batch, fetched while the next one runs. unit: number of the first window."""
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
    kept = (a[:, counted] for a in jax.device_get(running))
    return States(*kept, labels.reshape(-1)[counted], units.astype(np.int32))


@partial(jax.jit, static_argnames="config")
def _pass(params: Tree, config: ModelConfig, batch: Mapping[str, jax.Array]):
    """(boundary, cosine, kl, tokens, nlls) of all positions [b * t]."""
    reached = []

    def tap(e, x):
        reached.append(x.reshape(-1, x.shape[-1]))
        return x

    states = transformer.exit_states(
        params, config, batch["tokens"],
        positions=batch.get("positions"), segment_ids=batch.get("segment_ids"), tap=tap,
    )  # fmt: skip
    states = [h.reshape(-1, h.shape[-1]) for h in states]
    normed = lambda x: layers.norm(params["final"]["norm"], x, config) if config.final_norm else x
    last = normed(reached[-1])
    cosines = [cosine(normed(x), last) for x in reached[:-1]]
    heads = [exits.head(params, config, e) for e in range(config.n_exits + 1)]
    heads = [head._replace(table=head.table.astype(config.dtype)) for head in heads]

    def one(rows):
        states, label = rows
        logits = [exits.logits(head, h) for head, h in zip(heads, states, strict=True)]
        logps = [jax.nn.log_softmax(y) for y in logits]
        final = logps[-1]
        # Where padded tokens have no probability, neither has a difference a meaning.
        kl = lambda y: jnp.sum(jnp.where(final > -1e4, jnp.exp(final) * (final - y), 0.0), -1)
        picked = lambda y: jnp.take_along_axis(y, jnp.maximum(label, 0)[:, None], 1)[:, 0]
        stack = lambda values: jnp.stack(values)
        none = jnp.zeros((0, len(label)), jnp.float32)
        return (
            stack([kl(y) for y in logps[:-1]]) if len(logps) > 1 else none,
            stack([argmax(y) for y in logps]), stack([-picked(y) for y in logps]),
        )  # fmt: skip

    n = batch["labels"].size
    chunk = min(CHUNK, n)
    pad = lambda a: jnp.pad(a, [(0, -n % chunk)] + [(0, 0)] * (a.ndim - 1))
    cut = lambda a: pad(a).reshape(-1, chunk, *a.shape[1:])
    out = lax.map(one, (jax.tree.map(cut, states), cut(batch["labels"].reshape(-1))))
    flat = lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1)[:, :n]
    return jnp.stack(reached[:-1]), jnp.stack(cosines), *map(flat, out)
