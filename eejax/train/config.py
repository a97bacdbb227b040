"""Settings of a training run: frozen dataclasses, read once from a config file and validated."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Interval
from ml_collections import ConfigDict, config_dict

from eejax.common.errors import ConfigError, require
from eejax.common.fields import (
    BelowOne,
    NonNegativeInt,
    PositiveInt,
    check_fields,
    members,
)
from eejax.data.blend import shares_of
from eejax.data.loader import BatchSchedule
from eejax.data.records import CHAT, COMPLETION
from eejax.losses import schedules
from eejax.losses.objective import CROSS_ENTROPY, LossObjective
from eejax.models.config import ModelConfig
from eejax.models.config_checks import build
from eejax.models.transformer import Remat
from eejax.pipeline.config import PIPELINE, PipelineConfig
from eejax.sharding.mesh import MeshConfig
from eejax.train import recipes
from eejax.train.config_types import check_types, plain, require_known
from eejax.train.optimizer import OptimizerConfig
from eejax.train.scope import TuneConfig


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text and its division into batches.

    Attributes:
      source: "python-stdlib", a path or glob of text, JSON lines or Parquet, "hf:NAME", or several
        of them. "chat:FILES" are conversations and "completion:FILES" prompts and completions, of
        which only the answers are learned; "megatron:PREFIX" holds tokens.
      tokenizer: "bytes", "bpe" (trained on the source, with at most the model's vocabulary), the
        path of a tokenizer.json or a SentencePiece model, or "base", that of `train.base`.
      length: tokens per sequence.
      validation_fraction: share of documents in the validation split, chosen by the hash of their
        name and `split_seed`.
      split_seed: seed of the split.
      document_masks: whether attention and positions restart at every document.
      packed: folder for packed tokens, by default in the workdir.
      max_bytes: maximum bytes of text that are used, of each source of a mixture.
      text_field: field of JSON lines, Parquet files and Hugging Face data sets that holds the text.
      weights: one for each source: the share of the sequences that is drawn from it. The sources
        are then packed separately, and each has its own validation text.
      prefetch: threads that prepare batches ahead (0: none; needs grain).
    """

    source: str | tuple[str, ...] = "python-stdlib"
    tokenizer: str = "bytes"
    length: PositiveInt = 256
    validation_fraction: BelowOne = 0.05
    split_seed: int = 0
    document_masks: bool = False
    packed: str | None = None
    max_bytes: int | None = None
    text_field: str = "text"
    weights: tuple[float, ...] | None = None
    prefetch: Annotated[int, Interval(ge=0, le=256)] = 0

    def __post_init__(self):
        check_fields(self)
        if self.weights is not None:
            n = len(self.source) if isinstance(self.source, tuple) else 1
            require(
                n > 1 and len(self.weights) == n,
                "DataConfig.weights",
                self.weights,
                f"must have one weight for each of several sources ({n})",
            )
            shares_of(self.weights, "DataConfig.weights")


