"""Conditions under which a model was measured."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class MeasurementConditions(NamedTuple):
    """Conditions of a measurement. A change of any of them makes it stale.

    Attributes:
      model: digest of its parameters and configuration.
      device: kind of the accelerator, or of the processor with its number of cores.
      jax, eejax: versions.
      serving: the settings that matter, as JSON: slots, context, exits' rules, texts, quality; for
        evaluations, also what their quality is compared with (`judged_by`).
    """

    model: str
    device: str
    jax: str
    eejax: str
    serving: str

    @property
    def key(self) -> str:
        return json.dumps(self._asdict(), sort_keys=True)

    def judged_by(self, **settings: Any) -> MeasurementConditions:
        """Return the conditions of evaluations, whose quality depends on more settings than a
        profile's."""
        serving = json.loads(self.serving) | settings
        return self._replace(serving=json.dumps(serving, sort_keys=True))

    def differs(self, key: str) -> str:
        """Describe what changed since a measurement under the conditions of a key."""
        if not key:
            return "conditions, which were not stored"
        before, now = json.loads(key), self._asdict()
        parts = []
        for name, value in now.items():
            if value == before.get(name):
                continue
            if name == "serving":
                old, new = json.loads(before[name]), json.loads(value)
                parts += sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
            elif name == "model":
                parts.append("its parameters")
            else:
                parts.append(f"{name} ({before.get(name)}, now {value})")
        return ", ".join(parts)
