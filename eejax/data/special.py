"""Special tokens in text: recognise them in templates, and keep users from writing them.

A chat template writes special tokens by their names. A `Shield` puts a `MARK` into every such name
in the users' text, and `parts` removes the marks once the template's own names were found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MARK = "\ufdd0"
"""A code point that Unicode reserves for programs, so that no exchanged text should have it."""


class Splitter:
    """Splitter of text at the names of tokens, as in the library `tokenizers`.

    The leftmost, longest name matches, with the white space around it that the token absorbs.
    """

    def __init__(self, tokens: Mapping[int, Any]):
        """Build the splitter for tokens, `tokenizers.AddedToken` by id."""
        from tokenizers import Tokenizer, models

        # The only word stands for all text between the tokens.
        self._inner = Tokenizer(models.WordLevel({MARK: 0}, unk_token=MARK))
        self._inner.add_tokens(list(tokens.values()))
        number = {token.content: i for i, token in tokens.items()}
        vocabulary = self._inner.get_vocab()
        self._ids = {vocabulary[name]: i for name, i in number.items()}

    def __call__(self, text: str) -> list[int | str]:
        """Split a text into ids of tokens and the texts between them."""
        found = self._inner.encode(text)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [self._ids.get(i, text[begin:end]) for i, (begin, end) in pairs]


def parts(split: Splitter, text: str) -> list[int | str]:
    """Split a marked text into ids of special tokens and the texts between them, unmarked."""
    pieces = [p.replace(MARK, "") if isinstance(p, str) else p for p in split(text)]
    return [p for p in pieces if p != ""]


class Shield:
    """Marker of the names of special tokens in users' text.

    A name may also arise where a user's text meets the template's, or another user's. So a text
    that begins with the end of a name, or ends with the beginning of one, is marked there. Single
    words are exempt, because templates may build names from roles, as in '<|' + role + '|>'.
    """

    def __init__(self, names: Iterable[str]):
        self._names = [name for name in names if len(name) > 1]
        self._ends = {name[i:] for name in self._names for i in range(1, len(name))}
        self._begins = {name[:i] for name in self._names for i in range(1, len(name))}
        self._longest = max(map(len, self._names), default=0)

    def __call__(self, value: Any) -> Any:
        """Mark the texts of a JSON value. Raises ValueError if it already has a mark."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self(key): self(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        if MARK in text:
            raise ValueError("has the character U+FDD0, which Unicode reserves. Remove it")
        inside = [name for name in self._names if name in text]
        if inside:  # names may overlap
            at = re.compile(f"(?=(?:{'|'.join(map(re.escape, inside))}))(.)", re.DOTALL)
            marked = at.sub(lambda m: m[1] + MARK, text)
        else:
            marked = text
        if re.fullmatch(r"\w*", text):
            return marked
        sizes = range(1, min(len(text) + 1, self._longest))
        short = len(text) < self._longest and any(text in name for name in self._names)
        if short or any(text[:n] in self._ends for n in sizes):
            marked = MARK + marked
        if any(text[-n:] in self._begins for n in sizes):
            marked += MARK
        return marked