@dataclasses.dataclass(frozen=True)
class ExitWeights:
    """Weights of the early exits' losses over the steps; the final exit's is 1.

    The schedules are those of EE-LLM, Appendix C.1. A curriculum (LayerSkip, section 4.1) selects
    the exits that have a loss at a step; the others have the weight 0, and their heads cost no
    time. The weights of the selected exits are not raised to compensate.

    Attributes:
      weights: one for each early exit, at the end of the schedule.
      kind: "constant", "linear" or "cosine".
      initial: weights at the beginning of the schedule.
      steps: steps from `initial` to `weights` (0: from `begin` to the end of the run).
      begin: the step at which the schedule begins.
      curriculum: "none": all exits have a loss. "rotating": every `rotation`-th exit in turns.
        "gradual": the deepest exit first, and one more after the other in the first half of the
        run.
      rotation: distance of the exits in a rotating curriculum (None: one exit at a time).
    """

    weights: tuple[float, ...] = ()
    kind: schedules.Kind = "constant"
    initial: tuple[float, ...] | None = None
    steps: NonNegativeInt = 0
    begin: NonNegativeInt = 0
    curriculum: schedules.Curriculum = "none"
    rotation: int | None = None

    def __post_init__(self):
        check_fields(self)
        require(
            self.rotation is None or self.curriculum == "rotating",
            "ExitWeights.rotation",
            self.rotation,
            "has a meaning in a rotating curriculum only",
        )
        for name in ("steps", "begin"):
            value = getattr(self, name)
            require(
                self.kind != "constant" or not value,
                f"ExitWeights.{name}",
                value,
                "has no meaning in a constant schedule",
            )

    def schedule(self, steps: int) -> schedules.WeightSchedule:
        """Return step -> weights [e] of the early exits, for a run of `steps`."""
        rest = max(1, steps - self.begin)
        weights = schedules.schedule(
            self.kind,
            self.weights,
            initial=self.initial,
            steps=self.steps or rest,
            begin=self.begin,
        )
        if self.curriculum == "none":
            return weights
        chosen = schedules.curriculum(
            self.curriculum, len(self.weights), steps=steps, rotation=self.rotation
        )
        return lambda step: weights(step) * chosen(step)

    @property
    def sparse(self) -> bool:
        """True if exits are left out at some steps."""
        return self.curriculum != "none"

    @property
    def ends_with_the_run(self) -> bool:
        """True if the weights at a step depend on the number of steps of the run."""
        return self.curriculum == "gradual" or (self.kind != "constant" and not self.steps)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of a run, size of its batches, and intervals of its reports and checkpoints.

    An interval of 0 switches off evaluations or checkpoints within the run. A run always ends with
    a checkpoint and, if it was not stopped and has held-out text, with an evaluation.

    Attributes:
      steps: steps of the run.
      batch_size: global number of sequences per step.
      microbatches: number of parts in which a batch is processed one after the other.
      remat: the activation policy ("none", "dots", "full").
      seed: seed of initial values, the order of the data and dropout.
      log_every: steps between two lines of metrics.
      eval_every: steps between two evaluations of the validation split at every exit.
      eval_batches: batches of an evaluation, spread evenly over the split (None: all).
      checkpoint_every: steps between two checkpoints.
      keep_checkpoints: number of newest checkpoints that are kept.
      batch_rampup: (start, increment, samples): the batch begins with `start` sequences and grows
        by `increment` at a time to `batch_size` within that many sequences.
      layer_dropout: probability with which the last layer is left out for a sequence, lower for the
        layers below it (LayerSkip, section 4.1).
      layer_dropout_growth: whether that probability grows over the run ("exponential", for training
        from scratch) or not ("constant").
      ema: decay of averaged parameters, which are evaluated and saved beside the others (None: no
        average).
      loss_scale: first scale of the loss where the model computes in float16. It is halved after an
        overflow.
      loss_scale_interval: steps without an overflow after which the scale is doubled.
      profile_begin: first step of the profile; not step 1, which compiles.
      profile_steps: steps that are written to profile/ for TensorBoard or Perfetto.
      base: source of the weights (None: they are drawn): the workdir of a run, a Hugging Face
        folder, a GGUF file or a name. The model and its tokenizer come from there too.
      base_step: checkpoint of the base if it is a run (None: the newest).
    """

    steps: PositiveInt = 1000
    batch_size: PositiveInt = 8
    microbatches: PositiveInt = 1
    remat: Remat = "dots"
    seed: NonNegativeInt = 0
    log_every: PositiveInt = 10
    eval_every: NonNegativeInt = 250
    eval_batches: PositiveInt | None = 20
    checkpoint_every: NonNegativeInt = 250
    keep_checkpoints: PositiveInt = 3
    batch_rampup: tuple[int, ...] | None = None
    layer_dropout: BelowOne = 0.0
    layer_dropout_growth: recipes.Growth = "constant"
    ema: BelowOne | None = None
    loss_scale: recipes.InitialScale = 2.0**16
    loss_scale_interval: PositiveInt = 1000
    profile_begin: PositiveInt = 10
    profile_steps: NonNegativeInt = 0
    base: str | None = None
    base_step: NonNegativeInt | None = None

    def __post_init__(self):
        check_fields(self)
        BatchSchedule.of(self.batch_size, self.batch_rampup, "TrainConfig.batch_rampup")
        require(
            not self.profile_steps or self.profile_begin <= self.steps,
            "TrainConfig.profile_begin",
            self.profile_begin,
            f"must be one of the {self.steps} steps where profile_steps are traced",
        )
        require(
            self.base_step is None or self.base is not None,
            "TrainConfig.base_step",
            self.base_step,
            f"must be None, or the number of a checkpoint of train.base ({self.base!r})",
        )

    @property
    def batch_sizes(self) -> BatchSchedule:
        """Batch schedule of the run."""
        return BatchSchedule.of(self.batch_size, self.batch_rampup)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that a run depends on; a file in configs/ describes it."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    exit_weights: ExitWeights = ExitWeights()
    loss: LossObjective = CROSS_ENTROPY
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PIPELINE
    tune: TuneConfig = TuneConfig()

    def __post_init__(self):
        boundaries = [e.boundary for e in self.model.exits]
        require(
            self.tune.part == "all" or self.train.base is not None,
            "tune.part",
            self.tune.part,
            "must be 'all' where no train.base gives the rest of the model its weights",
        )
        for boundary in self.tune.exits:
            require(
                boundary in boundaries,
                "tune.exits",
                boundary,
                f"must be the boundary of one of the exits ({boundaries})",
            )
        self._check_routers()
        n, tuned = self.model.n_exits, len(self.tuned or ())
        exits = f"the {tuned} tuned exits" if tuned else f"the model's {n} early exits"
        require(
            len(self.exit_weights.weights) == (tuned or n),
            "exit_weights.weights",
            self.exit_weights.weights,
            f"must have one weight for each of {exits}",
        )
        self.exit_weights.schedule(self.train.steps)  # raises where it is not one
        require(
            not (tuned and self.loss.distillation and self.mesh.pipe > 1),
            "loss.distillation",
            self.loss.distillation,
            "must be 0 where exits are tuned on several stages (mesh.pipe = "
            f"{self.mesh.pipe}): the final exit is not run there",
            "Distil with mesh.pipe = 1.",
        )
        require(
            self.loss.exit_tokens == 1 or self.mesh.pipe == 1,
            "loss.exit_tokens",
            self.loss.exit_tokens,
            f"must be 1 on several stages (mesh.pipe = {self.mesh.pipe})",
            "Set it to 1, or use mesh.data and mesh.model in place of stages.",
        )
        require(
            not (tuned and self.train.layer_dropout),
            "train.layer_dropout",
            self.train.layer_dropout,
            "must be 0 where exits are tuned: the layers are not trained there",
        )
        require(
            not tuned or self.pipeline.fill == "none",
            "pipeline.fill",
            self.pipeline.fill,
            "must be 'none' where exits are tuned: no stage waits for a backward pass there",
        )
        sources = [self.data.source] if isinstance(self.data.source, str) else self.data.source
        supervised = [s for s in sources if s.partition(":")[0] in (CHAT, COMPLETION)]
        require(
            not supervised or self.pipeline.fill == "none",
            "pipeline.fill",
            self.pipeline.fill,
            "must be 'none' where some tokens of a text do not count "
            f"(data.source = {self.data.source!r}): microbatches weigh alike there",
        )
        if self.mesh.pipe > 1 and self.loss.distillation:
            self.pipeline.distilling()  # raises where it is not possible
        require(
            self.data.length <= self.model.context_length
            or self.model.position in ("alibi", "none"),
            "data.length",
            self.data.length,
            f"must fit the model's context_length ({self.model.context_length})",
            f"Set --config.data.length to at most {self.model.context_length}.",
        )

        shards = self.mesh.model if self.mesh.sequence else 1
        require(
            self.data.length % shards == 0,
            "data.length",
            self.data.length,
            f"must divide by mesh.model = {shards}, over which mesh.sequence cuts it",
            "Choose another length, or set mesh.sequence to False.",
        )

    def _check_routers(self) -> None:
        """Raise `ConfigError` where exits with routers, or what these read, would be trained."""
        routed = [e.boundary for e in self.model.exits if e.router]
        trained = boundaries = [e.boundary for e in self.model.exits]
        if self.tuned is not None:
            trained = [b for b in self.tuned if b in boundaries]
        elif self.train.base is None:
            trained = []
        require(
            not set(routed) & set(trained),
            "tune.exits" if self.tune.exits else "tune.part",
            self.tune.exits or self.tune.part,
            f"must leave exits with a router as they are ({routed}), which were trained for it",
            "Train those of the run that was calibrated, and calibrate the result.",
        )

    @property
    def tuned(self) -> tuple[int, ...] | None:
        """Boundaries of the exits if only exits are trained, ascending; otherwise None."""
        if self.tune.part != "exits":
            return None
        return self.tune.exits or tuple(e.boundary for e in self.model.exits)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, for `from_dict`."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Experiment:
        """Build an experiment from a config or `to_dict`; unknown fields raise `ConfigError`."""
        values = typed_sections(values)
        # Fields without a default, which `default_config` holds as None until they are set.
        model = {k: v for k, v in values.get("model", {}).items() if v is not None}
        fields = dataclasses.fields(ModelConfig)
        if not any(f.name in model for f in fields if f.default is dataclasses.MISSING):
            raise ConfigError(
                "config.model: missing. Name a configuration that has one "
                "(--config=configs/demo.py) or a model to begin with "
                "(--config.train.base=RUN, a folder or a name)."
            )
        built = {
            name: build(type_, values[name], f"config.{name}")
            for name, type_ in SECTIONS.items()
            if name in values and name != "model"
        }
        return cls(model=ModelConfig.from_dict(model), **built)


SECTIONS = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "exit_weights": ExitWeights,
    "loss": LossObjective,
    "mesh": MeshConfig,
    "pipeline": PipelineConfig,
    "tune": TuneConfig,
}


def typed_sections(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of a config file's ConfigDict, or of `to_dict`, as plain values.

    Raises `ConfigError` for an unknown section and for a value that is not of its field's type.
    """
    sections: dict[str, dict[str, Any]] = plain(values)
    for name in sections:
        require_known(name, "config", SECTIONS, "section")
    for name, section in sections.items():
        check_types(SECTIONS[name], section, f"config.{name}")
    return sections


