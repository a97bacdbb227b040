"""SentencePiece `.model` files as tokenizers."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from eejax.common.errors import DataError
from eejax.data.tokenizers import (
    MARKER,
    MODEL,
    SENTENCEPIECE,
    PieceStream,
    TextStream,
    all_ends,
    begun,
    settings_of,
    utf8,
    write_json,
)

_SPACE = "\u2581"  # how pieces write a space


class SentencePieceTokenizer:
    """A `.model` file of the `sentencepiece` library (Kudo & Richardson 2018).

    `model` is the file's content. `eos` and `bos` name control pieces; without them they are
    those the model was trained with, where it has them. With `adds_bos` texts begin with `bos`.

    Ids are the library's own, so what it does to text happens here too, as the model's training
    options have it: Unicode is normalized (NFKC by default), runs of spaces and line ends become
    one space, U+2581 becomes a space, and without byte fallback a character outside the
    vocabulary is lost. A model with the `identity` normalizer, byte fallback and
    `remove_extra_whitespaces` off gives back every text that has no U+2581.

    Most models put a space before a text and drop it in decoding. `byte_lengths` counts it,
    because a piece does not know where it stands: a text decoded from its beginning has one byte
    less than the sum over its ids, one that goes on after other text exactly the sum.

    The special tokens are the control pieces. Pieces the model calls user-defined are text, whole
    wherever it occurs. The unknown piece has no text.

    Raises:
      DataError: not a model, or one without a control piece called `eos` or `bos`.
    """

    def __init__(
        self,
        model: bytes,
        *,
        eos: str | None = None,
        bos: str | None = None,
        adds_bos: bool | None = None,
        ends: Sequence[int] = (),
        chat: str | None = None,
    ):
        self._model = model
        self._inner = _parse(model)
        self.vocab_size = self._inner.vocab_size()
        self.eos_id = self._special("eos", eos, self._inner.eos_id())
        self.bos_id = self._special("bos", bos, self._inner.bos_id())
        self.eos = None if self.eos_id is None else self._inner.id_to_piece(self.eos_id)
        self.bos = None if self.bos_id is None else self._inner.id_to_piece(self.bos_id)
        self.adds_bos = bool(adds_bos) and self.bos_id is not None
        self.end_ids = all_ends(self.eos_id, ends)
        self.chat = chat

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._model)
        named = [self.eos, self.bos, *(["begins"] if self.adds_bos else [])]
        digest.update(json.dumps(named).encode())
        return f"{SENTENCEPIECE}-{digest.hexdigest()[:16]}"

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], np.int64)

    def token_bytes(self, token: int) -> bytes:
        if not (0 <= token < self.vocab_size and self._has_text[token]):
            return b""
        piece = self._inner.id_to_piece(token)
        if self._inner.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode()

    @functools.cached_property
    def _has_text(self) -> np.ndarray:
        """[vocab_size] bool."""
        inner = self._inner
        silent = (
            inner.is_control(i) or inner.is_unknown(i) or inner.is_unused(i)
            for i in range(self.vocab_size)
        )  # fmt: skip
        return ~np.fromiter(silent, bool, self.vocab_size)

    @functools.cached_property
    def _control(self) -> dict[str, int]:
        ids = filter(self._inner.is_control, range(self.vocab_size))
        return {self._inner.id_to_piece(i): i for i in ids}

    def _special(self, field: str, name: str | None, own: int) -> int | None:
        if name is None:
            return None if own < 0 else own
        if name not in self._control:
            have = ", ".join(self._control) or "none: train it with control_symbols"
            raise DataError(f"{field} = {name!r} is no control piece of the model; it has {have}.")
        return self._control[name]

    def encode(self, text: str, *, allow_special: bool = False, begins: bool = True) -> np.ndarray:
        """int32 ids [t]. With `allow_special`, the text between control pieces is encoded as if
        it stood alone, the way prompts are put together from ids."""
        utf8(text)
        ids = self._ids(text, allow_special)
        return begun(self, ids) if begins else ids

    def _ids(self, text: str, allow_special: bool) -> np.ndarray:
        if not (allow_special and self._control):
            return np.asarray(self._inner.encode(text), np.int32)
        longest_first = sorted(self._control, key=len, reverse=True)
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text):
            control = self._control.get(part)
            ids.extend(self._inner.encode(part) if control is None else [control])
        return np.asarray(ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        ids = np.asarray(ids, np.int64).reshape(-1)
        ids = ids[(ids >= 0) & (ids < self.vocab_size)]
        return self._inner.decode(ids[self._has_text[ids]].tolist())

    def stream(self) -> TextStream:
        return PieceStream(self)

    def save(self, path: str | os.PathLike) -> None:
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, MODEL), "wb") as file:
            file.write(self._model)
        write_json(os.path.join(path, MARKER), {"kind": SENTENCEPIECE} | settings_of(self))


def _parse(model: bytes) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(
            "a SentencePiece model needs the package sentencepiece: pip install 'eejax[data]'."
        ) from error
    try:
        if not model:  # which the library takes for "load one later"
            raise RuntimeError("it is empty")
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise DataError(
            f"not a model of the sentencepiece library ({error}): download it again. A tiktoken "
            "file may have the same ending; give the tokenizer.json beside it instead."
        ) from error
