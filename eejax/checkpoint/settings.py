"""Settings of long work, kept in the folder that an interrupted call resumes from."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from eejax.checkpoint.files import write_text
from eejax.common.errors import CheckpointError, ConfigError


def require_same_settings(
    file: pathlib.Path, settings: Mapping[str, Any], stale: Sequence[str], work: str
) -> None:
    """Begin the folder of `file`, or check that it belongs to work of the same settings.

    Args:
      file: holds the settings as JSON.
      settings: values of JSON, in sections or not.
      stale: patterns of files that are removed where there are no settings: the work that they
        belong to is unknown.
      work: what the folder holds, such as "calibration".

    Raises:
      ConfigError: for other settings, which are named.
      CheckpointError: for a file that cannot be read.
    """
    folder, text = file.parent, json.dumps(settings, indent=1, sort_keys=True, default=str)
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for left in (path for pattern in stale for path in folder.glob(pattern)):
            left.unlink(missing_ok=True)
        return write_text(file, text + "\n")
    try:
        old, new = dict(json.loads(file.read_text(encoding="utf-8"))), json.loads(text)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}): remove {folder}.") from error
    a, b = _flat(old), _flat(new)
    differ = [f"{k.strip('.')} = {b.get(k)!r}, there {a.get(k)!r}" for k in b if a.get(k) != b[k]]
    if differ:
        raise ConfigError(
            f"{folder} holds a {work} of other settings: {'; '.join(differ)}. Remove it, or take "
            "those settings."
        )


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{k}.{n}": v
        for k, part in tree.items()
        for n, v in dict(part if isinstance(part, dict) else {"": part}).items()
    }
