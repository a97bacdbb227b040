"""Tokenizers: bytes and `tokenizer.json`, and the training of a BPE."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from eejax.common.errors import DataError, naming_file, require
from eejax.data.sources import Document, FieldDocument
from eejax.data.special import MARK, Splitter, parts
from eejax.data.streams import PieceStream, TextStream

if TYPE_CHECKING:
    cached_property = property  # which is what a protocol's property is to a checker
else:
    from functools import cached_property

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"

SENTENCEPIECE = "sentencepiece"
MARKER = "eejax_tokenizer.json"  # in a folder written by `save`: kind, eos, bos
MODEL = "tokenizer.model"
CHAT = "chat_template.jinja"

JSON = "tokenizer.json"
# Tried in this order where neither the caller nor a tokenizer_config.json names the token.
_EOS_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>")
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>")
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
# GPT-2's alphabet: bytes that print are themselves, the others letters from U+0100 on.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {chr(b): b for b in _PRINTED} | {
    chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTED)
}


class Tokenizer(Protocol):
    """Interface of a tokenizer; `eos_id` also ends documents.

    Attributes:
      vocab_size: number of ids.
      eos_id: token that ends a text, if there is one.
      bos_id: token that begins a text, if there is one.
      adds_bos: whether texts begin with `bos_id`, as in a pretrained model's training.
      end_ids: all tokens that end a text, `eos_id` among them.
      chat: source of the chat template, if the model has one.
      special: names of special tokens by their variables in templates: "bos_token", "pad_token",
        ...
      control: ids of the special tokens by their names, which users' text cannot contain.
      fingerprint: text that differs between tokenizers that give any text other ids.
    """

    chat: str | None

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def adds_bos(self) -> bool: ...

    @property
    def end_ids(self) -> tuple[int, ...]: ...

    @property
    def special(self) -> Mapping[str, str]: ...

    @property
    def control(self) -> Mapping[str, int]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of text, [vocab_size] int64, that each id stands for in running text.

        They are the bytes of the decoded text: for an id that is part of a character its own share,
        for a leading-space piece the space too, for special tokens and unused ids 0. Their sum over
        the scored labels turns nats per token into bits per byte (nats / ln 2 / bytes): the cost of
        special tokens counts, their names do not.
        """
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of an id in running text, as `byte_lengths` counts them."""
        ...

    def encode(self, text: str, *, allow_special: bool = False, begins: bool = True) -> np.ndarray:
        """Encode a text as int32 ids [t].

        `bos_id` precedes it if the tokenizer `adds_bos`, unless the text continues another one
        (`begins` False) or begins with it already. Names of special tokens are plain text unless
        `allow_special`.
        """
        ...

    def encode_marked(self, text: str) -> np.ndarray:
        """Encode the text of a chat template as int32 ids [t].

        Names of special tokens become these tokens, except names that `special.Shield` marked.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids; special tokens and ids outside the vocabulary have none."""
        ...

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """Return a stream that decodes ids as they arrive, as text that continues `prompt`."""
        ...

    def save(self, path: str | os.PathLike) -> None:
        """Write the tokenizer into the folder `path`, for `load_tokenizer`."""
        ...


class ByteTokenizer:
    """Tokenizer whose ids 0..255 are UTF-8 bytes.

    One more id ends documents: 256, or a byte that does not occur in text.
    """

    vocab_size = 257
    eos_id = 256
    bos_id = None
    adds_bos = False
    chat: str | None = None
    special: Mapping[str, str] = {}
    control: Mapping[str, int] = {}
    fingerprint = "bytes-257"

    def __init__(self, eos_id: int = 256, chat: str | None = None):
        require(0 <= eos_id <= 256, "eos_id", eos_id, "must be a byte, or 256")
        if chat is not None:
            self.chat = chat
        if eos_id != 256:  # otherwise keep a subclass's attributes
            self.eos_id, self.vocab_size = eos_id, 256
            self.fingerprint = f"bytes-256-{eos_id}"

    @property
    def end_ids(self) -> tuple[int, ...]:
        return (self.eos_id,)

    @property
    def byte_lengths(self) -> np.ndarray:
        return (np.arange(self.vocab_size) != self.eos_id).astype(np.int64)

    def token_bytes(self, token: int) -> bytes:
        return self.text_bytes([token])

    def encode(self, text: str, *, allow_special: bool = False, begins: bool = True) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def encode_marked(self, text: str) -> np.ndarray:
        return self.encode(text.replace(MARK, ""))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.text_bytes(ids).decode("utf-8", errors="replace")

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        return PieceStream(self.decode, prompt)

    def save(self, path: str | os.PathLike) -> None:
        os.makedirs(path, exist_ok=True)
        template = {} if self.chat is None else {"chat": self.chat}
        write_json(os.path.join(path, MARKER), {"kind": BYTES, "eos_id": self.eos_id} | template)

    def text_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        a = np.asarray(ids, np.int64).reshape(-1)
        return a[(a >= 0) & (a < 256) & (a != self.eos_id)].astype(np.uint8).tobytes()


class JsonTokenizer:
    """Tokenizer of a `tokenizer.json` of the Hugging Face `tokenizers` library.

    Nothing but `bos` is added to the text and nothing is truncated or padded, whatever the file's
    own settings say.

    Args:
      definition: content of the file.
      eos: name of the special token that ends texts.
      bos: name of the special token that begins texts.
      adds_bos: whether texts begin with `bos`; by default if the file's own template puts it there.
      ends: ids that end a text besides `eos`.
      chat: the source of a chat template.
      special: names as in `Tokenizer`, if there are more than `eos` and `bos`.

    Attributes:
      vocab_size: number of ids.
      eos_id: token that ends a text, if there is one.
      bos_id: token that begins a text, if there is one.

    Raises:
      DataError: the definition is not valid, or has no token called `eos` or `bos`.
    """

    def __init__(
        self,
        definition: str,
        *,
        eos: str | None = None,
        bos: str | None = None,
        adds_bos: bool | None = None,
        ends: Sequence[int] = (),
        chat: str | None = None,
        special: Mapping[str, str] | None = None,
    ):
        self.definition, self.chat = definition, chat
        self._plain = _parse(definition)
        self._plain.encode_special_tokens = True
        vocabulary = self._plain.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eos = _special("eos", eos, _EOS_NAMES, vocabulary)
        self.bos = _special("bos", bos, _BOS_NAMES, vocabulary)
        self.eos_id = None if self.eos is None else vocabulary[self.eos]
        self.bos_id = None if self.bos is None else vocabulary[self.bos]
        if adds_bos is None:
            adds_bos = self._plain.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]
        self.adds_bos = bool(adds_bos) and self.bos_id is not None
        self.end_ids = all_ends(self.eos_id, ends)
        self.special = names_of(self, special)

    def __reduce__(self):
        # The library's object loses settings when it is pickled.
        return rebuild, (type(self), self.definition, settings_of(self))

    @cached_property
    def fingerprint(self) -> str:
        # A hash of the file's content, which does not depend on the library's version.
        named = [self.eos, self.bos, *(["begins"] if self.adds_bos else [])]
        content = json.dumps([json.loads(self.definition), *named], sort_keys=True)
        return "json-" + hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], np.int64)

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size or token in self._added:
            return b""
        piece = self._plain.id_to_token(token)
        if piece is None:
            return b""
        # Part of a character alone decodes to U+FFFD, which does not identify its bytes.
        if "ByteLevel" in self._decoders:  # one letter of its alphabet for each byte
            if LETTERS.keys() >= set(piece):
                return bytes(LETTERS[c] for c in piece)
            return piece.encode()
        if "ByteFallback" in self._decoders and _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        start, first = self._before
        return self.decode([*start, token]).encode()[first:]

    @cached_property
    def _added(self) -> dict[int, Any]:
        """Special tokens, in the library's form."""
        return {i: t for i, t in self._plain.get_added_tokens_decoder().items() if t.special}

    @cached_property
    def control(self) -> dict[str, int]:
        return {token.content: i for i, token in self._added.items()}

    @cached_property
    def _decoders(self) -> set[str]:
        decoder = json.loads(self.definition).get("decoder") or {}
        return {d["type"] for d in (decoder, *decoder.get("decoders", ()))}

    @cached_property
    def _before(self) -> tuple[list[int], int]:
        """A piece that has text, and its bytes: decoders drop the space that begins a text."""
        piece = next((i for i in range(self.vocab_size) if self.decode([i]).strip()), None)
        start = [] if piece is None else [piece]
        return start, len(self.decode(start).encode())

    @cached_property
    def _with_special(self) -> Any:
        # A second instance, because the setting belongs to the object and engines use threads.
        return _parse(self.definition)

    def encode(self, text: str, *, allow_special: bool = False, begins: bool = True) -> np.ndarray:
        utf8(text)
        inner = self._with_special if allow_special else self._plain
        ids = np.asarray(inner.encode(text, add_special_tokens=False).ids, np.int32)
        return with_bos(self, ids) if begins else ids

    @cached_property
    def _marked(self) -> tuple[Splitter, Any, int]:
        """Return the splitter at special tokens, and a tokenizer for the text between them.

        In that tokenizer, MARK is a token that stands for any special token.
        """
        from tokenizers import AddedToken

        inner = _parse(self.definition)
        inner.encode_special_tokens = True
        inner.add_tokens([AddedToken(MARK, normalized=False)])
        return Splitter(self._added), inner, inner.token_to_id(MARK)

    def encode_marked(self, text: str) -> np.ndarray:
        if MARK not in text:
            return self.encode(text, allow_special=True, begins=False)
        utf8(text)
        split, inner, mark = self._marked
        pieces = parts(split, text)
        found = (p for p in pieces if not isinstance(p, str))
        text = "".join(p if isinstance(p, str) else MARK for p in pieces)
        ids = inner.encode(text, add_special_tokens=False).ids
        return np.asarray([next(found) if i == mark else i for i in ids], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        known = np.asarray(ids, np.int64).reshape(-1)
        known = known[(known >= 0) & (known < self.vocab_size)]
        return self._plain.decode(known.tolist(), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        return PieceStream(self.decode, prompt)

    def save(self, path: str | os.PathLike) -> None:
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, JSON), "w", encoding="utf-8") as file:
            file.write(self.definition)
        write_json(os.path.join(path, MARKER), {"kind": "json"} | settings_of(self))


