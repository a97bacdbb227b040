"""Thresholds and what they cost: the quality-speed frontier."""

from eejax.calibration.frontier import (
    Point,
    Scores,
    at_threshold,
    emitting_exits,
    fastest,
    score,
    sweep,
)

__all__ = ["Point", "Scores", "at_threshold", "emitting_exits", "fastest", "score", "sweep"]
