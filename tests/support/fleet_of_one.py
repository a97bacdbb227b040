"""Fleets of one small model by several names, for tests of what becomes of models as they serve."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from adding import add

from eejax.helios.choices import ControllerOptions, ModelProfile
from eejax.helios.controller import Controller
from eejax.helios.fleet import Fleet
from eejax.helios.objectives import ServiceObjective
from eejax.helios.pool import FleetMember
from eejax.helios.repository import Repository
from eejax.inference import capacity
from eejax.inference.options import EngineOptions

NEW = 24
OPTIONS = EngineOptions(cap=4, drafts=0, buckets=(8,))  # one compiles faster than three


def profile(model, scale: float) -> ModelProfile:
    n, options = model.config.n_exits + 1, dataclasses.replace(OPTIONS, can_deepen=True)
    sizes = [capacity.weight_bytes(model.config, d) for d in range(1, n + 1)]
    whole = [capacity.engine_bytes(model.config, options, d, 96, 3) for d in range(1, n + 1)]
    state = tuple(w - s for w, s in zip(whole, sizes, strict=True))
    sizes = np.diff([0, *sizes])
    own = dict.fromkeys(("seconds", "prefill", "load", "rebuild", "energy"), (scale,) * n)
    return ModelProfile(
        bytes=tuple(sizes.tolist()), state=state, sure=(1.0,) * n, unsure=(0.9,) * n, **own
    )


def fleet_of(model, names: str = "m", rules=None, made=None, **own):
    """A fleet of the same model by several names; own: options of its controller, or `Fleet`'s in
    `made`."""
    profiles = {name: profile(model, 1.0) for name in names}
    controller = Controller(
        profiles,
        ServiceObjective.of("throughput"),
        Repository(),
        ControllerOptions(**own),
        clock=lambda: 0.0,
    )
    member = FleetMember(model.params, model.config, rules or {}, OPTIONS)
    making = dict(slots=3, context=96, steps=2) | (made or {})
    return Fleet(dict.fromkeys(names, member), controller, **making), controller


def evaluated(fleet, model) -> None:
    """Serves until models were evaluated."""
    for i in itertools.count():
        if not fleet.controller.state.plan:
            break
        add(fleet, model.tokenizer.encode(f"def f{i}").tolist(), NEW)
        fleet.run()
