"""What a training run is: frozen dataclasses, read once from a config file and validated."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from eejax.common.errors import ConfigError, require, require_one_of
from eejax.losses import schedules
from eejax.models.config import ModelConfig, build
from eejax.models.transformer import REMAT
from eejax.sharding.mesh import MeshConfig
from eejax.train.optimizer import OptimizerConfig


def _positive(field: str, value: Any) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(ok, field, value, "must be a positive integer")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text and how it becomes batches.

    `source`: "python-stdlib", a path or glob, or several of them. `tokenizer`: "bytes", "bpe"
    (trained on the source, with at most the model's vocabulary), or the path of a
    tokenizer.json. `length`: tokens per sequence. Documents go to validation by the hash of
    their name and `split_seed`. With `document_masks` attention and positions start anew at
    every document. `packed`: the folder for packed tokens, by default in the workdir.
    `max_bytes` takes only that much text.
    """

    source: str | tuple[str, ...] = "python-stdlib"
    tokenizer: str = "bytes"
    length: int = 256
    validation_fraction: float = 0.05
    split_seed: int = 0
    document_masks: bool = False
    packed: str | None = None
    max_bytes: int | None = None

    def __post_init__(self):
        if isinstance(self.source, list):
            object.__setattr__(self, "source", tuple(self.source))
        _positive("DataConfig.length", self.length)
        require(
            0 <= self.validation_fraction < 1,
            "DataConfig.validation_fraction", self.validation_fraction, "must be in [0, 1)",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ExitWeights:
    """The weights of the early exits' losses over the steps; the final exit's is 1.

    `weights`, one for each early exit, hold at the end of the schedule and `initial` at its
    beginning; between them lie `steps` steps (0: the whole run), from step `begin` on (EE-LLM,
    Appendix C.1). `kind`: "constant", "linear" or "cosine".
    """

    weights: tuple[float, ...] = ()
    kind: str = "constant"
    initial: tuple[float, ...] | None = None
    steps: int = 0
    begin: int = 0

    def __post_init__(self):
        object.__setattr__(self, "weights", tuple(self.weights))
        if self.initial is not None:
            object.__setattr__(self, "initial", tuple(self.initial))
        require_one_of("ExitWeights.kind", self.kind, schedules.KINDS)
        require(self.steps >= 0, "ExitWeights.steps", self.steps, "must be at least 0")

    def schedule(self, steps: int) -> schedules.Schedule:
        """step -> weights [e] of the early exits, for a run of `steps`."""
        rest = max(1, steps - self.begin)
        return schedules.schedule(
            self.kind,
            self.weights,
            initial=self.initial,
            steps=self.steps or rest,
            begin=self.begin,
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, how much at once, and how often to look.

    `batch_size` is the global number of sequences per step, taken in `microbatches` parts one
    after the other; `remat` is the activation policy ("none", "dots", "full"). Every
    `log_every` steps metrics are written, every `eval_every` the validation split (at most
    `eval_batches` batches, None: all) is evaluated at every exit, every `checkpoint_every` a
    checkpoint is saved, the newest `keep_checkpoints` of which stay; 0 switches a thing off,
    though a run's end always has its evaluation and checkpoint. `seed` decides initial values,
    the order of the data and dropout.
    """

    steps: int = 1000
    batch_size: int = 8
    microbatches: int = 1
    remat: str = "dots"
    seed: int = 0
    log_every: int = 10
    eval_every: int = 250
    eval_batches: int | None = 20
    checkpoint_every: int = 250
    keep_checkpoints: int = 3

    def __post_init__(self):
        for name in ("steps", "batch_size", "microbatches", "log_every", "keep_checkpoints"):
            _positive(f"TrainConfig.{name}", getattr(self, name))
        require_one_of("TrainConfig.remat", self.remat, REMAT)
        for name in ("eval_every", "checkpoint_every", "seed"):
            value = getattr(self, name)
            ok = isinstance(value, int) and value >= 0
            require(ok, f"TrainConfig.{name}", value, "must be an integer of at least 0")
        if self.eval_batches is not None:
            _positive("TrainConfig.eval_batches", self.eval_batches)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything a run depends on; what a file in configs/ describes."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    exit_weights: ExitWeights = ExitWeights()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self):
        require(
            len(self.exit_weights.weights) == self.model.n_exits,
            "exit_weights.weights", self.exit_weights.weights,
            f"must have one weight for each of the model's {self.model.n_exits} early exits",
        )  # fmt: skip
        self.exit_weights.schedule(self.train.steps)  # raises where it is not one
        require(
            self.data.length <= self.model.context_length
            or self.model.position in ("alibi", "none"),
            "data.length", self.data.length,
            f"must fit the model's context_length ({self.model.context_length})",
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for `from_dict`."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Experiment:
        """From a config file's ConfigDict or `to_dict`; unknown fields raise `ConfigError`."""
        values = _plain(values)
        sections = {f.name: f for f in dataclasses.fields(cls)}
        unknown = [name for name in values if name not in sections]
        if unknown:
            raise ConfigError(
                f"config.{unknown[0]}: no such section. Known: {', '.join(sections)}."
            )
        if "model" not in values:
            raise ConfigError("config.model: missing; a run needs a model.")
        types = {
            "data": DataConfig, "train": TrainConfig, "optimizer": OptimizerConfig,
            "exit_weights": ExitWeights, "mesh": MeshConfig,
        }  # fmt: skip
        built = {
            name: build(type_, values[name], f"config.{name}")
            for name, type_ in types.items()
            if name in values
        }
        return cls(model=ModelConfig.from_dict(values["model"]), **built)


def _plain(value: Any) -> Any:
    """ConfigDicts as dicts and sequences as tuples, at every depth."""
    if isinstance(value, Mapping) or hasattr(value, "to_dict"):
        return {k: _plain(v) for k, v in value.items()}
    return tuple(_plain(v) for v in value) if isinstance(value, (list, tuple)) else value
