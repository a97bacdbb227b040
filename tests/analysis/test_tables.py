"""Markdown shows text as it is; settings are compared leaf by leaf."""

import hypothesis
import pytest
from hypothesis import strategies as st

from eejax.analysis import differences, markdown_table


def test_markdown():
    text = markdown_table(["run", "a|b"], [["_x_ of run_1", "[1]"], ["two\nlines", "$5 <b>"]])
    assert text.splitlines() == [
        "| run | a\\|b |",
        "| --- | ---: |",
        "| \\_x\\_ of run_1 | \\[1\\] |",
        "| two lines | \\$5 \\<b> |",
    ]
    with pytest.raises(ValueError):
        markdown_table(["a", "b"], [["1"]])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text("ab", max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=6,
)
SETTINGS = st.dictionaries(st.sampled_from("pqr"), JSON, max_size=3)


def flat(value, path=()):
    """Every leaf with its path; an empty mapping is one."""
    if isinstance(value, dict) and (value or not path):
        return {p: v for k, x in value.items() for p, v in flat(x, (*path, k)).items()}
    return {path: value}


@hypothesis.given(st.lists(SETTINGS, min_size=1, max_size=4))
def test_differences_are_the_leaves_that_are_not_the_same(many):
    leaves = [flat(s) for s in many]
    want = {}
    for path in {p for one in leaves for p in one}:
        have = {str(i): one[path] for i, one in enumerate(leaves) if path in one}
        # repr tells 1 from True.
        if len(have) < len(many) or len({repr(v) for v in have.values()}) > 1:
            want[".".join(path)] = have
    assert differences({str(i): s for i, s in enumerate(many)}) == want


def test_of_lists_of_mappings_what_tells_their_elements_apart_is_given():
    def exit(boundary, head="tied"):
        return {"boundary": boundary, "norm": True, "head": head}

    found = differences(
        {
            "a": {"exits": [exit(3)], "weights": [1.0], "steps": 1},
            "b": {"exits": [exit(3), exit(8)], "weights": [1, 2], "steps": 1.0},
            "c": {"exits": [], "weights": [1]},
        }
    )
    assert found == {
        "exits": {"a": [{"boundary": 3}], "b": [{"boundary": 3}, {"boundary": 8}], "c": []},
        "weights": {"a": [1.0], "b": [1, 2], "c": [1]},
        "steps": {"a": 1, "b": 1.0},
    }
    # An element that is alone is given whole: nothing tells it apart.
    assert differences({"a": {"exits": []}, "b": {"exits": [exit(3)]}}) == {
        "exits": {"a": [], "b": [exit(3)]}
    }
