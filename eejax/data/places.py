"""Folder of a packed data set, derived from the settings that decide its content."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from typing import Any

from eejax.common.errors import require
from eejax.data.sources import Source, is_supervised
from eejax.data.tokenizers import Tokenizer, require_end

FORMAT = 2


def place(
    source: Source,
    tokenizer: Tokenizer,
    root: str | os.PathLike,
    validation_fraction: float,
    seed: int,
) -> tuple[dict[str, Any], str]:
    """Return the settings that decide a data set's content, and its folder."""
    check_fraction(validation_fraction)
    require_end(tokenizer)
    spec = _spec(source.describe(), tokenizer, validation_fraction, seed)
    key = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return spec, os.path.join(_absolute(root), f"{spec['source']['kind']}-{key}")


def packed_before(
    source: Source,
    tokenizer: Tokenizer,
    root: str | os.PathLike,
    validation_fraction: float,
    seed: int,
) -> str | None:
    """Return the folder packed by the same settings from text that is gone, or None.

    It is also None if there are several, because the text changed in between.
    """
    settings_of_source = getattr(source, "settings", None)
    if settings_of_source is None:
        return None
    settings, found = settings_of_source(), []
    wanted = _spec(settings, tokenizer, validation_fraction, seed) | {"source": {}}
    of_text = {"files", "bytes", "digest"}
    for path in sorted(glob.glob(os.path.join(glob.escape(_absolute(root)), "*", "meta.json"))):
        try:
            with open(path, encoding="utf-8") as file:
                spec = json.load(file)["spec"]
            # A field that was not needed, as that of records, is left out of the description.
            same = all(spec["source"].get(k, v) == v for k, v in settings.items())
            same = same and set(spec["source"]) <= {*settings, *of_text}
            if same and spec | {"source": {}} == wanted:
                found.append(os.path.dirname(path))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # damaged, or of another format
    return found[0] if len(found) == 1 else None


def check_fraction(validation_fraction: float) -> None:
    ok = 0.0 <= validation_fraction < 1.0
    require(ok, "validation_fraction", validation_fraction, "must be at least 0 and below 1")


def _spec(
    source: dict[str, Any], tokenizer: Tokenizer, validation_fraction: float, seed: int
) -> dict[str, Any]:
    spec = {
        "format": FORMAT,
        "source": source,
        "tokenizer": tokenizer.fingerprint,
        "validation_fraction": validation_fraction,
        "seed": seed,
    }
    return spec | ({"chat": tokenizer.chat} if is_supervised(source) else {})


def _absolute(root: str | os.PathLike) -> str:
    return os.path.abspath(os.path.expanduser(os.fspath(root)))
