"""Models as runs: every launcher takes the workdir of a model that was not trained here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from eejax.checkpoint import overlay
from eejax.checkpoint.hf import Pretrained, load_pretrained
from eejax.checkpoint.hf.load import fetched
from eejax.checkpoint.language_model import LanguageModel, tokenizer_of
from eejax.checkpoint.manager import Checkpoints
from eejax.checkpoint.model import CHECKPOINTS, PARAMS, TOKENIZER, TUNING
from eejax.common.errors import CheckpointError
from eejax.common.paths import expanded
from eejax.data.tokenizers import save_tokenizer
from eejax.train.config import DataConfig, ExitWeights, Experiment
from eejax.train.runs import run_metadata


def import_pretrained(
    source: str | os.PathLike,
    workdir: str | os.PathLike,
    *,
    data: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    dtype: str = "float32",
    watch: Callable[[str], None] | None = None,
) -> Pretrained:
    """Write a pretrained model into `workdir`, as the checkpoint of step 0 of a run.

    Args:
      source: as `load_pretrained` takes it.
      data: fields of `DataConfig` for the text that the model is evaluated and tuned on; without a
        source there is none.
      tokenizer: "bytes", a file or a folder; by default the model's own.
      dtype: dtype of the computation; parameters are float32.
      watch: as `load_pretrained` takes it.

    Raises:
      ConfigError: the workdir has a calibrated run.
      CheckpointError: the workdir already has checkpoints, the model has no tokenizer, or
        `load_pretrained` fails.
      DataError: the tokenizer does not fit the model.
    """
    workdir = expanded(workdir)
    if any((workdir / folder).exists() for folder in (CHECKPOINTS, TUNING)):
        raise CheckpointError(f"{workdir} holds a run already. Remove it, or name another workdir.")
    overlay.require_free(workdir)
    path = fetched(source)
    loaded = load_pretrained(path, watch=watch)
    config = loaded.config.replace(dtype=dtype)
    chosen = tokenizer_of(path, loaded.raw, config.vocab_size, tokenizer)
    metadata = {"pretrained": loaded.facts}
    model = LanguageModel(config, loaded.params, chosen, metadata=metadata)
    save_as_run(model, workdir, data or {})
    return loaded._replace(config=config)


def save_as_run(model: LanguageModel, workdir: str | os.PathLike, data: Mapping[str, Any]) -> None:
    """Write a model as the checkpoint of step 0 of a run, whatever its architecture is.

    Args:
      workdir: a folder without checkpoints.
      data: as in `import_pretrained`.
    """
    workdir, config = expanded(workdir), model.config
    text = {
        "source": (),
        "length": min(config.context_length, DataConfig.length),
        "tokenizer": str(workdir / TOKENIZER),
    }
    experiment = Experiment(
        model=config,
        data=DataConfig(**text | dict(data)),
        exit_weights=ExitWeights((1.0,) * config.n_exits),
    )
    save_tokenizer(model.tokenizer, workdir / TOKENIZER)
    metadata = run_metadata(experiment, model.tokenizer.fingerprint, tokens=0, data={})
    if pretrained := model.metadata.get("pretrained"):
        metadata["pretrained"] = pretrained
    checkpoints = Checkpoints(workdir / CHECKPOINTS)
    try:
        checkpoints.save(0, {PARAMS: model.params}, metadata)
        checkpoints.wait()
    finally:
        checkpoints.close()
