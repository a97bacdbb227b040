"""The last tokens of the model that serves, and how many of them left below their threshold."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class BreachWindow:
    """The last tokens of the model that serves.

    Attributes:
      size: tokens that are kept at most.
      most: tokens below their threshold that are allowed among them.
      recent: whether each token left below its threshold, oldest first.
    """

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
    total = sum(recent)
    for one in below:
        total += one - (len(recent) == window.size and recent[0])
        recent.append(one)
        if total > window.most:
            found = dataclasses.replace(window, recent=tuple(recent))
            return found, total / len(recent)
    return dataclasses.replace(window, recent=tuple(recent)), None
