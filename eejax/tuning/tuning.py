"""Exits of a pretrained model, as `eejax.tune` trains them on stored states."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from eejax.calibration.calibration import with_exits
from eejax.checkpoint.digest import digest
from eejax.checkpoint.language_model import LanguageModel
from eejax.checkpoint.settings import require_same_settings
from eejax.common.errors import is_integer, require, require_count, require_one_of
from eejax.losses.cross_entropy import IGNORE
from eejax.models.config import ModelConfig
from eejax.train.starts import leading_dimensions
from eejax.tuning import states
from eejax.tuning.training import ExitQuality, TuningOptions, train_exits

ExitKind = Literal["norm", "adapter", "mlp", "block"]
KINDS: tuple[ExitKind, ...] = get_args(ExitKind)
WITH_MLP: tuple[ExitKind, ...] = ("adapter", "mlp")
SETTINGS = "tuning.json"
KNOWN_SHARE = 0.9  # of the final exit's predictions, by the vocabulary of a new exit


class Tuning(NamedTuple):
    """Outcome of a tuning (`LanguageModel.tuning`).

    Attributes:
      before: quality of each tuned exit on held-out text, as it was.
      after: as it is now.
      tokens: positions that exits were trained at, all passes together.
    """

    before: tuple[ExitQuality, ...]
    after: tuple[ExitQuality, ...]
    tokens: int


def check_exits(
    config: ModelConfig,
    boundaries: Sequence[int],
    kind: ExitKind,
    vocabulary: int | None,
    head_rank: int,
) -> tuple[int, ...]:
    """Return the boundaries of exits to tune, ascending; arguments are those of `tune_model`.

    Raises `ConfigError` for what `tune_model` refuses about them.
    """
    require_one_of("kind", kind, KINDS)
    if vocabulary is not None:
        require(
            is_integer(vocabulary) and 0 <= vocabulary <= config.vocab_size,
            "vocabulary",
            vocabulary,
            f"must be a number of tokens up to {config.vocab_size}, 0 for all, or None",
        )
    ranks = {e.head_rank for e in config.exits if e.head_rank}
    require(
        is_integer(head_rank)
        and 0 <= head_rank < config.d_model
        and (head_rank == 0 or ranks <= {head_rank}),
        "head_rank",
        head_rank,
        f"must be a number of dimensions below {config.d_model}, or 0 for all"
        + "".join(f"; the model's exits have {r}" for r in ranks),
    )
    listed = isinstance(boundaries, Sequence | set | frozenset) and not isinstance(boundaries, str)
    require(
        listed
        and all(map(is_integer, boundaries))
        and len(boundaries) > 0
        and all(n in range(config.n_layers) for n in boundaries),
        "exits",
        boundaries,
        f"must be a list of numbers of layers in 0..{config.n_layers - 1}, such as "
        f"[{config.n_layers // 3}]",
    )
    chosen = tuple(sorted({*boundaries}))
    routed = [e.boundary for e in config.exits if e.router and e.boundary in chosen]
    require(
        not routed,
        "exits",
        boundaries,
        f"must leave exits with a router as they are ({routed}), which were trained for it",
        "Tune the model before it is calibrated, and calibrate the result.",
    )
    other = next((e.mlp_width or config.d_ff for e in config.exits if e.mlp), None)
    width = mlp_width(config, "adapter")
    require(
        kind != "adapter" or other in (None, width),
        "kind",
        kind,
        f"is an MLP of width {width}, and must be as wide as those of the model's exits ({other})",
        "Choose 'mlp', which has that width, or 'norm' or 'block'.",
    )
    return chosen


def mlp_width(config: ModelConfig, kind: ExitKind) -> int:
    """Return `ExitConfig.mlp_width` of new exits: that of the model's exits, except of adapters."""
    if kind == "adapter":
        return min(max(config.d_model // 2, 1), config.d_ff)
    have = (e.mlp_width for e in config.exits if e.mlp)
    return next(have, 0) if kind == "mlp" else 0


def tune_model(
    model: LanguageModel,
    batches: Iterable[Mapping[str, Any]],
    boundaries: Sequence[int],
    options: TuningOptions,
    *,
    kind: ExitKind = "mlp",
    vocabulary: int | None = None,
    head_rank: int = 0,
    windows: int,
    folder: str | os.PathLike,
    about: Mapping[str, Any] | None = None,
    watch: Callable[[str], None] | None = None,
) -> LanguageModel:
    """Return the model with exits trained on batches of text (`data.batches`).

    The given model stays as it is and shares its other leaves with the new one.

    Args:
      model: the model.
      batches: batches of text.
      boundaries: boundaries of the exits. An exit that the model has is trained further.
      options: settings of the training.
      kind: what a new exit has below its norm: nothing ("norm"), an MLP half as wide as the model
        ("adapter"), one as wide as those of the model's other exits or, without any, of its layers
        ("mlp"), or a transformer block.
      vocabulary: `ExitConfig.vocabulary` of new exits. By default it holds nine tenths of the final
        exit's predictions on the text, and all tokens where that is over half of them.
      head_rank: `ExitConfig.head_rank` of new exits.
      windows: maximum number of windows of text.
      folder: where states are kept, and what an interrupted tuning resumes from.
      about: further settings that the tuning depends on, such as its text.
      watch: called with lines of progress.

    Raises:
      ConfigError: for impossible boundaries, another kind, an exit with a router, and a folder of
        another tuning.
      DataError: for text that is too short.
      CheckpointError: for a folder whose files cannot be read.
    """
    config, watch = model.config, watch or (lambda text: None)
    require_count("windows", windows)
    chosen = check_exits(config, boundaries, kind, vocabulary, head_rank)
    whole, has = with_exits(
        model.params,
        config,
        chosen,
        mlp=kind in WITH_MLP,
        block=kind == "block",
        mlp_width=mlp_width(config, kind),
        head_rank=head_rank,
    )
    folder = pathlib.Path(folder)
    there = folder.exists() and not folder.is_dir()
    require(not there, "folder", str(folder), "must be a folder, and it is a file")
    settings = {
        "boundaries": list(chosen),
        "windows": windows,
        "predictions": options.predictions,
        "dtype": config.dtype,
        "about": {"parameters": digest(has, whole), **(about or {})},
    }
    require_same_settings(folder / SETTINGS, settings, [states.PROGRESS_FILE], "tuning")
    kept = states.collect(
        whole, has, chosen, batches, windows, folder, k=options.predictions, watch=watch
    )
    known = _known(kept, config) if vocabulary is None else vocabulary
    if known:
        share = _share(kept, known)
        watch(
            f"new exits know {known} of {config.vocab_size} tokens, which are {share:.1%} of the "
            "final exit's predictions"
        )
    old, trees = {e.boundary for e in config.exits}, dict(whole["exits"])
    exits = [
        e if e.boundary in old else dataclasses.replace(e, vocabulary=known) for e in has.exits
    ]
    has = has.replace(exits=tuple(exits))
    for e in exits:
        if known and e.head_rank and e.boundary not in old:  # of the rows that it knows now
            trees[e.name] = trees[e.name] | {"low_rank": leading_dimensions(whole, has, e)}
    whole = whole | {"exits": trees}
    found = train_exits(whole, has, kept, options, watch=watch)
    params = whole | {"exits": whole["exits"] | found.exits}
    share = {q.boundary: round(q.agreement, 3) for q in found.after}
    has = has.replace(
        exits=tuple(
            dataclasses.replace(e, acceptance=share.get(e.boundary, e.acceptance))
            for e in has.exits
        )
    )
    tuning = Tuning(found.before, found.after, found.tokens)
    return dataclasses.replace(model, config=has, params=params, tuning=tuning, calibration=None)


def _predicted(stored: states.StoredStates) -> np.ndarray:
    """Return the final exit's most likely token at every counted position, [n]."""
    return stored.tokens[..., 0][np.asarray(stored.labels) != IGNORE]


def _share(stored: states.StoredStates, known: int) -> float:
    return float(np.mean(_predicted(stored) < known))


def _known(stored: states.StoredStates, config: ModelConfig) -> int:
    """Return the vocabulary of new exits, 0 for all tokens."""
    largest = np.quantile(_predicted(stored), KNOWN_SHARE, method="higher")
    known = 128 * math.ceil((int(largest) + 1) / 128)  # rows that matrix products like
    return known if 2 * known <= config.vocab_size else 0
