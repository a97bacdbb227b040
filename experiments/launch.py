"""Start of every launcher; every mistake of a user ends in one line, `error: ...`.

Launchers that can run as several processes call `define_processes()` beside their own flags.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import re
import shutil
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from absl import app, flags, logging
from tqdm import tqdm

from eejax.common.errors import CheckpointError, ConfigError, DataError, remedy
from eejax.experiments import (
    closed_output,
    config_errors,
    config_files,
    interrupts,
    jax_settings,
    library_logs,
)

if TYPE_CHECKING:
    from eejax.train.loop import TrainResult

MISTAKES = (ConfigError, DataError, CheckpointError, OSError, FloatingPointError)
RENAMED_FLAGS = {
    "grows": "can_deepen",
    "nogrows": "nocan_deepen",
    "max_depth": "num_segments",
    "min_depth": "min_exit_layer",
    "gamma": "drafts",
    "most": "max_slots",
}


flags.disclaim_key_flags()  # --help lists flags under the launcher that defines them


def define_processes() -> None:
    """Define the flags of a launcher that can run as several processes, off by default."""
    flags.DEFINE_bool(
        "distributed",
        False,
        "This is one of several processes, which the cluster describes: Slurm, Open MPI, "
        "Kubernetes or Cloud TPU.",
    )
    flags.DEFINE_string(
        "coordinator",
        None,
        "HOST:PORT of process 0: this is one of several processes, described by this flag, "
        "--processes and --process.",
    )
    flags.DEFINE_integer("processes", None, "Number of processes.")
    flags.DEFINE_integer("process", None, "The number of this process, from 0.")
    flags.DEFINE_integer(
        "connect_seconds", 300, "Seconds that processes wait for one another to start."
    )
    flags.DEFINE_integer(
        "heartbeat_seconds",
        60,
        "Seconds of silence after which a process counts as dead.",
    )


def run(
    main: Callable[..., None], *, interrupted: str = "interrupted", positional: bool = False
) -> None:
    """Parse the flags, call `main()` and end the process.

    With `positional`, `main` takes a list: the arguments that are not flags. Otherwise these are
    refused. The exit status is that of `main`, 1 after an error with its message, 130 after Ctrl-C,
    which prints `interrupted`, and 1 without a message if standard output is closed.
    """
    interrupts.install()
    jax_settings.apply()

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1 and not positional:
            sys.exit(f"error: unexpected arguments: {' '.join(argv[1:])}; see --help")
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax logs every file it touches
        for output in (sys.stdout, sys.stderr):  # replace characters that a terminal cannot show
            if hasattr(output, "reconfigure"):
                output.reconfigure(errors="replace")
        if sys.stdin is None:
            sys.stdin = open(os.devnull)  # noqa: SIM115  (as long as the process)
        if flags.FLAGS["verbosity"].value < logging.INFO:
            library_logs.redirect()
        try:
            with interrupts.unwinding(interrupted):
                _join()
                main(*([argv[1:]] if positional else []))
            if message := library_logs.report():
                say(f"done, though a library failed on the way.{message}")
        except BrokenPipeError:
            raise
        except (KeyboardInterrupt, Exception) as error:
            if interrupts.came_of_one(error):
                _interrupted(interrupted)
            elif isinstance(error, MISTAKES):
                _end(error, f"error: {_mistake(error)}{library_logs.report()}")
            elif _joined():
                _end(error, traceback.format_exc())
            raise

    with closed_output.ends_quietly():
        app.run(guarded, flags_parser=_parse)


def _require_numbers() -> None:
    """Raise `ConfigError` for a flag that is not a number: no bound of a flag refuses that."""
    for name, value in flags.FLAGS.flag_values_dict().items():
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"--{name} = nan: must be a number.")


def _join() -> None:
    """Make this process one of several, if the flags say so."""
    if "coordinator" not in flags.FLAGS:
        return
    values = flags.FLAGS.flag_values_dict()
    own = {f: values[f] for f in ("coordinator", "processes", "process")}
    given = [f"--{f}" for f, value in own.items() if value is not None]
    if given and values["distributed"]:
        raise ConfigError(
            f"{given[0]}: must be left out with --distributed, where the cluster sets it."
        )
    if given or values["distributed"]:
        from eejax.sharding import distributed

        limits = {f: values[f] for f in ("connect_seconds", "heartbeat_seconds")}
        distributed.start(distributed.Processes(**own, **limits))


@contextlib.contextmanager
def flags_named(renamed: Mapping[str, str]) -> Iterator[None]:
    """Make errors name a setting's flag: the one of its name, or that of `renamed`."""
    try:
        yield
    except ConfigError as error:
        message = with_flag(str(error), renamed)
        if message is None:
            raise
        raise ConfigError(message) from error


