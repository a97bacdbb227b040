"""Progress of long work, shown where a person looks: in a terminal or a notebook.

Elsewhere, in logs and pipes, nothing is shown; who wants lines there asks for them where the work
is done.
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

DELAY = 1.0  # seconds; work that is done sooner shows nothing
_COMPILED = "/jax/core/compile/backend_compile_duration"
_listeners: set[Callable[[str, float], None]] = set()


def watched() -> bool:
    """Whether standard error is a terminal, or this process the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    shell = shell.get_ipython() if shell else None
    if shell is not None and "IPKernelApp" in shell.config:
        return True
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def steps(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a bar with an estimate of the time left; call the function with what more is done."""
    with tqdm(
        total=total, desc=what, unit=unit, unit_scale=True, dynamic_ncols=True, leave=False,
        disable=not watched(), file=sys.stderr,
    ) as bar:  # fmt: skip
        yield bar.update


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show how long work without steps takes, and how many programs JAX compiles for it."""
    if not watched():
        yield
        return
    begin, programs, ended = time.monotonic(), [], threading.Event()

    def show() -> None:
        if ended.wait(DELAY):
            return
        with tqdm(bar_format="{desc}", leave=False, file=sys.stderr) as bar:
            while True:
                count = f", {len(programs)} programs compiled" if programs else ""
                bar.set_description_str(f"{what} ... {time.monotonic() - begin:.0f} s{count}")
                if ended.wait(0.5):
                    return

    shown = threading.Thread(target=show, daemon=True)
    shown.start()
    try:
        with compilations(lambda *about: programs.append(about)):
            yield
    finally:
        ended.set()
        shown.join()


@contextlib.contextmanager
def compilations(tell: Callable[[str, float], None]) -> Iterator[None]:
    """Call tell(name, seconds) for every program that JAX compiles inside of the block."""
    _listen()
    _listeners.add(tell)
    try:
        yield
    finally:
        _listeners.discard(tell)


@functools.cache
def _listen() -> None:
    """JAX lets no listener go, so there is one, for all of them."""
    jax.monitoring.register_event_duration_secs_listener(_hear)


def _hear(event: str, seconds: float, **about: str | int) -> None:
    if event == _COMPILED:
        for tell in tuple(_listeners):
            tell(str(about.get("fun_name", "a program")), seconds)
