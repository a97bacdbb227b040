"""Files of the folder of data sets, which $EEJAX_DATA names."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from eejax.common.errors import DataError
from eejax.common.paths import expanded


def path(name: str) -> pathlib.Path:
    """Return the path of a file in the folder.

    Raises:
      DataError: without the folder or the file.
      ConfigError: `$EEJAX_DATA` names a home folder that is not there.
    """
    folder = os.environ.get("EEJAX_DATA")
    if not folder:
        raise DataError(f"EEJAX_DATA is not set: name the folder that holds {name}.")
    found = expanded(folder) / name
    if not found.is_file():
        raise DataError(f"{found} does not exist: EEJAX_DATA must be a folder that holds it.")
    return found


def records(name: str) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines. Raises as `path`."""
    return [json.loads(line) for line in path(name).read_text(encoding="utf-8").splitlines()]
