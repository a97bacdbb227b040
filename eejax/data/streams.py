"""Decoding of token ids that continue a prompt, all at once or as they arrive.

The decoders of SentencePiece and Llama drop the space that begins a text, so that generated ids
decoded alone lose the space between prompt and answer. Here decode(prompt) + text ==
decode(prompt + ids), except if a prompt ends within a character: then the text begins with the
whole character.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

UNKNOWN = "\ufffd"
CONTEXT_TOKENS = 16  # tokens of a prompt that are decoded with new ids, unless they have no text

Decode = Callable[[Sequence[int]], str]


class TextStream(Protocol):
    """Incremental decoder of ids that never returns half a character."""

    def push(self, ids: Sequence[int] | int) -> str:
        """Return the text that these ids complete (often empty)."""
        ...

    def flush(self) -> str:
        """Return the rest at the end, with incomplete characters as U+FFFD."""
        ...

    @property
    def pending_text(self) -> str:
        """Text that `flush` would return now."""
        ...


def ending(decode: Decode, prompt: Sequence[int]) -> tuple[list[int], str]:
    """Return a suffix of a prompt after which ids decode as after the whole prompt, and its text.

    The text is not empty and begins with a whole character, if the prompt has such a suffix.
    """
    n = CONTEXT_TOKENS
    while True:
        last = [int(i) for i in prompt[-n:]]
        text = decode(last)
        if n >= len(prompt) or (text and not text.startswith(UNKNOWN)):
            return last, text
        n *= 2


def text_behind(decode: Decode, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Decode `ids` as the continuation of `prompt`."""
    context, before = ending(decode, prompt)
    return _after(before, decode([*context, *ids]))


def _after(before: str, text: str) -> str:
    """Return the part of a text after `before`, whose incomplete last character may change."""
    same = before if text.startswith(before) else os.path.commonprefix([before, text])
    return text[len(same) :]


class PieceStream:
    """Decoder that returns the text that new ids add to decode(context).

    It returns text once it does not end in U+FFFD. Returned tokens are kept as context because
    decoders treat the beginning of a text differently: they drop the first space or all of them.
    The context is the last group of tokens with text.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()):
        self._decode = decode
        self._ids, self._before = ending(decode, prompt)
        self._shown = len(self._ids)  # number of ids whose text has been returned
        self._held = ""

    @property
    def pending_text(self) -> str:
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
