"""Flags are derived from declarations: name, type, default, range, choices and description."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypedDict

import numpy as np
import pytest
from absl import flags
from annotated_types import Interval
from hypothesis import given
from hypothesis import strategies as st

from eejax.common.errors import ConfigError, require
from eejax.experiments import field_flags


@dataclasses.dataclass(frozen=True)
class Base:
    """A base.

    Attributes:
      on: turns `it` on.
    """

    on: bool = True


@dataclasses.dataclass(frozen=True)
class Options(Base):
    """Options.

    Attributes:
      path: a file.
      count, most: numbers of things
        that there are.
      share: a share.
      kind: one of two.
      interval: prompts between two, or "auto".
      layers: of stages [b, E].
      names: names.
      ratio: one, or one each.
      run: a function.
    """

    path: str | os.PathLike = "here"
    count: Annotated[int, Interval(ge=1, le=9)] = 2
    most: int | None = None
    share: float | None = 0.5
    kind: Literal["a", "b"] | None = None
    interval: int | Literal["auto"] = 150
    layers: tuple[int, ...] = ()
    names: Sequence[str] = ()
    ratio: float | Sequence[float] | np.ndarray = 1.0
    run: Callable[[], int] | None = None
    hidden: int = 0

    def __post_init__(self):
        require(self.count != 3, "count", self.count, "must not be 3")


class Rules(TypedDict, total=False):
    """Rules.

    Attributes:
      gate: a gate, by default first.
      decay: a rate.
    """

    gate: str | Sequence[str]
    decay: float | None


class Maker:
    """A class that is made.

    Attributes:
      seed: of the draws.
    """

    @classmethod
    def make(cls, width: int, seed: int | Sequence[int] = 0, **more):
        """Make one.

        Args:
          width: of it all.
        """
        return width, seed, more


@pytest.fixture
def define():
    """`field_flags.define`, whose flags end with the test."""
    before = set(flags.FLAGS)
    yield field_flags.define
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()


def parse(*arguments: str) -> None:
    flags.FLAGS(["launcher", *arguments])


FIELDS = "on path count most share kind interval layers names ratio".split()


def test_defaults_are_those_of_the_declaration(define):
    group = define(Options, FIELDS)
    parse()
    declared = {f.name: f.default for f in dataclasses.fields(Options) if f.name in FIELDS}
    assert group.values() == declared | {"layers": [], "names": []}
    assert group.on_command_line() == []
    assert group(layers=(), names=()) == Options()


@pytest.mark.parametrize(
    "field, argument, value",
    [
        ("on", "--noon", False),
        ("path", "--path=there", "there"),
        ("count", "--count=9", 9),
        ("most", "--most=4", 4),
        ("share", "--share=1e-3", 1e-3),
        ("kind", "--kind=b", "b"),
        ("interval", "--interval=auto", "auto"),
        ("interval", "--interval=12", 12),
        ("interval", "--interval=never", "never"),  # for the declaration to refuse
        ("layers", "--layers=7,5", [7, 5]),
        ("layers", "--layers=", []),
        ("names", "--names=a,b", ["a", "b"]),
        ("ratio", "--ratio=2", 2.0),
    ],
)
def test_values_are_read(define, field, argument, value):
    group = define(Options, FIELDS)
    parse(argument)
    assert group[field] == value and type(group[field]) is type(value)
    assert group.on_command_line() == [field]


@pytest.mark.parametrize(
    "argument",
    ["--count=0", "--count=10", "--count=x", "--count=1.5", "--share=x", "--kind=c", "--on=2"],
)
def test_values_of_another_type_or_range_are_refused(define, argument):
    define(Options, FIELDS)
    with pytest.raises(flags.IllegalFlagValueError, match=argument):
        parse(argument)


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=4), st.booleans())
def test_one_number_of_a_list_stands_for_itself(numbers, both):
    kind = field_flags._FlagType(float if both else None, float)
    texts = list(map(str, numbers))
    expected = numbers[0] if both and len(numbers) == 1 else numbers
    assert kind.read("x", texts) == expected


@given(st.integers(), st.text(max_size=5))
def test_a_number_or_a_word(number, text):
    kind = field_flags._FlagType(int, words=("auto",))
    assert kind.read("x", str(number)) == number
    try:
        expected = int(text)
    except ValueError:
        expected = text
    assert kind.read("x", text) == expected


def test_lists_that_are_no_numbers_name_the_flag(define):
    group = define(Options, {"layers": "stage_layers"})
    parse("--stage_layers=2,x")
    with pytest.raises(ConfigError, match="^--stage_layers = '2,x': must be numbers"):
        group.values()


def test_errors_of_the_declaration_name_the_flag(define):
    group = define(Options, {"count": "number"})
    parse("--number=3")
    with pytest.raises(ConfigError, match="^--number = 3: must not be 3"):
        group()


def test_lists_and_repeated_flags_are_chosen(define):
    group = define(Options, ["ratio", "layers"], lists=["ratio"], repeated=["layers"])
    parse("--ratio=0.5,2", "--layers=3", "--layers=4")
    assert group.values() == {"ratio": [0.5, 2.0], "layers": [3, 4]}


def test_settings_of_a_typed_dict_are_left_out_unless_given(define):
    group = define(Rules, ["gate", "decay"])
    parse("--decay=0")
    assert group.values() == {"decay": 0.0} == group()


def test_a_setting_without_a_default_is_required(define):
    group = define(Maker.make, ["width", "seed"], defaults={"seed": 4})
    with pytest.raises(flags.IllegalFlagValueError, match="--width must have a value"):
        parse()
    parse("--width=3")
    assert group(extra=1) == (3, 4, {"extra": 1})


def test_descriptions(define):
    define(Options, FIELDS, helps={"share": "Another share"}, note="If so: ")
    define(Maker.make, ["width", "seed"])
    helps = {name: flags.FLAGS[name].help for name in (*FIELDS, "width", "seed")}
    assert helps["on"] == "If so: Turns it on."
    assert helps["count"] == helps["most"] == "If so: Numbers of things that there are."
    assert helps["share"] == "If so: Another share."
    assert helps["kind"] == "<a|b>: If so: One of two."
    assert helps["layers"] == "If so: Of stages."
    assert (helps["width"], helps["seed"]) == ("Of it all.", "Of the draws.")


def test_what_no_flag_can_be_is_refused(define):
    with pytest.raises(TypeError, match="Options: its docstring does not describe hidden"):
        define(Options, ["hidden"])
    with pytest.raises(TypeError, match="run: there is no flag for"):
        define(Options, ["run"])
    with pytest.raises(TypeError, match="count: there is no flag for"):
        define(Options, ["count"], lists=["count"])
