"""Routers and thresholds: training, the quality-speed frontier, thresholds with a guarantee."""

from eejax.calibration.calibration import Calibration, calibrate_model, with_exits
from eejax.calibration.drafting import drafting_exit
from eejax.calibration.frontier import (
    ExitScores,
    FrontierPoint,
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
from eejax.calibration.routers import Quality, RouterOptions
from eejax.calibration.thresholds import thresholds_for

__all__ = [
    "CANDIDATES",
    "NEVER",
    "Calibration",
    "Guarantee",
    "FrontierPoint",
    "Quality",
    "RouterOptions",
    "ExitScores",
    "SegmentCosts",
    "at_threshold",
    "calibrate",
    "calibrate_model",
    "drafting_exit",
    "emitting_exits",
    "fastest",
    "learn_then_test",
    "score",
    "sweep",
    "text_risks",
    "thresholds_for",
    "unit_risks",
    "unlike",
    "with_exits",
]
