"""Lengths that arrays are padded to."""

from __future__ import annotations

import pytest

from eejax.common.lengths import padded_length, padded_lengths, power_of_two


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 32, 100])
def test_a_text_is_padded_to_the_smallest_length_that_holds_it(context):
    lengths = padded_lengths(context)
    assert lengths == sorted({*lengths}) and lengths[-1] == context
    for n in range(1, context + 1):
        assert padded_length(n, context) == next(length for length in lengths if length >= n)


def test_powers_of_two():
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
