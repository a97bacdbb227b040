"""Text to token ids and back: bytes, a `tokenizer.json`, training a byte-level BPE, loading."""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from eejax.common.errors import DataError, require
from eejax.data.sources import Document

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"

SENTENCEPIECE = "sentencepiece"
MARKER = "eejax_tokenizer.json"  # in a folder written by `save`: kind, eos, bos
MODEL = "tokenizer.model"
CHAT = "chat_template.jinja"

_JSON = "tokenizer.json"
# Tried in this order where neither the caller nor a tokenizer_config.json names the token.
_EOS_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>")
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>")
_BEGUN = ("Llama", "CodeLlama", "Gemma")  # classes whose texts begin with it by default
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
# GPT-2's alphabet: bytes that print are themselves, the others letters from U+0100 on.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = {chr(b): b for b in _PRINTED} | {
    chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTED)
}


class TextStream(Protocol):
    """Decodes ids as they arrive, never showing half a character."""

    def push(self, ids: Sequence[int] | int) -> str:
        """The text that became certain with these ids (often empty)."""
        ...

    def flush(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        ...


class Tokenizer(Protocol):
    """What the rest of eejax needs of a tokenizer; `eos_id` also ends documents.

    adds_bos: texts begin with `bos_id`, as those did that a pretrained model was trained on.
    end_ids: all tokens that end a text, `eos_id` among them. chat: the source of the template by
    which conversations are written, where the model has one.
    """

    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    adds_bos: bool
    end_ids: tuple[int, ...]
    chat: str | None
    fingerprint: str

    @property
    def byte_lengths(self) -> np.ndarray:
        """[vocab_size] int64: UTF-8 bytes of text that each id stands for, in running text.

        The bytes of the text that decoding gives: of an id that is part of a character its own
        share, of a leading-space piece the space too, of special tokens and unused ids 0.
        Summed over the labels that were scored, it turns nats per token into bits per byte
        (nats / ln 2 / bytes): what special tokens cost is paid for, and what their text is
        called is not counted.
        """
        ...

    def token_bytes(self, token: int) -> bytes:
        """What an id stands for in running text, as `byte_lengths` counts it."""
        ...

    def encode(self, text: str, *, allow_special: bool = False, begins: bool = True) -> np.ndarray:
        """int32 ids [t] of a text, with `bos_id` before it if the tokenizer `adds_bos`, unless it
        goes on after another one (`begins` False) or says so itself. Names of special tokens are
        plain text unless `allow_special`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens and ids outside the vocabulary have none."""
        ...

    def stream(self) -> TextStream: ...

    def save(self, path: str | os.PathLike) -> None:
        """Writes the tokenizer into the folder `path`, for `load_tokenizer`."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and one id for the end of a document: 256, or a byte that text
    does not have."""

    vocab_size = 257
    eos_id = 256
    bos_id = None
    adds_bos = False
    chat = None
    fingerprint = "bytes-257"

    def __init__(self, eos_id: int = 256):
        require(0 <= eos_id <= 256, "eos_id", eos_id, "must be a byte, or 256")
        if eos_id != 256:  # else a subclass's own stay
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

    def decode(self, ids: Sequence[int]) -> str:
        return self.text_bytes(ids).decode("utf-8", errors="replace")

    def stream(self) -> TextStream:
        return _ByteStream(self)

    def save(self, path: str | os.PathLike) -> None:
        os.makedirs(path, exist_ok=True)
        write_json(os.path.join(path, MARKER), {"kind": BYTES, "eos_id": self.eos_id})

    def text_bytes(self, ids: Sequence[int]) -> bytes:
        ids = np.asarray(ids, np.int64).reshape(-1)
        return ids[(ids >= 0) & (ids < 256) & (ids != self.eos_id)].astype(np.uint8).tobytes()


class JsonTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library.

    `eos` and `bos` name special tokens of the vocabulary. `adds_bos`: whether texts begin with
    `bos`; by default where the file's own template puts it there. Nothing else is added to the text
    and nothing truncated or padded, whatever the file's own settings say. `ends`: ids that end a
    text besides `eos`. `chat`: the source of a chat template.

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
    ):
        self._definition, self.chat = definition, chat
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
        self.adds_bos = adds_bos and self.bos_id is not None
        self.end_ids = all_ends(self.eos_id, ends)

    @functools.cached_property
    def fingerprint(self) -> str:
        # Of the file's content, which the library's version does not change.
        named = [self.eos, self.bos, *(["begins"] if self.adds_bos else [])]
        content = json.dumps([json.loads(self._definition), *named], sort_keys=True)
        return "json-" + hashlib.sha256(content.encode()).hexdigest()[:16]

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], np.int64)

    def token_bytes(self, token: int) -> bytes:
        piece = self._plain.id_to_token(token)
        if piece is None or token in self._special_ids:
            return b""
        # Part of a character alone decodes to U+FFFD, which says nothing.
        if "ByteLevel" in self._decoders:  # one letter of its alphabet for each byte
            if _LETTERS.keys() >= set(piece):
                return bytes(_LETTERS[c] for c in piece)
            return piece.encode()
        if "ByteFallback" in self._decoders and _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        start, first = self._before
        return self.decode([*start, token]).encode()[first:]

    @functools.cached_property
    def _special_ids(self) -> set[int]:
        return {i for i, t in self._plain.get_added_tokens_decoder().items() if t.special}

    @functools.cached_property
    def _decoders(self) -> set[str]:
        decoder = json.loads(self._definition).get("decoder") or {}
        return {d["type"] for d in (decoder, *decoder.get("decoders", ()))}

    @functools.cached_property
    def _before(self) -> tuple[list[int], int]:
        """A piece that has text, and its bytes: decoders drop the space that begins a text."""
        piece = next((i for i in range(self.vocab_size) if self.decode([i]).strip()), None)
        start = [] if piece is None else [piece]
        return start, len(self.decode(start).encode())

    @functools.cached_property
    def _with_special(self) -> Any:
        # A second instance, because the setting belongs to the object and engines use threads.
        return _parse(self._definition)

    def encode(self, text: str, *, allow_special: bool = False, begins: bool = True) -> np.ndarray:
        utf8(text)
        inner = self._with_special if allow_special else self._plain
        ids = np.asarray(inner.encode(text, add_special_tokens=False).ids, np.int32)
        return begun(self, ids) if begins else ids

    def decode(self, ids: Sequence[int]) -> str:
        ids = np.asarray(ids, np.int64).reshape(-1)
        ids = ids[(ids >= 0) & (ids < self.vocab_size)]
        return self._plain.decode(ids.tolist(), skip_special_tokens=True)

    def stream(self) -> TextStream:
        return PieceStream(self)

    def save(self, path: str | os.PathLike) -> None:
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, _JSON), "w", encoding="utf-8") as file:
            file.write(self._definition)
        write_json(os.path.join(path, MARKER), {"kind": "json"} | settings_of(self))


