"""`LanguageModel`, the one form of a loaded model, and `load`, which reads it from any source."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from eejax.checkpoint.hf import generation
from eejax.checkpoint.hf.load import fetched, load_pretrained
from eejax.checkpoint.hf.save import save_pretrained
from eejax.common.errors import CheckpointError, DataError, require
from eejax.common.paths import expanded
from eejax.common.trees import Tree
from eejax.data.tokenizer_files import load_tokenizer
from eejax.data.tokenizers import BYTES, MARKER, ByteTokenizer, Tokenizer, check_vocabulary
from eejax.models.config import ModelConfig

if TYPE_CHECKING:
    from eejax.data import Source
    from eejax.inference import EngineOptions, GenerationResult
    from eejax.train.evaluate import Evaluation
    from eejax.tuning import ExitKind

OWN_TOKENIZER = ("tokenizer.json", "tokenizer.model", MARKER)


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A loaded model.

    A changed model is a new one: `dataclasses.replace` starts with an empty cache.

    Attributes:
      config: configuration.
      params: training parameters (stacked layers).
      tokenizer: tokenizer.
      source: folder that it was read from, or None.
      step: step of its checkpoint; None for a model that was not read from a run.
      metadata: metadata of its checkpoint; of a pretrained model `Pretrained.facts` as
        "pretrained".
      calibration: results of `calibrate` (`eejax.calibration.Calibration`), or None.
      tuning: results of `tune` (`eejax.tuning.Tuning`), or None.
      cache: objects that were prepared or compiled for this model, kept for reuse.
    """

    config: ModelConfig
    params: Tree = dataclasses.field(repr=False)
    tokenizer: Tokenizer = dataclasses.field(repr=False)
    source: pathlib.Path | None = None
    step: int | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    calibration: Any = dataclasses.field(default=None, repr=False)
    tuning: Any = dataclasses.field(default=None, repr=False)
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, init=False)

    @property
    def generation(self) -> Mapping[str, Any]:
        """Contents of generation_config.json, {} for a model without a pretrained one below it."""
        return self.metadata.get("pretrained", {}).get("generation", {})

    def save(self, path: str | os.PathLike) -> None:
        """Save a folder that transformers opens, with exits and routers beside the weights.

        `load` reads it. Raises as `checkpoint.hf.save_pretrained`.
        """
        save_pretrained(
            path, self.config, self.params, tokenizer=self.tokenizer, generation=self.generation
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        *,
        agreement: float | None = None,
        draft_exit: int | None = None,
        engine: EngineOptions | str = "recompute",
        **options: Any,
    ) -> tuple[str, GenerationResult]:
        """Generate a text; see `eejax.generate`."""
        return _api().generate(
            self,
            prompt,
            max_new_tokens,
            agreement=agreement,
            draft_exit=draft_exit,
            engine=engine,
            **options,
        )

    def calibrate(
        self,
        text: str | Sequence[str] | Source,
        *,
        every: int = 4,
        boundaries: Sequence[int] | None = None,
        tokens: int = 200_000,
        length: int = 256,
        watch: Callable[[str], None] | None = None,
        **options: Any,
    ) -> LanguageModel:
        """Return the model with trained routers; see `eejax.calibrate`."""
        return _api().calibrate(
            self,
            text,
            every=every,
            boundaries=boundaries,
            tokens=tokens,
            length=length,
            watch=watch,
            **options,
        )

    def tune(
        self,
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
        """Return the model with trained exits; see `eejax.tune`."""
        return _api().tune(
            self,
            text,
            exits,
            kind=kind,
            vocabulary=vocabulary,
            head_rank=head_rank,
            tokens=tokens,
            length=length,
            folder=folder,
            watch=watch,
            **options,
        )

    def grade(
        self, text: str | Sequence[str] | Source, *, tokens: int = 200_000, length: int = 256
    ) -> Evaluation:
        """Measure loss, perplexity and bits per byte of every exit on text; see `eejax.grade`."""
        return _api().grade(self, text, tokens=tokens, length=length)


def _api() -> types.ModuleType:
    """Return the module of a later room whose functions implement the methods."""
    return importlib.import_module("eejax.interop.api")


def load(
    source: str | os.PathLike,
    *,
    tokenizer: str | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    watch: Callable[[str], None] | None = None,
) -> LanguageModel:
    """Load the model of a run's workdir, a Hugging Face folder, a GGUF file, or a name.

    Args:
      source: a path, a name of `hf.packages.PACKAGES` such as "smollm2", or one on the Hub.
      tokenizer: "bytes", a file or a folder, if the model has no tokenizer.
      dtype: dtype in which a pretrained model is computed, float32 by default. A run has its own
        tokenizer and dtype and takes neither.
      mesh: devices over which the parameters are sharded; by default one.
      watch: passed to `load_pretrained`.

    Raises:
      CheckpointError: for a source that is not a model, or is incomplete.
      ConfigError: for an argument that a run does not take.
    """
    # Imported here: runs are read as this class.
    from eejax.checkpoint.model import is_run, load_run

    path = expanded(source)
    if is_run(path):
        for name, value in (("tokenizer", tokenizer), ("dtype", dtype)):
            fix = "Leave it out."
            require(value is None, name, value, f"must be None: {path} is a run with its own", fix)
        return load_run(path, mesh=mesh)
    path = fetched(source)
    dtype = "float32" if dtype is None else dtype
    found = load_pretrained(path, dtype=dtype, mesh=mesh, watch=watch)
    own = tokenizer_of(path, found.raw, found.config.vocab_size, tokenizer)
    metadata = {"pretrained": found.facts}
    return LanguageModel(found.config, found.params, own, source=path, metadata=metadata)


def has_tokenizer(path: pathlib.Path) -> bool:
    """Return whether a pretrained model's folder has its own tokenizer."""
    return any((path / name).is_file() for name in OWN_TOKENIZER)


def tokenizer_of(
    path: pathlib.Path, raw: Mapping[str, Any], vocab_size: int, spec: str | None = None
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
            f"{path}: has no tokenizer ({' or '.join(OWN_TOKENIZER[:2])}). Name one, or "
            "'bytes' for a byte model."
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


def _ends(path: pathlib.Path, raw: Mapping[str, Any], vocab_size: int) -> list[int]:
    """List the end-of-text tokens that config.json and generation_config.json name."""
    declared = [of.get("eos_token_id") for of in (raw, generation.read(path, raw))]
    ids = [i for each in declared for i in (each if isinstance(each, list) else [each])]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size))
