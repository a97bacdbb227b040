"""Progress of long work, shown in a terminal or a notebook.

Nothing is shown in logs and pipes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax.monitoring
from tqdm.auto import tqdm

DELAY = 1.0  # seconds; shorter work shows nothing
EVERY = 10.0  # seconds between two reports
LOG = "eejax.serving"  # logs the progress of an engine until it is ready, at level INFO
_COMPILED = "/jax/core/compile/backend_compile_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # what compiles next
_listeners: set[Callable[[str, float], None]] = set()
_compiling: dict[int, str] = {}  # by thread


def watched() -> bool:
    """Return whether standard error is a terminal or this process is a notebook's kernel."""
    shell = sys.modules.get("IPython")
    shell = shell.get_ipython() if shell else None
    if shell is not None and "IPKernelApp" in shell.config:
        return True
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def steps(what: str, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """Show a bar with an estimate of the time left; yield a function that adds finished units."""
    with tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=True,
        dynamic_ncols=True,
        leave=False,
        disable=not watched(),
        file=sys.stderr,
    ) as bar:
        yield bar.update


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show the elapsed time of work without steps, and the number of programs that JAX compiles."""
    if not watched():
        yield
        return

    def show(begin: float, programs: list, ended: threading.Event) -> None:
        if ended.wait(DELAY):
            return
        with tqdm(bar_format="{desc}", leave=False, file=sys.stderr) as bar:
            while True:
                count = f", {len(programs)} programs compiled" if programs else ""
                bar.set_description_str(f"{what} ... {time.monotonic() - begin:.0f} s{count}")
                if ended.wait(0.5):
                    return

    with _alongside(show):
        yield


@contextlib.contextmanager
def reports(say: Callable[[str], None], every: float = EVERY) -> Iterator[None]:
    """Say every few seconds how long the block has taken and what JAX compiles at the moment.

    `say` is called from another thread.
    """

    def report(begin: float, programs: list, ended: threading.Event) -> None:
        while not ended.wait(every):
            now = ", compiling " + ", ".join(sorted({*_compiling.values()})) if _compiling else ""
            say(f"{time.monotonic() - begin:.0f} s, {len(programs)} programs compiled{now} ...")

    with _alongside(report):
        yield


@contextlib.contextmanager
def _alongside(show: Callable[[float, list, threading.Event], None]) -> Iterator[None]:
    """Call `show` in a thread while the block runs.

    Its arguments are the beginning of the block, a growing list of the programs compiled since, and
    an event that is set when the block ends, upon which it returns.
    """
    programs, ended = [], threading.Event()
    shown = threading.Thread(target=show, args=(time.monotonic(), programs, ended), daemon=True)
    shown.start()
    try:
        with compilations(lambda *about: programs.append(about)):
            yield
    finally:
        ended.set()
        shown.join()


@contextlib.contextmanager
def compilations(listener: Callable[[str, float], None]) -> Iterator[None]:
    """Call listener(name, seconds) for every program that JAX compiles inside the block."""
    _listen()
    _listeners.add(listener)
    try:
        yield
    finally:
        _listeners.discard(listener)


@functools.cache
def _listen() -> None:
    """Register the only listener, once, because JAX cannot unregister listeners."""
    jax.monitoring.register_event_duration_secs_listener(_hear)


def _hear(event: str, duration_secs: float, **about: str | int) -> None:
    name = str(about.get("fun_name", "a program"))
    if event == _LOWERED:
        _compiling[threading.get_ident()] = name
    elif event == _COMPILED:
        _compiling.pop(threading.get_ident(), None)
        for listener in tuple(_listeners):
            listener(name, duration_secs)
