"""Load tokenizers from files, with the settings that lie beside a vocabulary."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from eejax.common.errors import DataError, require
from eejax.data.tokenizer_settings import (
    CONFIG,
    SettingCheck,
    TokenizerSettings,
    read_json,
    read_saved,
    read_settings,
    require_setting,
    token,
)
from eejax.data.tokenizers import (
    BYTES,
    CHAT,
    JSON,
    MARKER,
    MODEL,
    SENTENCEPIECE,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
)

# Classes whose ids are those of the pieces of a `tokenizer.model`.
_LLAMA = ("LlamaTokenizer", "CodeLlamaTokenizer")
_BEGUN = (*_LLAMA, "GemmaTokenizer")  # texts begin with `bos` by default
_PIECES = (*_LLAMA, "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
_LLAMA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_TEMPLATE = SettingCheck(
    'a text, null, or a list of {"name": "...", "template": "..."}',
    lambda v: v is None or isinstance(v, str) or _named_templates(v) is not None,
)


def load_tokenizer(
    spec: str | os.PathLike,
    *,
    eos: str | None = None,
    bos: str | None = None,
    ends: Sequence[int] = (),
) -> Tokenizer:
    """Load the tokenizer `"bytes"`, a `tokenizer.json`, a SentencePiece `.model`, or a folder.

    A folder was written by `save`, or holds a `tokenizer.json` or a `tokenizer.model` (the first if
    it holds both). The tokens that begin and end a document come from the first of: `eos` and
    `bos`, the folder's saved settings, a `tokenizer_config.json` or `special_tokens_map.json`
    beside the file, the `.model`, the usual names. Whether texts begin with `bos` comes from the
    saved settings, `add_bos_token` of the config, or the template in the `tokenizer.json`. The chat
    template and the names of special tokens come from the settings or the files beside it; for a
    `.model`, so do the tokens added to its pieces and the position of a space before a text
    (`legacy`, `add_prefix_space`). A folder's `chat_template.jinja` overrides the template of its
    saved settings.

    Args:
      ends: ids of further tokens that end a text.

    Raises:
      DataError: there is no usable tokenizer, or a setting beside the file would change ids and is
        not supported.
      ConfigError: `spec` is not a path.
    """
    path = isinstance(spec, str | os.PathLike)
    require(path, "tokenizer", spec, "must be 'bytes', or the path of a file or folder")
    spec = os.fspath(spec)
    if spec == BYTES:
        return ByteTokenizer()
    spec = os.path.expanduser(spec)
    file, saved = spec, None
    if os.path.isdir(spec):
        marker, file = os.path.join(spec, MARKER), os.path.join(spec, JSON)
        model = os.path.join(spec, MODEL)
        if os.path.exists(marker):
            saved = read_saved(marker)
            if (own := _own_template(spec)) is not None:
                saved["chat"] = own
            kind = saved.pop("kind")
            if kind == BYTES:
                return ByteTokenizer(saved.get("eos_id", 256), saved.get("chat"))
            file = model if kind == SENTENCEPIECE else file
        elif os.path.isfile(model) and not os.path.isfile(file):
            file = model
    if not os.path.isfile(file):
        raise DataError(
            f"tokenizer {spec!r}: no file {file}. Give 'bytes', the path of a tokenizer.json or "
            "of a SentencePiece .model, a folder holding one or, as data.tokenizer, 'bpe'."
        )
    is_model = file.endswith(".model")
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
        settings: dict[str, Any] = {"definition": definition} | (
            _beside(file, definition) if saved is None else saved
        )
        tokens: dict[str, Any] = {
            "eos": eos or settings.get("eos"),
            "bos": bos or settings.get("bos"),
        }
        tokens["ends"] = [*ends, *settings.get("ends", ())]
        return make(settings.pop("definition"), **settings | tokens)
    except DataError as error:
        raise DataError(f"tokenizer {file}: {error}") from error


class TemplateSource(NamedTuple):
    """A chat template as `chat.ChatTemplate` takes it.

    Attributes:
      source: text of the template.
      special: names of special tokens by what the template calls them.
    """

    source: str
    special: dict[str, str]


def chat_template(folder: str | os.PathLike) -> str | None:
    """Read the chat template of a folder's `chat_template.jinja`, else its `tokenizer_config.json`.

    Returns None if there is neither. Raises DataError for a file that cannot be read.
    """
    if (own := _own_template(folder)) is not None:
        return own
    config = os.path.join(folder, CONFIG)
    if not os.path.isfile(config):
        return None
    source = read_json(config).get("chat_template")
    require_setting(config, "chat_template", source, _TEMPLATE)
    if source is None or isinstance(source, str):
        return source
    return (_named_templates(source) or {}).get("default")


def _named_templates(value: Any) -> dict[str, str] | None:
    """Return templates by name; None for a value that is no list of them."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return None
    pairs = [(one.get("name"), one.get("template")) for one in value]
    texts = all(isinstance(name, str) and isinstance(text, str) for name, text in pairs)
    return dict(pairs) if texts else None


