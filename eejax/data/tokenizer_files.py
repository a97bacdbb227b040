"""Load tokenizers from files, with the settings that lie beside a vocabulary."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eejax.common.errors import DataError
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

CONFIG, ADDED, NAMES = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"

NAMED = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Names of special tokens in transformers and its chat templates."""

# Classes whose ids are those of the pieces of a `tokenizer.model`.
_LLAMA = ("LlamaTokenizer", "CodeLlamaTokenizer")
_BEGUN = (*_LLAMA, "GemmaTokenizer")  # texts begin with `bos` by default
_PIECES = (*_LLAMA, "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
_LLAMA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


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
    """
    spec = os.fspath(spec)
    if spec == BYTES:
        return ByteTokenizer()
    spec = os.path.expanduser(spec)
    file, saved = spec, None
    if os.path.isdir(spec):
        marker, file = os.path.join(spec, MARKER), os.path.join(spec, JSON)
        model = os.path.join(spec, MODEL)
        if os.path.exists(marker):
            saved = _read_json(marker)
            if (own := _own_template(spec)) is not None:
                saved["chat"] = own
            kind = saved.pop("kind", None)
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
        settings = {"definition": definition} | (
            _beside(file, definition) if saved is None else saved
        )
        tokens = {"eos": eos or settings.get("eos"), "bos": bos or settings.get("bos")}
        tokens["ends"] = [*ends, *settings.get("ends", ())]
        return make(settings.pop("definition"), **settings | tokens)
    except DataError as error:
        raise DataError(f"tokenizer {file}: {error}") from error


class TemplateSource(NamedTuple):
    """A chat template as `chat.Template` takes it.

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
    source = _read_json(config).get("chat_template") if os.path.isfile(config) else None
    if isinstance(source, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


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
    files = {name: os.path.join(folder, name) for name in (CONFIG, ADDED, NAMES)}
    read = {name: _read_json(p) if os.path.isfile(p) else {} for name, p in files.items()}
    config = read[CONFIG]
    if "added_tokens_decoder" not in config:
        config = config | read[NAMES]
    special = {k: _content(config.get(k)) for k in NAMED}
    special = {k: v for k, v in special.items() if v is not None}
    added = dict(_added(config, read[ADDED], special))
    found = dict(
        eos=special.get("eos_token"),
        bos=special.get("bos_token"),
        adds_bos=config.get("add_bos_token"),
        chat=chat_template(folder),
        special=special,
    )
    if isinstance(definition, bytes):
        return found | _of_pieces(definition, config, added, special)
    return found | {"definition": _with_added(definition, added, special.values())}


def _added(
    config: Mapping[str, Any], others: Mapping[str, int], special: Mapping[str, str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (id, token) for the tokens that were added to a vocabulary."""
    if "added_tokens_decoder" in config:
        for i, token in config["added_tokens_decoder"].items():
            flags = {name: bool(token.get(name, False)) for name in _FLAGS}
            yield int(i), _token(token["content"], **flags)
        return
    more = [*(config.get("additional_special_tokens") or ())]
    names = {*special.values(), *map(_content, more)}
    for name, i in others.items():
        yield i, _token(name, special=name in names)


def _of_pieces(
    model: bytes, config: Mapping[str, Any], added: dict[int, dict], special: Mapping[str, str]
) -> dict[str, Any]:
    """Collect the arguments of a `.model`. Raises DataError for settings that change its ids."""
    # Here, because that module builds on the same ones.
    from eejax.data.sentencepiece import parse_model

    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if kind and kind not in _PIECES:
        raise DataError(
            f"tokenizer_class = {config['tokenizer_class']!r}: must be one of {list(_PIECES)}, as "
            "others may give pieces other ids. Save it with transformers, as tokenizer.json."
        )
    if not kind:
        return {"added": added}
    pieces = parse_model(model)
    number = {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}
    for i, token in added.items():
        if i < len(number) and pieces.id_to_piece(i) != token["content"]:
            raise DataError(
                f"token {i} = {token['content']!r} of {CONFIG}: must be the model's piece "
                f"{pieces.id_to_piece(i)!r}. Save it with transformers, as tokenizer.json."
            )
    # Defaults of these classes, for settings that the folder lacks.
    adds = {"adds_bos": True} if config.get("add_bos_token") is None and kind in _BEGUN else {}
    if kind not in _LLAMA:
        return {"added": added} | adds
    special = _LLAMA_NAMES | special
    there = {token["content"] for token in added.values()}
    for name in special.values():
        if name in number and name not in there:
            added[number[name]] = _token(name, special=True)
    return {"added": added, "special": special, "space": _space(config)} | adds


def _space(config: Mapping[str, Any]) -> str:
    """Return the position at which transformers 5's Llama class puts a space before a text."""
    if config.get("add_prefix_space") is False:
        return "never"
    return "always" if config.get("legacy") else "first"


def _with_added(definition: str, added: dict[int, dict], names: Collection[str]) -> str:
    """Add the tokens that the files beside it declare to a tokenizer.json's added tokens.

    Raises DataError for tokens that its vocabulary lacks.
    """
    if not added and not names:
        return definition
    try:
        made = json.loads(definition)
        model = made["model"]["vocab"]
        number = model if isinstance(model, dict) else {t[0]: i for i, t in enumerate(model)}
        own = {token["content"]: token["id"] for token in made.get("added_tokens", ())}
    except (ValueError, TypeError, KeyError, IndexError):
        return definition  # its reader reports the error
    missing = []
    for i, token in added.items():
        have = own.get(token["content"], number.get(token["content"]))
        if have != i:
            raise DataError(
                f"token {i} = {token['content']!r} of the files beside it: "
                f"{'has the id ' + str(have) if have is not None else 'is not in its vocabulary'}."
                " Save both again with transformers."
            )
        if token["content"] not in own:
            missing.append({"id": i} | token)
    listed = {*own, *(token["content"] for token in missing)}
    missing += [
        {"id": number[name]} | _token(name, special=True)
        for name in dict.fromkeys(names)
        if name in number and name not in listed
    ]
    if not missing:
        return definition
    made["added_tokens"] = sorted([*made.get("added_tokens", ()), *missing], key=lambda t: t["id"])
    return json.dumps(made, ensure_ascii=False)


def _token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content} | dict.fromkeys(_FLAGS, False) | flags


def _content(token: Any) -> str | None:
    """Return the content of a token, which tokenizer_config.json has as a string or an object."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: must be a JSON object.")
    return found