def all_ends(eos_id: int | None, others: Sequence[int]) -> tuple[int, ...]:
    """Return every token that ends a text, once."""
    return tuple(dict.fromkeys([*([] if eos_id is None else [eos_id]), *others]))


def names_of(tokenizer: Any, special: Mapping[str, str] | None) -> dict[str, str]:
    """Return `Tokenizer.special` with the tokens that begin and end texts."""
    own = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
    return {**(special or {}), **{k: v for k, v in own.items() if v is not None}}


def settings_of(tokenizer: Any) -> dict[str, Any]:
    """Return the arguments beside the vocabulary, which a folder written by `save` keeps."""
    return {
        "eos": tokenizer.eos,
        "bos": tokenizer.bos,
        "adds_bos": tokenizer.adds_bos,
        "ends": list(tokenizer.end_ids),
        "chat": tokenizer.chat,
        "special": tokenizer.special,
    }


def rebuild(kind: type, definition: Any, settings: Mapping[str, Any]) -> Any:
    """Rebuild the tokenizer of a definition and settings, in another process."""
    return kind(definition, **settings)


def with_bos(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Return ids [t] after the token with which the tokenizer's texts begin."""
    first = tokenizer.bos_id
    if not tokenizer.adds_bos or first is None or ids[:1].tolist() == [first]:
        return ids
    return np.append(np.int32(first), ids)


def require_end(tokenizer: Tokenizer) -> int:
    """Return the token that ends documents. Raises `DataError` for a tokenizer without one."""
    if tokenizer.eos_id is None:
        raise DataError(
            f"tokenizer {tokenizer.fingerprint} has no token that ends a document: load it with "
            "eos= the name of one of its special tokens."
        )
    return tokenizer.eos_id


def train_bpe(
    documents: Iterable[Document | FieldDocument | str], vocab_size: int
) -> JsonTokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; GPT-2's byte alphabet) on documents.

    A `FieldDocument` gives the texts of its messages, or its prompt and completion. The 256 bytes
    and the end-of-text token are always in it, so every text can be encoded; a small corpus may run
    out of pairs and give fewer than `vocab_size` entries.
    """
    require(vocab_size >= 257, "vocab_size", vocab_size, "must be at least 257 (bytes + end)")
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ([d] if isinstance(d, str) else d.texts for d in documents)
    inner.train_from_iterator(itertools.chain.from_iterable(texts), trainer)
    return JsonTokenizer(inner.to_str(), eos=END_OF_TEXT)


def save_tokenizer(tokenizer: Tokenizer, path: str | os.PathLike) -> None:
    """Write `tokenizer` into the folder `path`; `load_tokenizer(path)` reads it.

    A kill or a full disk leaves no partial folder. Files of a folder that exists are replaced, each
    completely or not at all. Raises `OSError` naming the folder.
    """
    folder = pathlib.Path(os.path.abspath(path))
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed here
    try:
        with naming_file(folder):
            tokenizer.save(part)
            for file in part.iterdir():
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
            if folder.is_dir():
                for file in part.iterdir():
                    file.replace(folder / file.name)
            else:
                part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise `DataError` unless a model with `vocab_size` entries has a row for every token."""
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer ({tokenizer.fingerprint}) has {tokenizer.vocab_size} tokens but the "
            f"model's vocab_size is {vocab_size}: set model.vocab_size = {tokenizer.vocab_size}, "
            "or use the tokenizer the model was trained with."
        )


def _parse(definition: str) -> Any:
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_str(definition)
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"not a tokenizer.json of the tokenizers library ({error}): export it again with "
            "`save_pretrained` or `Tokenizer.save`."
        ) from error
    inner.no_truncation()
    inner.no_padding()
    return inner


def _special(
    field: str, name: str | None, usual: tuple[str, ...], vocabulary: dict[str, int]
) -> str | None:
    if name is None:
        return next((n for n in usual if n in vocabulary), None)
    if name not in vocabulary:
        near = [n for n in (*_EOS_NAMES, *_BOS_NAMES) if n in vocabulary]
        raise DataError(
            f"{field} = {name!r} is not in the vocabulary"
            + (f"; it has {', '.join(near)}." if near else "; name one of its special tokens.")
        )
    return name


def utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has a lone surrogate at character {error.start}, which is not Unicode "
            "text: decode its source with the right encoding."
        ) from error


def write_json(path: str, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
