"""Tables, plots and text baselines: numpy in, figures and numbers out."""

from eejax.analysis.baselines import Trigram, compression_bits_per_byte
from eejax.analysis.depths import convergence_by_depth
from eejax.analysis.pairs import Ratio, interleave, median_ratio, total_ratio
from eejax.analysis.panels import Panel, compare
from eejax.analysis.plots import (
    exit_histogram,
    exit_label,
    frontiers,
    loss_curves,
    quality_against_speed,
    save,
)
from eejax.analysis.tables import differences, markdown_table
from eejax.common.tables import table

__all__ = [
    "Panel",
    "Ratio",
    "Trigram",
    "compare",
    "compression_bits_per_byte",
    "convergence_by_depth",
    "differences",
    "exit_histogram",
    "exit_label",
    "frontiers",
    "interleave",
    "loss_curves",
    "markdown_table",
    "median_ratio",
    "quality_against_speed",
    "save",
    "table",
    "total_ratio",
]
