"""From a `DataConfig` to packed tokens and their tokenizer, made once per workdir."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

from absl import logging

from eejax import data
from eejax.checkpoint.files import naming
from eejax.common.errors import DataError
from eejax.sharding import distributed
from eejax.train.config import DataConfig, Experiment

BPE = "bpe"
BASE = "base"  # the tokenizer of the model that the run begins with, which is the workdir's
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
    """The data set of a run, its tokenizer saved in the workdir's `tokenizer_folder`.

    A tokenizer found there is the run's, and must be the one configured; a trained one is not
    trained again. `workers` and `progress` are `data.pack`'s; tokens that Megatron-LM prepared
    are read where they lie. Of several processes, which share the workdir, the first makes all of
    it and the others open what it has made; the text need be where the first is. Raises `DataError`
    for unusable text, or a tokenizer that does not fit, and `OSError` where the tokenizer cannot
    be written.
    """
    workdir, made = pathlib.Path(workdir), []

    def make() -> tuple[list[str], str]:
        made.append(_prepare(config, vocab_size, workdir, tokenizer_folder, workers, progress))
        parts = made[0].datasets if isinstance(made[0], data.Mixture) else made
        return [part.path for part in parts], made[0].fingerprint

    places, fingerprint = distributed.by_first(make)
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
    if trained:  # what took time is kept; another is, once the text was found to be readable
        save_tokenizer(tokenizer, saved)

    pack = functools.partial(data.pack, workers=workers, progress=progress)
    made = _open(config, tokenizer, workdir, pack)
    if not saved.is_dir():
        save_tokenizer(tokenizer, saved)
    return made


def _open_shared(
    config: DataConfig,
    places: list[str],
    fingerprint: str,
    workdir: pathlib.Path,
    tokenizer_folder: str,
) -> Dataset:
    """What process 0 prepared, opened in another one."""
    opened = []
    for place in places:
        if megatron_prefix(config) is not None:
            tokenizer = data.load_tokenizer(workdir / tokenizer_folder)
            opened.append(data.open_megatron(place, tokenizer, **_split(config)))
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
    """What `prepare` gives, read anew and verified, if it is there; None where it is not.

    Raises `DataError` where it is damaged.
    """
    workdir = pathlib.Path(workdir)
    tokenizer = _tokenizer(config, workdir, workdir / tokenizer_folder)
    if tokenizer is None:
        return None
    return _open(config, tokenizer, workdir, data.find_packed)


def _open(
    config: DataConfig, tokenizer: data.Tokenizer, workdir: pathlib.Path, packed: Callable
) -> Dataset | None:
    """Every part by `data.pack` or `data.find_packed`; None where one of them is not there."""
    made = []
    for part in _parts(config):
        split = _split(part)
        if (prefix := megatron_prefix(part)) is not None:
            made.append(data.open_megatron(prefix, tokenizer, **split))
        else:
            folder = pathlib.Path(part.packed) if part.packed else workdir / "data"
            made.append(packed(_source(part), tokenizer, folder, **split))
    if None in made:
        return None
    return made[0] if config.weights is None else data.Mixture(tuple(made), config.weights)


def _split(config: DataConfig) -> dict[str, float | int]:
    return {"validation_fraction": config.validation_fraction, "seed": config.split_seed}


def loader(
    experiment: Experiment, dataset: Dataset, shard: tuple[int, int] = (0, 1)
) -> data.Loader:
    """The training batches of a run, from its beginning.

    shard: (index, count), the part of every batch's rows that is read.
    """
    config, train = experiment.data, experiment.train
    whole = data.Loader(
        data.parts(dataset, "train"), train.batch_size, config.length, train.seed,
        weights=config.weights, document_masks=config.document_masks, rampup=train.batch_rampup,
    )  # fmt: skip
    return whole.shard(*shard)


def held_out(
    config: DataConfig, dataset: Dataset, batch_size: int, limit: int | None = None
) -> list[tuple[float, Iterator[data.Batch]]]:
    """The validation text of every data set as (weight, batches for an evaluation step).

    With `limit`, about that many batches, spread evenly over the split; of several, each has its
    weight's part of them, and at least one.
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
    """One for each source that is packed apart."""
    if config.weights is None:
        return [config]
    return [dataclasses.replace(config, source=s, weights=None) for s in config.source]


def _source(config: DataConfig) -> data.Source:
    return data.source(config.source, config.max_bytes, config.text_field)


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
    for part in _parts(config):
        megatron_prefix(part)  # where the settings do not go together, that is what to say
    have = data.load_tokenizer(saved) if saved.is_dir() else None
    if config.tokenizer == BASE:
        if have is None:
            raise DataError(
                f"data.tokenizer = {BASE!r}: {saved} is not there, where a run keeps the tokenizer "
                "of its train.base. Name a tokenizer, or a base."
            )
        return have
    if config.tokenizer == BPE:
        if have is not None and not isinstance(have, data.JsonTokenizer):
            raise DataError(
                f"data.tokenizer = {BPE!r}: {workdir} was begun with {have.fingerprint}: restore "
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
            f"was begun with {have.fingerprint}: restore that setting, or use a new workdir."
        )
    return tokenizer


def save_tokenizer(tokenizer: data.Tokenizer, folder: pathlib.Path) -> None:
    """All of the tokenizer's folder at once: a kill or a full disk leaves none.

    Several processes may save the same one: the first that is done has.
    """
    part = folder.with_name(f"{folder.name}.{distributed.index()}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed here
    try:
        with naming(folder):
            data.save_tokenizer(tokenizer, part)
            for file in part.iterdir():
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
            try:
                part.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def strip(batch: data.Batch, document_masks: bool) -> data.Batch:
    """Without document masks, segments and positions say nothing; leaving them out saves a mask."""
    if document_masks:
        return batch
    return {name: batch[name] for name in ("tokens", "labels")}
