"""Training of exits on the stored states of a model that stays as it is."""

from eejax.tuning.own_text import write_own_text
from eejax.tuning.states import StoredStates
from eejax.tuning.training import ExitQuality, TuningOptions
from eejax.tuning.tuning import KINDS, ExitKind, Tuning, check_exits, tune_model

__all__ = [
    "KINDS",
    "ExitKind",
    "ExitQuality",
    "StoredStates",
    "Tuning",
    "TuningOptions",
    "check_exits",
    "tune_model",
    "write_own_text",
]
