"""Small files of a run: whole or not there, and an error says which one could not be written."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator


def write_text(path: str | os.PathLike, text: str) -> None:
    """Replaces the file `path` at once: a kill or a full disk leaves the old one, or none.

    Raises `OSError` naming `path`.
    """
    path = pathlib.Path(path)
    part = path.with_name(f"{path.name}.part")
    try:
        with naming(path), open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Gives an `OSError` the name of the file that is written, which writing itself leaves out."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def unwritable(error: OSError, checkpoints: str | os.PathLike) -> OSError:
    """An error for people: what could not be written, and which checkpoint stays usable."""
    folder = pathlib.Path(checkpoints)
    # Orbax gives a checkpoint its name, a number, when it is finished.
    steps = [int(p.name) for p in folder.glob("*") if p.name.isdecimal()]
    kept = (
        f"The checkpoint {folder / str(max(steps))} stays usable"
        if steps
        else "There is no checkpoint yet"
    )
    what = error.filename or folder.parent
    return OSError(
        f"{what} could not be written: {error.strerror or error}. {kept}; make room (or give a "
        "--workdir that can be written) and start the same command again."
    )