def with_flag(error: str, renamed: Mapping[str, str] = types.MappingProxyType({})) -> str | None:
    """Replace the setting's name at an error's beginning by its flag's; None without one."""
    field = re.match(r"[\w.]*", error)[0]
    own = field.rpartition(".")[2] if field[:1].isupper() else field  # of a class of options
    flag = renamed.get(own, own if own in flags.FLAGS else None)
    return None if flag is None else f"--{flag}{error[len(field) :]}"


def configured(workdir: str | os.PathLike | None = None):
    """Return the experiment that --config describes, with the fields that its `train.base` fixes.

    The run in `workdir` remembers those fields. Raises as `train.base.with_base` does.
    """
    from ml_collections import config_flags

    from eejax.train.base import with_base

    config = flags.FLAGS["config"]
    return with_base(config.value, workdir, config_flags.get_override_values(config))


def end_if_stopped(result: TrainResult) -> None:
    """End the process with status 128 + signal if a signal stopped the training of `result`."""
    if result.stopped is not None:
        sys.exit(128 + result.stopped)


def say(text: str) -> None:
    """Print a line of progress to standard error, above a bar if there is one."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


def one_model(names: Sequence[str]) -> str:
    """Return the model that a command's arguments name. Raises `ConfigError` unless it is one."""
    if len(names) != 1:
        raise ConfigError(
            f"MODEL = {' '.join(names)!r}: must be one model: a run's workdir, a Hugging Face "
            "folder, a GGUF file, or a name such as smollm2."
        )
    return names[0]


def shell_command() -> str:
    """Return the command `eejax` of this environment, as a user would type it here."""
    path = pathlib.Path(sys.executable).with_name("eejax")
    if shutil.which("eejax") == str(path):
        return "eejax"
    here = pathlib.Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def numbers(flag: str, texts: list[str], kind: type = float) -> list:
    """Return the values of a list flag. Raises `ConfigError` for a value that is not a number."""
    try:
        return [kind(text) for text in texts]
    except ValueError as error:
        raise ConfigError(f"--{flag} = {','.join(texts)!r}: must be numbers ({error}).") from error


