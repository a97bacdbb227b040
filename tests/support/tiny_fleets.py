"""A fleet of random models for tests, made in a process of its own."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from controlled import controller_with

from eejax.data.tokenizers import ByteTokenizer
from eejax.helios import build
from eejax.helios.choices import ControllerOptions
from eejax.helios.pool import FleetMember
from eejax.inference.options import EngineOptions
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.serving import fleets
from eejax.serving.messages import BuiltEngine

# As few programs as can be, as all of them are compiled.
FLEET = {
    name: ModelConfig(
        vocab_size=257,
        n_layers=n,
        d_model=16,
        n_heads=2,
        context_length=context,
        exits=(ExitConfig(n - 1),),
    )
    for name, n, context in (("small", 2, 48), ("large", 3, 32))
}


# Assesses all models again and again, whether or not that could change anything.
Restless = controller_with(is_settled=lambda state: False, may_be_better=lambda state, model: True)


@dataclasses.dataclass(frozen=True)
class TinyFleet:
    """Builds a fleet of random models, which is never content for long. alike: two models of the
    same weights, all of whose tokens leave by the first exit, so that a text is the same wherever
    it goes on."""

    alike: bool = False
    slots: int = 2

    def members(self) -> dict[str, FleetMember]:
        configs = dict.fromkeys(FLEET, FLEET["large"]) if self.alike else FLEET
        keys = (0, 0) if self.alike else (0, 1)
        # Most of what random models say is surer than this, and not by far.
        rules = dict(threshold=0.0, prefill_exit=True) if self.alike else dict(threshold=0.2)
        options = EngineOptions(cap=4, buckets=(4,), chunk=16, logits_params=True)
        return {
            name: FleetMember(weights(config, key), config, rules, options)
            for (name, config), key in zip(configs.items(), keys, strict=True)
        }

    def __call__(self) -> BuiltEngine:
        build.Controller = Restless  # in the engine's own process
        options = ControllerOptions(prompts=2, interval=6, window=20, breaches=6, tokens=16)
        members, tokenizer = self.members(), ByteTokenizer()
        config = build.FleetConfig(options=options)
        fleet = build.build_fleet(members, tokenizer, config, slots=self.slots)
        return fleets.served_fleet(members, tokenizer, None, fleet)


def weights(config: ModelConfig, key: int):
    """Random ones, larger than those that training begins with: nearly tied logits are rare."""

    def large(a):
        return np.float32(6) * np.asarray(a)

    return jax.tree.map(large, params.init(config, jax.random.key(key)))
