"""How every launcher starts: whatever a user can do wrong ends in one line, `error: ...`."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable

from absl import app, flags, logging

from eejax.common.errors import CheckpointError, ConfigError, DataError

MISTAKES = (ConfigError, DataError, CheckpointError, OSError, FloatingPointError)


def run(
    main: Callable[..., None], *, interrupted: str = "interrupted", positional: bool = False
) -> None:
    """Parses the flags, calls `main()` and ends the process.

    With `positional`, `main` takes a list: the arguments that are no flags. Else they are refused.

    Exit status: that of `main`, 1 after an error that the message names, or where Ctrl-C was
    pressed, which prints `interrupted`.
    """

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1 and not positional:
            sys.exit(f"error: unexpected arguments: {' '.join(argv[1:])}; see --help")
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax logs every file it touches
        try:
            main(*([argv[1:]] if positional else []))
        except MISTAKES as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit(interrupted)

    app.run(guarded, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    """The arguments that are no flags. Ends the process where a flag cannot be used.

    A config file is executed and its fields are set while flags are parsed, so all of its errors
    come from here, as whatever exception they happen to be.
    """
    try:
        _check_config(argv)
        return flags.FLAGS(argv)
    except (AttributeError, KeyError, IndexError) as error:
        sys.exit(
            f"error: {_one_line(error)}: the configuration file does not have the field that is "
            "to be set. Let it begin with eejax.train.config.default_config(), and set in the "
            "file what lies in model.exits."
        )
    except (flags.Error, OSError, TypeError, ValueError, SyntaxError, ImportError) as error:
        sys.exit(f"error: {_one_line(error)}")


def _check_config(argv: list[str]) -> None:
    """Raises `ConfigError` for --config.* that is no field, or a --config that is no file."""
    if "config" not in flags.FLAGS:
        return
    for previous, argument in zip(["", *argv], argv, strict=False):
        if field := re.match(r"--?(?:no)?config\.([^=]+)", argument):
            # Imported late: without such flags this launcher may not need JAX.
            from eejax.train.config import check_field

            check_field(field[1])
        file = re.match(r"--?config=(.*)", argument)
        path = file[1] if file else argument if previous in ("--config", "-config") else None
        if path is not None and not pathlib.Path(path.split(":")[0]).is_file():
            raise ConfigError(f"--config = {path!r}: no such file.")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
