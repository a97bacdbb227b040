"""Numbers and lengths that arrays are padded to, so that few programs are compiled."""

from __future__ import annotations

MIN_LENGTH = 16  # the shortest texts are padded to this


def power_of_two(n: int) -> int:
    """Return the smallest power of two of at least n."""
    return 1 << (n - 1).bit_length()


def round_up(n: int, step: int) -> int:
    """Return the smallest multiple of `step` of at least n."""
    return -(-n // step) * step


def padded_lengths(context: int) -> list[int]:
    """Return the lengths that texts are padded to: powers of two up to `context`, and that."""
    lengths = [min(MIN_LENGTH, context)]
    while lengths[-1] < context:
        lengths.append(min(2 * lengths[-1], context))
    return lengths


def padded_length(n: int, context: int) -> int:
    """Return the smallest of `padded_lengths` for a text of n tokens, at most `context`."""
    return min(max(MIN_LENGTH, power_of_two(n)), context)