def all_ends(eos_id: int | None, others: Sequence[int]) -> tuple[int, ...]:
    """Every token that ends a text, once."""
    return tuple(dict.fromkeys([*([] if eos_id is None else [eos_id]), *others]))


def settings_of(tokenizer: Any) -> dict[str, Any]:
    """What a folder written by `save` keeps beside the vocabulary."""
    return {
        "eos": tokenizer.eos, "bos": tokenizer.bos, "adds_bos": tokenizer.adds_bos,
        "ends": list(tokenizer.end_ids), "chat": tokenizer.chat,
    }  # fmt: skip


def begun(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """ids [t] with the token before them with which the tokenizer's texts begin."""
    if not tokenizer.adds_bos or ids[:1].tolist() == [tokenizer.bos_id]:
        return ids
    return np.append(np.int32(tokenizer.bos_id), ids)


def train_bpe(documents: Iterable[Document | str], vocab_size: int) -> JsonTokenizer:
    """Trains a byte-level BPE (Sennrich et al. 2016; GPT-2's byte alphabet) on documents.

    The 256 bytes and the end-of-text token are always in it, so every text can be encoded; a
    small corpus may run out of pairs and give fewer than `vocab_size` entries.
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
    texts = (d.text if isinstance(d, Document) else d for d in documents)
    inner.train_from_iterator(texts, trainer)
    return JsonTokenizer(inner.to_str(), eos=END_OF_TEXT)


def load_tokenizer(
    spec: str | os.PathLike,
    *,
    eos: str | None = None,
    bos: str | None = None,
    ends: Sequence[int] = (),
) -> Tokenizer:
    """`"bytes"`, a `tokenizer.json`, a SentencePiece `.model`, or a folder.

    A folder holds a `tokenizer.json` or a `tokenizer.model` (the first where there are both) or
    was written by `save`. Which tokens begin and end a document is read from `eos` and `bos`,
    else from the folder's saved settings, else from the `.model` or a `tokenizer_config.json`
    beside the `tokenizer.json`, else guessed from the usual names; whether texts begin with `bos`
    from those settings, from `add_bos_token` of a `tokenizer_config.json`, else from the
    `tokenizer.json`'s template, or for a `.model` from the class that the config names. `ends`: ids
    that end a text too. A chat template is read from the settings or the files beside it.

    Raises:
      DataError: nothing usable there.
    """
    spec = os.fspath(spec)
    if spec == BYTES:
        return ByteTokenizer()
    spec = os.path.expanduser(spec)
    file, named = spec, {}
    if os.path.isdir(spec):
        marker, file = os.path.join(spec, MARKER), os.path.join(spec, _JSON)
        model = os.path.join(spec, MODEL)
        if os.path.exists(marker):
            named = _read_json(marker)
            if named.get("kind") == BYTES:
                return ByteTokenizer(named.get("eos_id", 256))
            file = model if named.get("kind") == SENTENCEPIECE else file
        elif os.path.isfile(model) and not os.path.isfile(file):
            file = model
    if not os.path.isfile(file):
        raise DataError(
            f"tokenizer {spec!r}: no file {file}. Give 'bytes', the path of a tokenizer.json or "
            "of a SentencePiece .model, a folder holding one or, as data.tokenizer, 'bpe'."
        )
    config = os.path.join(os.path.dirname(file), "tokenizer_config.json")
    is_model = file.endswith(".model")
    if not named and os.path.exists(config):
        raw = _read_json(config)
        if not is_model:
            named = {k: _content(raw.get(f"{k}_token")) for k in ("eos", "bos")}
        adds = raw.get("add_bos_token")
        if adds is None and is_model and str(raw.get("tokenizer_class")).startswith(_BEGUN):
            adds = True  # what transformers takes where it is not said
        named = named | {"adds_bos": adds}
    chat = named["chat"] if "chat" in named else chat_template(os.path.dirname(file))
    try:
        with open(file, "rb") as handle:
            content = handle.read()
        definition = content if is_model else content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"tokenizer {file} cannot be read: {error}.") from error
    # Here, because that module builds on this one.
    from eejax.data.sentencepiece import SentencePieceTokenizer

    make = SentencePieceTokenizer if is_model else JsonTokenizer
    try:
        return make(
            definition, eos=eos or named.get("eos"), bos=bos or named.get("bos"),
            adds_bos=named.get("adds_bos"), ends=[*ends, *named.get("ends", ())], chat=chat,
        )  # fmt: skip
    except DataError as error:
        raise DataError(f"tokenizer {file}: {error}") from error


def chat_template(folder: str | os.PathLike) -> str | None:
    """The source of a folder's chat template: of its `chat_template.jinja`, else of its
    `tokenizer_config.json`; None where there is none. Raises DataError for what cannot be read."""
    own, config = (os.path.join(folder, name) for name in (CHAT, "tokenizer_config.json"))
    if os.path.isfile(own):
        try:
            with open(own, encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{own} cannot be read: {error}.") from error
    source = _read_json(config).get("chat_template") if os.path.isfile(config) else None
    if isinstance(source, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def save_tokenizer(tokenizer: Tokenizer, path: str | os.PathLike) -> None:
    """Writes `tokenizer` into the folder `path`; `load_tokenizer(path)` gives it back."""
    tokenizer.save(path)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises `DataError` unless a model with `vocab_size` entries has a row for every token."""
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer ({tokenizer.fingerprint}) has {tokenizer.vocab_size} tokens but the "
            f"model's vocab_size is {vocab_size}: set model.vocab_size = {tokenizer.vocab_size}, "
            "or use the tokenizer the model was trained with."
        )


class _ByteStream:
    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int] | int) -> str:
        return self._decoder.decode(self._tokenizer.text_bytes(np.atleast_1d(ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceStream:
    """Shows decode(context + new) minus decode(context) once it does not end in U+FFFD.

    Shown tokens are kept as context because decoders treat the beginning of a text differently:
    they drop the first space or all of them. So it is the last group that has text there.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # the first ids of _ids whose text has been shown

    def push(self, ids: Sequence[int] | int) -> str:
        self._ids.extend(int(i) for i in np.atleast_1d(ids))
        return self._show(final=False)

    def flush(self) -> str:
        return self._show(final=True)

    def _show(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._shown])
        text = self._tokenizer.decode(self._ids)
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        if self._tokenizer.decode(self._ids[self._shown :]):
            del self._ids[: self._shown]
        self._shown = len(self._ids)
        return text[len(before) :]


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


def _content(token: Any) -> str | None:
    """tokenizer_config.json gives a token as a string or as an object with its content."""
    return token.get("content") if isinstance(token, dict) else token


def utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has a lone surrogate at character {error.start}, which is no Unicode "
            "text: decode its source with the right encoding."
        ) from error


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from error


def write_json(path: str, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
