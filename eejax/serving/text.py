"""Text that is safe to stream: whole characters, and nothing that could begin a stop string."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from eejax.data.tokenizers import Tokenizer


class TextDelta(NamedTuple):
    """Text that can be streamed now.

    Attributes:
      text: the new text.
      tokens: number of tokens whose text was streamed so far, partly streamed ones included.
      stopped: whether the text ended at a stop string.
    """

    text: str
    tokens: int
    stopped: bool = False


class StreamingDetokenizer:
    """Detokenizer of a request that returns only text that no later token can change.

    Texts continue a prompt (`data.streams`). A token's text may wait for the rest of a character,
    and text that could begin a stop string waits for what follows. Stop strings are never returned,
    whatever token they end in.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), prompt: Sequence[int] = ()
    ):
        self._stream, self._stop_strings = tokenizer.stream(prompt), tuple(stop_strings)
        self._ends: list[int] = []  # end of each token's text, in characters
        self._held, self._shown = "", 0  # text held back, and characters streamed
        self.stopped = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens up to the one in which a stop string ended, or of all tokens."""
        return len(self._ends)

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Add tokens and return the text that can be streamed now; nothing after a stop string."""
        if self.stopped:
            return TextDelta("", self._count(), True)
        for token in ids:
            self._held += self._stream.push(int(token))
            self._ends.append(self._shown + len(self._held))
            if (at := find_stop_string(self._held, self._stop_strings)) is not None:
                return self._stop(at)
        return self._show(len(self._held) - partial_stop_length(self._held, self._stop_strings))

    def finish(self) -> TextDelta:
        """Return the rest."""
        if self.stopped:
            return TextDelta("", self._count(), True)
        self._held += self._stream.flush()
        if (at := find_stop_string(self._held, self._stop_strings)) is not None:
            return self._stop(at)
        shown = self._show(len(self._held))
        return shown._replace(tokens=len(self._ends))

    def _stop(self, at: int) -> TextDelta:
        self.stopped = True
        return self._show(at)._replace(stopped=True)

    def _show(self, n: int) -> TextDelta:
        text, self._held = self._held[:n], self._held[n:]
        self._shown += n
        return TextDelta(text, self._count())

    def _count(self) -> int:
        """Return the number of tokens that began before the text that is held back."""
        if not self._ends or not self._shown:
            return 0
        return 1 + bisect.bisect_left(self._ends, self._shown, 0, len(self._ends) - 1)


class TokenOffsets:
    """Offsets of the tokens in a text, in characters.

    A token that is part of a character begins where that character does, and so does a token
    without text that comes between its parts. The space that a decoder drops at the beginning of a
    text has no offset.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        """Start a text that continues `prompt`."""
        self._tokenizer, self._stream = tokenizer, tokenizer.stream(prompt)
        self._certain = 0  # characters that later tokens do not change

    def push(self, token: int) -> int:
        begin = self._certain
        self._certain += len(self._stream.push(token))
        try:
            text = self._tokenizer.token_bytes(token).decode()
        except UnicodeDecodeError:
            text = ""
        if not text:
            return begin
        return max(0, self._certain + len(self._stream.pending_text) - len(text))


def find_stop_string(text: str, stop_strings: Sequence[str]) -> int | None:
    """Return the position of the first stop string in a text, or None."""
    found = [at for stop in stop_strings if (at := text.find(stop)) >= 0]
    return min(found, default=None)


def partial_stop_length(text: str, stop_strings: Sequence[str]) -> int:
    """Return the number of characters at a text's end that a stop string could begin with."""
    most = min(len(text), max((len(stop) - 1 for stop in stop_strings), default=0))
    ends = (
        n for n in range(most, 0, -1) if any(stop.startswith(text[-n:]) for stop in stop_strings)
    )
    return next(ends, 0)
