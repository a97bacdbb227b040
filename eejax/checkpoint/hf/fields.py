"""Settings of a Hugging Face config.json, and what they are to `ModelConfig`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from eejax.common.errors import CheckpointError
from eejax.models.config import ModelConfig, RotaryConfig

REQUIRED = object()

ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "quick_gelu": "gelu_quick",
    "relu": "relu", "relu2": "relu2", "silu": "silu", "swish": "silu",
}  # fmt: skip
NAMES = {
    "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "gelu_quick": "quick_gelu", "relu": "relu",
    "relu2": "relu2", "silu": "silu",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Raw:
    """The values of a config.json. Errors (CheckpointError) name the file and the field."""

    path: pathlib.Path
    values: Mapping[str, Any]

    def __call__(self, name: str, default: Any = REQUIRED) -> Any:
        """A field's value; null counts as left out. One with a default that is a switch or a
        number must be one too."""
        value = self.values.get(name)
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
        """A field that is an object, {} where it is left out. name: a.b is b within a."""
        *outer, last = name.split(".")
        inside = self.table(".".join(outer)) if outer else self.values
        value = inside.get(last)
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

    def windows(self, default: int | None, pattern) -> int | tuple[int | None, ...] | None:
        """Sliding windows: of all layers, or of those that have one by `layer_types`, or else by
        `pattern(i)`. Left out, a window is the default; null is none."""
        window, n = self.values.get("sliding_window", default), self("num_hidden_layers")
        kinds = self("layer_types", None)
        if kinds is None:
            slides = [pattern(i) for i in range(n)]
        else:
            known = ("sliding_attention", "full_attention")
            if not isinstance(kinds, list) or len(kinds) != n or any(k not in known for k in kinds):
                raise self.refuse("layer_types", kinds, f"must be one of {known} for each layer")
            slides = [kind == known[0] for kind in kinds]
        if window is None or not any(slides):
            return None
        return window if all(slides) else tuple(window if s else None for s in slides)


def is_number(value: Any) -> bool:
    """A finite one: JSON of Python's has Infinity and NaN too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


def read_rotary(
    raw: Raw, theta: float = 10000.0, fraction: float = 1.0, local: float | None = None, **fixed
) -> RotaryConfig:
    """Rotary settings in either of their forms: `rope_parameters`, or `rope_theta` and
    `rope_scaling`; the numbers given are the family's defaults."""
    where = "rope_parameters" if raw.table("rope_parameters") else "rope_scaling"
    rope = raw.table(where)
    own_local = raw("rope_local_base_freq", local)
    if "full_attention" in rope or "sliding_attention" in rope:
        sliding = raw.table(f"{where}.sliding_attention")
        rope = raw.table(f"{where}.full_attention")
        own_local = sliding.get("rope_theta", own_local)
        if sliding.get("rope_type", "default") != "default":
            raise raw.refuse(where, sliding, "sliding layers must have rope_type 'default'")

    def needed(name: str) -> Any:
        """What a scaling is nothing without: a default would load as another model."""
        if rope.get(name) is None:
            raise CheckpointError(
                f"{raw.path}: {where}.{name} is missing: rope_type {kind!r} needs it."
            )
        return rope[name]

    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise raw.refuse(f"{where}.rope_type", kind, f"must be among {', '.join(SCALINGS)}")
    values: dict[str, Any] = dict(
        theta=rope.get("rope_theta", raw("rope_theta", raw("rotary_emb_base", theta))),
        fraction=rope.get(
            "partial_rotary_factor", raw("partial_rotary_factor", raw("rotary_pct", fraction))
        ),
        scaling=SCALINGS[kind], **fixed,
    )  # fmt: skip
    if local is not None:
        values["local_theta"] = own_local
    if kind != "default":
        values["factor"] = needed("factor")
    if kind == "llama3":
        values |= dict(
            low_frequency=needed("low_freq_factor"), high_frequency=needed("high_freq_factor")
        )
    if kind in ("llama3", "yarn"):
        values["original_context"] = rope.get(
            "original_max_position_embeddings", raw("max_position_embeddings")
        )
    if kind == "yarn":
        values |= dict(
            beta_fast=rope.get("beta_fast") or 32.0, beta_slow=rope.get("beta_slow") or 1.0
        )
        for name, plain in (("attention_factor", None), ("mscale", None), ("truncate", True)):
            if rope.get(name, plain) != plain:
                raise raw.refuse(f"{where}.{name}", rope[name], "cannot be represented")
    return RotaryConfig(**values)


def write_rotary(config: ModelConfig, fraction: str | None = None) -> dict[str, Any]:
    """The second form, which old and new versions read. fraction: what it is called there."""
    rotary = config.rotary
    out: dict[str, Any] = {"rope_theta": rotary.theta, "rope_scaling": None}
    if fraction is not None:
        out[fraction] = rotary.fraction
    if rotary.local_theta is not None:
        out["rope_local_base_freq"] = rotary.local_theta
    kinds = {ours: theirs for theirs, ours in SCALINGS.items()}
    if rotary.scaling != "none":
        if rotary.scaling not in kinds:
            return out  # told by the comparison of what comes back
        scaling = {"rope_type": kinds[rotary.scaling], "factor": rotary.factor}
        if rotary.original_context is not None:
            scaling["original_max_position_embeddings"] = rotary.original_context
        if rotary.scaling == "llama3":
            scaling |= dict(
                low_freq_factor=rotary.low_frequency, high_freq_factor=rotary.high_frequency
            )
        if rotary.scaling == "yarn":
            scaling |= dict(beta_fast=rotary.beta_fast, beta_slow=rotary.beta_slow)
        out["rope_scaling"] = scaling
    return out


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """`sliding_window` and `layer_types`."""
    each = [config.window(i) for i in range(config.n_layers)]
    sizes = {w for w in each if w is not None}
    return {
        "sliding_window": min(sizes, default=None),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in each],
    }
