"""Pretrained models as runs: every launcher takes the workdir of an imported model."""

from __future__ import annotations

import json
import os
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh

import eejax
from eejax.checkpoint.hf import Pretrained, load_pretrained
from eejax.checkpoint.hf.load import fetched
from eejax.checkpoint.manager import Checkpoints
from eejax.checkpoint.model import CHECKPOINTS, PARAMS, TOKENIZER, TUNING, load_model
from eejax.checkpoint.overlay import opened
from eejax.common.errors import CheckpointError, DataError, require
from eejax.common.paths import expanded
from eejax.common.trees import Tree
from eejax.data.tokenizer_files import load_tokenizer
from eejax.data.tokenizers import (
    BYTES,
    MARKER,
    ByteTokenizer,
    Tokenizer,
    check_vocabulary,
    save_tokenizer,
)  # fmt: skip
from eejax.models.config import ModelConfig
from eejax.train.config import DataConfig, ExitWeights, Experiment

OWN = ("tokenizer.json", "tokenizer.model", MARKER)


def import_pretrained(
    source: str | os.PathLike,
    workdir: str | os.PathLike,
    *,
    data: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    watch: Callable[[str], None] | None = None,
) -> Pretrained:
    """Write a pretrained model into `workdir`, as the checkpoint of step 0 of a run.

    Args:
      source: as `load_pretrained` takes it.
      data: fields of `DataConfig` for the text that the model is evaluated and tuned on.
      tokenizer: "bytes", a file or a folder; by default the model's own.
      dtype: dtype of the computation; parameters are float32.
      watch: as `load_pretrained` takes it.

    Raises:
      CheckpointError: the workdir already has checkpoints, the model has no tokenizer, or
        `load_pretrained` fails.
      DataError: the tokenizer does not fit the model.
    """
    workdir = expanded(workdir)
    if (workdir / CHECKPOINTS).exists():
        raise CheckpointError(f"{workdir} holds a run already. Remove it, or name another workdir.")
    path = fetched(source)
    loaded = load_pretrained(path, mesh=mesh, watch=watch)
    config = loaded.config.replace(dtype=dtype)
    chosen = tokenizer_of(path, loaded.raw, config.vocab_size, tokenizer)
    text = {
        "length": min(config.context_length, DataConfig.length),
        "tokenizer": str(workdir / TOKENIZER),
    }
    experiment = Experiment(
        model=config, data=DataConfig(**text | dict(data or {})),
        exit_weights=ExitWeights((1.0,) * config.n_exits),
    )  # fmt: skip
    save_tokenizer(chosen, workdir / TOKENIZER)
    metadata = {
        "version": eejax.__version__, "model": config.to_dict(), "experiment": experiment.to_dict(),
        "tokenizer": chosen.fingerprint, "tokens": 0, "averaged": False, "data": {},
        "pretrained": {
            "source": os.fspath(source),
            "family": loaded.family.model_type,
            "generation": dict(loaded.generation),
        },
    }  # fmt: skip
    checkpoints = Checkpoints(workdir / CHECKPOINTS)
    try:
        checkpoints.save(0, {PARAMS: loaded.params}, metadata)
        checkpoints.wait()
    finally:
        checkpoints.close()
    return loaded._replace(config=config)


class Opened(NamedTuple):
    """An opened model, the folder it was read from, and its generation_config.json."""

    config: ModelConfig
    params: Tree
    tokenizer: Tokenizer
    path: pathlib.Path
    generation: Mapping[str, Any] = types.MappingProxyType({})


def open_model(
    source: str | os.PathLike,
    *,
    tokenizer: str | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    watch: Callable[[str], None] | None = None,
) -> Opened:
    """Open the model of a run's workdir, of a Hugging Face folder, or of a name on the Hub.

    Arguments and errors are those of `eejax.load`; a pretrained model is sharded over `mesh`, and
    `watch` is passed to `load_pretrained`.
    """
    path = expanded(source)
    if is_run(path):
        for name, value in (("tokenizer", tokenizer), ("dtype", dtype)):
            fix = "Leave it out."
            require(value is None, name, value, f"must be None: {path} is a run with its own", fix)
        run = load_model(path)
        return Opened(run.config, run.params, run.tokenizer, path, generation_of(run.metadata))
    path = fetched(source)
    found = load_pretrained(path, dtype=dtype or "float32", mesh=mesh, watch=watch)
    own = tokenizer_of(path, found.raw, found.config.vocab_size, tokenizer)
    return Opened(found.config, found.params, own, path, found.generation)


def generation_of(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the generation_config.json of an imported run's model, {} for any other run."""
    return metadata.get("pretrained", {}).get("generation", {})


def is_run(path: pathlib.Path) -> bool:
    """Return whether a folder is the workdir of a run, finished or not."""
    has = any((path / name).is_dir() for name in (CHECKPOINTS, TUNING))
    return has or opened(path) is not None


def has_tokenizer(path: pathlib.Path) -> bool:
    """Return whether a pretrained model's folder has its own tokenizer."""
    return any((path / name).is_file() for name in OWN)


def tokenizer_of(
    path: pathlib.Path, raw: dict[str, Any], vocab_size: int, spec: str | None = None
) -> Tokenizer:
    """Load the tokenizer `spec`, or by default the folder's own.

    Its end-of-text tokens include those that the model's config.json and generation_config.json
    name. A byte model with a vocabulary of 256 ends texts with the byte that its config.json names.

    Raises:
      CheckpointError: the folder has no tokenizer and `spec` is None.
      DataError: the tokenizer has more tokens than the model, or `spec` ends texts with a token
        that does not end the model's.
    """
    if spec is None and not has_tokenizer(path):
        raise CheckpointError(
            f"{path}: has no tokenizer ({' or '.join(OWN[:2])}). Name one, or 'bytes' for a byte "
            "model."
        )
    ends = _ends(path, raw, vocab_size)
    found = load_tokenizer(path if spec is None else spec, ends=ends)
    if spec == BYTES and vocab_size == 256 and ends:
        found = ByteTokenizer(ends[0])
    try:
        check_vocabulary(found, vocab_size)
    except DataError as error:
        raise DataError(
            f"{path}: the tokenizer has {found.vocab_size} tokens, the model {vocab_size}. Name "
            "the tokenizer the model was trained with."
        ) from error
    if spec not in (None, BYTES) and ends and found.eos_id not in ends:
        raise DataError(
            f"{spec}: its texts end with token {found.eos_id}, those of {path} with "
            f"{' or '.join(map(str, ends))} (eos_token_id of config.json). Name the tokenizer the "
            "model was trained with."
        )
    return found


def _ends(path: pathlib.Path, raw: dict[str, Any], vocab_size: int) -> list[int]:
    """List the end-of-text tokens that config.json and generation_config.json name."""
    declared = [raw.get("eos_token_id")]
    file = path / "generation_config.json"
    if file.is_file():
        try:
            declared.append(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id"))
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error}).") from error
    ids = [i for each in declared for i in (each if isinstance(each, list) else [each])]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size))
