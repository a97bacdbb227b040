"""A running part of a stage, whose figures are written as soon as they are known."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

METERED = 3.0
"""Seconds over which energy is counted: a card's counter may advance ten times a second."""


@dataclasses.dataclass
class StageCheck:
    """A running part of a stage.

    Attributes:
      part: the part's name.
      out: the folder of results and logs.
      name: name of the part's own files there.
      small: whether to use tiny models.
      card: a name in `experiments.aot.CARDS`, to compile for.
      deadline: the time after which no measurement begins, by `time.monotonic`.
      figures: results by name.
      errors: errors by the measurement's name.
      not_measured: measurements for which no time was left.
    """

    part: str
    out: pathlib.Path
    name: str
    small: bool
    card: str
    deadline: float
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    not_measured: list[str] = dataclasses.field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def measure(self, name: str, run: Callable[[], Any]) -> Any:
        """Run a measurement unless time is up; keep its result, or its error.

        Returns:
          its result; None if it failed or was left out.
        """
        if self.seconds_left <= 0:
            self.not_measured.append(name)
            self.write()
            return None
        begin = time.monotonic()
        print(f"-- {name}", file=sys.stderr, flush=True)
        try:
            found = run()
        except Exception as error:
            traceback.print_exc()
            self.errors[name] = "".join(traceback.format_exception(error, limit=-4))[-1500:]
            found = None
        else:
            self.figures[name] = found
        print(f"-- {name}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
        self.write()
        return found

    def write(self) -> None:
        """Write the results so far, atomically."""
        known = dict(figures=self.figures, errors=self.errors, not_measured=self.not_measured)
        text = json.dumps({k: v for k, v in known.items() if v}, default=_plain)
        path = self.out / f"{self.name}.partial.json"
        path.with_suffix(".tmp").write_text(text)
        os.replace(path.with_suffix(".tmp"), path)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        return vars(value)
    return str(value)


def on_gpu() -> bool:
    """Return whether JAX computes on a GPU."""
    import jax

    return jax.default_backend() == "gpu"


def missing_module(*modules: str) -> str | None:
    """Return a sentence naming the first module that cannot be imported, None if all can."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name}: cannot be imported ({error})"
    return None


def call_forms() -> list[str]:
    """Return the forms in which kernels can be called here: "ffi", and maybe "legacy"."""
    from eejax.kernels import triton_call

    return ["ffi", "legacy"] if triton_call.knows_legacy() else ["ffi"]


def median_seconds(run: Callable[[], Any], repeats: int, before: Callable[[], Any] = lambda: None):
    """Return the median seconds of a run, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        before()
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds[1:]))


def mean_joules(run: Callable[[], Any], before: Callable[[], Any], seconds: float) -> float | None:
    """Return the joules that JAX's device spends in a run; None if nothing counts them.

    The counter advances in ticks and `before` takes power too. Both are therefore repeated for
    `seconds`, then `before` alone, and the difference of a turn is the run's.
    """
    from eejax.helios.energy import meter

    counter = meter()
    if counter is None:
        return None

    def each(*parts: Callable[[], Any]) -> float:
        turns, start, begin = 0, counter.read(), time.perf_counter()
        while not turns or time.perf_counter() - begin < seconds:
            for part in parts:
                part()
            turns += 1
        return (counter.read() - start) / turns

    return each(before, run) - each(before)


def copy_rate(check: StageCheck) -> float:
    """Return the bytes that copies larger than any cache read and write in a second."""
    import jax

    size = 2**14 if check.small else 2**28  # float32: 1 GB
    x = jax.random.normal(jax.random.key(0), (size,))
    run = jax.jit(lambda a: a + 1)
    calls = 2 if check.small else 10

    def many() -> None:
        for _ in range(calls):
            y = run(x)
        y.block_until_ready()

    return 2 * 4 * size * calls / median_seconds(many, 5)


def product_rate(check: StageCheck) -> float:
    """Return the operations a second of large matrix products of bfloat16."""
    import jax
    import jax.numpy as jnp

    n = 128 if check.small else 8192
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    run = jax.jit(lambda a, b: a @ b)
    calls = 2 if check.small else 20

    def many() -> None:
        for _ in range(calls):
            y = run(a, b)
        y.block_until_ready()

    return 2 * float(n) ** 3 * calls / median_seconds(many, 5)
