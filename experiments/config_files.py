"""Find the config files that are installed with eejax by their names."""

from __future__ import annotations

import pathlib
import re

from eejax import configs

FOLDER = pathlib.Path(configs.__file__).resolve().parent
_PARTS = ("__init__", "common")  # no experiments by themselves


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in _PARTS)


def path_of(config: str) -> str:
    """Return the value of --config with the path of an installed file in the place of its name.

    Args:
      config: a path, or the name of an installed config file: "tiny", "tiny.py" or
        "configs/tiny.py". Arguments may follow a colon. A file of that path goes first, and what
        is neither comes back as it is.
    """
    path, colon, arguments = config.partition(":")
    name = re.fullmatch(r"(?:configs/)?(\w+)(?:\.py)?", path)
    if pathlib.Path(path).is_file() or name is None or name[1] not in names():
        return config
    return f"{FOLDER / name[1]}.py{colon}{arguments}"
