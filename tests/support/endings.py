"""How a launcher's command ends: its status and what it prints, without another process."""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import launchers
from absl import logging

from eejax.experiments import launch


class Ending(NamedTuple):
    """The status of a command, and what it wrote."""

    status: int
    out: str
    err: str


def ended(name: str, *arguments: object) -> Ending:
    """Run a launcher as its command does, but in this process.

    Its own start, `launch.run`, reads its flags, a config file and its fields among them, and makes
    an error one line. Any other error is raised.
    """
    launchers.functions_of(name)  # what its imports print is not its own
    argv = [name, *map(str, arguments)]
    with (
        _process_kept(),
        launchers._flags_of(name) as module,
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = None
        try:
            # With the arguments that are no flags, where it has any.
            launch.run(module.main, positional=bool(inspect.signature(module.main).parameters))
        except SystemExit as end:
            status = end.code
    if isinstance(status, str):  # Python prints it, and ends with status 1
        return Ending(1, out.getvalue(), f"{err.getvalue()}{status}\n")
    return Ending(status or 0, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Leave out what would last until this process ends, and take away what a config file left."""
    sys.modules.pop("config_config", None)  # a file before this one, as ml_collections calls it
    verbosity = logging.get_verbosity()

    def run(main, flags_parser):
        sys.exit(main(flags_parser(sys.argv)))

    with contextlib.ExitStack() as stack:
        for what in ("interrupts.install", "jax_settings.apply", "library_logs.redirect"):
            stack.enter_context(mock.patch(f"eejax.experiments.{what}"))
        stack.enter_context(mock.patch.object(launch.app, "run", run))
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
