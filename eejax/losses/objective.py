"""The cost of a token at an exit: cross entropy, and the changes that recipes make to it."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from annotated_types import Interval

from eejax.common.fields import NonNegativeFloat, PositiveFloat, UnitFloat, check_fields


@dataclasses.dataclass(frozen=True)
class LossObjective:
    """The cost of one token at one exit.

    With p the exit's distribution, q the final exit's (held constant), y the label, Z the
    normaliser of the exit's softmax and p_T, q_T the distributions at temperature T, it is

        c [(1 - distillation) (-log p(y)) + distillation T^2 KL(q_T || p_T)] + z_loss log(Z)^2

    at an early exit. `distillation` lets exits learn from the final exit (Hinton et al. 2015; the
    factor T^2 keeps the gradient's size), `distillation_temperature` is T. c is 1, or with
    `confidence_weighted` the exit's highest probability, held constant: an exit spends its
    capacity on the tokens that will leave there (EE-Tuning, Pan et al. 2024). The final exit has
    c = 1 and no distillation. `z_loss` (PaLM: 1e-4) keeps log Z near 0, at every exit.

    `exit_tokens`: the share of each sample's tokens at which early exits have a loss, drawn anew
    at every step and scaled up by its inverse, so that losses and gradients keep their
    expectations. With a large vocabulary the exits' heads are most of a step.
    """

    z_loss: NonNegativeFloat = 0.0
    confidence_weighted: bool = False
    distillation: UnitFloat = 0.0
    distillation_temperature: PositiveFloat = 1.0
    exit_tokens: Annotated[float, Interval(gt=0, le=1)] = 1.0

    def __post_init__(self):
        check_fields(self)


CROSS_ENTROPY = LossObjective()
