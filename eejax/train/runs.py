"""A run on disk: open its trained model, and refuse to resume it with other settings."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh

import eejax
from eejax.checkpoint.language_model import LanguageModel
from eejax.checkpoint.model import TOKENIZER, load_run, saved_settings
from eejax.common.errors import CheckpointError, DataError
from eejax.common.paths import expanded
from eejax.train import inputs
from eejax.train.base import same_source
from eejax.train.config import Experiment

# Settings that may change when a run is resumed. Except for the batch size and the filling of
# bubbles, which a run may change deliberately, they leave the path of the parameters unchanged, up
# to the rounding of sums in another order. The text and its tokenizer may be moved; their
# fingerprints are compared instead.
MAY_DIFFER = {
    "data": {"source", "tokenizer", "packed", "max_bytes", "text_field", "prefetch"},
    "train": {
        # The data continues at the next sequence, in batches of another size.
        "batch_size",
        "batch_rampup",
        "microbatches",
        "remat",
        "log_every",
        "eval_every",
        "eval_batches",
        "checkpoint_every",
        "keep_checkpoints",
        "profile_begin",
        "profile_steps",
    },
    "mesh": {"data", "pipe", "model", "sequence", "shard_optimizer", "shard_params"},
    "pipeline": {"schedule", "exits", "layers", "placement", "fill", "backward_cost"},
}


class TrainedRun(NamedTuple):
    """A trained model and the experiment it comes from."""

    workdir: pathlib.Path
    model: LanguageModel
    experiment: Experiment

    def dataset(self) -> inputs.Dataset:
        """Return the run's packed text, packed again if it is gone.

        Raises `DataError` if the text has changed since the training run: the validation split
        might then hold text that was trained on.
        """
        config = self.experiment.data
        dataset = inputs.prepare(config, self.model.config.vocab_size, self.workdir, TOKENIZER)
        if change := _other_text(self.model.metadata, self.experiment, dataset.fingerprint):
            raise DataError(
                f"the text of {self.workdir} has changed since the model was trained on it, so "
                f"what is held out now may have been trained on.\n  {change}\nRestore the text "
                "(python-stdlib is that of the Python that runs this), or evaluate on other text."
            )
        return dataset


def open_run(
    workdir: str | os.PathLike,
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
    ema: bool = False,
) -> TrainedRun:
    """Open a checkpoint of a run.

    Args:
      workdir: the training run.
      step: step of the checkpoint; by default the newest complete one.
      mesh: devices over which the parameters are sharded; by default one.
      ema: take the averaged parameters, of a run that keeps them (`train.ema`).

    Raises:
      CheckpointError: as `load_run` does.
    """
    model = load_run(workdir, step=step, mesh=mesh, ema=ema)
    return TrainedRun(expanded(workdir), model, saved_experiment(model.metadata))


def run_metadata(
    experiment: Experiment, tokenizer: str, *, tokens: int, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the metadata of a run's checkpoint.

    Args:
      experiment: settings of the run.
      tokenizer: fingerprint of its tokenizer.
      tokens: tokens that it was trained on.
      data: state of its loader (`Loader.state`).
    """
    return {
        "version": eejax.__version__,
        "model": experiment.model.to_dict(),
        "experiment": experiment.to_dict(),
        "data": data,
        "tokenizer": tokenizer,
        "tokens": tokens,
        "averaged": experiment.train.ema is not None,
    }


def saved_experiment(metadata: Mapping[str, Any]) -> Experiment:
    """Read the experiment from a checkpoint's metadata."""
    return saved_settings(metadata, "experiment", Experiment.from_dict)


def check_same_run(
    metadata: Mapping[str, Any], wanted: Experiment, fingerprint: str, where: str | os.PathLike
) -> None:
    """Raise `CheckpointError` naming every setting that makes `wanted` another run.

    Settings in `MAY_DIFFER` may differ, and `train.steps` if no schedule depends on it.

    Args:
      metadata: of the checkpoint in the folder `where`.
      fingerprint: of the text as it is now.
    """
    saved = saved_experiment(metadata)
    old, new = saved.to_dict(), wanted.to_dict()
    differ = []
    for section, fields in new.items():
        for field, value in fields.items():
            may = field in MAY_DIFFER.get(section, ())
            if (section, field) == ("train", "steps"):
                may = not (_ends_with_the_run(saved) or _ends_with_the_run(wanted))
            if (section, field) == ("train", "base"):
                # A run that trains only exits reads its base again and compares a digest.
                may = saved.tuned is not None or same_source(old[section][field], value)
            if old[section][field] != value and not may:
                differ.append(
                    f"{section}.{field}: {old[section][field]!r} in the checkpoint, {value!r} in "
                    "the configuration"
                )
    differ += filter(None, [_other_text(metadata, wanted, fingerprint)])
    if differ:
        steps = "\nA schedule that ends with the run ties it to its train.steps."
        raise CheckpointError(
            f"the checkpoints in {where} are of another run; these settings differ:\n  "
            + "\n  ".join(differ)
            + (steps if any(d.startswith("train.steps") for d in differ) else "")
            + "\nRestore these settings to resume, or give a new workdir to begin anew."
        )


def _ends_with_the_run(experiment: Experiment) -> bool:
    """Return whether a step depends on `train.steps`."""
    train = experiment.train
    return (
        experiment.optimizer.schedule in ("cosine", "linear")
        or experiment.exit_weights.ends_with_the_run
        or (train.layer_dropout > 0 and train.layer_dropout_growth != "constant")
    )


def _other_text(
    metadata: Mapping[str, Any], experiment: Experiment, fingerprint: str
) -> str | None:
    """Describe a change of the text since the checkpoint, or return None."""
    trained = metadata.get("data", {}).get("dataset")
    if trained in (None, fingerprint):  # None for a pretrained model, whose text is unknown
        return None
    return (
        f"the text of data.source = {experiment.data.source!r}: fingerprint {trained} in the "
        f"checkpoint, {fingerprint} now"
    )
