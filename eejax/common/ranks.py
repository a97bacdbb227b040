"""Percentiles of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence


def nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least a share of the values does not exceed.

    Args:
      values: at least one value, in any order.
      share: share in [0, 1], such as 0.99 for the 99th percentile.
    """
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
