"""Early exit for a pretrained model in three lines: `eejax.load`, `calibrate` and `generate`.

The last two are methods of `checkpoint.language_model.LanguageModel` too.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from eejax import data
from eejax.calibration import RouterOptions, calibrate_model
from eejax.checkpoint import language_model
from eejax.checkpoint.language_model import LanguageModel as LanguageModel
from eejax.common import progress
from eejax.common.errors import ConfigError, require_count
from eejax.data import Source
from eejax.inference import EngineOptions, GenerationResult, Generator
from eejax.train.inputs import strip

BATCH = 16


def load(
    source: str | os.PathLike, *, tokenizer: str | None = None, dtype: str | None = None
) -> LanguageModel:
    """Load the model of a run's workdir, of a Hugging Face folder, or of a name on the Hub.

    Arguments and errors are those of `checkpoint.language_model.load`.
    """
    with progress.waiting(f"loading {source}"):
        return language_model.load(source, tokenizer=tokenizer, dtype=dtype)


def calibrate(
    model: LanguageModel,
    text: str | Sequence[str] | Source,
    *,
    every: int = 4,
    boundaries: Sequence[int] | None = None,
    tokens: int = 200_000,
    length: int = 256,
    watch: Callable[[str], None] | None = None,
    **options: Any,
) -> LanguageModel:
    """Return the model with routers, trained on `text`; the given model stays as it is.

    Args:
      text: files, globs, or any `data.Source`.
      length: tokens of a window of text.
      options: fields of `RouterOptions` (width, label, bound, epochs, ...).
      every, boundaries, tokens, watch: as in `calibration.calibrate_model`.

    Raises:
      DataError: for text that is empty.
      ConfigError: and others as `calibration.calibrate_model`.
    """
    require_count("length", length)
    length = min(length, model.config.context_length)
    chosen = RouterOptions(**options)
    source = data.source(text) if isinstance(text, str | Sequence) else text
    with tempfile.TemporaryDirectory() as folder:
        packed = data.pack(source, model.tokenizer, folder, validation_fraction=0.0)
        batches = data.batches(
            packed.split("train"), BATCH, length, limit=-(-tokens // (BATCH * length))
        )
        return calibrate_model(
            model,
            (strip(batch, False) for batch in batches),
            chosen,
            every=every,
            boundaries=boundaries,
            tokens=tokens,
            watch=watch,
        )


def generate(
    model: LanguageModel,
    prompt: str | Sequence[int],
    max_new_tokens: int = 128,
    *,
    agreement: float | None = None,
    engine: EngineOptions | str = "recompute",
    **options: Any,
) -> tuple[str, GenerationResult]:
    """Return the text behind `prompt`, and what every token of it took.

    The generator of an engine is kept with the model, so that a second call prepares nothing.

    Args:
      prompt: text, in which names of special tokens are text, or token ids, such as those of
        `model.tokenizer.encode(text, allow_special=True)`, where they are these tokens.
      agreement: for a calibrated model, the share of tokens that should be the full model's; the
        thresholds of its routers follow from it. Instead of it, `options` may give gate and
        threshold. With neither, no token leaves early.
      options: as `Generator.stream` takes them.

    Raises:
      ConfigError: for an agreement of a model that `calibrate` did not make, and as `Generator`.
    """
    chosen = [name for name in ("gate", "threshold") if name in options]
    if agreement is not None and chosen:
        raise ConfigError(
            f"agreement = {agreement!r}: says which {' and '.join(chosen)} are taken: leave out "
            "either."
        )
    if agreement is not None:
        options = {"gate": "router", "threshold": _threshold(model, agreement)} | options
    generator = generator_of(model, engine)
    tokenizer = model.tokenizer
    ids = tokenizer.encode(prompt).tolist() if isinstance(prompt, str) else prompt
    options = {"stop_token_ids": tokenizer.end_ids, "decode_text": tokenizer.decode} | options
    with progress.waiting("generating"):
        result = generator.generate([ids], max_new_tokens, **options)
    return result.text(0, tokenizer.decode), result


def generator_of(model: LanguageModel, engine: EngineOptions | str) -> Generator:
    """Return the model's generator with an engine, prepared once. Raises as `Generator.make`."""
    options = EngineOptions(engine=engine) if isinstance(engine, str) else engine
    if options not in model.cache:
        model.cache[options] = Generator.make(model.params, model.config, options)
    return model.cache[options]


def _threshold(model: LanguageModel, agreement: float) -> tuple[float, ...]:
    if model.calibration is None:
        raise ConfigError(
            f"agreement = {agreement!r}: is known of what calibrate() returns alone, and not of a "
            "model that was saved: give gate and threshold."
        )
    return model.calibration.thresholds(model.calibration.point(agreement))
