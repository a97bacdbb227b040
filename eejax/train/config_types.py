"""Checks of a config's values against the annotations of its dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from eejax.common.errors import ConfigError, require
from eejax.common.fields import field_types, is_a, type_name


def require_known(name: str, where: str, known: Mapping[str, Any], kind: str) -> None:
    """Raise `ConfigError`, which names similar words, unless `name` is among the `known`."""
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=3)
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    raise ConfigError(f"{where}.{name}: no such {kind}.{meant} Known: {', '.join(known)}.")


def check_types(cls: type, values: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` for a value that is not of its field's type; unknown fields pass."""
    require(isinstance(values, Mapping), where, values, "must be a section with fields")
    annotations = field_types(cls)
    for field in dataclasses.fields(cls):
        if field.name not in values:
            continue
        value, type_ = values[field.name], annotations[field.name]
        unset = value is None and field.default is dataclasses.MISSING
        allowed = f"must be {type_name(type_)}"
        require(unset or is_a(value, type_), f"{where}.{field.name}", value, allowed)
        is_section = isinstance(type_, type) and dataclasses.is_dataclass(type_)
        if is_section and isinstance(value, Mapping):
            check_types(type_, value, f"{where}.{field.name}")


def plain(value: Any) -> Any:
    """Convert ConfigDicts to dicts and sequences to tuples, at every depth."""
    if isinstance(value, Mapping) or hasattr(value, "to_dict"):
        return {k: plain(v) for k, v in value.items()}
    return tuple(plain(v) for v in value) if isinstance(value, (list, tuple)) else value