def _own_template(folder: str | os.PathLike) -> str | None:
    """Read a folder's `chat_template.jinja`, None if it has none. Raises DataError."""
    file = os.path.join(folder, CHAT)
    if not os.path.isfile(file):
        return None
    try:
        with open(file, encoding="utf-8") as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}.") from error


def _beside(file: str, definition: str | bytes) -> dict[str, Any]:
    """Read a tokenizer's arguments from the files beside it, as transformers does."""
    folder = os.path.dirname(file)
    settings = read_settings(folder)
    found = dict(
        eos=settings.special.get("eos_token"),
        bos=settings.special.get("bos_token"),
        adds_bos=settings.config.get("add_bos_token"),
        chat=chat_template(folder),
        special=settings.special,
    )
    if isinstance(definition, bytes):
        return found | _of_pieces(definition, settings)
    return found | {"definition": _with_added(definition, settings)}


def _of_pieces(model: bytes, settings: TokenizerSettings) -> dict[str, Any]:
    """Collect the arguments of a `.model`. Raises DataError for settings that change its ids."""
    # Here, because that module builds on the same ones.
    from eejax.data.sentencepiece import parse_model

    config = settings.config
    kind = (config.get("tokenizer_class") or "").removesuffix("Fast")
    if kind and kind not in _PIECES:
        raise DataError(
            f"tokenizer_class = {config['tokenizer_class']!r}: must be one of {list(_PIECES)}, as "
            "others may give pieces other ids. Save it with transformers, as tokenizer.json."
        )
    pieces = parse_model(model)
    number = {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}
    added, special, named = dict(settings.added), settings.special, settings.named
    for i, one in added.items() if kind else ():
        if i < len(number) and pieces.id_to_piece(i) != one["content"]:
            raise DataError(
                f"token {i} = {one['content']!r} of {CONFIG}: must be the model's piece "
                f"{pieces.id_to_piece(i)!r}. Save it with transformers, as tokenizer.json."
            )
    if kind in _LLAMA:
        special = _LLAMA_NAMES | special
        named = {name: token(name, special=True) for name in special.values()} | named
    there = {one["content"] for one in added.values()}
    for name in named.keys() & number.keys() - there:
        # Control pieces are special tokens anyway.
        if kind in _LLAMA or not pieces.is_control(number[name]):
            added[number[name]] = named[name] | {"normalized": False}
    found = {"added": dict(sorted(added.items())), "special": special}
    # Defaults of these classes, for settings that the folder lacks.
    if config.get("add_bos_token") is None and kind in _BEGUN:
        found["adds_bos"] = True
    return found | ({"space": _space(settings)} if kind in _LLAMA else {})


def _space(settings: TokenizerSettings) -> str:
    """Return the position at which transformers 5's Llama class puts a space before a text."""
    if settings.config.get("add_prefix_space") is False:
        return "never"
    return "always" if settings.config.get("legacy") else "first"


def _with_added(definition: str, settings: TokenizerSettings) -> str:
    """Add the tokens that the files beside it declare to a tokenizer.json's added tokens.

    Tokens that the files name as special ones become special. Raises DataError for tokens that were
    added to another vocabulary.
    """
    if not settings.added and not settings.named:
        return definition
    try:
        made = json.loads(definition)
        model = made["model"]["vocab"]
        number = model if isinstance(model, dict) else {t[0]: i for i, t in enumerate(model)}
        own = {one["content"]: one for one in made.get("added_tokens", ())}
        ids = number | {name: one["id"] for name, one in own.items()}
        if not all(type(i) is int for i in ids.values()):
            raise TypeError
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return definition  # its reader reports the error
    tokens = dict(own)
    for i, one in settings.added.items():
        name, have = one["content"], ids.get(one["content"])
        if have != i:
            raise DataError(
                f"token {i} = {name!r} of the files beside it: "
                f"{'has the id ' + str(have) if have is not None else 'is not in its vocabulary'}."
                " Save both again with transformers."
            )
        if name not in own or settings.replaces:
            tokens[name] = {"id": i} | one
    for name in filter(None, settings.named.keys() & ids.keys()):
        tokens[name] = tokens.get(name) or {"id": ids[name]} | settings.named[name]
        tokens[name] = tokens[name] | {"special": True}
    for name, one in own.items():  # special tokens stay so
        if one.get("special"):
            tokens[name] = tokens[name] | {"special": True}
    if tokens == own:
        return definition
    made["added_tokens"] = sorted(tokens.values(), key=lambda one: one["id"])
    return json.dumps(made, ensure_ascii=False)
