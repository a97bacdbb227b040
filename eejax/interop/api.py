"""Early exit for a pretrained model: `eejax.load`, `calibrate`, `tune`, `grade` and `generate`.

All except `load` are also methods of `checkpoint.language_model.LanguageModel`.
"""

from __future__ import annotations

import contextlib
import numbers
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eejax import data
from eejax.calibration import RouterOptions, calibrate_model, drafting_exit, with_exits
from eejax.checkpoint import language_model
from eejax.checkpoint.language_model import LanguageModel as LanguageModel
from eejax.common import progress
from eejax.common.errors import ConfigError, require, require_count
from eejax.data import Batch, Source
from eejax.inference import EngineOptions, GenerationResult, Generator
from eejax.sharding.mesh import MeshConfig, known_mesh
from eejax.train.evaluate import Evaluation, evaluate, of_all_tokens
from eejax.train.inputs import strip
from eejax.train.metrics import exit_names
from eejax.train.step import make_eval_step
from eejax.tuning import ExitKind, TuningOptions, check_exits, tune_model, write_own_text

BATCH = 16
TUNING_TOKENS, OWN_TOKENS = 100_000, 20_000  # of a text, and of one that the model writes
LOOKUP = 7  # drafts from the text itself: with the row before them a bucket of 8 rows
GRADING = "grading"  # key of a model's compiled evaluation in its cache


def load(
    source: str | os.PathLike, *, tokenizer: str | None = None, dtype: str | None = None
) -> LanguageModel:
    """Load the model of a run's workdir, a Hugging Face folder, a GGUF file, or a name.

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
      every: as in `calibration.calibrate_model`.
      boundaries: as in `calibration.calibrate_model`.
      tokens: as in `calibration.calibrate_model`.
      length: tokens of a window of text.
      watch: as in `calibration.calibrate_model`.
      options: fields of `RouterOptions` (width, label, bound, epochs, ...).

    Raises:
      DataError: for text that is empty.
      ConfigError: and others as `calibration.calibrate_model`.
    """
    chosen = RouterOptions(**options)
    with _batches(model, text, tokens, length) as batches:
        return calibrate_model(
            model,
            batches,
            chosen,
            every=every,
            boundaries=boundaries,
            tokens=tokens,
            watch=watch,
        )


def own_text(
    model: LanguageModel,
    tokens: int = OWN_TOKENS,
    *,
    seed: int = 0,
    watch: Callable[[str], None] | None = print,
) -> data.Documents:
    """Let the model write a text, which `tune`, `calibrate` and `grade` take as `text`.

    Arguments and errors are those of `tuning.write_own_text`.
    """
    return write_own_text(model, generator_of(model, "full"), tokens, seed=seed, watch=watch)


