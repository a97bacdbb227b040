"""Fields are checked by their annotations: types, ranges and choices."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Literal

import pytest
from annotated_types import Interval
from hypothesis import given
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.common.fields import (
    BelowOne,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_fields,
)


@dataclasses.dataclass(frozen=True)
class Inner:
    depth: int = 0


@dataclasses.dataclass(frozen=True)
class Sample:
    count: PositiveInt = 1
    share: BelowOne = 0.0
    rate: PositiveFloat = 1.0
    decay: NonNegativeFloat | None = None
    level: Annotated[int, Interval(ge=-2, le=3)] = 0
    least: Annotated[float, Interval(ge=0.5)] = 1.0
    kind: Literal["a", "b"] = "a"
    layers: Literal["even"] | tuple[PositiveInt, ...] = "even"
    text: str | tuple[str, ...] = ""
    on: bool = False
    inner: Inner = Inner()

    def __post_init__(self):
        check_fields(self)


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("count", 0, "must be in [1, 2^31)"),
        ("count", 2**31, "must be in [1, 2^31)"),
        ("count", True, "must be an integer"),
        ("count", 1.0, "must be an integer"),
        ("count", None, "must be an integer"),
        ("share", 1.0, "must be in [0, 1)"),
        ("share", math.nan, "must be in [0, 1)"),
        ("share", "0.5", "must be a number"),
        ("rate", 0, "must be above 0 and finite"),
        ("rate", math.inf, "must be above 0 and finite"),
        ("decay", -1.0, "must be at least 0 and finite, or None"),
        ("decay", "x", "must be a number or None"),
        ("level", -3, "must be in [-2, 3]"),
        ("least", 0.0, "must be at least 0.5"),
        ("kind", "c", "must be one of 'a', 'b'"),
        ("kind", 3, "must be one of 'a', 'b'"),
        ("layers", (1, 0), "must be in [1, 2^31) each"),
        ("layers", "odd", "must be 'even' or a tuple of integers"),
        ("layers", (1, "x"), "must be 'even' or a tuple of integers"),
        ("text", (1,), "must be a string or a tuple of strings"),
        ("on", 1, "must be True or False"),
        ("inner", 5, "must be Inner"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(field, value, allowed):
    with pytest.raises(ConfigError) as error:
        Sample(**{field: value})
    assert str(error.value) == f"Sample.{field} = {value!r}: {allowed}."


def test_lists_become_tuples():
    config = Sample(layers=[2, 3], text=["a"])
    assert config.layers == (2, 3) and config.text == ("a",)
    assert hash(config) == hash(Sample(layers=(2, 3), text=("a",)))


NUMBERS = st.integers(-5, 5) | st.floats() | st.booleans() | st.text(max_size=2) | st.none()


@given(NUMBERS, st.integers(-3, 3), st.integers(0, 4), st.booleans(), st.booleans())
def test_ranges_agree_with_comparisons(value, low, width, open_low, open_high):
    high = low + width
    limits = {"gt" if open_low else "ge": low, "lt" if open_high else "le": high}

    @dataclasses.dataclass
    class Ranged:
        value: float

    Ranged.__annotations__["value"] = Annotated[float, Interval(**limits)]
    is_number = type(value) in (int, float)
    above = is_number and (value > low if open_low else value >= low)
    below = is_number and (value < high if open_high else value <= high)
    if above and below:
        check_fields(Ranged(value))
        return
    with pytest.raises(ConfigError) as error:
        check_fields(Ranged(value))
    brackets = "[("[open_low], "])"[open_high]
    allowed = f"in {brackets[0]}{low}, {high}{brackets[1]}" if is_number else "a number"
    assert str(error.value) == f"Ranged.value = {value!r}: must be {allowed}."
