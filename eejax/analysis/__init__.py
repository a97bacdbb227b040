"""Tables, plots and text baselines: numpy in, figures and numbers out."""

from eejax.analysis.baselines import Trigram, compression_bits_per_byte
from eejax.analysis.pairs import Ratio, interleave, median_ratio
from eejax.analysis.plots import exit_histogram, loss_curves, quality_against_speed, save
from eejax.analysis.tables import table

__all__ = [
    "Ratio",
    "Trigram",
    "compression_bits_per_byte",
    "exit_histogram",
    "interleave",
    "loss_curves",
    "median_ratio",
    "quality_against_speed",
    "save",
    "table",
]
