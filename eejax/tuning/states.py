"""States of a frozen model at some boundaries and what its final exit predicts, kept on disk."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eejax.checkpoint.files import write_text
from eejax.common import progress
from eejax.common.errors import CheckpointError, DataError
from eejax.common.trees import Tree, map_chunks
from eejax.models import exits, transformer
from eejax.models.config import ExitConfig, ModelConfig

CHUNK = 512  # tokens whose logits exist at a time
PROGRESS_FILE = "states.json"
FREE_SHARE = 0.5  # of the disk's free space that states may take


@dataclasses.dataclass(frozen=True)
class StoredStates:
    """States of w windows of t tokens, in files that are mapped into memory.

    Attributes:
      boundaries: numbers of layers, ascending.
      states: for each boundary [w, t, d] bfloat16, the state there.
      tokens: [w, t, k] int32, the final exit's most likely tokens, the best first.
      logprobs: [w, t, k] float16, their log-probabilities.
      labels: [w, t] int32, the next token of the text, `IGNORE` where it does not count.
    """

    boundaries: tuple[int, ...]
    states: tuple[np.ndarray, ...]
    tokens: np.ndarray
    logprobs: np.ndarray
    labels: np.ndarray

    @property
    def windows(self) -> int:
        return len(self.labels)

    def first(self, n: int) -> StoredStates:
        """Return the first n windows."""
        cut = tuple(a[:n] for a in self.states)
        return StoredStates(
            self.boundaries, cut, self.tokens[:n], self.logprobs[:n], self.labels[:n]
        )


def window_bytes(config: ModelConfig, boundaries: Sequence[int], length: int, k: int) -> int:
    """Return the bytes that a window of `length` tokens takes on disk."""
    return length * (len(boundaries) * 2 * config.d_model + 6 * k + 4)


def collect(
    params: Tree,
    config: ModelConfig,
    boundaries: Sequence[int],
    batches: Iterable[Mapping[str, Any]],
    windows: int,
    folder: str | os.PathLike,
    *,
    k: int,
    watch: Callable[[str], None],
) -> StoredStates:
    """Run the model over windows of text once, and keep what tuning of exits needs.

    A folder that was filled in part, by an interrupted call, is continued. The caller ensures that
    it is of this model and text.

    Args:
      params: parameters of the model.
      config: its configuration; its own exits do not matter.
      boundaries: boundaries whose states are kept, ascending.
      batches: batches of text (`data.batches`), all of one shape.
      windows: maximum number of windows. There are fewer where the text ends, or where half of the
        disk's free space is full.
      folder: where the files are.
      k: number of predictions that are kept for a token.
      watch: called with lines of progress.

    Raises:
      DataError: for a text without a whole window.
      CheckpointError: for a folder whose files cannot be read.
    """
    folder, boundaries = pathlib.Path(folder), tuple(boundaries)
    iterator = iter(batches)
    try:
        first = next(iterator)
    except StopIteration:
        raise DataError("no window to tune on: the text is too short. Give more text.") from None
    length = first["labels"].shape[1]
    k = min(k, config.vocab_size)
    done, most = _progress(folder)
    if most is None:
        folder.mkdir(parents=True, exist_ok=True)
        room = int(FREE_SHARE * shutil.disk_usage(folder).free)
        most = min(windows, max(room // window_bytes(config, boundaries, length, k), 1))
        if most < windows:
            watch(
                f"{most * length} of {windows * length} tokens: more would take over half of the "
                f"free space of {folder}"
            )
    mode = "r+" if done else "w+"
    kept = _files(folder, config, boundaries, (most, length, k), mode)
    with progress.steps("running the model over text", most * length, "token") as advance:
        advance(done * length)
        for at, rows in _rows(params, config, boundaries, k, _chain(first, iterator), done, most):
            for into, a in zip(_leaves(kept), rows, strict=True):
                into[at : at + len(a)] = a
            done = at + len(rows[-1])
            _flush(kept)
            write_text(folder / PROGRESS_FILE, json.dumps({"done": done, "most": most}) + "\n")
            advance(len(rows[-1]) * length)
    return kept.first(done)


def _chain(first, rest: Iterator) -> Iterator:
    yield first
    yield from rest


def _progress(folder: pathlib.Path) -> tuple[int, int | None]:
    """Return the number of windows that are done, and that there are to be; (0, None) for none."""
    file = folder / PROGRESS_FILE
    if not file.is_file():
        return 0, None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return int(found["done"]), int(found["most"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error!r}): remove {folder}.") from error


def _files(folder, config, boundaries, shape, mode) -> StoredStates:
    """Map the files of w windows, with shape = (w, t, k)."""
    w, t, k = shape

    def file(name: str, shape: tuple[int, ...], dtype) -> np.ndarray:
        path = folder / f"{name}.npy"
        try:
            a = np.lib.format.open_memmap(path, mode, dtype, shape if mode == "w+" else None)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}): remove {folder}.") from error
        if a.shape != shape:
            raise CheckpointError(f"{path}: has the shape {a.shape}, not {shape}: remove {folder}.")
        return a

    # The format of these files has no name for bfloat16.
    states = tuple(
        file(f"states_{n}", (w, t, config.d_model), np.uint16).view(ml_dtypes.bfloat16)
        for n in boundaries
    )
    tokens, logprobs = file("tokens", (w, t, k), np.int32), file("logprobs", (w, t, k), np.float16)
    return StoredStates(boundaries, states, tokens, logprobs, file("labels", (w, t), np.int32))


def _leaves(kept: StoredStates) -> tuple[np.ndarray, ...]:
    return (*kept.states, kept.tokens, kept.logprobs, kept.labels)


def _flush(kept: StoredStates) -> None:
    for a in _leaves(kept):
        assert isinstance(a, np.memmap)
        a.flush()


def _rows(params, config, boundaries, k, batches, done, most) -> Iterator:
    """Yield (first window, rows of `_leaves`) of every batch while the next one runs."""
    at, before = 0, None
    for batch in batches:
        n = len(batch["labels"])
        if at >= most:
            break
        if at >= done:  # otherwise it is on disk already
            running = _pass(params, config, boundaries, k, jnp.asarray(batch["tokens"]))
            if before is not None:
                yield _fetched(*before, most)
            before = at, running, np.asarray(batch["labels"])
        at += n
    if before is not None:
        yield _fetched(*before, most)


def _fetched(at: int, running, labels: np.ndarray, most: int):
    states, tokens, logprobs = jax.device_get(running)
    rows = (*states, tokens, logprobs.astype(np.float16), labels)
    return at, tuple(a[: most - at] for a in rows)


def bare(config: ModelConfig, boundaries: Sequence[int]) -> ModelConfig:
    """Return the model with exits that read the state at a boundary as it is."""
    return config.replace(exits=tuple(ExitConfig(n, norm=False) for n in boundaries))


@partial(jax.jit, static_argnames=("config", "boundaries", "k"))
def _pass(params: Tree, config: ModelConfig, boundaries, k, tokens):
    """Return (states [b, t, d] of each boundary, tokens [b, t, k], log-probabilities [b, t, k])."""
    config = bare(config, boundaries)
    params = params | {"exits": {e.name: {} for e in config.exits}}
    *states, last = transformer.exit_states(params, config, tokens)
    head = exits.head(params, config, config.n_exits)
    head = head._replace(table=head.table.astype(last.dtype))

    def best(h):
        y = exits.logits(head, h)
        top, ids = jax.lax.top_k(y, k)
        return ids, top - jax.nn.logsumexp(y, -1, keepdims=True)

    ids, logprobs = map_chunks(best, last.reshape(-1, last.shape[-1]), CHUNK)
    shape = (*tokens.shape, k)
    states = [x.astype(jnp.bfloat16) for x in states]
    return states, ids.reshape(shape), logprobs.reshape(shape)
