"""Thresholds and what they cost: the quality-speed frontier, and thresholds with a guarantee."""

from eejax.calibration.frontier import (
    Point,
    Scores,
    SegmentCosts,
    at_threshold,
    emitting_exits,
    fastest,
    score,
    sweep,
)
from eejax.calibration.guarantee import (
    CANDIDATES,
    NEVER,
    Guarantee,
    calibrate,
    learn_then_test,
    text_risks,
    unit_risks,
    unlike,
)

__all__ = [
    "CANDIDATES",
    "NEVER",
    "Guarantee",
    "Point",
    "Scores",
    "SegmentCosts",
    "at_threshold",
    "calibrate",
    "emitting_exits",
    "fastest",
    "learn_then_test",
    "score",
    "sweep",
    "text_risks",
    "unit_risks",
    "unlike",
]
