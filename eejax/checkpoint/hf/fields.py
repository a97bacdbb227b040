"""Settings of a Hugging Face config.json, and their meaning for `ModelConfig`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from eejax.common.errors import CheckpointError, require
from eejax.models.config import ModelConfig

REQUIRED = object()

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
NAMES = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu_quick": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
}


@dataclasses.dataclass(frozen=True)
class Raw:
    """The values of a config.json, whose errors (CheckpointError) name the file and the field.

    Attributes:
      path: path of the file.
      values: its contents.
      fields_read: fields that were read, which shows those that nothing reads.
    """

    path: pathlib.Path
    values: Mapping[str, Any]
    fields_read: set[str] = dataclasses.field(default_factory=set, compare=False)

    def stored(self, name: str, default: Any = None) -> Any:
        """Return a field's value as it is written, including null; the default if it is missing."""
        self.fields_read.add(name)
        return self.values.get(name, default)

    def __call__(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a field's value; null counts as missing.

        A field whose default is a switch or a number must be one too.
        """
        value = self.stored(name)
        if value is not None:
            if isinstance(default, bool) and not isinstance(value, bool):
                raise self.refuse(name, value, "must be true or false")
            if is_number(default) and not is_number(value):
                raise self.refuse(name, value, "must be a number")
            return value
        if default is REQUIRED:
            raise CheckpointError(
                f"{self.path}: {name} is missing: a model of type "
                f"{self.values.get('model_type')!r} needs it."
            )
        return default

    def refuse(self, name: str, value: Any, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} = {value!r}: {why}.")

    def size(self, name: str, default: Any = REQUIRED) -> Any:
        value = self(name, default)
        if value is not default and not (type(value) is int and 0 < value < 2**31):
            raise self.refuse(name, value, "must be a positive whole number below 2**31")
        return value

    def positive(self, name: str, default: float) -> Any:
        value = self(name, default)
        if value <= 0:
            raise self.refuse(name, value, "must be positive")
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a field that is an object, {} if it is missing; a name a.b is field b within a."""
        *outer, last = name.split(".")
        value = self.table(".".join(outer)).get(last) if outer else self.stored(last)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, value, "must be an object {...}, or null")
        return value or {}

    def must_be(self, name: str, *allowed: Any, default: Any = None) -> None:
        value = self(name, default)
        if value not in (*allowed, default):
            raise self.refuse(name, value, f"cannot be represented; must be among {[*allowed]}")

    def activation(self, name: str, default: str) -> str:
        value = self(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.refuse(name, value, f"must be among {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def must_divide(self, name: str, whole: str) -> int:
        """Return the quotient of two sizes, of which `name` is the divisor."""
        rest = self.size(whole) % self.size(name)
        if rest:
            raise self.refuse(name, self(name), f"must divide {whole} ({self(whole)})")
        return self(whole) // self(name)

    def windows(self, default: int | None, pattern=None) -> int | tuple[int | None, ...] | None:
        """Return the sliding windows of the layers.

        The layers with a window are those of `layer_types`, or else of `pattern(i)`; without a
        pattern all layers have one. A missing window is the default; null is none.
        """
        window, n = self.stored("sliding_window", default), self("num_hidden_layers")
        kinds = self("layer_types", None)
        known = ("sliding_attention", "full_attention")
        slides = [pattern is None or pattern(i) for i in range(n)]
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != n or any(k not in known for k in kinds):
                raise self.refuse("layer_types", kinds, f"must be one of {known} for each layer")
            slides = [kind == known[0] for kind in kinds]
            if pattern is None and not all(slides) and window is not None:
                raise self.refuse(
                    "layer_types",
                    kinds,
                    f"cannot be represented: a {self('model_type')} has windows in all of its "
                    "layers, or in none (sliding_window = null)",
                )
        if window is None or not any(slides):
            return None
        if type(window) is not int or window < 1:
            raise self.refuse("sliding_window", window, "must be a positive whole number, or null")
        return window if all(slides) else tuple(window if s else None for s in slides)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; JSON as Python writes it also has Infinity and
    NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def write_windows(
    config: ModelConfig, by_layer: bool = True, empty: int | None = None
) -> dict[str, Any]:
    """Return `sliding_window`, and `layer_types` if the family has windows by layer.

    `empty` is written for a model without windows. Raises ConfigError for windows of several sizes,
    or for windows of some layers if the family has them in all.
    """
    each = [config.window(i) for i in range(config.n_layers)]
    sizes = {w for w in each if w is not None}
    mixed = len(set(each)) > 1 and not by_layer
    require(
        len(sizes) <= 1 and not mixed,
        "ModelConfig.sliding_window",
        config.sliding_window,
        "must be the same in all layers" if mixed else "must be of one size",
    )
    values: dict[str, Any] = {"sliding_window": min(sizes, default=empty)}
    if by_layer:
        values["layer_types"] = ["sliding_attention" if w else "full_attention" for w in each]
    return values
