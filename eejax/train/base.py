"""Facts about the model that a run begins with: another run's, or a pretrained one's.

`with_base` builds the experiment: it takes the model and the tokenizer from the base. A run writes
these facts into its workdir, so that it resumes without its base, unless only exits are trained.
`train.base_weights` reads the weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import reprlib
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from absl import logging

from eejax.checkpoint import overlay
from eejax.checkpoint.files import finished_steps, only_user, write_text
from eejax.checkpoint.hf.load import fetched, pretrained_config
from eejax.checkpoint.language_model import has_tokenizer, tokenizer_of
from eejax.checkpoint.model import (
    CHECKPOINTS,
    TOKENIZER,
    TUNING,
    is_run,
    load_metadata,
    load_run_tokenizer,
    model_config,
)
from eejax.common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    remedy,
    require,
    require_count,
)
from eejax.common.paths import expanded
from eejax.data.tokenizer_files import load_tokenizer
from eejax.data.tokenizers import Tokenizer, save_tokenizer
from eejax.models.config import ModelConfig
from eejax.sharding import distributed
from eejax.train import inputs
from eejax.train.config import DataConfig, Experiment, typed_sections

T = TypeVar("T")

BASE = "base.json"
FREE = ("exits", "dtype", "dropout", "vocab_multiple")
"""Fields of a model that a run may change. Exits are added to the base's."""


class FixedFields(NamedTuple):
    """The part of an experiment that a base fixes.

    Attributes:
      source: the value of `train.base`: the whole path of a folder, or a name.
      step: the checkpoint of a run; None for a pretrained model.
      config: the base's model.
      tokenizer: its fingerprint.
      digest: of the parameters that were read (`checkpoint.digest`); None before they are.
      pretrained: `Pretrained.facts` of a base that is or was made of a pretrained model, else None.
    """

    source: str
    step: int | None
    config: ModelConfig
    tokenizer: str
    digest: str | None = None
    pretrained: Mapping[str, Any] | None = None


def base_model(
    source: str, step: int | None = None, workdir: str | os.PathLike | None = None
) -> ModelConfig:
    """Return the model of a base, as `with_base` finds it.

    Raises:
      CheckpointError: for a base that is not a model.
    """
    if (facts := _resumed(workdir, source)) is not None:
        return facts.config
    path = expanded(source)
    if is_run(path):
        return naming_base(source, lambda: model_config(load_metadata(path, step=step)))
    return naming_base(source, lambda: pretrained_config(fetched(source))[0])


def with_base(
    values: Mapping[str, Any],
    workdir: str | os.PathLike | None = None,
    overrides: Collection[str] = (),
) -> Experiment:
    """Build the experiment of a configuration whose model and tokenizer are those of `train.base`.

    Args:
      values: values of a configuration file, as `Experiment.from_dict` takes them. Fields of
        `model` that are None or have their default are the base's; exits are added to the base's,
        at its temperature unless they say another. Exit weights that are left out are 1. A
        tokenizer must be the base's, but may bring a chat template.
      workdir: the run's folder. It gets the base's tokenizer. If it has a checkpoint, its
        `FixedFields` are used, so that a run resumes without its base.
      overrides: fields that were set on the command line, such as "model.norm": they must be the
        base's even if they have their default.

    Raises:
      ConfigError: a field that contradicts the base, or has a wrong type; or the workdir is in use
        or has a calibrated run.
      CheckpointError: a base that is not a model, or a run whose tokenizer is not the one it began
        with.
      DataError: another tokenizer than the base's, or another chat template than the run's.
    """
    values = typed_sections(values)
    train = values.get("train", {})
    if train.get("base") is None:
        return Experiment.from_dict(values)
    source = _located(train["base"])
    data = values.setdefault("data", {})
    spec = data.get("tokenizer", DataConfig.tokenizer)
    chosen = spec if spec != DataConfig.tokenizer or "data.tokenizer" in overrides else None
    if workdir is not None:
        workdir = expanded(workdir)
        check_workdir(workdir, source)
        overlay.require_free(workdir)
    facts = _resumed(workdir, source)
    if workdir is None or facts is None:
        facts, tokenizer = _facts(source, train.get("base_step"), spec, chosen)
        if workdir is not None:
            distributed.broadcast_from_process_zero(lambda: _keep(tokenizer, workdir))
    else:
        _check_resumed_tokenizer(chosen, facts, workdir)
    train["base"] = facts.source
    values["model"] = _model(values.get("model", {}), facts, overrides)
    data["tokenizer"] = inputs.BASE
    weights = values.setdefault("exit_weights", {})
    if not weights.get("weights"):
        chosen = values.get("tune", {}).get("exits") or values["model"]["exits"]
        weights["weights"] = (1.0,) * len(chosen)
    elif values.get("tune", {}).get("part", "all") != "exits":
        _check_weights(weights["weights"], facts, values["model"]["exits"])
    return Experiment.from_dict(values)


