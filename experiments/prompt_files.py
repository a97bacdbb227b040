"""Files of prompts: one prompt, or one a line, as plain text or a JSON object with a "prompt"."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from eejax.common.errors import DataError


def read(flag: str, path: str) -> str:
    """Read the text of a file, or of standard input for "-". Errors name the flag."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise DataError(f"--{flag} = {path!r}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"--{flag} = {path!r}: is not UTF-8 text ({error}): convert it.") from error


def fields(line: str) -> dict[str, Any]:
    """Return the fields of a line: a JSON object if it begins with a brace, else a prompt.

    Raises:
      ValueError: for a line that begins with a brace and is not a JSON object.
    """
    if not line.lstrip().startswith("{"):
        return {"prompt": line}
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not a readable JSON object ({error})") from error


def texts(flag: str, path: str) -> list[str]:
    """Read only the prompts of a file. Raises `DataError` for lines without one."""
    found = []
    for number, line in enumerate(read(flag, path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = fields(line).get("prompt")
        except ValueError as error:
            raise DataError(f"--{flag} = {path!r}: line {number} {error}.") from error
        if not isinstance(text, str):
            raise DataError(f'--{flag} = {path!r}: line {number} must have a text as "prompt".')
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON may write half of a pair
            half = f"\\u{ord(text[error.start]):04x}"
            raise DataError(
                f"--{flag} = {path!r}: line {number} has {half} in its prompt, which is half a "
                "character: write both halves of the pair, or leave it out."
            ) from error
        found.append(text)
    if not found:
        raise DataError(f"--{flag} = {path!r}: must have a line that is not empty.")
    return found
