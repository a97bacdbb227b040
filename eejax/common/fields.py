"""Checks of dataclass fields by their annotations.

An annotation says everything that is allowed of one field: its type, a range as `Annotated[int,
Interval(ge=1)]`, choices as `Literal["a", "b"]`. The class checks conditions on several fields.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Interval

from eejax.common.errors import require

LIMIT = 2**31  # integers of devices are below it
PositiveInt = Annotated[int, Interval(ge=1, lt=LIMIT)]
NonNegativeInt = Annotated[int, Interval(ge=0, lt=LIMIT)]
PositiveFloat = Annotated[float, Interval(gt=0, lt=math.inf)]
NonNegativeFloat = Annotated[float, Interval(ge=0, lt=math.inf)]
UnitFloat = Annotated[float, Interval(ge=0, le=1)]
"""A number in [0, 1]."""
BelowOne = Annotated[float, Interval(ge=0, lt=1)]
"""A number in [0, 1)."""


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the annotations of a dataclass by field, ranges included."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_fields(config: Any) -> None:
    """Raise `ConfigError` unless every field of a dataclass is what its annotation allows.

    A list becomes a tuple first where the field is a tuple, so that the config can be hashed.
    """
    for name, type_ in field_types(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, list) and any(_origin(t) is tuple for t in members(type_)):
            object.__setattr__(config, name, value := tuple(value))
        check_value(f"{type(config).__name__}.{name}", value, type_)


def check_value(field: str, value: Any, type_: Any) -> None:
    """Raise `ConfigError`, which names the field, unless the annotation allows the value."""
    fitting = [t for t in members(type_) if is_a(value, t)]
    require(bool(fitting), field, value, f"must be {type_name(type_)}")
    wrong = list(filter(None, (_outside(value, t) for t in fitting)))
    optional = ", or None" if types.NoneType in members(type_) else ""
    require(len(wrong) < len(fitting), field, value, f"must be {' or '.join(wrong)}{optional}")


def _outside(value: Any, type_: Any) -> str:
    """Return, in words, the range of an annotation that a value lies outside of, else ''."""
    if _origin(type_) is tuple:
        element = typing.get_args(type_)[0]
        wrong = filter(None, (_outside(v, element) for v in value))
        return next((f"{limits} each" for limits in wrong), "")
    limits = next((a for a in getattr(type_, "__metadata__", ()) if isinstance(a, Interval)), None)
    return "" if limits is None or _within(value, limits) else _bounds(limits)


def is_a(value: Any, type_: Any) -> bool:
    """Return whether a value has an annotation's type, or is among its choices.

    An int counts as a float, a bool is not a number, and a mapping may stand for a dataclass.
    """
    if len(members(type_)) > 1:
        return any(is_a(value, t) for t in members(type_))
    origin, arguments = _origin(type_), typing.get_args(type_)
    if origin is Annotated:
        return is_a(value, arguments[0])
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(is_a(v, arguments[0]) for v in value)
    if origin is Mapping:
        key, element = arguments
        return isinstance(value, Mapping) and all(
            is_a(k, key) and is_a(v, element) for k, v in value.items()
        )
    if isinstance(type_, type) and dataclasses.is_dataclass(type_):
        return isinstance(value, (Mapping, type_))
    if type_ in (int, float):
        return isinstance(value, (int, type_)) and not isinstance(value, bool)
    return isinstance(value, type_)


def members(type_: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    is_union = _origin(type_) in (types.UnionType, typing.Union)
    return typing.get_args(type_) if is_union else (type_,)


def type_name(type_: Any) -> str:
    """Return an annotation in words, without ranges."""
    if len(members(type_)) > 1:
        return " or ".join(map(type_name, members(type_)))
    origin, arguments = _origin(type_), typing.get_args(type_)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        choices = ", ".join(map(repr, arguments))
        return choices if len(arguments) == 1 else f"one of {choices}"
    if origin is tuple:
        return f"a tuple of {_plural(arguments[0])}"
    if origin is Mapping:
        return f"a mapping of {_plural(arguments[0])} to {_plural(arguments[1])}"
    return _NAMES.get(type_) or getattr(type_, "__name__", str(type_))


_NAMES = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    types.NoneType: "None",
}


def _plural(type_: Any) -> str:
    name = type_name(type_)
    return f"{name.split(' ', 1)[1]}s" if name.startswith(("a ", "an ")) else name


def _origin(type_: Any) -> Any:
    return Annotated if hasattr(type_, "__metadata__") else typing.get_origin(type_)


def _within(value: Any, limits: Interval) -> bool:
    """Return whether a number lies in an interval; NaN lies in none."""
    return (
        (limits.ge is None or value >= limits.ge)
        and (limits.gt is None or value > limits.gt)
        and (limits.le is None or value <= limits.le)
        and (limits.lt is None or value < limits.lt)
    )


def _bounds(limits: Interval) -> str:
    """Return an interval in words, as "in [0, 1)", "at least 1" or "above 0 and finite"."""
    low = limits.gt if limits.ge is None else limits.ge
    high = limits.lt if limits.le is None else limits.le
    if low is not None and high not in (None, math.inf):
        left, right = "(" if limits.ge is None else "[", ")" if limits.le is None else "]"
        return f"in {left}{_number(low)}, {_number(high)}{right}"
    words = []
    if low is not None:
        words.append(f"{'above' if limits.ge is None else 'at least'} {_number(low)}")
    if high is not None:
        bound = f"{'below' if limits.le is None else 'at most'} {_number(high)}"
        words.append("finite" if high == math.inf else bound)
    return " and ".join(words)


def _number(value: Any) -> str:
    power = math.log2(value) if value > 0 else 0.0
    return f"2^{power:.0f}" if power >= 10 and power.is_integer() else f"{value:g}"
