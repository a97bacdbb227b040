"""Nested dicts that are cut in two and made one again."""

from __future__ import annotations

from eejax.common.trees import join, split

TREE = {
    "embed": {"tokens": 1},
    "exits": {"exit_3": {"norm": {"scale": 2}, "head": None}, "exit_6": {}},
    "final": {"head": [3, {"a": 4}]},
}


def test_leaves_are_chosen_by_their_names_and_dicts_without_any_are_left_out():
    names = []

    def chosen(name):
        names.append(name)
        return name.startswith("exits/") and name.endswith("scale")

    first, rest = split(TREE, chosen)
    assert names == ["embed/tokens", "exits/exit_3/norm/scale", "exits/exit_3/head", "final/head"]
    assert first == {"exits": {"exit_3": {"norm": {"scale": 2}}}}
    assert rest == {
        "embed": {"tokens": 1},
        "exits": {"exit_3": {"head": None}},
        "final": {"head": [3, {"a": 4}]},
    }
    assert split({}, chosen) == ({}, {})


def test_parts_that_are_joined_are_the_whole():
    first, rest = split(TREE, lambda name: len(name) % 2 == 0)
    whole = {**TREE, "exits": {"exit_3": TREE["exits"]["exit_3"]}}
    assert join(first, rest) == join(rest, first) == whole
    assert join({"a": 1}, {"a": 2}) == {"a": 2}
