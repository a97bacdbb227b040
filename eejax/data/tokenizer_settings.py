"""Settings of a tokenizer in the files beside its vocabulary: read, merged and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from eejax.common.errors import DataError
from eejax.data.tokenizers import BYTES, SENTENCEPIECE

CONFIG, ADDED, NAMES = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

_DECODER = "added_tokens_decoder"
# Names of special tokens in transformers and its chat templates. A model may have others that end
# in `_token`.
_NAMED = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTS = ("additional_special_tokens", "extra_special_tokens")  # transformers 4's and 5's


class SettingCheck(NamedTuple):
    """A condition on a value, in words and as a function."""

    allowed: str
    holds: Callable[[Any], bool]


class TokenizerSettings(NamedTuple):
    """Settings in the files beside a vocabulary.

    Tokens are arguments of `tokenizers.AddedToken`.

    Attributes:
      config: values of `tokenizer_config.json`, with those of `special_tokens_map.json` where
        transformers reads them.
      special: names of special tokens by what templates call them.
      named: the special tokens that the files name, by their names.
      added: tokens by id that were added to the vocabulary.
      replaces: `added` has the flags that count where a `tokenizer.json` has others.
    """

    config: Mapping[str, Any]
    special: dict[str, str]
    named: dict[str, dict[str, Any]]
    added: dict[int, dict[str, Any]]
    replaces: bool


def read_settings(folder: str) -> TokenizerSettings:
    """Read the files beside a vocabulary as transformers does. Raises DataError for a bad value."""
    paths = {name: os.path.join(folder, name) for name in (CONFIG, ADDED, NAMES)}
    read = {name: read_json(p) if os.path.isfile(p) else {} for name, p in paths.items()}
    config = read[CONFIG]
    replaces = config.get(_DECODER) is not None
    names = {} if replaces else read[NAMES]
    # A token's name in both files is that of the second; all else adds up.
    first = {key: one for key, one in config.items() if key not in _NAMED or key not in names}
    found = []
    for path, values in ((paths[NAMES], names), (paths[CONFIG], first)):
        for key, check in _SETTINGS.items():
            require_setting(path, key, values.get(key), check)
        found += _named(path, values)
    found.sort(key=lambda one: one[0])
    special = {called: one["content"] for _, called, one in found if called is not None}
    named = {one["content"]: one for *_, one in found}  # the last one's flags count
    if replaces:
        added = dict(_decoder(paths[CONFIG], config[_DECODER], special.values()))
    else:
        for name, i in read[ADDED].items():
            require_setting(paths[ADDED], name, i, _ID)
        usual = {one["content"] for _, called, one in found if called in (*_NAMED, None)}
        added = {i: token(name, special=name in usual) for name, i in read[ADDED].items()}
    for one in added.values():
        one["special"] |= one["content"] in named
    return TokenizerSettings(config | names, special, named, added, replaces)


def read_saved(path: str) -> dict[str, Any]:
    """Read the settings in a folder written by `save`. Raises DataError for a bad value."""
    saved = read_json(path)
    require_setting(path, "kind", saved.get("kind"), _KIND)
    checks = _SAVED[saved["kind"]]
    for key, value in saved.items():
        if key != "kind" and key not in checks:
            raise DataError(
                f"{path}: {key!r} is not a setting of the kind {saved['kind']!r}, which has "
                f"{', '.join(checks)}. Remove it, or save the tokenizer again."
            )
        if key != "kind":
            require_setting(path, key, value, checks[key])
    return saved


def read_json(path: str) -> dict[str, Any]:
    """Read an object of JSON. Raises DataError, naming the file."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: must be a JSON object.")
    return found


def require_setting(path: str, key: str, value: Any, check: SettingCheck) -> None:
    """Raise DataError, naming file, key, value and what is allowed, unless the check holds."""
    if not check.holds(value):
        shown = repr(value)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        raise DataError(f"{path}: {key} = {shown}: must be {check.allowed}.")


def token(content: str, **flags: bool) -> dict[str, Any]:
    """Make the arguments of a `tokenizers.AddedToken`, with the library's defaults."""
    special = flags.get("special", False)
    return {"content": content} | dict.fromkeys(FLAGS, False) | {"normalized": not special} | flags


