"""Early exit for a pretrained model in three lines: `eejax.load`, `eejax.calibrate`,
`eejax.generate`."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eejax import data
from eejax.calibration import Calibrated, RouterOptions, calibrate_model
from eejax.checkpoint.hf import save_pretrained
from eejax.common import progress
from eejax.common.errors import ConfigError, require_count
from eejax.common.trees import Tree
from eejax.data import Source, Tokenizer
from eejax.inference import EngineOptions, Generator, Result
from eejax.models.config import ModelConfig
from eejax.train.inputs import strip
from eejax.train.pretrained import open_model

BATCH = 16


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that can be calibrated and generate: configuration, parameters and tokenizer.

    calibrated: how its routers came out, where `calibrate` made it. generation: of
    generation_config.json, which `save` writes back.
    """

    config: ModelConfig
    params: Tree = dataclasses.field(repr=False)
    tokenizer: Tokenizer = dataclasses.field(repr=False)
    calibrated: Calibrated | None = dataclasses.field(default=None, repr=False)
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def save(self, path: str | os.PathLike) -> None:
        """As a folder that transformers opens, with exits and routers beside the weights, which
        `load` reads. Raises as `checkpoint.hf.save_pretrained`."""
        save_pretrained(
            path, self.config, self.params, tokenizer=self.tokenizer, generation=self.generation
        )


def load(
    source: str | os.PathLike, *, tokenizer: str | None = None, dtype: str | None = None
) -> Model:
    """The model of a run's workdir, of a Hugging Face folder, or of a name on the Hub.

    tokenizer: "bytes", a file or a folder, where the model has none of its own; dtype: in which a
    pretrained model is computed, float32 by default. A run has both, and takes neither. Raises
    CheckpointError for what is no model, or not whole, ConfigError as said.
    """
    with progress.waiting(f"loading {source}"):
        found = open_model(source, tokenizer=tokenizer, dtype=dtype)
    return Model(found.config, found.params, found.tokenizer, generation=found.generation)


def calibrate(
    model: Model,
    text: str | Sequence[str] | Source,
    *,
    every: int = 4,
    boundaries: Sequence[int] | None = None,
    tokens: int = 200_000,
    length: int = 256,
    watch: Callable[[str], None] | None = None,
    **options: Any,
) -> Model:
    """The model with routers, trained on `text`: files, globs, or any `data.Source`.

    length: tokens of a window of text. options: of `RouterOptions` (width, label, bound, epochs,
    ...); the rest as `calibration.calibrate_model`, which says what is raised. DataError for text
    that is empty. The model that was given is as it was.
    """
    require_count("length", length)
    length = min(length, model.config.context_length)
    chosen = RouterOptions(**options)
    source = data.source(text) if isinstance(text, str | list | tuple) else text
    with tempfile.TemporaryDirectory() as folder:
        packed = data.pack(source, model.tokenizer, folder, validation_fraction=0.0)
        batches = data.batches(
            packed.split("train"), BATCH, length, limit=-(-tokens // (BATCH * length))
        )
        read = (strip(batch, False) for batch in batches)
        found = calibrate_model(
            model.params, model.config, read, chosen, every=every, boundaries=boundaries,
            tokens=tokens, watch=watch,
        )  # fmt: skip
    return dataclasses.replace(
        model, config=found.config, params=found.params, calibrated=found
    )  # fmt: skip


def generate(
    model: Model,
    prompt: str | Sequence[int],
    max_new_tokens: int = 128,
    *,
    agreement: float | None = None,
    engine: EngineOptions | str = "recompute",
    **options: Any,
) -> tuple[str, Result]:
    """(the text behind `prompt`, what every token of it took).

    prompt: text, in which names of special tokens are text, or token ids, such as those of
    `model.tokenizer.encode(text, allow_special=True)`, where they are these tokens.
    agreement: of a calibrated model the share of tokens that are to be those of the full one, from
    which thresholds of its routers follow; instead of it options may say gate and threshold, as all
    that `Generator.stream` takes. By neither, no token leaves early. Raises ConfigError for an
    agreement of a model that `calibrate` did not make, and as `Generator`.
    """
    chosen = [name for name in ("gate", "threshold") if name in options]
    if agreement is not None and chosen:
        raise ConfigError(
            f"agreement = {agreement!r}: says which {' and '.join(chosen)} are taken: leave out "
            "either."
        )
    if agreement is not None:
        options = {"gate": "router", "threshold": _threshold(model, agreement)} | options
    generator = Generator.make(model.params, model.config, engine)
    tokenizer = model.tokenizer
    ids = tokenizer.encode(prompt).tolist() if isinstance(prompt, str) else prompt
    options = {"stop_tokens": tokenizer.end_ids, "decode_text": tokenizer.decode} | options
    with progress.waiting("generating"):
        result = generator.generate([ids], max_new_tokens, **options)
    return result.text(0, tokenizer.decode), result


def _threshold(model: Model, agreement: float) -> tuple[float, ...]:
    if model.calibrated is None:
        raise ConfigError(
            f"agreement = {agreement!r}: is known of what calibrate() returns alone, and not of a "
            "model that was saved: give gate and threshold."
        )
    made = model.calibrated
    return made.thresholds(made.point(agreement))
