"""Small files of a run that are written completely or not at all, with errors that name the
file."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

from filelock import FileLock, Timeout

from eejax.common.errors import ConfigError, naming_file, remedy

LOCK = ".lock"


def write_text(path: str | os.PathLike, text: str) -> None:
    """Replace the file `path` atomically: after a kill or with a full disk the old one stays, or
    none.

    Raises `OSError` naming `path`.
    """
    path = pathlib.Path(path)
    part = path.with_name(f"{path.name}.part")
    try:
        with naming_file(path), open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def only_user(folder: str | os.PathLike) -> Iterator[None]:
    """Lock `folder` for this process until it ends.

    Raises `ConfigError` if another process has locked it: two runs in one workdir would write the
    same checkpoints and remove each other's.
    """
    path = pathlib.Path(folder) / LOCK
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"workdir = {os.fspath(folder)!r} is in use by process {path.read_text().strip()}: "
            "wait for its end, or give another workdir."
        ) from None
    try:
        with naming_file(path):
            path.write_text(f"{os.getpid()}\n")
        yield
    finally:
        lock.release()


def finished_steps(checkpoints: str | os.PathLike) -> list[int]:
    """List the steps of the finished checkpoints in a folder, which may not exist.

    Orbax renames a checkpoint to its step number when it is finished.
    """
    return sorted(int(p.name) for p in pathlib.Path(checkpoints).glob("*") if p.name.isdecimal())


def unwritable(error: OSError, checkpoints: str | os.PathLike) -> OSError:
    """Return an error that says what could not be written, and which checkpoint stays usable."""
    folder = pathlib.Path(checkpoints)
    steps = finished_steps(folder)
    kept = (
        f"The checkpoint {folder / str(max(steps))} stays usable"
        if steps
        else "There is no checkpoint yet"
    )
    what = error.filename or folder.parent
    return OSError(
        f"{what} could not be written: {error.strerror or error}. {kept}; {remedy(error)}, and "
        "start the same command again."
    )
