"""Reading the model of a run, without its optimizer state."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jax.sharding import Mesh

from eejax.checkpoint import overlay
from eejax.checkpoint.language_model import LanguageModel
from eejax.checkpoint.manager import Checkpoints, Restored, Targets
from eejax.common.errors import CheckpointError, ConfigError, DataError
from eejax.common.paths import expanded
from eejax.common.trees import Tree
from eejax.data.tokenizer_files import load_tokenizer
from eejax.data.tokenizers import Tokenizer, check_vocabulary
from eejax.models import params
from eejax.models.config import ModelConfig
from eejax.sharding import rules
from eejax.sharding.mesh import MeshConfig, make_mesh

CHECKPOINTS = overlay.CHECKPOINTS
TUNING = overlay.TUNING
TOKENIZER = "tokenizer"
PARAMS = "params"
EMA = "ema"

T = TypeVar("T")


def load_run(
    workdir: str | os.PathLike,
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
    part: Callable[[ModelConfig, Tree], Tree] | None = None,
    ema: bool = False,
) -> LanguageModel:
    """Load the model of a run's checkpoint, without the optimiser's state.

    Args:
      workdir: the training run.
      step: step of the checkpoint; by default the newest complete one.
      mesh: devices over which the parameters are sharded; by default one.
      part: chooses what is read: from the configuration and the shape structs of all parameters it
        makes those of some leaves, or of the first layers of the stack.
      ema: take the averaged parameters, of a run that keeps them (`train.ema`).

    Raises:
      CheckpointError: if there is no usable checkpoint, it is of another program version, or it
        has no averaged parameters although these are wanted.
    """
    workdir = expanded(workdir)
    mesh = make_mesh(MeshConfig()) if mesh is None else mesh
    if (over := _overlay(workdir, step)) is not None:
        return _overlaid(over, mesh, part, ema)
    item = EMA if ema else PARAMS

    def targets(metadata: dict[str, Any]) -> dict[str, Tree]:
        if ema and not metadata.get("averaged"):
            raise CheckpointError(
                f"{workdir} has no averaged parameters: it was trained without train.ema. Leave "
                "the average out, or train with --config.train.ema=0.999."
            )
        config = model_config(metadata)
        everything = abstract_params(config, mesh)
        return {item: everything if part is None else part(config, everything)}

    restored = _restore(workdir, targets, step, part is not None)
    config = model_config(restored.metadata)
    tokenizer = load_run_tokenizer(workdir, restored.metadata)
    check_vocabulary(tokenizer, config.vocab_size)
    tree, metadata = restored.trees[item], restored.metadata
    return LanguageModel(config, tree, tokenizer, workdir, restored.step, metadata)


def load_metadata(workdir: str | os.PathLike, *, step: int | None = None) -> dict[str, Any]:
    """Return the metadata of a run's newest checkpoint (or that of `step`) without its values.

    Raises `CheckpointError` if none has a complete description.
    """
    if (over := _overlay(expanded(workdir), step)) is not None:
        return over.metadata
    return _restore(expanded(workdir), lambda _: {}, step).metadata


def _overlay(workdir: pathlib.Path, step: int | None) -> overlay.Overlay | None:
    found = overlay.open_overlay(workdir)
    if found is not None:
        overlay.beneath_overlays(workdir)  # raises if they form a circle
    if found is not None and step not in (None, found.step):
        raise CheckpointError(
            f"{workdir} has the exits of step {found.step} of {found.base}, and of no step {step}."
        )
    return found


def _overlaid(over: overlay.Overlay, mesh: Mesh, part, ema: bool) -> LanguageModel:
    """Return the base's model with the exits that are stored in a separate workdir."""
    config = over.config
    wanted = abstract_params(config, mesh)
    wanted = wanted if part is None else part(config, wanted)
    seen = {}

    def below(of: ModelConfig, _: Tree) -> Tree:
        seen["config"] = of
        return overlay.beneath(config, of, wanted)

    try:
        base = load_run(over.base, step=over.step, mesh=mesh, part=below, ema=ema)
    except CheckpointError as error:
        raise CheckpointError(f"{over.path} is made of another run's model: {error}") from error
    tree = overlay.above(config, seen["config"], base.params)
    if part is None:
        over.check(tree)
    tree |= {"exits": over.exits(wanted["exits"])} if "exits" in wanted else {}
    tokenizer = load_run_tokenizer(over.path, over.metadata)
    return LanguageModel(config, tree, tokenizer, over.path, over.step, over.metadata)


def is_run(path: pathlib.Path) -> bool:
    """Return whether a folder is the workdir of a run, finished or not."""
    has = any((path / name).is_dir() for name in (CHECKPOINTS, TUNING))
    return has or overlay.open_overlay(path) is not None


def _restore(
    workdir: pathlib.Path, targets: Targets, step: int | None, partial: bool = False
) -> Restored:
    folder = workdir / CHECKPOINTS
    if not folder.is_dir() and (workdir / TUNING).is_dir():
        raise CheckpointError(
            f"{workdir} is a tuning run that has not ended: the command that began it "
            "(eejax tune ...) finishes it."
        )
    if not folder.is_dir() and (workdir / "config.json").is_file():
        raise CheckpointError(
            f"{workdir} holds no checkpoints: it is a model's folder. To make a run of it: eejax "
            f"import-hf --model={workdir} --workdir=..."
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"{workdir} holds no checkpoints: give the --workdir of a training run "
            "(eejax train --config=... --workdir=...)."
        )
    checkpoints = Checkpoints(folder, read_only=True)
    try:
        restored = checkpoints.restore(targets, step=step, partial=partial)
    finally:
        checkpoints.close()
    if restored is None:
        raise CheckpointError(f"{folder} is empty: no checkpoint of that run was finished.")
    return restored


def model_config(metadata: dict[str, Any]) -> ModelConfig:
    """Return the model configuration in a checkpoint's metadata."""
    return saved_settings(metadata, "model", ModelConfig.from_dict)


def saved_settings(metadata: Mapping[str, Any], name: str, build: Callable[[Any], T]) -> T:
    """Return `build` of the entry `name` in a checkpoint's metadata.

    Raises `CheckpointError` if this version of the program cannot read it.
    """
    try:
        return build(metadata[name])
    except (KeyError, ConfigError) as error:
        raise CheckpointError(
            f"the checkpoint's {name} configuration cannot be read ({error}): it was saved by "
            f"another version of eejax ({metadata.get('version', 'unknown')})."
        ) from error


def abstract_params(config: ModelConfig, mesh: Mesh) -> Tree:
    """Return shape structs of the parameters with their shardings on `mesh`."""
    return rules.structs(params.abstract(config), mesh)


def load_run_tokenizer(workdir: pathlib.Path, metadata: dict[str, Any]) -> Tokenizer:
    """Load the tokenizer saved in a workdir, and check that the checkpoint was trained with it."""
    try:
        tokenizer = load_tokenizer(workdir / TOKENIZER)
    except DataError as error:
        raise CheckpointError(
            f"the run's tokenizer cannot be read: {error} Copy the folder {TOKENIZER!r} of the "
            f"original workdir to {workdir / TOKENIZER}."
        ) from error
    expected = metadata.get("tokenizer")
    if tokenizer.fingerprint != expected:
        raise CheckpointError(
            f"{workdir / TOKENIZER} is {tokenizer.fingerprint}, the checkpoint was trained with "
            f"{expected}. Put that tokenizer back."
        )
    return tokenizer
