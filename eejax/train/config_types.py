"""Checks of a config's values against the annotations of its dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

from eejax.common.errors import ConfigError, require


def require_known(name: str, where: str, known: Mapping[str, Any], kind: str) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=3)
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    raise ConfigError(f"{where}.{name}: no such {kind}.{meant} Known: {', '.join(known)}.")


def check_types(cls: type, values: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` for a value that is not of its field's type; unknown fields pass."""
    require(isinstance(values, Mapping), where, values, "must be a section with fields")
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in values:
            continue
        value, type_ = values[field.name], hints[field.name]
        unset = value is None and field.default is dataclasses.MISSING
        require(
            unset or _is_a(value, type_), f"{where}.{field.name}", value, f"must be {field.type}"
        )
        is_section = isinstance(type_, type) and dataclasses.is_dataclass(type_)
        if is_section and isinstance(value, Mapping):
            check_types(type_, value, f"{where}.{field.name}")


def is_union(type_: Any) -> bool:
    return typing.get_origin(type_) in (types.UnionType, typing.Union)


def _is_a(value: Any, type_: Any) -> bool:
    """isinstance for the annotations used here; an int is a float, a bool is no int."""
    if is_union(type_):
        return any(_is_a(value, t) for t in typing.get_args(type_))
    if typing.get_origin(type_) is tuple:
        element = typing.get_args(type_)[0]
        return isinstance(value, tuple) and all(_is_a(v, element) for v in value)
    if isinstance(type_, type) and dataclasses.is_dataclass(type_):
        return isinstance(value, (Mapping, type_))
    if type_ in (int, float):
        return isinstance(value, (int, type_)) and not isinstance(value, bool)
    return isinstance(value, type_)


def plain(value: Any) -> Any:
    """ConfigDicts as dicts and sequences as tuples, at every depth."""
    if isinstance(value, Mapping) or hasattr(value, "to_dict"):
        return {k: plain(v) for k, v in value.items()}
    return tuple(plain(v) for v in value) if isinstance(value, (list, tuple)) else value
