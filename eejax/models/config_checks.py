"""Checks of the fields of a model's configuration, and building it from a mapping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from eejax.common.errors import ConfigError, require


def is_size(value: Any) -> bool:
    """Return True for an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_size_or_zero(value: Any) -> bool:
    """Return True for an integer of at least 0."""
    return is_size(value) or (isinstance(value, int) and value is not False and value == 0)


def is_number(value: Any) -> bool:
    """Return True for a finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def require_positive(config: Any, *names: str) -> None:
    """Raise ConfigError unless the fields are positive, finite numbers."""
    for name in names:
        value = getattr(config, name)
        require(
            is_number(value) and value > 0,
            f"{type(config).__name__}.{name}",
            value,
            "must be a positive, finite number",
        )


def require_sizes(config: Any, *names: str) -> None:
    """Raise ConfigError unless the fields of a `ModelConfig` are integers of at least 1."""
    for name in names:
        value = getattr(config, name)
        require(is_size(value), f"ModelConfig.{name}", value, "must be a positive integer")


def require_switches(config: Any) -> None:
    """Raise ConfigError unless all fields declared as bool are True or False."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.type == "bool":
            field = f"{type(config).__name__}.{f.name}"
            require(isinstance(value, bool), field, value, "must be True or False")


def build(cls: type, values: Mapping[str, Any], where: str = "") -> Any:
    """Return `cls(**values)`; raise `ConfigError` for unknown and missing fields."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    where = where or cls.__name__
    for name, value in values.items():
        if name not in known:
            raise ConfigError(
                f"{where}.{name} = {value!r}: no such field. Known: {', '.join(known)}."
            )
    missing = [
        n
        for n, f in known.items()
        if n not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}.")
    return cls(**values)