def _check_weights(weights: Any, facts: FixedFields, exits: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` where weights leave out exits that came with the base."""
    n, own = len(exits), tuple(e.boundary for e in facts.config.exits)
    new = tuple(e["boundary"] for e in exits if e["boundary"] not in own)
    added = f", and the configuration's, after layers {new}" if new else ""
    require(
        not own or not isinstance(weights, list | tuple) or len(weights) == n,
        "exit_weights.weights",
        weights,
        f"must have one weight for each of the model's {n} early exits: the base's, after layers "
        f"{own}{added}",
        f"Set --config.exit_weights.weights to a tuple of {n} in the order of the layers, or to () "
        "for 1 everywhere.",
    )


def _located(source: str) -> str:
    """Return the whole path of a folder, so that a run may resume anywhere, or a name as it is.

    Links stay in the path, so that the same path finds the run's facts when they are gone.
    """
    path = expanded(source)
    if not path.is_dir():
        return source
    whole, real = os.path.abspath(path), os.path.realpath(path)
    return whole if os.path.realpath(whole) == real else real  # ".." behind a link


def _keep(tokenizer: Tokenizer, workdir: pathlib.Path) -> None:
    """Save the tokenizer unless the workdir has one; `load_base` refuses a different one.

    A new chat template replaces that of an attempt without a checkpoint, but never that of a run.
    Raises `ConfigError` while another process uses the workdir.
    """
    folder = workdir / TOKENIZER
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"workdir = {os.fspath(workdir)!r}: cannot be made ({error.strerror}): {remedy(error)}."
        ) from error
    with only_user(workdir):
        if folder.is_dir():
            if has_checkpoint(workdir):
                return
            old = load_tokenizer(folder)
            if old.fingerprint != tokenizer.fingerprint or old.chat == tokenizer.chat:
                return
            shutil.rmtree(folder)
        save_tokenizer(tokenizer, folder)


def _model(
    wanted: Mapping[str, Any], facts: FixedFields, overrides: Collection[str]
) -> dict[str, Any]:
    """Return the base's model with the fields of `wanted` that are the run's own."""
    base = facts.config.to_dict()

    def unset(f):
        return None if f.default is dataclasses.MISSING else _plain(f.default)

    defaults = {f.name: unset(f) for f in dataclasses.fields(ModelConfig)}
    own = dict(base)
    for name, value in wanted.items():
        if name not in base or name == "exits":
            continue  # an unknown field is named by ModelConfig.from_dict
        value, said = _plain(value), any(f"{g}.".startswith(f"model.{name}.") for g in overrides)
        if not said and (value is None or value == defaults[name]):
            continue
        if name in FREE:
            own[name] = value
            continue
        require(
            value == base[name],
            f"model.{name}",
            value,
            f"must be the base's, {base[name]!r} (train.base = {facts.source!r})",
            "Leave the field out: the model is the base's.",
        )
    exits = {e["boundary"]: e for e in base["exits"]}
    for e in map(dict, _plain(wanted.get("exits") or ())):
        e = {"temperature": base["temperature"]} | e
        full = dataclasses.asdict(ModelConfig.from_dict(base | {"exits": [e]}).exits[0])
        have = exits.get(full["boundary"])
        require(
            have is None or full == have,
            "model.exits",
            full,
            f"must be the base's at that boundary, {have!r} (train.base = {facts.source!r})",
            "Leave it out: exits of the base stay.",
        )
        exits[full["boundary"]] = full
    own["exits"] = [e for _, e in sorted(exits.items())]
    shared = any(e["head"] == "shared" for e in own["exits"])
    if base["head"] == "own" and shared and all(e["head"] != "shared" for e in base["exits"]):
        own["head"] = "shared"  # the same table under another name; the base has no shared one
    return own | {k: v for k, v in wanted.items() if k not in base}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    to_dict = getattr(value, "to_dict", None)
    if to_dict is not None:
        return to_dict()
    if isinstance(value, Mapping):
        return dict(value)
    # As `ModelConfig.to_dict` has them.
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _facts(
    source: str, step: int | None, spec: str, chosen: str | None
) -> tuple[FixedFields, Tokenizer]:
    """Read a base's facts and its tokenizer.

    Args:
      source: `train.base`.
      step: `train.base_step`.
      spec: the configured tokenizer, for a base without one of its own.
      chosen: a tokenizer that the user asks for; it must be the base's. None: not asked for.
    """
    path = expanded(source)
    if is_run(path):
        metadata = naming_base(source, lambda: load_metadata(path, step=step))
        tokenizer = naming_base(source, lambda: load_run_tokenizer(path, metadata))
        facts = FixedFields(source, step, model_config(metadata), tokenizer.fingerprint)
    else:
        require(
            step is None,
            "train.base_step",
            step,
            f"must be None where the base is not a run of eejax ({source})",
        )
        path = naming_base(source, lambda: fetched(source))
        config, raw = naming_base(source, lambda: pretrained_config(path))
        own = has_tokenizer(path)
        if not own and spec in (inputs.BPE, inputs.BASE):
            raise DataError(
                f"data.tokenizer = {spec!r}: must name the tokenizer that train.base = {source!r} "
                "was trained with, as that model has none of its own. Give a tokenizer.json, a "
                "SentencePiece model, or 'bytes' for a model of bytes."
            )
        tokenizer = tokenizer_of(path, raw, config.vocab_size, None if own else spec)
        chosen = chosen if own else None
        facts = FixedFields(source, None, config, tokenizer.fingerprint)
    other = _chosen_tokenizer(chosen, facts)
    if other is not None and other.chat is not None:
        tokenizer.chat = other.chat
    return facts, tokenizer


def _chosen_tokenizer(chosen: str | None, facts: FixedFields) -> Tokenizer | None:
    """Load the tokenizer that the user asks for; None where that is left to the base.

    Raises `DataError` for another one than the base's.
    """
    if chosen in (None, inputs.BASE):
        return None
    other = None if chosen == inputs.BPE else load_tokenizer(chosen)
    if other is None or other.fingerprint != facts.tokenizer:
        found = "one that is trained anew" if other is None else other.fingerprint
        raise DataError(
            f"data.tokenizer = {chosen!r}: must be the base's, {facts.tokenizer} "
            f"(train.base = {facts.source!r}), and is {found}. Leave the field out."
        )
    return other


def _check_resumed_tokenizer(chosen: str | None, facts: FixedFields, workdir: pathlib.Path) -> None:
    """Compare the tokenizer of a run that resumes with the one that it began with.

    Raises:
      CheckpointError: the workdir has another tokenizer than the run began with.
      DataError: the user asks for another one, or for another chat template.
    """
    saved = load_run_tokenizer(workdir, {"tokenizer": facts.tokenizer})
    try:
        other = _chosen_tokenizer(chosen, facts)
    except DataError as error:
        if chosen is None or chosen == inputs.BPE or expanded(chosen).exists():
            raise
        logging.warning("%s The run's own copy of it is used: %s", error, workdir / TOKENIZER)
        return
    if other is not None and other.chat not in (None, saved.chat):
        raise DataError(
            f"data.tokenizer = {chosen!r}: its chat template must be the one that the run in "
            f"{workdir} began with, {reprlib.repr(saved.chat)}, and is "
            f"{reprlib.repr(other.chat)}. Leave the field out, or begin anew in another workdir."
        )


def check_workdir(workdir: pathlib.Path, source: str) -> None:
    """Raise `ConfigError` where a run would be written into its base."""
    require(
        not same_source(str(workdir), source),
        "workdir",
        str(workdir),
        f"must differ from train.base ({source!r})",
        "Use another workdir.",
    )


def same_source(a: str | None, b: str | None) -> bool:
    """Return whether two values of `train.base` are the same path, however it is written."""
    resolved = [s and expanded(s).resolve() for s in (a, b)]
    return resolved[0] == resolved[1]


def has_checkpoint(workdir: pathlib.Path) -> bool:
    """Return whether a run has a finished checkpoint to resume from."""
    return any(finished_steps(workdir / name) for name in (CHECKPOINTS, TUNING))


def _resumed(workdir: str | os.PathLike | None, source: str) -> FixedFields | None:
    """Read the facts of a run that resumes; None where it begins, whatever lies in the workdir."""
    if workdir is None or not has_checkpoint(expanded(workdir)):
        return None
    return remembered(workdir, source)


def remembered(workdir: str | os.PathLike | None, source: str | None = None) -> FixedFields | None:
    """Read the facts about the base that a run began with.

    Returns:
      the facts; None if the run began without a base, or with another than `source`.

    Raises:
      CheckpointError: for a file that cannot be read.
    """
    file = None if workdir is None else expanded(workdir) / BASE
    if file is None or not os.path.lexists(file):
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        facts = FixedFields(**values | {"config": ModelConfig.from_dict(values["config"])})
        for name in ("source", "tokenizer", "digest"):
            value = getattr(facts, name)
            require(isinstance(value, str), name, value, "must be a string")
        if facts.step is not None:
            require_count("step", facts.step, 0)
        of = facts.pretrained
        require(of is None or isinstance(of, dict), "pretrained", of, "must be a mapping or None")
        known = same_source(facts.source if source is None else source, facts.source)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error}). Put it back, or begin anew in another workdir."
        ) from error
    return facts if known else None


def remember(workdir: pathlib.Path, facts: FixedFields) -> None:
    """Write the facts that `remembered` reads."""
    values = facts._asdict() | {"config": facts.config.to_dict()}
    distributed.broadcast_from_process_zero(
        lambda: write_text(workdir / BASE, json.dumps(values, indent=1) + "\n")
    )


def origin(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Describe what a run began with, as the metadata of its checkpoints do."""
    return metadata_of(workdir)["base"]


def metadata_of(workdir: pathlib.Path) -> dict[str, Any]:
    """Return the metadata that the checkpoints of a run with a base have because of it."""
    facts = remembered(workdir)
    if facts is None:
        return {"base": None}
    base = {"source": facts.source, "step": facts.step, "digest": facts.digest}
    return {"base": base} | ({"pretrained": facts.pretrained} if facts.pretrained else {})


def naming_base(source: str, load: Callable[[], T]) -> T:
    """Return `load()`; its errors name the field `train.base`."""
    try:
        return load()
    except CheckpointError as error:
        raise CheckpointError(f"train.base = {source!r}: {error}") from error
