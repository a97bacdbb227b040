"""Sessions in a terminal: prompts line by line, and answers that grow in the colors of exits."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from eejax.common.errors import DataError
from eejax.experiments import launch
from eejax.inference.result import paint


def prepare_lines() -> None:
    """Refuse only the lines of standard input that are not UTF-8."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")


def greet() -> None:
    """Tell a person at a terminal how to end, and make lines editable."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lines can be edited and come back)
        print("Ctrl-C ends an answer; at the prompt it ends the session, as Ctrl-D does.")


def from_standard_input(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise DataError(f"standard input: is not UTF-8 text ({error}): convert it.") from error


def read_line() -> str | None:
    """Return the next prompt; None where the input ends, or Ctrl-C ends it."""
    typed = sys.stdin.isatty()
    try:
        return from_standard_input(lambda: input("> " if typed else ""))
    except (EOFError, KeyboardInterrupt):
        if typed:
            print()
        return None


def waits() -> None:
    if sys.stderr.isatty():
        launch.say("compiling ...")


class StreamPace:
    """Tokens and seconds of one stream after its second result, when both programs have run."""

    def __init__(self):
        self.tokens, self.seconds, self._number, self._since = 0, 0.0, 0, (0.0, 0)

    def add(self, result) -> None:
        now = time.perf_counter(), int(result.lengths.sum())
        if self._number == 1:
            self._since = now
        elif self._number > 1:
            self.seconds, self.tokens = now[0] - self._since[0], now[1] - self._since[1]
        self._number += 1


def rate(paces: list[StreamPace]) -> float | None:
    """Return tokens per second; None if there were too few to time."""
    tokens = sum(pace.tokens for pace in paces)
    return tokens / sum(pace.seconds for pace in paces) if tokens else None


def per_second(value: float | None) -> str:
    return "too few tokens to time" if value is None else f"{value:.1f} tokens/s"


class Screen:
    """Writer of a request's tokens as they arrive."""

    def __init__(self, tokenizer, prompt: list[int], colors: bool):
        self._text, self._shown, self._colors = tokenizer.stream(prompt), 0, colors

    def show(self, result) -> None:
        while self._shown < result.lengths[0]:
            piece = self._text.push(int(result.tokens[0, self._shown]))
            color = result.color(0, self._shown) if self._colors else None
            print(paint(piece, color), end="")
            self._shown += 1
        sys.stdout.flush()

    def end(self) -> None:
        """Show the rest of the text, and end the line."""
        print(self._text.flush())
