"""Launchers as modules, for tests of their functions."""

from __future__ import annotations

import importlib
import types

from absl import flags


def functions_of(name: str) -> types.ModuleType:
    """The module of a launcher, its flags taken away again: launchers share names of flags, and
    absl allows each but once in a process."""
    module = importlib.import_module(name)
    for flag in flags.FLAGS.get_flags_for_module(name):
        delattr(flags.FLAGS, flag.name)
    return module
