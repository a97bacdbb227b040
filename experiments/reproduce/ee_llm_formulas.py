"""EE-LLM's Appendix A.3 as the paper writes it, to compare our accounts with.

Stages i count from 1 to P; `n[i - 1]` is N_i, the number of early exits on Stage i. The parts are
named as in Table 2: IN, BB, EE and FE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from eejax.experiments.stage_memory import Size
from eejax.pipeline.simulate import PassTime


def time_bound(p: int, m: int, n: Sequence[int], of: Mapping[str, PassTime]) -> float:
    """Return the upper bound on the time of an iteration of M microbatches (A.3.1, step 3)."""
    both = {o: work.forward + work.backward for o, work in of.items()}
    parts_1_and_3 = both["IN"] + (p - 1) * both["BB"]
    parts_1_and_3 += sum(n[i - 1] * both["EE"] for i in range(1, p))
    return parts_1_and_3 + m * max(
        both["BB"] + (i == 1) * both["IN"] + (i == p) * both["FE"] + n[i - 1] * both["EE"]
        for i in range(1, p + 1)
    )


def stage_memory(p: int, n: Sequence[int], of: Mapping[str, Size]) -> np.ndarray:
    """Return the total memory [P] of the stages (Eq. 4 to 6).

    `Size.state` is alpha m_o, `Size.kept` m_o^+.
    """
    out = np.zeros(p)
    for i in range(1, p + 1):
        parameters = (
            of["BB"].state
            + (i == 1) * of["IN"].state
            + (i == p) * of["FE"].state
            + n[i - 1] * of["EE"].state
        )
        activations = (
            (p + 1 - i) * of["BB"].kept
            + (i == 1) * p * of["IN"].kept
            + (i == p) * of["FE"].kept
            + n[i - 1] * of["EE"].kept
        )
        out[i - 1] = parameters + activations
    return out


def max_inserted(p: int, f: float, b: float) -> int:
    """Return K, the microbatches that can be inserted into Part 1 or Part 2 (C.2.1)."""
    return math.floor((p - 1) / (f / b + 1))
