"""Flags that are derived from declarations: fields of a dataclass, or parameters of a function.

A setting has its type, range, choices, default and description where it is declared, and a launcher
names the settings for which it has flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from absl import flags
from annotated_types import Interval

from eejax.common.fields import members
from eejax.experiments import launch

flags.disclaim_key_flags()  # --help lists flags under the launcher that defines them

NOTHING: Mapping[str, Any] = types.MappingProxyType({})
SECTION = re.compile(r"^(?:Args|Attributes):\n((?:[ ]+.*(?:\n|$)|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^  (\w+(?:, \w+)*): (.*(?:\n   .*)*)", re.MULTILINE)


class FlagGroup:
    """Flags of some settings of a declaration.

    `group["threshold"]` is the value of a setting's flag, and `group()` calls the declaration with
    the values of all flags.
    """

    def __init__(self, declared: Callable[..., Any], flags_by_setting: Mapping[str, _SettingFlag]):
        self._declared, self._flags = declared, flags_by_setting

    def __getitem__(self, setting: str) -> Any:
        return self._flags[setting].value

    def __call__(self, *arguments: Any, **others: Any) -> Any:
        """Call the declaration with the flags' values and further ones. Errors name the flag."""
        with self.named():
            return self._declared(*arguments, **(self.values() | others))

    def values(self) -> dict[str, Any]:
        """Return values by setting, without settings of a `TypedDict` that have no value."""
        found = {setting: self[setting] for setting in self._flags}
        if typing.is_typeddict(self._declared):
            return {setting: value for setting, value in found.items() if value is not None}
        return found

    @property
    def names(self) -> dict[str, str]:
        """Names of the flags by setting."""
        return {setting: flag.holder.name for setting, flag in self._flags.items()}

    def on_command_line(self) -> list[str]:
        """Return the names of the flags that are on the command line."""
        return [flag.holder.name for flag in self._flags.values() if flag.holder.present]

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which errors name the flag in place of the setting."""
        return launch.flags_named(self.names)


def define(
    declared: Callable[..., Any],
    settings: Collection[str] | Mapping[str, str],
    *,
    defaults: Mapping[str, Any] = NOTHING,
    helps: Mapping[str, str] = NOTHING,
    lists: Collection[str] = (),
    repeated: Collection[str] = (),
    note: str = "",
) -> FlagGroup:
    """Define a flag for each of some settings.

    A setting without a default must be on the command line, unless it is one of a `TypedDict`,
    whose flags are None by default.

    Args:
      declared: a dataclass, a `TypedDict` or a function. Its docstring describes the settings.
      settings: their names, or a mapping from them to the names of their flags.
      defaults: defaults of a launcher that differ from the declared ones, by setting.
      helps: descriptions of settings that mean something else in a launcher.
      lists: settings of one value or several, whose flag takes values separated by commas.
      repeated: settings of several values whose flag is repeated for each.
      note: beginning of all descriptions.

    Raises:
      TypeError: for a setting that has no description, or a type that no flag can have.
    """
    hints = typing.get_type_hints(declared, include_extras=True)
    known, described = _defaults(declared) | dict(defaults), descriptions(declared) | dict(helps)
    found = {}
    for setting in settings:
        name = settings[setting] if isinstance(settings, Mapping) else setting
        if setting not in described:
            raise TypeError(f"{declared.__qualname__}: its docstring does not describe {setting}.")
        multiple = "repeated" if setting in repeated else "list" if setting in lists else ""
        kind = _FlagType.of(setting, hints[setting], multiple)
        holder = kind.define(name, known.get(setting), note + _sentence(described[setting]))
        if setting not in known:
            flags.mark_flag_as_required(name)
        found[setting] = _SettingFlag(holder, kind)
    return FlagGroup(declared, found)


def descriptions(declared: Any) -> dict[str, str]:
    """Return the descriptions of settings, `name: text` below "Args:" or "Attributes:".

    Those of a base class count, and for a method also those of its class.
    """
    found = {}
    is_class = isinstance(declared, type)
    owner = None if is_class else getattr(declared, "__self__", None)
    for source in reversed(declared.__mro__) if is_class else (owner, declared):
        for section in SECTION.findall(inspect.cleandoc(source.__doc__ or "")):
            for names, text in ENTRY.findall(section):
                found |= dict.fromkeys(names.split(", "), text)
    return found


def _defaults(declared: Any) -> dict[str, Any]:
    if typing.is_typeddict(declared):
        return dict.fromkeys(declared.__annotations__)
    if dataclasses.is_dataclass(declared):
        missing = dataclasses.MISSING
        fields = dataclasses.fields(declared)
        return {f.name: f.default for f in fields if f.default is not missing}
    parameters = inspect.signature(declared).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _sentence(text: str) -> str:
    """Return a description as a sentence, without shapes such as [b, E] and without backticks."""
    text = re.sub(r" \[[a-zA-Z](?:, [a-zA-Z])*\]", "", " ".join(text.split()))
    text = text.replace("`", "").removesuffix(".")
    return f"{text[0].upper()}{text[1:]}."


@dataclasses.dataclass(frozen=True)
class _FlagType:
    """Kinds of values that a flag takes.

    Attributes:
      scalar: bool, int, float or str, for one value; None where there must be several.
      element: int, float or str, the type of each of several values; None for one value.
      words: choices, beside numbers if there is a `scalar`.
      limits: range of a number.
      repeated: whether several values come from repeated flags, not from commas.
    """

    scalar: type | None = None
    element: type | None = None
    words: tuple[str, ...] = ()
    limits: Interval = dataclasses.field(default_factory=Interval)
    repeated: bool = False

    @classmethod
    def of(cls, setting: str, type_: Any, multiple: str) -> _FlagType:
        scalar, element, words, limits = None, None, (), Interval()
        for member in members(type_):
            if isinstance(member, type(Annotated[int, 0])):
                member, limits = typing.get_args(member)[:2]
            origin, arguments = typing.get_origin(member), typing.get_args(member)
            if member in (bool, int, float, str):
                scalar = scalar or member
            elif origin is Literal:
                words = arguments
            elif origin in (Sequence, tuple, list) and arguments[0] in (int, float, str):
                element = arguments[0]
        if multiple and element is None or not (scalar or element or words):
            raise TypeError(f"{setting}: there is no flag for {type_}.")
        if not multiple and (scalar or words):
            element = None
        return cls(scalar, element, words, limits, multiple == "repeated")

    def define(self, name: str, default: Any, text: str) -> flags.FlagHolder:
        if self.element and self.repeated:
            make = {int: flags.DEFINE_multi_integer, float: flags.DEFINE_multi_float}
            make = make.get(self.element, flags.DEFINE_multi_string)
            return make(name, None if default is None else [*default], text)
        if self.element:
            values = default if isinstance(default, (list, tuple)) else [default]
            return flags.DEFINE_list(name, None if default is None else [*map(str, values)], text)
        if self.scalar is bool:
            return flags.DEFINE_bool(name, default, text)
        if self.words and not self.scalar:
            return flags.DEFINE_enum(name, default, self.words, text)
        if self.words or self.scalar is str:
            return flags.DEFINE_string(name, None if default is None else str(default), text)
        make = flags.DEFINE_integer if self.scalar is int else flags.DEFINE_float
        # The declaration checks open ends of a range.
        bounds: dict[str, Any] = dict(lower_bound=self.limits.ge, upper_bound=self.limits.le)
        return make(name, default, text, **bounds)

    def read(self, name: str, value: Any) -> Any:
        """Convert the value of a flag to the value of its setting."""
        if value is None or self.repeated:
            return value
        if self.element:
            values = value if self.element is str else launch.numbers(name, value, self.element)
            return values[0] if self.scalar and len(values) == 1 else values
        if self.words and self.scalar and value not in self.words:
            with contextlib.suppress(ValueError):
                return self.scalar(value)
        return value


class _SettingFlag(typing.NamedTuple):
    holder: flags.FlagHolder
    kind: _FlagType

    @property
    def value(self) -> Any:
        return self.kind.read(self.holder.name, self.holder.value)
