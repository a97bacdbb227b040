"""A run that consists of another run's model and its own exits and routers, which alone are stored.

    <workdir>/eejax.json               the model, its base, and the metadata of a checkpoint
    <workdir>/eejax_exits.safetensors  the parameters of its exits
    <workdir>/tokenizer/

The two files have the same form as those beside exported weights (`hf.sidecar`).
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
from eejax.common.errors import CheckpointError, ConfigError, require
from eejax.common.paths import expanded
from eejax.common.trees import Tree, path_name
from eejax.models.config import ModelConfig

OWN = "exits/"  # prefix of this run's leaves; all others are the base's
CHECKPOINTS = "checkpoints"  # folder of a run that was trained
TUNING = "tuning"  # checkpoints from which a run that tunes exits resumes


class Overlay(NamedTuple):
    """Exits that are stored apart from their base model.

    Attributes:
      path: the workdir.
      base: the workdir of the base model.
      step: step of its checkpoint.
      config: configuration with this run's exits.
      digest: digest of the base's parameters.
      content: `file_digest` of the exits' file, or None.
      metadata: that of the checkpoint, with this run's model.
    """

    path: pathlib.Path
    base: pathlib.Path
    step: int
    config: ModelConfig
    digest: str
    content: str | None
    metadata: dict[str, Any]

    def exits(self, wanted: Tree) -> Tree:
        """Return the stored leaves, placed as the shape structs `wanted` say.

        Raises CheckpointError for files that are cut off or of different models.
        """
        side = sidecar.Sidecar.of(self.path, self.config, self.content)

        def one(path, struct):
            read = side.reader(f"{OWN}{path_name(path)}")

            def part(index):
                return read(index).astype(struct.dtype)

            return jax.make_array_from_callback(struct.shape, struct.sharding, part)

        return jax.tree_util.tree_map_with_path(one, wanted)

    def check(self, params: Tree) -> None:
        """Raise CheckpointError if the base model has changed its parameters."""
        same_model(self.path, self.digest, digest(self.config, params), str(self.base))


def write_overlay(
    workdir: str | os.PathLike,
    base: str | os.PathLike,
    step: int,
    config: ModelConfig,
    params: Tree,
    metadata: Mapping[str, Any],
) -> None:
    """Store the exits of a model, given all its `params`, whose other parameters are a base's.

    Raises ConfigError if a run would be lost by it (`spoilt`).
    """
    if reason := spoilt(workdir, base):
        raise ConfigError(f"workdir = '{workdir}' with base = '{base}': {reason}")
    workdir = expanded(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    sidecar.write_exits(workdir, config, {"exits": jax.device_get(params["exits"])})
    # From resolved paths: ".." leaves the folder that a link points to, not the link's folder.
    beneath = os.path.relpath(expanded(base).resolve(), workdir.resolve())
    values = {
        "model": config.to_dict(),
        "digest": digest(config, params),
        "base": {"workdir": beneath, "step": step},
        "metadata": dict(metadata) | {"model": config.to_dict()},
        **sidecar.content(workdir),
    }
    write_text(workdir / sidecar.SETTINGS, json.dumps(values, indent=1) + "\n")


def spoilt(workdir: str | os.PathLike, base: str | os.PathLike) -> str:
    """Return why an overlay of `base` cannot be stored in `workdir`, or "".

    A folder with an overlay is always read as one, so a run in the same folder would be hidden.
    Raises CheckpointError for overlays beneath the base that are not models.
    """
    workdir, base = (expanded(path) for path in (workdir, base))
    if workdir.resolve() == base.resolve():
        return "the run that is made cannot replace the one it is made of; give it a new folder."
    if workdir.resolve() in beneath_overlays(base):
        return "the base is made of the run in that folder; give the new run a folder of its own."
    for folder in (CHECKPOINTS, TUNING):
        if (workdir / folder).exists():
            return (
                f"there is a run in it ({folder}/) already; give the new one a folder of its own."
            )
    if (workdir / sidecar.SETTINGS).is_file():
        kind = "an exported model" if open_overlay(workdir) is None else "a calibrated run"
        return (
            f"there is {kind} in it ({sidecar.SETTINGS}) already; remove it, or give the new run a "
            "folder of its own."
        )
    return ""


def require_free(workdir: str | os.PathLike) -> None:
    """Raise ConfigError if there is an overlay in `workdir`, which would hide a run there."""
    require(
        open_overlay(expanded(workdir)) is None,
        "workdir",
        os.fspath(workdir),
        f"must not be the folder of a calibrated run ({sidecar.SETTINGS}), which would hide the "
        "new one",
        "Remove it, or give the new run a folder of its own.",
    )


def beneath_overlays(workdir: pathlib.Path) -> list[pathlib.Path]:
    """Return the resolved folders of the models beneath a run, the nearest first; [] for a trained
    run.

    Raises CheckpointError if they form a circle.
    """
    seen, over = [workdir.resolve()], open_overlay(workdir)
    while over is not None:
        if over.base in seen:
            raise CheckpointError(
                f"{over.path / sidecar.SETTINGS}: its base, {over.base}, is made of it in turn, so "
                "there is no model beneath. Let base.workdir name the run that was calibrated."
            )
        seen.append(over.base)
        over = open_overlay(over.base)
    return seen[1:]


def open_overlay(workdir: str | os.PathLike) -> Overlay | None:
    """Return the overlay in a workdir, or None without one. Raises CheckpointError."""
    workdir = pathlib.Path(workdir)
    file = workdir / sidecar.SETTINGS
    if not file.is_file():
        return None
    values = read_json(file)
    if "base" not in values:  # the file of exported weights
        return None
    try:
        return Overlay(
            workdir,
            (workdir / values["base"]["workdir"]).resolve(),
            int(values["base"]["step"]),
            ModelConfig.from_dict(values["model"]),
            str(values["digest"]),
            values.get(sidecar.CONTENT),
            dict(values["metadata"]),
        )
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error!r}).") from error


def beneath(config: ModelConfig, of: ModelConfig, tree: Tree) -> Tree:
    """Return the part of a tree of `config`'s parameters that the base `of` has, in its form."""
    tree = {k: v for k, v in tree.items() if k != "exits"}
    if config.head == "shared" and of.head == "own" and "shared_head" in tree:
        tree["final"] = tree.get("final", {}) | {"head": tree.pop("shared_head")}
    return tree


def above(config: ModelConfig, of: ModelConfig, tree: Tree) -> Tree:
    """Invert `beneath`."""
    if config.head == "shared" and of.head == "own" and "head" in tree.get("final", {}):
        final = dict(tree["final"])
        tree = tree | {"shared_head": final.pop("head"), "final": final}
    return tree
