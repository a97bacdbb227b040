"""Configuration of rotary position embeddings."""

from __future__ import annotations

import dataclasses

from eejax.common.errors import require, require_one_of
from eejax.models.config_checks import is_number, is_size, require_positive, require_switches

ROTARY_SCALINGS = ("none", "linear", "llama3", "yarn", "ntk")


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding (Su et al. 2021) and its usual context extensions.

    Attributes:
      fraction: part of each head that is rotated (GPT-NeoX, Phi).
      interleaved: whether neighbouring dimensions (2i, 2i+1) are paired, as in GPT-J and the Llama
        paper; otherwise dimension i is paired with i + h/2, as in Hugging Face's Llama.
      scaling: how `factor` extends the context: "linear" divides positions; "ntk" raises the base;
        "llama3" divides low frequencies, smoothly from `low_frequency` to `high_frequency`; "yarn"
        (Peng et al. 2023) interpolates between both by wavelength (`beta_fast`, `beta_slow`) and
        scales attention.
      original_context: the length that the model was first trained for; "llama3" and "yarn" only.
      local_theta: base of sliding-window layers (Gemma 3), which are never scaled; or `theta`.
    """

    theta: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: str = "none"
    factor: float = 1.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_context: int | None = None
    local_theta: float | None = None

    def __post_init__(self):
        name = "RotaryConfig"
        require_switches(self)
        require_positive(self, "theta", "fraction", "factor", "low_frequency", "beta_slow")
        require(self.fraction <= 1, f"{name}.fraction", self.fraction, "must be in (0, 1]")
        require_one_of(f"{name}.scaling", self.scaling, ROTARY_SCALINGS)
        require(self.factor >= 1, f"{name}.factor", self.factor, "must be at least 1")
        require(
            self.scaling != "none" or self.factor == 1,
            f"{name}.factor",
            self.factor,
            "is not used with scaling 'none'",
            "Set scaling, or leave factor at 1.",
        )
        for low, high in (("low_frequency", "high_frequency"), ("beta_slow", "beta_fast")):
            value, bound = getattr(self, high), getattr(self, low)
            require(
                is_number(value) and value > bound,
                f"{name}.{high}",
                value,
                f"must be a number above {low} ({bound})",
            )
        if self.scaling in ("llama3", "yarn"):
            require(
                is_size(self.original_context),
                f"{name}.original_context",
                self.original_context,
                f"scaling {self.scaling!r} needs the context length of the original training",
            )
        else:
            require(
                self.original_context is None,
                f"{name}.original_context",
                self.original_context,
                f"is not used with scaling {self.scaling!r}",
                "Leave it out.",
            )
        if self.scaling == "yarn":
            require(self.theta > 1, f"{name}.theta", self.theta, "must be above 1 for 'yarn'")
        if self.local_theta is not None:
            require_positive(self, "local_theta")
