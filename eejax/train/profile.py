"""A trace of a few steps for TensorBoard, XProf or Perfetto, and the memory in use."""

from __future__ import annotations

import errno
import os
import pathlib
import resource
import sys
from collections.abc import Iterable
from typing import Any

from eejax.common.errors import require

STEP = "train"  # name of a step's annotation in the trace
FOLDER = "profile"


class Profiler:
    """Tracer of the steps begin, ..., begin + steps - 1 into `folder`.

        with Profiler(workdir / FOLDER, begin=10, steps=5) as profiler:
            for step in ...:
                profiler.before(step, state)
                state, metrics = train_step(state, next(batches))
                profiler.after(step, metrics)

    The host waits for the device at both ends of the window, so that the trace has the work of
    exactly these steps; anything else that the process does in between (an evaluation) is in it
    too. A run that resumes inside the window traces the rest of it, one that resumes after it
    nothing. Leaving the `with` closes an open window, however it is left. A process's first step
    compiles: a window that begins later shows typical steps. With steps = 0 nothing is done.

    Raises:
      ConfigError: no such window.
      OSError: the trace cannot be written, naming `folder`.
      RuntimeError: another trace is being taken in this process.
    """

    def __init__(self, folder: str | os.PathLike, begin: int, steps: int):
        require(steps >= 0, "steps", steps, "must be at least 0 steps to trace")
        require(not steps or begin >= 1, "begin", begin, "must be a step: they count from 1")
        self._folder, self._window = pathlib.Path(folder), range(begin, begin + steps)
        self._open = False
        self._annotation = self._result = None

    def before(self, step: int, state: Any) -> None:
        """Begin step `step`, given the state that the previous step left on the device."""
        if step not in self._window:
            return
        # Imported late: a run without a trace does not need the profiler.
        import jax

        if not self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._open = True
        self._annotation = jax.profiler.StepTraceAnnotation(STEP, step_num=step)
        self._annotation.__enter__()

    def after(self, step: int, result: Any) -> None:
        """Note that step `step` was dispatched; `result` is one of its outputs."""
        if not self._open:
            return
        self._leave_step()
        self._result = result
        if step + 1 not in self._window:
            self._close()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind, error: BaseException | None, traceback) -> None:
        if not self._open:
            return
        self._leave_step()
        if error is None:
            self._close()
            return
        self._result = None  # do not wait for a device that may have failed
        try:
            self._close()
        except OSError as second:  # the error that ended the run matters more
            error.add_note(f"and then: {second}")

    def _leave_step(self) -> None:
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def _close(self) -> None:
        import jax

        result, self._result, self._open = self._result, None, False
        try:
            jax.block_until_ready(result)
        finally:
            try:
                jax.profiler.stop_trace()
            except RuntimeError as error:
                raise OSError(errno.EIO, str(error), str(self._folder)) from error


def device_memory(devices: Iterable[Any]) -> dict[str, float]:
    """Return the bytes in use and their peak, for each device of this process.

    The peak is since the process began. Names are 'memory/device_0/bytes_in_use' and
    'memory/device_0/peak_bytes', numbered by the device's id. If no device counts them (on a CPU),
    the process's own peak is 'memory/host_peak_bytes'.
    """
    found = {}
    for device in devices:
        stats = device.memory_stats() or {}
        for name, key in (("bytes_in_use", "bytes_in_use"), ("peak_bytes", "peak_bytes_in_use")):
            if key in stats:
                found[f"memory/device_{device.id}/{name}"] = float(stats[key])
    return found or {"memory/host_peak_bytes": float(_host_peak())}


def _host_peak() -> int:
    """Return the peak resident bytes of this process.

    getrusage counts KiB on Linux, bytes on macOS.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
