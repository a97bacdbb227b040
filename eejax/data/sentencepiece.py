"""SentencePiece `.model` files as tokenizers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eejax.common.errors import DataError
from eejax.data.special import Splitter, parts
from eejax.data.streams import PieceStream, TextStream
from eejax.data.tokenizers import (
    MARKER,
    MODEL,
    SENTENCEPIECE,
    all_ends,
    cached_property,
    names_of,
    rebuild,
    settings_of,
    utf8,
    with_bos,
    write_json,
)

_SPACE = "\u2581"  # how pieces write a space
# normalizer_spec.add_dummy_prefix of a model's message. If a field occurs twice, the last one
# counts, as in Protocol Buffers.
_SPACED, _BARE = b"\x1a\x02\x18\x01", b"\x1a\x02\x18\x00"


class SentencePieceTokenizer:
    """Tokenizer of a `.model` file of the `sentencepiece` library (Kudo & Richardson 2018).

    Ids are the library's own, so its changes of text apply here too, as the model's training
    options say: Unicode is normalized (NFKC by default), runs of spaces and line ends become one
    space, U+2581 becomes a space, and without byte fallback a character outside the vocabulary is
    lost. A model with the `identity` normalizer, byte fallback and `remove_extra_whitespaces` off
    gives back every text that has no U+2581.

    Most models put a space before a text and drop it in decoding. `byte_lengths` counts it, because
    a piece does not know its position: a text decoded from its beginning has one byte less than the
    sum over its ids, one that continues other text exactly the sum.

    The special tokens are the control pieces, and added ones that are `special`. Other added
    tokens, and pieces that the model calls user-defined, are text, and stay whole wherever they
    occur. The unknown piece has no text.

    Args:
      model: content of the file.
      eos: control piece that ends texts; by default the one the model was trained with, if any.
      bos: control piece that begins texts; by default as `eos`.
      adds_bos: whether texts begin with `bos`.
      ends: further ids that end a text.
      chat: source of the chat template.
      special: names of special tokens, as in `Tokenizer`.
      added: arguments of `tokenizers.AddedToken` by id, for tokens that were added to the pieces,
        or are found in a text before it is cut into pieces.
      space: where, unlike in the library, a space is put before a text that does not begin with
        one, as transformers does for the class Llama: "first" before a whole text only, "always"
        also after special tokens, "never".

    Raises:
      DataError: not a model, or one without a special token called `eos` or `bos`.
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
        special: Mapping[str, str] | None = None,
        added: Mapping[int, Mapping[str, Any]] | None = None,
        space: str | None = None,
    ):
        self.model, self.space = model, space
        self._inner = parse_model(model)
        if space is not None:
            self._inner = parse_model(model + _SPACED)
        self._n = self._inner.vocab_size()
        self.added = {int(i): dict(token) for i, token in (added or {}).items()}
        self.vocab_size = max([self._n, *(i + 1 for i in self.added)])
        self.control = {
            self._inner.id_to_piece(i): i for i in filter(self._inner.is_control, range(self._n))
        } | {token["content"]: i for i, token in self.added.items() if token["special"]}
        self.eos_id = self._special("eos", eos, self._inner.eos_id())
        self.bos_id = self._special("bos", bos, self._inner.bos_id())
        names = {i: name for name, i in self.control.items()}
        self.eos = None if self.eos_id is None else names.get(self.eos_id)
        self.bos = None if self.bos_id is None else names.get(self.bos_id)
        self.adds_bos = bool(adds_bos) and self.bos_id is not None
        self.end_ids = all_ends(self.eos_id, ends)
        self.chat = chat
        self.special = names_of(self, special)

    def __reduce__(self):
        return rebuild, (type(self), self.model, self._settings)

    @cached_property
    def _bare(self) -> Any:
        """Model without a space before texts."""
        return parse_model(self.model + _BARE)

    @property
    def _settings(self) -> dict[str, Any]:
        return settings_of(self) | {"added": self.added, "space": self.space}

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.model)
        named = [self.eos, self.bos, *(["begins"] if self.adds_bos else [])]
        if self.added or self.space:
            named += [self.space, sorted(self.added.items())]
        digest.update(json.dumps(named).encode())
        return f"{SENTENCEPIECE}-{digest.hexdigest()[:16]}"

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], np.int64)

    def token_bytes(self, token: int) -> bytes:
        if not (0 <= token < self.vocab_size and self._has_text[token]):
            return b""
        if token in self.added:
            return self.added[token]["content"].encode()
        piece = self._inner.id_to_piece(token)
        if self._inner.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode()

    @cached_property
    def _has_text(self) -> np.ndarray:
        """Mask [vocab_size] bool of the ids that have text."""
        inner, found = self._inner, np.zeros(self.vocab_size, bool)
        for i in range(self._n):
            found[i] = not (inner.is_control(i) or inner.is_unknown(i) or inner.is_unused(i))
        for i, token in self.added.items():
            found[i] = not token["special"]
        return found

    def _special(self, field: str, name: str | None, own: int) -> int | None:
        if name is None:
            return None if own < 0 else own
        if name not in self.control:
            have = ", ".join(self.control) or "none: train it with control_symbols"
            raise DataError(
                f"{field} = {name!r} is not a control piece of the model; it has {have}."
            )
        return self.control[name]

    def encode(self, text: str, *, allow_special: bool = False, begins: bool = True) -> np.ndarray:
        """Encode a text as int32 ids [t].

        With `allow_special`, the text between special tokens is encoded as if it stood alone, as
        prompts are composed from ids, except for its `space`.
        """
        utf8(text)
        pieces = self._special_tokens(text) if allow_special else [text]
        ids = self._ids(pieces)
        return with_bos(self, ids) if begins else ids

    def encode_marked(self, text: str) -> np.ndarray:
        utf8(text)
        return self._ids(parts(self._special_tokens, text))

    @cached_property
    def _special_tokens(self) -> Splitter:
        from tokenizers import AddedToken

        own = {i: AddedToken(name, normalized=False) for name, i in self.control.items()}
        ours = {i: AddedToken(**t) for i, t in self.added.items() if t["special"]}
        return Splitter(own | ours)

    @cached_property
    def _text_tokens(self) -> Splitter | None:
        """Return the splitter at added tokens that are text, None where there are none."""
        from tokenizers import AddedToken

        found = {i: AddedToken(**t) for i, t in self.added.items() if not t["special"]}
        return Splitter(found) if found else None

    def _ids(self, pieces: Sequence[int | str]) -> np.ndarray:
        """Return ids of special tokens and of the texts between them."""
        ids: list[int] = []
        split = self._text_tokens
        for number, piece in enumerate(pieces):
            texts = [piece] if isinstance(piece, int) or split is None else split(piece)
            for part, text in enumerate(texts):
                first = number == part == 0
                ids.extend([text] if isinstance(text, int) else self._encoder(text, first)(text))
        return np.asarray(ids, np.int32)

    def _encoder(self, text: str, first: bool) -> Callable[[str], list[int]]:
        if self.space is None:
            return self._inner.encode
        spaced = self.space == "always" or (self.space == "first" and first)
        return (self._inner if spaced and text[:1] not in (" ", _SPACE) else self._bare).encode

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        known = np.asarray(ids, np.int64).reshape(-1)
        known = known[(known >= 0) & (known < self.vocab_size)]
        shown = known[self._has_text[known]].tolist()
        decode = (self._bare if self.space == "never" else self._inner).decode
        if not any(i in self.added for i in shown):
            return decode(shown)
        text, run = "", []
        for i in [*shown, None]:
            if i is not None and i not in self.added:
                run.append(i)
                continue
            # Text after an added token keeps its leading space.
            text += decode(run) if not text else self._bare.decode(run)
            text += "" if i is None else self.added[i]["content"]
            run = []
        return text

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        return PieceStream(self.decode, prompt)

    def save(self, path: str | os.PathLike) -> None:
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, MODEL), "wb") as file:
            file.write(self.model)
        write_json(os.path.join(path, MARKER), {"kind": SENTENCEPIECE} | self._settings)


def parse_model(model: bytes) -> Any:
    """Return the library's processor of a `.model`. Raises `DataError` if it cannot be read."""
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
