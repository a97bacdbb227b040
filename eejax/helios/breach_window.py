"""The last tokens of the model that serves, and how many of them left below their threshold."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class BreachWindow:
    """The last tokens of the model that serves.

    Attributes:
      size: maximum number of tokens.
      max_breaches: maximum of them that may leave below their threshold.
      recent: whether each token left below its threshold, oldest first.
    """

    size: int
    max_breaches: int
    recent: tuple[bool, ...] = ()


def clear(window: BreachWindow) -> BreachWindow:
    """Forget the tokens."""
    return dataclasses.replace(window, recent=())


def count_tokens(window: BreachWindow, below: Sequence[bool]) -> tuple[BreachWindow, float | None]:
    """Count tokens, in the order in which they came.

    Returns:
      The window, and the share of tokens below their threshold if there were too many, else None.
      Tokens after that point are not counted.
    """
    recent = collections.deque(window.recent, maxlen=window.size)
    total = sum(recent)
    for one in below:
        total += one - (len(recent) == window.size and recent[0])
        recent.append(one)
        if total > window.max_breaches:
            found = dataclasses.replace(window, recent=tuple(recent))
            return found, total / len(recent)
    return dataclasses.replace(window, recent=tuple(recent)), None