def tune(
    model: LanguageModel,
    text: str | Sequence[str] | Source | None = None,
    exits: Sequence[int] | None = None,
    *,
    kind: ExitKind = "mlp",
    vocabulary: int | None = None,
    head_rank: int = 0,
    tokens: int | None = None,
    length: int = 256,
    folder: str | os.PathLike | None = None,
    watch: Callable[[str], None] = print,
    **options: Any,
) -> LanguageModel:
    """Return the model with exits trained on `text`, all other parameters unchanged.

    The exits learn the final exit's distribution. The model runs over the text once; its states are
    kept on disk, and every pass of the training runs the exits alone. What an exit is like before
    and after, on text that it was not trained on, is printed and kept as `model.tuning`.

    Source: EE-Tuning (Pan et al. 2024). The command `eejax tune` trains on many devices.

    Args:
      text: files, globs, or any `data.Source`; by default text that the model writes itself
        (`own_text`), which takes a pass through the model for every token.
      exits: boundaries of the exits. Existing exits are trained further; new ones begin as copies
        of the final norm and head. By default one after a tenth of the layers, whose drafts are
        cheap, and one after two thirds, which is more often right.
      kind: what a new exit has below its norm: nothing ("norm"), an MLP half as wide as the model
        ("adapter"), one as wide as those of the model's other exits or, without any, of its layers
        ("mlp"), or a transformer block.
      vocabulary: number of tokens that a new exit knows, the first ones, so that its head is cheap;
        0 for all. By default they are nine tenths of the final exit's predictions on the text.
      head_rank: dimensions of the state that the head of a new exit reads (`ExitConfig.head_rank`),
        another way to make it cheap; 0 for all.
      tokens: maximum tokens of text, evenly spaced if it has more; by default 100,000, of a text
        that the model writes 20,000.
      length: tokens of a window of text.
      folder: where the states are kept, and from where the same call continues after an
        interruption; by default none stays.
      watch: called with lines of progress.
      options: fields of `TuningOptions` (passes, learning_rate, ...).

    Raises:
      DataError: for text that is too short.
      ConfigError: and others as `tuning.tune_model`.
    """
    chosen = TuningOptions(**options)
    if tokens is None:
        tokens = OWN_TOKENS if text is None else TUNING_TOKENS
    require_count("tokens", tokens)
    exits = default_exits(model.config.n_layers) if exits is None else exits
    check_exits(model.config, exits, kind, vocabulary, head_rank)
    text = own_text(model, tokens, watch=watch) if text is None else text
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(_batches(model, text, tokens, length))
        length = min(length, model.config.context_length)
        about = {"text": _source(text).describe(), "length": length}
        kept = folder or stack.enter_context(tempfile.TemporaryDirectory())
        return tune_model(
            model,
            batches,
            exits,
            chosen,
            kind=kind,
            vocabulary=vocabulary,
            head_rank=head_rank,
            windows=max(tokens // length, 2),
            folder=kept,
            about=about,
            watch=watch,
        )


def default_exits(n_layers: int) -> tuple[int, ...]:
    """Return the boundaries at which `tune` puts exits."""
    wanted = max(1, round(n_layers / 10)), max(1, round(2 * n_layers / 3))
    return tuple(sorted({min(boundary, n_layers - 1) for boundary in wanted}))


@contextlib.contextmanager
def _batches(
    model: LanguageModel, text: str | Sequence[str] | Source, tokens: int, length: int
) -> Iterator[Iterator[Batch]]:
    """Provide batches of windows of text, evenly spaced if it has more than `tokens`."""
    require_count("length", length)
    require_count("tokens", tokens)
    length = min(length, model.config.context_length)
    source = _source(text)
    with tempfile.TemporaryDirectory() as folder:
        packed = data.pack(source, model.tokenizer, folder, validation_fraction=0.0)
        batches = data.batches(
            packed.split("train"), BATCH, length, limit=-(-tokens // (BATCH * length))
        )
        yield (strip(batch, False) for batch in batches)


def _source(text: Any) -> Source:
    """Return the source that `text` is or names."""
    named = _named(text)
    readable = all(hasattr(text, name) for name in ("documents", "describe"))
    allowed = "must be files, globs, or a data.Source"
    require(named is not None or readable, "text", text, allowed)
    return text if named is None else data.source(named)


def _named(text: Any) -> tuple[str, ...] | None:
    """Return paths, globs or names of sources as a tuple, None for anything else."""
    parts = [text] if isinstance(text, str | os.PathLike) else text
    if not isinstance(parts, list | tuple):
        return None
    each = all(isinstance(one, str | os.PathLike) for one in parts)
    return tuple(str(os.fspath(one)) for one in parts) if each else None


def grade(
    model: LanguageModel,
    text: str | Sequence[str] | Source,
    *,
    tokens: int = 200_000,
    length: int = 256,
) -> Evaluation:
    """Measure loss, perplexity and bits per byte of every exit on `text`.

    Exits of a smaller vocabulary are left out: some tokens have no loss there.

    Args:
      text: files, globs, or any `data.Source`.
      tokens: tokens of it that are measured, evenly spaced, in whole batches of 16 windows.
      length: tokens of a window of text.

    Raises:
      DataError: for text that is empty.
      ConfigError: for counts below 1, or another kind of text.
    """
    mesh = known_mesh(MeshConfig())
    params, config = of_all_tokens(model.params, model.config)
    if GRADING not in model.cache:
        model.cache[GRADING] = make_eval_step(config, mesh)
    names, byte_lengths = exit_names(config), model.tokenizer.byte_lengths
    with _batches(model, text, tokens, length) as batches:
        return evaluate(model.cache[GRADING], params, batches, mesh, names, byte_lengths)


def generate(
    model: LanguageModel,
    prompt: str | Sequence[int],
    max_new_tokens: int = 128,
    *,
    agreement: float | None = None,
    draft_exit: int | None = None,
    engine: EngineOptions | str = "recompute",
    **options: Any,
) -> tuple[str, GenerationResult]:
    """Return the text after `prompt`, and the result with each token's exit and layers.

    The generator of an engine is kept with the model, so that a second call prepares nothing.

    Args:
      prompt: text, in which names of special tokens are plain text; or token ids, such as those of
        `model.tokenizer.encode(text, allow_special=True)`, which turns names into special tokens.
      max_new_tokens: maximum number of tokens to generate.
      agreement: for a calibrated model, the share of tokens that should be the full model's; the
        thresholds of its routers follow from it. Instead of it, `options` may give gate and
        threshold. With neither, no token leaves early.
      draft_exit: number of layers after which an exit drafts tokens that the layers above verify
        (the engine "speculative"): the text of the full model, in less time if many drafts are
        right. A model without an exit there gets one of the final norm and head (LayerSkip;
        Elhoushi et al. 2024). Where the text repeats itself, its own continuation is the draft. The
        number of drafts adapts to how many are accepted.
      engine: name of an engine, or options of one. "speculative" drafts as with `draft_exit`, by
        the exit that promises most (`calibration.drafting_exit`), or from the text alone if there
        is none.
      options: as `Generator.stream` takes them.

    Raises:
      ConfigError: for an agreement of a model that `calibrate` did not make, a `draft_exit` beside
        other rules of exits, and as `Generator`.
    """
    chosen = [name for name in ("gate", "threshold") if name in options]
    if draft_exit is not None:
        others = [*chosen, *(["agreement"] if agreement is not None else [])]
        alone = not others and engine in ("recompute", "speculative")
        allowed = "must be None beside agreement, gate, threshold and other engines"
        require(alone, "draft_exit", draft_exit, allowed, "Early exits emit nothing then.")
    if agreement is not None and chosen:
        raise ConfigError(
            f"agreement = {agreement!r}: says which {' and '.join(chosen)} are taken: leave out "
            "either."
        )
    if agreement is not None:
        options = {"gate": "router", "threshold": _threshold(model, agreement)} | options
    if chosen and not model.config.exits:
        warnings.warn(
            f"{' and '.join(chosen)}: this model has no early exits, so every token runs all "
            "layers: calibrate() or tune() gives it some.",
            stacklevel=2,
        )
    drafts = draft_exit is not None or engine == "speculative"
    generator = drafting_generator(model, draft_exit) if drafts else generator_of(model, engine)
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


def drafting_generator(model: LanguageModel, boundary: int | None = None) -> Generator:
    """Return the model's generator that drafts, prepared once.

    Args:
      boundary: of the exit that drafts; by default `calibration.drafting_exit`. If that is none,
        the text alone drafts.

    Raises:
      ConfigError: for a boundary that the model does not have.
    """
    chosen = drafting_exit(model.config) if boundary is None else boundary
    drafts = 0 if chosen is None else None
    options = EngineOptions("speculative", draft_exit=chosen, lookup=LOOKUP, drafts=drafts)
    most = model.config.n_layers - 1
    if options not in model.cache:
        params, config = model.params, model.config
        if chosen is None:  # the engine runs drafts from below an exit: here from below all layers
            params, config = with_exits(params, config, [0])
        else:
            allowed = f"must be a number of layers in 0..{most}, below the last"
            require(chosen <= most, "draft_exit", chosen, allowed)
            params, config = with_exits(params, config, [chosen])
        model.cache[options] = Generator.make(params, config, options)
    return model.cache[options]


def _threshold(model: LanguageModel, agreement: float) -> tuple[float, ...]:
    number = isinstance(agreement, numbers.Real) and not isinstance(agreement, bool)
    require(number, "agreement", agreement, "must be a number in [0, 1]")
    if model.calibration is None:
        raise ConfigError(
            f"agreement = {agreement!r}: requires a model that calibrate() returned in this "
            "process, because saved models do not keep it: give gate and threshold."
        )
    return model.calibration.thresholds(model.calibration.point(agreement))
