"""Text behind a prompt: decoding token ids that go on after other ones, at once or as they come.

Decoders of SentencePiece and Llama drop the space that begins a text, so that generated ids decoded
alone lose the space between prompt and answer. Here decode(prompt) + text == decode(prompt + ids),
except where a prompt ends within a character: then the text begins with the whole character.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

UNKNOWN = "\ufffd"
SEEN = 16  # tokens of a prompt that are decoded with what follows, if they have text

Decode = Callable[[Sequence[int]], str]


class TextStream(Protocol):
    """Decodes ids as they arrive, never showing half a character."""

    def push(self, ids: Sequence[int] | int) -> str:
        """The text that became certain with these ids (often empty)."""
        ...

    def flush(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        ...

    @property
    def held(self) -> str:
        """The text that `flush` would return now."""
        ...


def ending(decode: Decode, prompt: Sequence[int]) -> tuple[list[int], str]:
    """The last tokens of a prompt, which decode what follows as the whole prompt does, and their
    text: they have some, and begin with a whole character."""
    n = SEEN
    while True:
        last = [int(i) for i in prompt[-n:]]
        text = decode(last)
        if n >= len(prompt) or (text and not text.startswith(UNKNOWN)):
            return last, text
        n *= 2


def text_behind(decode: Decode, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of `ids` as they go on behind `prompt`."""
    context, before = ending(decode, prompt)
    return _after(before, decode([*context, *ids]))


def _after(before: str, text: str) -> str:
    """What a text has beyond the one before it, of which an incomplete character may change."""
    same = before if text.startswith(before) else os.path.commonprefix([before, text])
    return text[len(same) :]


class PieceStream:
    """Shows decode(context + new) beyond decode(context) once it does not end in U+FFFD.

    Shown tokens are kept as context because decoders treat the beginning of a text differently:
    they drop the first space or all of them. So it is the last group that has text there.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()):
        self._decode = decode
        self._ids, self._before = ending(decode, prompt)
        self._shown = len(self._ids)  # the first ids of _ids whose text has been shown
        self._held = ""

    @property
    def held(self) -> str:
        return self._held

    def push(self, ids: Sequence[int] | int) -> str:
        self._ids.extend(int(i) for i in np.atleast_1d(ids))
        return self._show(final=False)

    def flush(self) -> str:
        return self._show(final=True)

    def _show(self, final: bool) -> str:
        text = self._decode(self._ids)
        self._held = _after(self._before, text)
        if not self._held or (text.endswith(UNKNOWN) and not final):
            return ""
        shown, self._held = self._held, ""
        if self._decode(self._ids[self._shown :]):
            del self._ids[: self._shown]
            text = self._decode(self._ids)
        self._before, self._shown = text, len(self._ids)
        return shown