def _joined() -> bool:
    """Return whether this process is one of several, even if there is only one."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def _end(error: BaseException, message: str) -> None:
    """Print the message and end the process, without waiting for others of a run."""
    if not _joined():
        sys.exit(message)
    from eejax.sharding import distributed

    lost = distributed.peer_failure_message(error)
    if lost:  # a guess: any error of XLA may be another process's end
        traceback.print_exception(error)
    print(f"error: {lost}" if lost else message, file=sys.stderr)
    distributed.exit_process(1, alone=lost is not None)


def _mistake(error: Exception) -> str:
    """Return the error, with the line of the config file that caused it, if one did."""
    file = _config_file(sys.argv)
    if file is not None and (message := config_errors.located(error, file)):
        return message
    if file is not None and isinstance(error, ConfigError):
        return config_errors.with_line(str(error), file, _overridden())
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}: {remedy(error)}."
    return str(error)


def _overridden() -> Collection[str]:
    """Return the fields of the config that the command line sets."""
    from ml_collections import config_flags

    return config_flags.get_override_values(flags.FLAGS["config"])


def _interrupted(line: str) -> None:
    """End the process after Ctrl-C; several processes of a run end together."""
    if _joined():
        from eejax.sharding import distributed

        distributed.wait_for_peers()
    interrupts.end(line)


def _parse(argv: list[str]) -> list[str]:
    """Return the arguments that are not flags. Ends the process for a flag that cannot be used.

    A config file is executed and its fields are set while flags are parsed, so all of its errors
    come from here, as exceptions of any kind.
    """
    _find_config(argv)
    file = _config_file(argv)
    try:
        _check_config(argv, file)
        # The error that follows covers warnings of Python and ml_collections about the file.
        with warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            rest = flags.FLAGS(argv)
        _require_numbers()
        if file is not None:
            _check_result(file)
        return rest
    except BrokenPipeError:  # from --help
        raise
    except Exception as error:
        if file is not None and (message := config_errors.located(error, file)):
            sys.exit(f"error: {message}")
        if isinstance(error, AttributeError | KeyError | IndexError):
            sys.exit(
                f"error: {_one_line(error)}: the configuration file does not have this field. "
                f"Let it begin {config_errors.BEGIN}, and set fields of model.exits in the file."
            )
        if isinstance(error, flags.UnrecognizedFlagError) and error.flagname in RENAMED_FLAGS:
            name = error.flagname
            sys.exit(f"error: --{name}: is now called --{RENAMED_FLAGS[name]}.")
        if found := re.search(r"--(\w+)=None: Flag --\1 must have a value", str(error)):
            sys.exit(f"error: --{found[1]}: is required. See --help.")
        if isinstance(error, flags.Error | OSError | TypeError | ValueError):
            sys.exit(f"error: {_one_line(error)}")
        raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(before)


def _find_config(argv: list[str]) -> None:
    """Replace the name of an installed config file by its path."""
    if "config" not in flags.FLAGS:
        return
    for i, argument in enumerate(argv):
        if given := re.match(r"(--?config=)(.*)", argument):
            argv[i] = given[1] + config_files.path_of(given[2])
        elif i > 0 and argv[i - 1] in ("--config", "-config"):
            argv[i] = config_files.path_of(argument)


def _config_file(argv: list[str]) -> str | None:
    """Return the file of --config or its default; None if the launcher has no such flag."""
    if "config" not in flags.FLAGS:
        return None
    flag = flags.FLAGS["config"]
    # A default is read when the flag is defined, unless the command line names another file.
    path = flag.default if isinstance(flag.default, str | None) else flag.config_filename
    for previous, argument in zip(["", *argv], argv, strict=False):
        if given := re.match(r"--?config=(.*)", argument):
            path = given[1]
        elif previous in ("--config", "-config"):
            path = argument
    return None if path is None else path.split(":")[0]


def _check_config(argv: list[str], file: str | None) -> None:
    """Raise `ConfigError` for --config.* that is not a field, or a --config that is not a file."""
    if "config" not in flags.FLAGS:
        return
    for argument in argv:
        if field := re.match(r"--?(?:no)?config\.([^=]+)", argument):
            # Imported late: without such flags this launcher may not need JAX.
            from eejax.train.config import check_field

            check_field(field[1])
    if file is not None and not pathlib.Path(file).is_file():
        raise ConfigError(
            f"--config = {file!r}: no such file. Give the path of one, or the name of one that is "
            f"installed: {', '.join(config_files.names())}."
        )


def _check_result(file: str) -> None:
    """Raise `ConfigError` if the file's `get_config` does not return a config."""
    value = flags.FLAGS["config"].value
    if not hasattr(value, "to_dict"):
        raise ConfigError(config_errors.returns(file, type(value).__name__))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def lines(tree: dict, before: str = "") -> list[tuple[str, str]]:
    """Return (name, text) of every number in nested dicts of results, for a table."""
    found = []
    for key, value in tree.items():
        name = f"{before}{key}"
        found += lines(value, f"{name} ") if isinstance(value, dict) else [(name, _shown(value))]
    return found


def _shown(value) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def require_text(source: object, workdir: object, flag: str | None = "source") -> None:
    """Raise `ConfigError` if a run has no text: its model was imported without one.

    Args:
      source: the run's `data.source`.
      workdir: its folder.
      flag: the flag that names a text instead; None if the command has none.
    """
    if source == ():
        from eejax.data import PYTHON_STDLIB

        field, again = f"--{flag}", "Give"
        if flag is None:
            field, flag, again = "data.source", "source", "Import it again (eejax import-hf) with"
        raise ConfigError(
            f"{field} = None: must name a text, as {workdir} was imported without one. {again} "
            f"--{flag}=FILES, files or globs of text like the model's future input, or "
            f"--{flag}={PYTHON_STDLIB} for the library of this Python."
        )
