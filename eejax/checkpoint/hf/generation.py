"""The file generation_config.json: how a model's texts begin, end and are sampled by default."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from eejax.checkpoint.hf.folder import read_json
from eejax.data.tokenizers import Tokenizer

FILE = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read(path: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a folder's file; without one, the token ids of its config.json.

    Raises CheckpointError if the file is not a JSON object.
    """
    if (path / FILE).is_file():
        return read_json(path / FILE)
    return {name: config[name] for name in IDS if config.get(name) is not None}


def tokens(
    tokenizer: Tokenizer | None, vocab_size: int, generation: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ids that begin, end and pad texts, with every token that ends one for the
    tokenizer.

    Ids that the tokenizer lacks are those of `generation`. An id that is no token of the model is
    null, because a missing one would be the family's.
    """
    ends = list(getattr(tokenizer, "end_ids", ()))
    found = (getattr(tokenizer, "bos_id", None), ends or None, getattr(tokenizer, "pad_id", None))
    return {
        name: _of_model(generation.get(name) if value is None else value, vocab_size)
        for name, value in zip(IDS, found, strict=True)
    }


def write(path: pathlib.Path, generation: Mapping[str, Any], ids: Mapping[str, Any]) -> None:
    """Write the file from the values that were read and a model's `tokens`."""
    values = {**generation, **ids}
    values = {name: value for name, value in values.items() if value is not None}
    (path / FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _of_model(ids: Any, vocab_size: int) -> Any:
    if isinstance(ids, list):
        kept = [i for i in ids if _of_model(i, vocab_size) is not None]
        return kept[0] if len(kept) == 1 else kept or None
    return ids if type(ids) is int and 0 <= ids < vocab_size else None
