"""From a `DataConfig` to packed tokens and their tokenizer, made once per workdir."""

from __future__ import annotations

import os
import pathlib
import shutil

from eejax import data
from eejax.checkpoint.files import naming
from eejax.common.errors import DataError
from eejax.train.config import DataConfig

BPE = "bpe"


def prepare(
    config: DataConfig, vocab_size: int, workdir: str | os.PathLike, tokenizer_folder: str
) -> data.PackedDataset:
    """The packed data set of a run, its tokenizer saved in the workdir's `tokenizer_folder`.

    A tokenizer found there is the run's, and must be the one configured; a trained one is not
    trained again. Raises `DataError` for unusable text, or a tokenizer that does not fit, and
    `OSError` where the tokenizer cannot be written.
    """
    workdir = pathlib.Path(workdir)
    source = data.source(config.source, config.max_bytes)
    saved = workdir / tokenizer_folder
    have = data.load_tokenizer(saved) if saved.is_dir() else None
    if config.tokenizer == BPE:
        tokenizer = have or data.train_bpe(source.documents(), vocab_size)
    else:
        tokenizer = data.load_tokenizer(config.tokenizer)
        if have is not None and have.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"data.tokenizer = {config.tokenizer!r} is {tokenizer.fingerprint}, but {workdir} "
                f"was begun with {have.fingerprint}: restore that setting, or use a new workdir."
            )
    data.check_vocabulary(tokenizer, vocab_size)
    if have is None:
        save_tokenizer(tokenizer, saved)
    packed = pathlib.Path(config.packed) if config.packed else workdir / "data"
    return data.pack(
        source, tokenizer, packed,
        validation_fraction=config.validation_fraction, seed=config.split_seed,
    )  # fmt: skip


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
