"""Exits beside a Hugging Face folder's weights, in separate files that other libraries do not
read."""

from __future__ import annotations

import json
import pathlib
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from eejax.checkpoint.arrays import SafeTensors, write_arrays
from eejax.checkpoint.digest import digest_of, file_digest
from eejax.checkpoint.files import write_text
from eejax.checkpoint.hf.folder import read_json
from eejax.common.errors import CheckpointError, ConfigError
from eejax.common.trees import Tree, path_name
from eejax.models import params
from eejax.models.config import ModelConfig

SETTINGS = "eejax.json"
WEIGHTS = "eejax_exits.safetensors"
CONTENT = "content"  # key in `SETTINGS` for the `file_digest` of `WEIGHTS`


class Sidecar(NamedTuple):
    """The exits stored beside a model.

    Attributes:
      config: the model's, with its exits.
      shapes: shapes of the leaves in the side file.
      tensors: the side file.
      digest: digest of the parameters that they belong to; "" where the caller has it.
    """

    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    tensors: SafeTensors | None
    digest: str = ""

    @classmethod
    def of(
        cls,
        path: pathlib.Path,
        config: ModelConfig,
        content: str | None,
        digest: str = "",
    ) -> Sidecar:
        """Open the side file of a model's folder.

        Args:
          path: the folder.
          config: as the attribute.
          content: its `file_digest`; None for a model that has no such file.
          digest: as the attribute.

        Raises:
          CheckpointError: for another file.
        """
        shapes = own_shapes(config)
        tensors = SafeTensors(path / WEIGHTS) if shapes else None
        if tensors and content != file_digest(path / WEIGHTS):
            raise CheckpointError(
                f"{path / WEIGHTS}: is not the file that {SETTINGS} was written with: another "
                "model's, or damaged. Put that one back, or make both anew."
            )
        return cls(config, shapes, tensors, digest)

    def reader(self, name: str):
        """Return a leaf's reader. Raises CheckpointError if it is missing or of another shape."""
        shape, tensors = self.shapes[name], self.tensors
        assert tensors is not None  # the file of the leaves in `shapes`

        def read(index: tuple[slice, ...]) -> np.ndarray:
            found = tensors.names().get(name)
            if found != shape:
                raise CheckpointError(
                    f"{WEIGHTS}: {name} is {found or 'missing'}, where {SETTINGS} tells of "
                    f"{shape}: the two are of different models."
                )
            return tensors.read(name)[index]

        return read


def open_sidecar(path: pathlib.Path, config: ModelConfig) -> Sidecar | None:
    """Return the side file of a folder whose model is `config` without exits, or None.

    Raises CheckpointError if it belongs to another model.
    """
    file = path / SETTINGS
    if not file.is_file():
        if (path / WEIGHTS).is_file():
            warnings.warn(
                f"{path}: {WEIGHTS} is not read, because {SETTINGS} is missing beside it: the "
                "model has no exits. Copy that file too, or remove this one.",
                stacklevel=4,
            )
        return None
    values = read_json(file)
    for name, kinds, what in (
        ("model", dict, "must be an object {...} of a ModelConfig's fields"),
        ("digest", str, "must be a string"),
        (CONTENT, str | None, "must be a string"),
    ):
        if not isinstance(values.get(name), kinds):
            raise CheckpointError(
                f"{file}: {name} = {values.get(name)!r}: {what}. Copy the file again, or remove it "
                "to go without exits."
            )
    try:
        whole = ModelConfig.from_dict(values["model"]).replace(dtype=config.dtype)
    except (TypeError, ConfigError) as error:
        raise CheckpointError(f"{file}: model: cannot be read ({error}).") from error
    differ = differences(without_exits(whole), without_exits(config))
    if differ:
        raise CheckpointError(
            f"{file}: is of another model than config.json: {differ}. Remove it to go without "
            "exits."
        )
    return Sidecar.of(path, whole, values.get(CONTENT), values["digest"])


def write(path: pathlib.Path, config: ModelConfig, tree: Tree, dtype: str) -> None:
    """Write the two files, unless the model has nothing that other libraries would not read.

    `dtype` is that of the weights beside them.
    """
    if config == without_exits(config):
        return
    write_exits(path, config, tree)
    values = {"model": config.to_dict(), "digest": _written(config, tree, dtype)} | content(path)
    write_text(path / SETTINGS, json.dumps(values, indent=1) + "\n")


def content(path: pathlib.Path) -> dict[str, str]:
    """Return the entry of `SETTINGS` for the side file in a folder, {} without one."""
    file = path / WEIGHTS
    return {CONTENT: file_digest(file)} if file.is_file() else {}


def _written(config: ModelConfig, tree: Tree, dtype: str) -> str:
    """Return the digest of what is read from both files: the side file's leaves are stored
    unrounded."""
    own = own_shapes(config)
    leaves = {path_name(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    def values(name, at):
        found = leaves[name][at]
        return found if name in own else found.astype(dtype)

    return digest_of(config, {name: leaf.shape for name, leaf in leaves.items()}, values)


def write_exits(path: pathlib.Path, config: ModelConfig, tree: Tree) -> None:
    """Write the file of the leaves in `tree` that other libraries do not have."""
    own = own_shapes(config)
    held = {
        path_name(p): np.asarray(leaf)
        for p, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if path_name(p) in own
    }
    if held:
        write_arrays(path / WEIGHTS, held)


def own_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of leaves that other libraries do not have."""
    found = jax.tree_util.tree_leaves_with_path(params.shapes(config))
    shapes = {path_name(path): leaf.shape for path, leaf in found}

    def own(n):
        return n.startswith("exits/") or (n == "shared_head" and config.head != "shared")

    return {name: shape for name, shape in shapes.items() if own(name)}


def without_exits(config: ModelConfig) -> ModelConfig:
    """Return the model as other libraries see it: without exits and settings of training."""
    head = "own" if config.head == "shared" else config.head
    return config.replace(exits=(), dropout=0.0, vocab_multiple=1, head=head)


def differences(one: ModelConfig, other: ModelConfig) -> str:
    """Return the fields that differ, "" for none; dtype and unused fields do not count."""
    if one.n_layers != other.n_layers:  # before anything with that many layers is made
        return f"n_layers = {one.n_layers!r} and not {other.n_layers!r}"
    a, b = (_used(c) for c in (one, other))
    both = [k for k in a if k in b]  # if only one of them uses a field, another field differs too
    return ", ".join(f"{k} = {a[k]!r} and not {b[k]!r}" for k in both if a[k] != b[k])


def _used(config: ModelConfig) -> dict[str, Any]:
    values = config.to_dict()
    del values["dtype"], values["vocab_multiple"]
    if config.position != "rotary":
        del values["rotary"]
    if config.norm != "layernorm":
        del values["norm_bias"]
    windows = [config.window(i) for i in range(config.n_layers)]
    values["sliding_window"] = windows
    if config.position == "rotary" and all(w is None for w in windows):
        values["rotary"].pop("local_theta")
    if config.attention_scale is None:
        values["attention_scale"] = config.head_dim**-0.5
    return {
        k: round(v, 12) if isinstance(v, float) else v for k, v in values.items() if k != "rotary"
    } | {f"rotary.{k}": v for k, v in values.get("rotary", {}).items()}
