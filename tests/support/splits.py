"""Documents of packed text."""

from __future__ import annotations

import numpy as np

from eejax.data.packing import Split


def document(split: Split, i: int) -> np.ndarray:
    """The tokens of the split's i-th document, its end token last."""
    return split.read(int(split.starts[i]), int(split.starts[i + 1] - split.starts[i]))
