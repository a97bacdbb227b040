"""From a `DataConfig` to packed tokens and their tokenizer, made once per workdir."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable

from eejax import data
from eejax.checkpoint.files import naming
from eejax.common.errors import DataError
from eejax.train.config import DataConfig

BPE = "bpe"
MEGATRON = "megatron:"  # data.source = "megatron:PREFIX" names PREFIX.bin and PREFIX.idx

Dataset = data.PackedDataset | data.MegatronDataset


def prepare(
    config: DataConfig,
    vocab_size: int,
    workdir: str | os.PathLike,
    tokenizer_folder: str,
    *,
    workers: int = 1,
    progress: Callable[[data.PackProgress], None] | None = None,
) -> Dataset:
    """The data set of a run, its tokenizer saved in the workdir's `tokenizer_folder`.

    A tokenizer found there is the run's, and must be the one configured; a trained one is not
    trained again. `workers` and `progress` are `data.pack`'s; tokens that Megatron-LM prepared
    are read where they lie. Raises `DataError` for unusable text, or a tokenizer that does not
    fit, and `OSError` where the tokenizer cannot be written.
    """
    workdir = pathlib.Path(workdir)
    saved = workdir / tokenizer_folder
    tokenizer = _tokenizer(config, workdir, saved)
    if tokenizer is None:
        documents = data.source(config.source, config.max_bytes).documents()
        tokenizer = data.train_bpe(documents, vocab_size)
    data.check_vocabulary(tokenizer, vocab_size)
    if not saved.is_dir():
        save_tokenizer(tokenizer, saved)
    if (prefix := megatron_prefix(config)) is not None:
        return data.open_megatron(prefix, tokenizer, **_split(config))
    return data.pack(
        data.source(config.source, config.max_bytes), tokenizer, _packed(config, workdir),
        **_split(config), workers=workers, progress=progress,
    )  # fmt: skip


def find(config: DataConfig, workdir: str | os.PathLike, tokenizer_folder: str) -> Dataset | None:
    """What `prepare` gives, read anew and verified, if it is there; None where it is not.

    Raises `DataError` where it is damaged.
    """
    workdir = pathlib.Path(workdir)
    tokenizer = _tokenizer(config, workdir, workdir / tokenizer_folder)
    if tokenizer is None:
        return None
    if (prefix := megatron_prefix(config)) is not None:
        return data.open_megatron(prefix, tokenizer, **_split(config))
    source = data.source(config.source, config.max_bytes)
    return data.find_packed(source, tokenizer, _packed(config, workdir), **_split(config))


def megatron_prefix(config: DataConfig) -> str | None:
    """PREFIX of "megatron:PREFIX"; None for a source of text.

    Raises `DataError` for settings that tokens already made cannot follow.
    """
    sources = (config.source,) if isinstance(config.source, str) else config.source
    if not any(s.startswith(MEGATRON) for s in sources):
        return None
    if len(sources) > 1:
        raise DataError(
            f"data.source = {config.source!r}: tokens prepared by Megatron-LM stand alone; merge "
            "them with its tools/merge_datasets.py, or name one."
        )
    if config.tokenizer == BPE:
        raise DataError(
            f"data.tokenizer = {BPE!r}: {sources[0]} holds tokens and no text to train on; give "
            "the tokenizer they were made with."
        )
    if config.max_bytes is not None:
        raise DataError(
            f"data.max_bytes = {config.max_bytes}: {sources[0]} is read whole; set it to None."
        )
    return sources[0].removeprefix(MEGATRON)


def _tokenizer(
    config: DataConfig, workdir: pathlib.Path, saved: pathlib.Path
) -> data.Tokenizer | None:
    """The configured one, which must be that of the workdir; None where it is to be trained."""
    megatron_prefix(config)  # where the settings do not go together, that is what to say
    have = data.load_tokenizer(saved) if saved.is_dir() else None
    if config.tokenizer == BPE:
        return have
    tokenizer = data.load_tokenizer(config.tokenizer)
    if have is not None and have.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"data.tokenizer = {config.tokenizer!r} is {tokenizer.fingerprint}, but {workdir} "
            f"was begun with {have.fingerprint}: restore that setting, or use a new workdir."
        )
    return tokenizer


def _packed(config: DataConfig, workdir: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(config.packed) if config.packed else workdir / "data"


def _split(config: DataConfig) -> dict[str, float | int]:
    return {"validation_fraction": config.validation_fraction, "seed": config.split_seed}


def save_tokenizer(tokenizer: data.Tokenizer, folder: pathlib.Path) -> None:
    """All of the tokenizer's folder at once: a kill or a full disk leaves none."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed here
    try:
        with naming(folder):
            data.save_tokenizer(tokenizer, part)
            for file in part.iterdir():
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def strip(batch: data.Batch, document_masks: bool) -> data.Batch:
    """Without document masks, segments and positions say nothing; leaving them out saves a mask."""
    if document_masks:
        return batch
    return {name: batch[name] for name in ("tokens", "labels")}
