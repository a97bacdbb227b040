"""What a frozen model makes of text at its boundaries: one pass, from which routers learn."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
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

    def take(self, which: np.ndarray) -> States:
        """Of the positions [n] bool alone."""
        return States(*(a[..., which, :] if i == 0 else a[..., which] for i, a in enumerate(self)))


def bytes_per_token(config: ModelConfig) -> int:
    """Memory that a position takes."""
    width = np.dtype(jnp.dtype(config.dtype)).itemsize
    return config.n_exits * (config.d_model * width + 16) + 16


def collect(
    params: Tree,
    config: ModelConfig,
    batches: Iterable[Mapping[str, Any]],
    most: int,
    *,
    folder: str | os.PathLike | None = None,
    watch: Callable[[int], None] | None = None,
) -> States:
    """The states of the first `most` counted positions of batches (as `data.batches` gives).

    Every window is a unit. With a `folder` parts are kept there, and those that are there already
    are taken from it: the caller sees to it that they are of this model and these batches. watch:
    is told the positions so far. Raises DataError where no position counts, FloatingPointError for
    states that are not finite.
    """
    done, n = [], 0
    for part in _parts(params, config, batches, folder):
        done.append(part)
        n += part.n
        if watch is not None:
            watch(min(n, most))
        if n >= most:
            break
    if not n:
        raise DataError("no token to calibrate on: the text is empty, or too short for a label.")
    join = lambda *parts: np.concatenate(parts, 1 if parts[0].ndim > 1 else 0)
    whole = States(*(join(*leaves) for leaves in zip(*done, strict=True)))
    if n > most:
        whole = whole.take(np.arange(n) < most)
    for name in ("cosine", "kl", "nlls"):
        if not np.isfinite(getattr(whole, name)).all():
            raise FloatingPointError(f"{name} is not finite: check the model's parameters.")
    return whole


def _parts(params, config, batches, folder) -> Iterator[States]:
    """Parts of `PART` positions or some more, of batches in a row."""
    iterator, held, number, unit = iter(batches), [], 0, 0

    def file() -> pathlib.Path | None:
        return None if folder is None else pathlib.Path(folder) / f"states-{number:05d}.safetensors"

    def whole(parts) -> States:
        join = lambda *a: np.concatenate(a, 1 if a[0].ndim > 1 else 0)
        return States(*(join(*leaves) for leaves in zip(*parts, strict=True)))

    while True:
        if not held and file() is not None and file().is_file():
            arrays, about = read_arrays(file())
            for _ in range(int(about["batches"])):
                unit += len(next(iterator)["labels"])
            number += 1
            yield States(**arrays)
            continue
        batch = next(iterator, None)
        if batch is not None:
            held.append(_look(params, config, batch, unit))
            unit += len(batch["labels"])
        if held and (batch is None or sum(part.n for part in held) >= PART):
            part = whole(held)
            if file() is not None:
                write_arrays(file(), part._asdict(), {"batches": str(len(held))})
            held, number = [], number + 1
            yield part
        if batch is None:
            return


def _look(params: Tree, config: ModelConfig, batch: Mapping[str, Any], unit: int) -> States:
    labels = np.asarray(batch["labels"])
    counted = labels.reshape(-1) != IGNORE
    units = np.repeat(unit + np.arange(len(labels)), labels.shape[1])[counted]
    inputs = {k: a for k, a in batch.items() if k != "units"}
    seen = jax.device_get(_pass(params, config, inputs))
    pick = lambda a: a[:, counted]
    return States(*map(pick, seen), labels.reshape(-1)[counted], units.astype(np.int32))


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


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """float32 cosine [...] of vectors [..., d]."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    dot = lambda x, y: jnp.sum(x * y, -1)
    return dot(a, b) * lax.rsqrt(jnp.maximum(dot(a, a) * dot(b, b), 1e-30))
