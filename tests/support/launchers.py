"""Launchers as modules, for tests of their functions."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import warnings
from collections.abc import Iterator
from unittest import mock

from absl import flags

from eejax.experiments import launch

_FLAGS: dict[str, list[flags.Flag]] = {}  # of each launcher that was imported


def functions_of(name: str) -> types.ModuleType:
    """The module of a launcher, its flags taken away again: launchers share names of flags, and
    absl allows each but once in a process."""
    with warnings.catch_warnings():  # ml_collections loads a default config in a deprecated way
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module(name)
    if name not in _FLAGS:
        _FLAGS[name] = flags.FLAGS.get_flags_for_module(name)
        _remove({flag.name for flag in _FLAGS[name]})
    return module


def help_of(name: str, flag: str) -> str:
    functions_of(name)
    return next(f.help for f in _FLAGS[name] if f.name == flag)


def flags_of(name: str) -> frozenset[str]:
    """Return the names of a launcher's flags."""
    functions_of(name)
    return frozenset(flag.name for flag in _FLAGS[name])


def call(name: str, *arguments: str) -> None:
    """Runs a launcher's `main` in this process, with its flags. Raises what that raises."""
    with _flags_of(name) as module:
        flags.FLAGS([name, *arguments])
        module.main()


def parse(name: str, *arguments: str) -> None:
    """Parses a launcher's flags as it does, in this process. Raises SystemExit as it does."""
    with parsed(name, *arguments):
        pass


@contextlib.contextmanager
def parsed(name: str, *arguments: str) -> Iterator[None]:
    """Keep a launcher's flags, parsed as it parses them, inside of the block."""
    sys.modules.pop("config_config", None)  # a file before this one, as ml_collections calls it
    with _flags_of(name), mock.patch.object(sys, "argv", [name, *arguments]):
        launch._parse(sys.argv)
        yield


@contextlib.contextmanager
def _flags_of(name: str) -> Iterator[types.ModuleType]:
    module = functions_of(name)
    names = {*flags.FLAGS}
    for flag in _FLAGS[name]:
        flags.FLAGS[flag.name] = flag
    try:
        yield module
    finally:
        flags.FLAGS.unparse_flags()
        _remove({*flags.FLAGS} - names)  # fields that were set, as --config.train.steps, are flags


def _remove(names: set[str]) -> None:
    for name in names:
        delattr(flags.FLAGS, name)
