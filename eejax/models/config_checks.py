"""Checks of the fields of a model's configuration."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from eejax.common.errors import require


def is_size(value: Any) -> bool:
    """Return True for an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


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
