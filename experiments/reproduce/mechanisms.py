"""Propositions, equations and mechanisms of the papers, each on a model trained in seconds.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 \\
        eejax reproduce mechanisms --json

It checks what needs no scale: gradients on pipeline stages beside autodiff of the whole loss
(EE-LLM, Proposition 3.1), filled iterations over draws of text (Claim C.1), times and memory of
schedules beside the closed forms (Appendix A.3, C.2), tokens of all inference methods beside each
other (Section 4), routers and kernels beside float64 (TIDE, Section 3), and reassessments (HELIOS,
Section 3.4.2). It needs four devices, which may be fake ones as above; kernels run in Triton's
interpreter. It takes about 8 minutes on 2 cores.

With --json the last line is one JSON object; `eejax reproduce all` puts its `findings` on the page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from absl import flags

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from eejax.common.errors import require
from eejax.experiments import launch
from eejax.experiments.reproduce.claims import Finding

_PARTS = flags.DEFINE_list("parts", None, "Only these; all by default.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")


def main() -> None:
    import jax

    from eejax.common.errors import require_one_of
    from eejax.experiments.reproduce import (
        mechanisms_helios,
        mechanisms_inference,
        mechanisms_routers,
        mechanisms_schedules,
        mechanisms_training,
    )

    parts = {
        "schedules": mechanisms_schedules,
        "training": mechanisms_training,
        "inference": mechanisms_inference,
        "routers": mechanisms_routers,
        "helios": mechanisms_helios,
    }
    for name in _PARTS.value or ():
        require_one_of("--parts", name, tuple(parts))
    devices = jax.device_count()
    fix = "Set XLA_FLAGS=--xla_force_host_platform_device_count=4."
    require(devices >= 4, "devices", devices, "must be at least 4", fix)
    found: list[Finding] = []
    for name in _PARTS.value or parts:
        launch.say(f"{name} ...")
        found += parts[name].findings()
    print(show(found), flush=True)
    if _JSON.value:
        print(json.dumps({"findings": [one.to_dict() for one in found]}))


def show(found: Sequence[Finding]) -> str:
    from eejax import analysis

    cells = [[one.paper, one.place, one.ours, str(one.verdict)] for one in found]
    return analysis.table(["paper", "place", "found", "verdict"], cells)


if __name__ == "__main__":
    launch.run(main)
