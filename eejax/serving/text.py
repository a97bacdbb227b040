"""Text as it may be shown: whole characters, and nothing that could begin a stop string."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from eejax.data.tokenizers import Tokenizer


class Shown(NamedTuple):
    """text: what may be shown now; tokens: how many of the tokens so far it shows, those that it
    shows a part of among them; stopped: whether it ends at a stop string."""

    text: str
    tokens: int
    stopped: bool = False


class Revealed:
    """A request's text, of which as much is shown as nothing that comes can take back.

    Texts go on behind a prompt (`data.streams`). A token's text may wait for the rest of a
    character, and a text that could be the beginning of a stop string for what follows. Stop
    strings are not shown, whatever token they end in.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), prompt: Sequence[int] = ()):
        self._stream, self._stops = tokenizer.stream(prompt), tuple(stops)
        self._ends: list[int] = []  # of each token's text, in characters of the text so far
        self._held, self._shown = "", 0  # text that waits, and characters that do not any more
        self.stopped = False

    @property
    def taken(self) -> int:
        """Tokens up to the one in which a stop string ended, or all of them."""
        return len(self._ends)

    def push(self, ids: Sequence[int]) -> Shown:
        """What more may be shown with these tokens; nothing behind a stop string."""
        if self.stopped:
            return Shown("", self._count(), True)
        for token in ids:
            self._held += self._stream.push(int(token))
            self._ends.append(self._shown + len(self._held))
            if (at := first(self._held, self._stops)) is not None:
                return self._stop(at)
        return self._show(len(self._held) - partial(self._held, self._stops))

    def finish(self) -> Shown:
        """The rest."""
        if self.stopped:
            return Shown("", self._count(), True)
        self._held += self._stream.flush()
        if (at := first(self._held, self._stops)) is not None:
            return self._stop(at)
        shown = self._show(len(self._held))
        return shown._replace(tokens=len(self._ends))

    def _stop(self, at: int) -> Shown:
        self.stopped = True
        return self._show(at)._replace(stopped=True)

    def _show(self, n: int) -> Shown:
        text, self._held = self._held[:n], self._held[n:]
        self._shown += n
        return Shown(text, self._count())

    def _count(self) -> int:
        """Tokens that began before what is not shown."""
        if not self._ends or not self._shown:
            return 0
        return 1 + bisect.bisect_left(self._ends, self._shown, 0, len(self._ends) - 1)


class Offsets:
    """Where the tokens of a text begin in it, in characters.

    A token that is part of a character begins where that character does. The space that a decoder
    drops at the beginning of a text is nowhere.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        """prompt: what the text goes on behind."""
        self._tokenizer, self._stream = tokenizer, tokenizer.stream(prompt)
        self._certain = 0  # characters that later tokens do not change

    def push(self, token: int) -> int:
        begin = self._certain
        self._certain += len(self._stream.push(token))
        try:
            text = self._tokenizer.token_bytes(token).decode()
        except UnicodeDecodeError:
            return begin
        return max(0, self._certain + len(self._stream.held) - len(text))


def first(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string in a text begins."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=None)


def partial(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that a stop string could begin with."""
    most = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    ends = (n for n in range(most, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops))
    return next(ends, 0)
