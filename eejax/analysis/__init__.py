"""Tables, plots and text baselines: numpy in, figures and numbers out."""

from eejax.analysis.baselines import Trigram, compression_bits_per_byte
from eejax.analysis.plots import exit_histogram, loss_curves, quality_against_speed, save
from eejax.analysis.tables import table

__all__ = [
    "Trigram",
    "compression_bits_per_byte",
    "exit_histogram",
    "loss_curves",
    "quality_against_speed",
    "save",
    "table",
]
