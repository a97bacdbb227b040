"""The last tokens of the model that serves, and how many of them left below their threshold."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class BreachWindow:
    """The last `size` tokens at most, oldest first: whether each left below its threshold. More
    than `most` such tokens are too many."""

    size: int
    most: int
    recent: tuple[bool, ...] = ()


def clear(window: BreachWindow) -> BreachWindow:
    """Forget the tokens."""
    return dataclasses.replace(window, recent=())


def count_tokens(window: BreachWindow, below: Sequence[bool]) -> tuple[BreachWindow, float | None]:
    """Count tokens, in the order in which they came.

    Returns:
      The window, and the share of tokens below their threshold once those were too many; None
      where they are not. Tokens behind that are not counted.
    """
    recent = collections.deque(window.recent, maxlen=window.size)
    for one in below:
        recent.append(one)
        if sum(recent) > window.most:
            found = dataclasses.replace(window, recent=tuple(recent))
            return found, sum(recent) / len(recent)
    return dataclasses.replace(window, recent=tuple(recent)), None
