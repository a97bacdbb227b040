"""Redirection of the tracebacks that libraries log and print to a file.

A library that fails in its threads shows a traceback for each: hundreds of lines, the last of which
is the launcher's own error. They go into a file instead, which that error names.
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from logging import LogRecord

from absl import logging

import eejax

LIMIT = 1 << 20  # characters that are kept
_OURS = tuple(
    f"{pathlib.Path(file).resolve().parent}{os.sep}" for file in (eejax.__file__, __file__)
)

_texts: list[str] = []
_file: str | None = None


def redirect() -> None:
    """Collect the logs of libraries and the output of their threads, for `report`.

    This lasts until the process ends, because threads of libraries fail at the end, too.
    """
    sys.excepthook = _outside_the_main_thread(sys.excepthook)
    sys.unraisablehook = _outside_the_main_thread(sys.unraisablehook)
    threading.excepthook = _in_thread
    logging.get_absl_handler().addFilter(_passes)
    # A failed write leaves coroutines of Orbax, about which Python would warn after the last line.
    warnings.filterwarnings("ignore", r"coroutine .* was never awaited", RuntimeWarning)


def report() -> str:
    """Write the collected texts to a file; return a sentence that names it, or ''."""
    global _file
    if not _texts:
        return ""
    if _file is None:
        text = "\n".join(_texts)
        try:
            with tempfile.NamedTemporaryFile(
                "w", prefix="eejax-", suffix=".log", delete=False, encoding="utf-8"
            ) as file:
                file.write(text[:LIMIT])
            _file = file.name
        except OSError:  # the full disk may be that of temporary files
            return ""
    return f" The libraries' output is in {_file}."


def _keep(text: str) -> None:
    if sum(map(len, _texts)) < LIMIT:
        _texts.append(text)


def _passes(record: LogRecord) -> bool:
    if not record.exc_info or record.pathname.startswith(_OURS):
        return True
    _keep(logging.get_absl_handler().format(record))
    return False


def _outside_the_main_thread(hook: Callable) -> Callable:
    """Limit a hook to errors of the main thread, as C++ code calls it for its own threads too."""

    def keep_or_show(*arguments) -> None:
        if threading.current_thread() is threading.main_thread():
            hook(*arguments)
            return
        kind, error, trace = arguments[0][:3] if len(arguments) == 1 else arguments
        _keep("".join(traceback.format_exception(kind, error, trace)))

    return keep_or_show


def _in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is not SystemExit:
        error = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
        _keep("".join(traceback.format_exception(*error)))
