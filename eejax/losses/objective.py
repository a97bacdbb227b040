"""The cost of a token at an exit: cross entropy, and the changes that recipes make to it."""

from __future__ import annotations

import dataclasses
import math

from eejax.common.errors import require


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

    z_loss: float = 0.0
    confidence_weighted: bool = False
    distillation: float = 0.0
    distillation_temperature: float = 1.0
    exit_tokens: float = 1.0

    def __post_init__(self):
        def number(field: str, ok, allowed: str) -> None:
            value = getattr(self, field)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            require(is_number and ok(value), f"LossObjective.{field}", value, allowed)

        number("z_loss", lambda x: 0 <= x < math.inf, "must be a finite number of at least 0")
        number("distillation", lambda x: 0 <= x <= 1, "must be in [0, 1]")
        number(
            "distillation_temperature", lambda x: 0 < x < math.inf, "must be positive and finite"
        )
        number("exit_tokens", lambda x: 0 < x <= 1, "must be above 0 and at most 1")
        require(
            isinstance(self.confidence_weighted, bool),
            "LossObjective.confidence_weighted",
            self.confidence_weighted,
            "must be True or False",
        )


CROSS_ENTROPY = LossObjective()