def default_config() -> ConfigDict:
    """Return every field of every section with its default, as a base of files in configs/.

    Fields that exist there can be set on the command line. Fields that must be given (the model's
    sizes) are None.
    """
    return ConfigDict({name: _defaults(type_) for name, type_ in SECTIONS.items()})


def check_field(path: str) -> None:
    """Raise `ConfigError` unless a name given to --config.*, like 'train.steps', is a field."""
    # `model.exits[0].head` reaches into a value; what lies in it is checked when it is set.
    names, known, where = path.split("[")[0].split("."), SECTIONS, "config"
    for name in names:
        require_known(name, where, known, "field" if where != "config" else "section")
        type_, where = known[name], f"{where}.{name}"
        if not dataclasses.is_dataclass(type_):
            return
        known = typing.get_type_hints(type_)


def _defaults(cls: type) -> dict[str, Any]:
    result, hints = {}, typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        type_ = hints[field.name]
        if isinstance(type_, type) and dataclasses.is_dataclass(type_):
            result[field.name] = _defaults(type_)
        elif field.default is dataclasses.MISSING:
            result[field.name] = config_dict.placeholder(type_)
        elif len(members(type_)) > 1:  # a flag takes any literal, None too; `check_types` judges it
            result[field.name] = config_dict.FieldReference(field.default, field_type=object)
        else:
            result[field.name] = field.default
    return result
