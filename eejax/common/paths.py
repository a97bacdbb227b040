"""Expansion of home folders in paths."""

from __future__ import annotations

import os
import pathlib

from eejax.common.errors import ConfigError


def expanded(path: str | os.PathLike) -> pathlib.Path:
    """Return a path with the home folder in place of its `~` or `~user`.

    Raises `ConfigError`, naming the path, if that folder is unknown, or if it is not a path.
    """
    try:
        return pathlib.Path(path).expanduser()
    except TypeError:
        raise ConfigError(f"path = {path!r}: must be the path of a file or folder.") from None
    except RuntimeError:
        name = pathlib.Path(path).parts[0]
        raise ConfigError(
            f"{os.fspath(path)!r}: there is no home folder {name}. Name an existing user, or give "
            "the whole path of a folder of that name."
        ) from None
