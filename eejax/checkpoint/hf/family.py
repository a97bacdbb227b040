"""The description of a model family: its settings, and the places of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from eejax.checkpoint.hf import fields
from eejax.checkpoint.hf.fields import Raw
from eejax.checkpoint.hf.layouts import Rule
from eejax.common.errors import ConfigError, require
from eejax.models.config import ModelConfig

Values = dict[str, Any]
_TYPES = {f.name: f.type for f in dataclasses.fields(ModelConfig)}


@dataclasses.dataclass(frozen=True)
class Family:
    """Description of a `model_type`.

    `read` and `write` are inverse to each other: a model that a family cannot write would be read
    as a different one.

    Attributes:
      model_type, architecture: their names in config.json.
      sizes: name in config.json -> (name in ModelConfig, default).
      rules: places of the tensors.
      fixed: settings that are the same in the whole family.
      activation: the setting's name, and its default.
      tied: whether the head is tied if config.json does not say.
      plain: settings of which only one value can be represented.
      more, written: functions for further settings that are read from, and written to, config.json.
      prefix: prefix of all names, which some files leave out.
      renamed: replaced names of tensors.
      skipped: suffixes of names that hold no parameters.
      aliases: other names of settings, which must agree.
      whole_heads: whether transformers refuses a hidden size that the heads do not divide.
    """

    model_type: str
    architecture: str
    sizes: Mapping[str, tuple[str, Any]]
    rules: Callable[[ModelConfig, Raw | None], list[Rule]]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    tied: bool = False
    plain: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    more: Callable[[Raw], Values] = lambda raw: {}
    written: Callable[[ModelConfig], Values] = lambda config: {}
    prefix: str = "model."
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    skipped: tuple[str, ...] = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    whole_heads: bool = False

    def read(self, raw: Raw) -> ModelConfig:
        """Read a config.json. Raises CheckpointError for settings that cannot be read."""
        for name, value in self.plain.items():
            raw.must_be(name, value, default=value)
        for other, name in self.aliases.items():
            if raw(other, None) not in (None, raw(name)):
                raise raw.refuse(other, raw(other), f"must be {raw(name)!r}, as {name} is")
        if raw("per_layer_config", None):
            raise raw.refuse(
                "per_layer_config", raw("per_layer_config"), "layers of unlike sizes are not read"
            )
        values = {ours: _size(raw, name, ours, v) for name, (ours, v) in self.sizes.items()}
        declared = "head_dim" in self.sizes or "head_dim" in self.fixed
        if not declared and (given := raw("head_dim", None)) is not None:
            usual = values["d_model"] // values["n_heads"]
            if given != usual:
                raise raw.refuse("head_dim", given, f"must be {usual} in a {self.model_type}")
        values["activation"] = raw.activation(*self.activation)
        values["head"] = "tied" if raw("tie_word_embeddings", self.tied) else "own"
        try:
            return ModelConfig(**values | dict(self.fixed) | self.more(raw))
        except ConfigError as error:
            raise raw.refuse("model_type", self.model_type, f"as {error}".rstrip(".")) from error

    def write(self, config: ModelConfig) -> Values:
        """Return config.json's values.

        A model that the family cannot express is read back as a different one. Raises ConfigError
        for a model that transformers would not open.
        """
        require(
            not self.whole_heads or config.d_model % config.n_heads == 0,
            "ModelConfig.n_heads",
            config.n_heads,
            f"must divide d_model ({config.d_model}) in a {self.model_type} of transformers",
        )
        values = {name: getattr(config, ours) for name, (ours, _) in self.sizes.items()}
        values[self.activation[0]] = fields.NAMES[config.activation]
        values["tie_word_embeddings"] = config.head == "tied"
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **values,
            **self.plain,
            **self.written(config),
        }


FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Add a family to import and export; it replaces another one of its `model_type`."""
    FAMILIES[family.model_type] = family


def _size(raw: Raw, name: str, ours: str, default: Any) -> Any:
    """Return a size, or another number; null counts as a value only if the field may be None."""
    if _TYPES[ours] == "int | None" and raw.stored(name, default) is None:
        return None
    return (raw.size if _TYPES[ours].startswith("int") else raw)(name, default)
