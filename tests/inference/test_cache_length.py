"""Lengths of caches that a `Generator` compiles programs for."""

from hypothesis import given
from hypothesis import strategies as st

from eejax.inference import EngineOptions
from eejax.inference.generate import cache_length


@given(st.integers(1, 5000), st.integers(1, 64))
def test_caches_hold_their_requests_and_little_more(tokens, cap):
    options = EngineOptions(cap=cap)
    need = tokens + max(cap, 4)
    length, grown = (cache_length(tokens, 5000, options, growing) for growing in (False, True))
    assert need <= length < need + max(128, need / 4) and need <= grown <= max(512, 2 * need)
    for growing in (False, True):  # no longer than a whole context needs
        assert need <= cache_length(tokens, tokens, options, growing) < need + 16


def test_caches_have_few_lengths():
    options = EngineOptions()
    assert {cache_length(n, 5000, options) for n in range(1009, 2033)} == {1280, 1536, 1792, 2048}
    assert {cache_length(n, 5000, options, growing=True) for n in range(1009, 2033)} == {2048}
