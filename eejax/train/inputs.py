"""Packed tokens and the tokenizer of a `DataConfig`, made once per workdir."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator

from absl import logging

from eejax import data
from eejax.common.errors import DataError
from eejax.sharding import distributed
from eejax.train.config import DataConfig, Experiment

BPE = "bpe"
BASE = "base"  # the tokenizer of the run's base model, which is saved in the workdir
MEGATRON = "megatron:"  # data.source = "megatron:PREFIX" names PREFIX.bin and PREFIX.idx

Dataset = data.PackedDataset | data.MegatronDataset | data.Mixture


def prepare(
    config: DataConfig,
    vocab_size: int,
    workdir: str | os.PathLike,
    tokenizer_folder: str,
    *,
    workers: int = 1,
    progress: Callable[[data.PackProgress], None] | None = None,
) -> Dataset:
    """Prepare the data set of a run and save its tokenizer in the workdir's `tokenizer_folder`.

    A tokenizer that is already saved there belongs to the run: it must be the configured one, and a
    trained one is not trained again. `workers` and `progress` are passed to `data.pack`. Tokens
    prepared by Megatron-LM are read in place. Several processes share the workdir: process 0
    prepares everything and the others open the result, so only process 0 needs the text.

    Raises:
      DataError: the text is unusable, or the tokenizer does not fit.
      OSError: the tokenizer cannot be written.
    """
    workdir, made = pathlib.Path(workdir), []

    def make() -> tuple[list[str], str]:
        made.append(_prepare(config, vocab_size, workdir, tokenizer_folder, workers, progress))
        parts = made[0].datasets if isinstance(made[0], data.Mixture) else made
        return [part.path for part in parts], made[0].fingerprint

    places, fingerprint = distributed.broadcast_from_process_zero(make)
    return made[0] if made else _open_shared(config, places, fingerprint, workdir, tokenizer_folder)


def _prepare(
    config: DataConfig,
    vocab_size: int,
    workdir: pathlib.Path,
    tokenizer_folder: str,
    workers: int,
    progress: Callable[[data.PackProgress], None] | None,
) -> Dataset:
    saved = workdir / tokenizer_folder
    tokenizer = _tokenizer(config, workdir, saved)
    trained = tokenizer is None
    if trained:
        texts = (_source(part).documents() for part in _parts(config))
        tokenizer = data.train_bpe(itertools.chain.from_iterable(texts), vocab_size)
    data.check_vocabulary(tokenizer, vocab_size)
    if trained:  # keep what took time; another tokenizer is saved once the text could be read
        data.save_tokenizer(tokenizer, saved)

    pack = functools.partial(data.pack, workers=workers, progress=progress)
    made = _open(config, tokenizer, workdir, pack)
    assert made is not None  # what is not there is packed
    if not saved.is_dir():
        data.save_tokenizer(tokenizer, saved)
    return made


def _open_shared(
    config: DataConfig,
    places: list[str],
    fingerprint: str,
    workdir: pathlib.Path,
    tokenizer_folder: str,
) -> Dataset:
    """Open in another process what process 0 prepared."""
    opened = []
    for part, place in zip(_parts(config), places, strict=True):
        if megatron_prefix(part) is not None:
            tokenizer = data.load_tokenizer(workdir / tokenizer_folder)
            opened.append(_open_megatron(part, place, tokenizer))
        elif pathlib.Path(place).is_dir():
            opened.append(data.open_packed(place))
        else:
            raise DataError(
                f"{place}, which process 0 has prepared, is not there for process "
                f"{distributed.index()}: the workdir (or data.packed) must be a folder that all "
                "hosts share, under the same name."
            )
    dataset = opened[0] if config.weights is None else data.Mixture(tuple(opened), config.weights)
    if dataset.fingerprint != fingerprint:
        raise DataError(
            f"the tokens that process {distributed.index()} reads at {', '.join(places)} have "
            f"fingerprint {dataset.fingerprint}, those of process 0 {fingerprint}: give all hosts "
            "the same files."
        )
    return dataset


def find(config: DataConfig, workdir: str | os.PathLike, tokenizer_folder: str) -> Dataset | None:
    """Read and verify the result of an earlier `prepare`; return None if there is none.

    Raises `DataError` if it is damaged.
    """
    workdir = pathlib.Path(workdir)
    tokenizer = _tokenizer(config, workdir, workdir / tokenizer_folder)
    if tokenizer is None:
        return None
    return _open(config, tokenizer, workdir, data.find_packed)


def _open(
    config: DataConfig, tokenizer: data.Tokenizer, workdir: pathlib.Path, packed: Callable
) -> Dataset | None:
    """Open every part with `packed`, which is `data.pack` or `data.find_packed`.

    Returns None if a part is missing.
    """
    made = []
    for part in _parts(config):
        if (prefix := megatron_prefix(part)) is not None:
            made.append(_open_megatron(part, prefix, tokenizer))
        else:
            folder = pathlib.Path(part.packed) if part.packed else workdir / "data"
            fraction, seed = part.validation_fraction, part.split_seed
            source = _source(part)
            made.append(packed(source, tokenizer, folder, validation_fraction=fraction, seed=seed))
    if None in made:
        return None
    return made[0] if config.weights is None else data.Mixture(tuple(made), config.weights)


def _open_megatron(
    config: DataConfig, prefix: str, tokenizer: data.Tokenizer
) -> data.MegatronDataset:
    fraction, seed = config.validation_fraction, config.split_seed
    return data.open_megatron(prefix, tokenizer, validation_fraction=fraction, seed=seed)


def loader(
    experiment: Experiment, dataset: Dataset, shard: tuple[int, int] = (0, 1)
) -> data.Loader:
    """Make the loader of a run's training batches, at its beginning.

    Args:
      shard: (index, count), the part of every batch's rows to read.
    """
    config, train = experiment.data, experiment.train
    whole = data.Loader(
        data.parts(dataset, "train"),
        train.batch_size,
        config.length,
        train.seed,
        weights=config.weights,
        document_masks=config.document_masks,
        rampup=train.batch_rampup,
    )
    return whole.shard(*shard)


def held_out(
    config: DataConfig, dataset: Dataset, batch_size: int, limit: int | None = None
) -> list[tuple[float, Iterator[data.Batch]]]:
    """List (weight, batches for an evaluation step) of every data set's validation split.

    `limit` caps the total number of batches, approximately. They are spread evenly over each split
    and divided between the data sets by weight, with at least one for each.
    """
    splits = data.parts(dataset, "validation")
    weights, parts = config.weights or (1.0,), []
    for split, weight in zip(splits, weights, strict=True):
        share = limit and max(1, round(limit * weight / sum(weights)))
        batches = data.batches(
            split, batch_size, config.length, document_masks=config.document_masks, limit=share
        )
        parts.append((weight, (strip(batch, config.document_masks) for batch in batches)))
    return parts


def _parts(config: DataConfig) -> list[DataConfig]:
    """Split a config into one for each source that is packed separately."""
    if config.weights is None:
        return [config]
    return [dataclasses.replace(config, source=s, weights=None) for s in config.source]


def _source(config: DataConfig) -> data.Source:
    return data.source(config.source, config.max_bytes, config.text_field)


def megatron_prefix(config: DataConfig) -> str | None:
    """Return the PREFIX of "megatron:PREFIX", or None for a source of text.

    Raises `DataError` for settings that do not apply to tokens that are already prepared.
    """
    sources = [config.source] if isinstance(config.source, str) else list(config.source)
    if not any(s.startswith(MEGATRON) for s in sources):
        return None
    if len(sources) > 1:
        raise DataError(
            f"data.source = {config.source!r}: tokens prepared by Megatron-LM must stand alone. "
            "Merge them with its tools/merge_datasets.py, or name one source."
        )
    if config.tokenizer == BPE:
        raise DataError(
            f"data.tokenizer = {BPE!r}: {sources[0]} holds tokens, so a tokenizer cannot be "
            "trained on it. Give the tokenizer that the tokens were made with."
        )
    if config.max_bytes is not None:
        raise DataError(
            f"data.max_bytes = {config.max_bytes}: {sources[0]} is read whole. Set it to None."
        )
    return sources[0].removeprefix(MEGATRON)


def _tokenizer(
    config: DataConfig, workdir: pathlib.Path, saved: pathlib.Path
) -> data.Tokenizer | None:
    """Load the configured tokenizer, which must match the workdir's.

    Returns None if it is still to be trained.
    """
    for part in _parts(config):
        megatron_prefix(part)  # report contradicting settings before anything else
    have = data.load_tokenizer(saved) if saved.is_dir() else None
    if config.tokenizer == BASE:
        if have is None:
            raise DataError(
                f"data.tokenizer = {BASE!r}: {saved} does not exist; a run keeps the tokenizer of "
                "its train.base there. Set data.tokenizer to another one, or set train.base."
            )
        return have
    if config.tokenizer == BPE:
        if have is not None and not isinstance(have, data.JsonTokenizer):
            raise DataError(
                f"data.tokenizer = {BPE!r}: {workdir} was begun with {have.fingerprint}. Restore "
                "that setting, or use a new workdir."
            )
        return have
    try:
        tokenizer = data.load_tokenizer(config.tokenizer)
    except DataError as error:
        if have is None or os.path.exists(os.path.expanduser(config.tokenizer)):
            raise
        logging.warning("%s The run's own copy of it is used: %s", error, saved)
        return have
    if have is not None and have.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"data.tokenizer = {config.tokenizer!r} is {tokenizer.fingerprint}, but {workdir} "
            f"was begun with {have.fingerprint}. Restore that setting, or use a new workdir."
        )
    return tokenizer


def strip(batch: data.Batch, document_masks: bool) -> data.Batch:
    """Drop segments and positions from a batch that needs no document masks.

    Without document masks they carry no information, and leaving them out saves a mask.
    """
    if document_masks:
        return batch
    return {name: batch[name] for name in ("tokens", "labels")}
