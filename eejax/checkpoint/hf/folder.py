"""The tensors of a Hugging Face folder, read by name one at a time."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np

from eejax.checkpoint.arrays import SafeTensors
from eejax.checkpoint.hf.gguf_file import GgufFile
from eejax.checkpoint.hf.torch_file import TorchFile
from eejax.common.errors import CheckpointError

CONFIG = "config.json"
GGUF = "model.gguf"
FILES = ("model.safetensors", "pytorch_model.bin", GGUF)
"""Weights in one file; `<name>.index.json` lists the files if there are several."""


class Tensors(Protocol):
    """The tensors of one file."""

    def names(self) -> Mapping[str, tuple[int, ...]]:
        """Return shapes by name."""
        ...

    def read(self, name: str) -> np.ndarray: ...


class Folder:
    """All tensors of a folder.

    Files are opened once; values are read on request. `absent` maps names that an index lists, and
    their file lacks, to that file's path.

    Raises CheckpointError if there are no weights, or a shard is missing or cut off.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self._of: dict[str, Tensors] = {}
        self.absent: dict[str, pathlib.Path] = {}
        for name in FILES:
            index = self.path / f"{name}.index.json"
            if (self.path / name).is_file():
                return self._add(open_tensors(self.path / name))
            if index.is_file():
                return self._add_shards(index)
        raise CheckpointError(
            f"{self.path} holds no weights: looked for {', '.join(FILES)} and their .index.json."
        )

    def _add(self, tensors: Tensors) -> None:
        self._of |= dict.fromkeys(tensors.names(), tensors)

    def _add_shards(self, index: pathlib.Path) -> None:
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
            raise CheckpointError(f"{index}: weight_map must say in which file each tensor lies.")
        files = sorted(set(where.values()))
        outside = [f for f in files if pathlib.PurePath(f).name != f]
        if outside:
            raise CheckpointError(f"{index}: weight_map names {outside}: must be in this folder.")
        missing = [f for f in files if not (self.path / f).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.path}: {len(missing)} of {len(files)} shards are missing: {missing}. Copy "
                "or download them."
            )
        for file in files:
            tensors = open_tensors(self.path / file)
            wanted = {name for name, f in where.items() if f == file}
            absent = wanted - set(tensors.names())
            self.absent |= dict.fromkeys(absent, self.path / file)
            self._of |= dict.fromkeys(wanted - absent, tensors)

    def require_whole(self, spare: Collection[str] = ()) -> None:
        """Raise CheckpointError if the index and its files list different tensors.

        Tensors in `spare` are not needed and may be missing.
        """
        absent = sorted(set(self.absent) - set(spare))
        if absent:
            raise CheckpointError(
                f"{self.absent[absent[0]]}: has no {brief(absent)}, which the index says lie "
                "there: the files are of different checkpoints."
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.names()[name]) for name, t in self._of.items()}

    def read(self, name: str) -> np.ndarray:
        return self._of[name].read(name)


def open_tensors(path: pathlib.Path) -> Tensors:
    kinds = {".safetensors": SafeTensors, ".gguf": GgufFile}
    return kinds.get(path.suffix, TorchFile)(path)


def brief(names: list[str]) -> str:
    return f"{names[:4]}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON file. Raises CheckpointError, naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must be a JSON object.")
    return values
