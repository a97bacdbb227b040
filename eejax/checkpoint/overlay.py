"""A run that is another run's model with exits and routers of its own, which alone are stored.

    <workdir>/eejax.json               the model, whose it is, and what a checkpoint says of itself
    <workdir>/eejax_exits.safetensors  the parameters of its exits
    <workdir>/tokenizer/

The two files are those that lie beside exported weights too (`hf.sidecar`).
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from eejax.checkpoint.digest import digest, same_model
from eejax.checkpoint.files import write_text
from eejax.checkpoint.hf import sidecar
from eejax.checkpoint.hf.folder import read_json
from eejax.common.errors import CheckpointError, ConfigError
from eejax.common.trees import Tree, path_name
from eejax.models.config import ModelConfig

OWN = "exits/"  # leaves that are this run's; all others are the base's


class Overlay(NamedTuple):
    """base: the workdir of the model beneath, and step, the checkpoint of it; metadata: as that
    checkpoint's, with this run's model."""

    path: pathlib.Path
    base: pathlib.Path
    step: int
    config: ModelConfig
    digest: str
    metadata: dict[str, Any]

    def exits(self, wanted: Tree) -> Tree:
        """The stored leaves, laid out as the shape structs `wanted` say.

        Raises CheckpointError for files that are cut off or not of one model.
        """
        side = sidecar.Sidecar.of(self.path, self.config)

        def one(path, struct):
            read = side.reader(f"{OWN}{path_name(path)}")
            part = lambda index: read(index).astype(struct.dtype)
            return jax.make_array_from_callback(struct.shape, struct.sharding, part)

        return jax.tree_util.tree_map_with_path(one, wanted)

    def check(self, params: Tree) -> None:
        """Raises CheckpointError where the model beneath has other parameters than it had."""
        same_model(self.path, self.digest, digest(self.config, params), str(self.base))


def write_overlay(
    workdir: str | os.PathLike,
    base: str | os.PathLike,
    step: int,
    config: ModelConfig,
    params: Tree,
    metadata: Mapping[str, Any],
) -> None:
    """Stores the exits of a model (parameters `params` of all of it) that is else a base's."""
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    sidecar.write_exits(workdir, config, {"exits": jax.device_get(params["exits"])})
    beneath = os.path.relpath(pathlib.Path(base).expanduser(), workdir)
    values = {
        "model": config.to_dict(), "digest": digest(config, params),
        "base": {"workdir": beneath, "step": step},
        "metadata": dict(metadata) | {"model": config.to_dict()},
    }  # fmt: skip
    write_text(workdir / sidecar.SETTINGS, json.dumps(values, indent=1) + "\n")


def opened(workdir: str | os.PathLike) -> Overlay | None:
    """The overlay that a workdir is, None where it is none. Raises CheckpointError."""
    workdir = pathlib.Path(workdir)
    file = workdir / sidecar.SETTINGS
    if not file.is_file():
        return None
    values = read_json(file)
    if "base" not in values:  # beside exported weights
        return None
    try:
        return Overlay(
            workdir, workdir / values["base"]["workdir"], int(values["base"]["step"]),
            ModelConfig.from_dict(values["model"]), str(values["digest"]),
            dict(values["metadata"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error!r}).") from error


def beneath(config: ModelConfig, of: ModelConfig, tree: Tree) -> Tree:
    """Of a tree like `config`'s parameters what the base `of` has, as it has it."""
    tree = {k: v for k, v in tree.items() if k != "exits"}
    if config.head == "shared" and of.head == "own" and "shared_head" in tree:
        tree["final"] = tree.get("final", {}) | {"head": tree.pop("shared_head")}
    return tree


def above(config: ModelConfig, of: ModelConfig, tree: Tree) -> Tree:
    """The inverse of `beneath`."""
    if config.head == "shared" and of.head == "own" and "head" in tree.get("final", {}):
        final = dict(tree["final"])
        tree = tree | {"shared_head": final.pop("head"), "final": final}
    return tree