def _named(
    path: str, values: Mapping[str, Any]
) -> Iterator[tuple[int, str | None, dict[str, Any]]]:
    """Yield (rank, what templates call it or None, token) for special tokens that a file names.

    transformers adds tokens to a vocabulary by rank.
    """
    for key, value in values.items():
        pairs: Iterable[tuple[str | None, Any]] = [(key, value)]
        if key in _LISTS and value is not None:
            require_setting(path, key, value, _TOKENS)
            rank = len(_NAMED) + (1 if isinstance(value, dict) else 2)
            pairs = value.items() if isinstance(value, dict) else [(None, one) for one in value]
        elif key in _NAMED:
            require_setting(path, key, value, _TOKEN_OR_NULL)
            rank = _NAMED.index(key)
        elif key.endswith("_token") and _TOKEN.holds(value):  # else it is no token
            rank = len(_NAMED)
        else:
            continue
        for called, one in pairs:
            if one is not None:
                one = {"content": one} if isinstance(one, str) else one
                yield rank, called, token(one["content"], **_flags(one) | {"special": True})


def _decoder(
    path: str, values: Any, called: Collection[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (id, token) of an `added_tokens_decoder`. called: tokens that have names."""
    require_setting(path, _DECODER, values, _OBJECT)
    for key, one in values.items():
        require_setting(path, f"a key of {_DECODER}", key, _KEY)
        require_setting(path, f"{_DECODER}.{key}", one, _ADDED_TOKEN)
        name, special = one["content"], one.get("special", False)
        yield int(key), token(name, **_flags(one) | {"special": special or name in called})


def _flags(one: Mapping[str, Any]) -> dict[str, bool]:
    return {flag: one[flag] for flag in FLAGS if flag in one}


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_key(value: Any) -> bool:
    digits = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 10
    return digits and _is_id(int(value))


def _is_token(value: Any) -> bool:
    """Return whether a value is an object with a token's name, and flags that are switches."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return False
    return all(isinstance(value.get(flag, False), bool) for flag in FLAGS)


def _or_null(check: SettingCheck) -> SettingCheck:
    return SettingCheck(f"{check.allowed}, or null", lambda v: v is None or check.holds(v))


def _is_list_of(items: Any, check: SettingCheck) -> bool:
    return isinstance(items, list) and all(map(check.holds, items))


def _is_object_of(items: Any, check: SettingCheck) -> bool:
    return isinstance(items, dict) and all(map(check.holds, items.values()))


_TEXT = SettingCheck("a text", lambda v: isinstance(v, str))
_SWITCH = SettingCheck("true or false", lambda v: isinstance(v, bool))
_OBJECT = SettingCheck("an object {...}", lambda v: isinstance(v, dict))
_ID = SettingCheck("a token's id, a whole number from 0 and below 2**31", _is_id)
_KEY = SettingCheck("a token's id in digits, below 2**31", _is_key)
_ADDED_TOKEN = SettingCheck(
    f'an object with the text "content" and true or false for {FLAGS}', _is_token
)
_SAVED_TOKEN = SettingCheck(
    "", lambda v: _is_token(v) and "special" in v and {*v} <= {"content", *FLAGS}
)
_TOKEN = SettingCheck(
    f"a token's name, or {_ADDED_TOKEN.allowed}", lambda v: isinstance(v, str) or _is_token(v)
)
_TOKEN_OR_NULL = _or_null(_TOKEN)
_TOKENS = SettingCheck(
    f"a list or an object of tokens, each {_TOKEN.allowed}",
    lambda v: _is_list_of(v, _TOKEN) or _is_object_of(v, _TOKEN),
)

# Settings of a `tokenizer_config.json` that are no tokens.
_SETTINGS = {
    "add_bos_token": _or_null(_SWITCH),
    "add_prefix_space": _or_null(_SWITCH),
    "legacy": _or_null(_SWITCH),
    "tokenizer_class": _or_null(_TEXT),
}

# Settings that `save` writes, by the kind of tokenizer.
_JSON = {
    "eos": _or_null(_TEXT),
    "bos": _or_null(_TEXT),
    "adds_bos": _or_null(_SWITCH),
    "ends": SettingCheck(f"a list of ids, each {_ID.allowed}", lambda v: _is_list_of(v, _ID)),
    "chat": _or_null(_TEXT),
    "special": SettingCheck("an object of texts", lambda v: _is_object_of(v, _TEXT)),
}
_SPACES = ("first", "always", "never")
_SAVED: dict[str, dict[str, SettingCheck]] = {
    BYTES: {
        "eos_id": SettingCheck("a byte, or 256", lambda v: _is_id(v) and v <= 256),
        "chat": _or_null(_TEXT),
    },
    "json": _JSON,
    SENTENCEPIECE: _JSON
    | {
        "added": SettingCheck(
            f'an object of tokens by id, each with "content", "special" and others of {FLAGS}',
            lambda v: _is_object_of(v, _SAVED_TOKEN) and all(map(_is_key, v)),
        ),
        "space": _or_null(SettingCheck(f"one of {', '.join(_SPACES)}", lambda v: v in _SPACES)),
    },
}
_KIND = SettingCheck(f"one of {', '.join(_SAVED)}", lambda v: isinstance(v, str) and v in _SAVED)
