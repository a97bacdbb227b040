"""Export of a model as a folder that transformers opens."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import stat
import tempfile
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eejax.checkpoint import arrays
from eejax.checkpoint.hf import generation as generations
from eejax.checkpoint.hf import sidecar
from eejax.checkpoint.hf.families import FAMILIES, Family
from eejax.checkpoint.hf.fields import Raw
from eejax.checkpoint.hf.folder import CONFIG
from eejax.checkpoint.hf.layouts import Rule
from eejax.common.errors import CheckpointError, ConfigError, require_one_of
from eejax.common.paths import expanded
from eejax.common.trees import Tree
from eejax.data.tokenizer_export import save_for_transformers
from eejax.data.tokenizers import Tokenizer
from eejax.models.config import DTYPES, ModelConfig

SHARD = 5 * 10**9  # bytes of a file of weights, as in transformers


def save_pretrained(
    path: str | os.PathLike,
    config: ModelConfig,
    tree: Tree,
    *,
    family: str | None = None,
    tokenizer: Tokenizer | None = None,
    generation: Mapping[str, Any] = types.MappingProxyType({}),
    dtype: str = "float32",
) -> str:
    """Write the new folder `path` and return its family.

    Exits are in separate files beside the weights, which `load_pretrained` reads and transformers
    does not. The folder gets its name once it is complete. One layer at a time is brought to the
    host.

    Args:
      family: the `model_type`; by default the first one that has such models.
      generation: contents of generation_config.json, as in `Pretrained`; ids that the tokenizer
        knows are taken from the tokenizer.
      dtype: dtype of the written weights.

    Raises:
      ConfigError: if no family has such a model; it names what none of them could represent.
      CheckpointError: if the folder exists or cannot be written.
    """
    from safetensors import SafetensorError  # raised for a full disk

    require_one_of("dtype", dtype, DTYPES)
    path = expanded(path)
    if path.exists():
        raise CheckpointError(f"{path}: is there already: remove it, or name another folder.")
    base = sidecar.without_exits(config)
    chosen, values = hf_config_of(base, family)
    values["torch_dtype"] = dtype
    values |= (ids := generations.tokens(tokenizer, config.vocab_size, generation))
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = _fresh(path)
        (part / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        generations.write(part, generation, ids)
        _write_weights(part, tensors(base, tree, chosen), dtype)
        sidecar.write(part, config, tree, dtype)
        if tokenizer is not None:
            save_for_transformers(tokenizer, part, config.context_length)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path}: cannot be written ({why}). Make room, or name a folder that can be written."
        ) from error
    finally:
        if part is not None:  # it was renamed unless something failed
            shutil.rmtree(part, ignore_errors=True)
    return chosen.model_type


def _fresh(path: pathlib.Path) -> pathlib.Path:
    """Make a new folder beside `path`, to be renamed to it."""
    own = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        (own / "mode").mkdir()  # only to learn the usual mode: `own` is private
        own.chmod(stat.S_IMODE((own / "mode").stat().st_mode))
        (own / "mode").rmdir()
    except OSError:
        shutil.rmtree(own, ignore_errors=True)
        raise
    return own


def hf_config_of(config: ModelConfig, name: str | None = None) -> tuple[Family, dict]:
    """Return the family, and config.json's values that it reads as `config`. Raises ConfigError."""
    if name is not None:
        require_one_of("family", name, tuple(sorted(FAMILIES)))
    messages = []
    for family in [FAMILIES[name]] if name else FAMILIES.values():
        try:
            values = family.write(config)
            back = family.read(Raw(pathlib.Path(CONFIG), values))
            differ = sidecar.differences(config, sidecar.without_exits(back))
            if not differ:
                return family, values
        except (CheckpointError, ConfigError) as error:
            differ = str(error)
        messages.append(
            (max(1, differ.count(" and not ")), f"{family.model_type}: {differ.rstrip('.')}")
        )
    least = min(messages, key=lambda one: one[0])[1]
    raise ConfigError(
        f"no model of {'family ' + name if name else 'any family'} is like this one. Nearest is "
        f"{least}. register_family() makes another known."
    )


def tensors(config: ModelConfig, tree: Tree, family: Family) -> Iterator[tuple[str, np.ndarray]]:
    """Yield all tensors with their names."""
    for rule in family.rules(config, None):
        if rule.write is None:  # other rules write its leaves
            continue
        for i in range(config.n_layers) if rule.layered else [None]:
            leaves = tuple(np.asarray(jax.device_get(_leaf(tree, rule, o, i))) for o in rule.ours)
            made = rule.write(config, leaves)
            for name, tensor in zip(rule.theirs, made, strict=True):
                yield name.format(i=i), tensor


def _leaf(tree: Tree, rule: Rule, ours: str, i: int | None) -> jax.Array:
    if ours == "final/head" and "head" not in tree["final"]:
        return tree["shared_head"]
    node = tree["layers"] if rule.layered else tree
    for key in ours.split("/"):
        node = node[key]
    return node if i is None else node[i]


def _write_weights(path: pathlib.Path, made, dtype: str) -> None:
    held: dict[str, np.ndarray] = {}
    files: list[list[str]] = []
    total = 0

    def part(i):
        return path / f"part-{i}.safetensors"

    def flush() -> None:
        arrays.save(part(len(files)), held, {"format": "pt"})
        files.append([*held])
        held.clear()

    for name, tensor in made:
        tensor = np.ascontiguousarray(tensor.astype(jnp.dtype(dtype)))
        total += tensor.nbytes
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > SHARD:
            flush()
        held[name] = tensor
    flush()
    if len(files) == 1:
        part(0).rename(path / "model.safetensors")
        return
    where = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        part(i).rename(path / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
