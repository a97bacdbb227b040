"""Errors that say what is wrong, what is allowed, and how to fix it."""

from __future__ import annotations

import contextlib
import errno
import numbers
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class ConfigError(ValueError):
    """Error of a setting that is out of its range or contradicts another."""


class DataError(ValueError):
    """Error of a file, tokenizer or batch that cannot be used as it is."""


class CheckpointError(RuntimeError):
    """Error of a checkpoint that is missing, damaged, or belongs to another model."""


def require(ok: bool, field: str, value: Any, allowed: str, fix: str = "") -> None:
    """Raise `ConfigError` naming field, value, what is allowed and the fix, unless `ok`."""
    if not ok:
        raise ConfigError(_message(field, value, allowed, fix))


def require_given(field: str, value: T | None, allowed: str, fix: str = "") -> T:
    """Return the value. Raises `ConfigError`, as `require` does, if it is None."""
    if value is None:
        raise ConfigError(_message(field, value, allowed, fix))
    return value


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, of Python or numpy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def require_count(field: str, value: Any, minimum: int = 1) -> None:
    """Raise `ConfigError` unless the value is an integer of at least `minimum`."""
    count = is_integer(value) and int(value) >= minimum
    require(count, field, value, f"must be an integer of at least {minimum}")


def require_array(field: str, value: Any, allowed: str) -> np.ndarray:
    """Return `value` as an array. Raises `ConfigError` for a ragged one."""
    try:
        return np.asarray(value)
    except ValueError:
        raise ConfigError(_message(field, value, allowed, "")) from None


def require_one_of(field: str, value: Any, choices: tuple) -> None:
    """Raise `ConfigError` unless `value` is among `choices`."""
    require(value in choices, field, value, f"must be one of {', '.join(map(repr, choices))}")


def _message(field: str, value: Any, allowed: str, fix: str) -> str:
    return f"{field} = {value!r}: {allowed}." + (f" {fix}" if fix else "")


@contextlib.contextmanager
def naming_file(path: str | os.PathLike) -> Iterator[None]:
    """Add the name of the file to an `OSError`; errors of writing lack it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def remedy(error: OSError) -> str:
    """Return a fix for a path that cannot be used."""
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return "give another folder, as this is a file"
    if error.errno == errno.EISDIR:
        return "give a file, as this is a folder"
    if error.errno == errno.ENOENT:
        return "give a path that exists"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "give a path that this user may use"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room, or give another folder"
    return "give another path"
