"""A trace holds the steps of its window and no other, however the run ends."""

import gzip
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.common.errors import ConfigError
from eejax.train.profile import STEP, Profiler, device_memory


@jax.jit
def train_step(state):
    state = state @ state / jnp.linalg.norm(state)
    return state, {"loss": state.sum()}


donating = jax.jit(train_step, donate_argnums=0)


def traces(folder):
    """The events of every trace in `folder`."""
    files = sorted(folder.glob("plugins/profile/*/*.trace.json.gz"))
    return [json.loads(gzip.decompress(f.read_bytes()))["traceEvents"] for f in files]


def annotated(folder):
    """The steps that the only trace in `folder` is annotated with."""
    (events,) = traces(folder)
    return [int(e["args"]["step_num"]) for e in events if e.get("name") == STEP]


@pytest.fixture(autouse=True)
def no_trace_stays_open():
    yield
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


def run(profiler, first, last, step_fn=donating, each=lambda step: None):
    state = jnp.ones((64, 64))
    with profiler:
        for step in range(first, last + 1):
            profiler.before(step, state)
            each(step)
            state, metrics = step_fn(state)
            profiler.after(step, metrics)


@pytest.mark.parametrize(
    "first, last, begin, steps, want",
    [
        (1, 9, 3, 4, [3, 4, 5, 6]),
        (1, 5, 1, 1, [1]),
        (1, 4, 3, 9, [3, 4]),  # the run ends within the window
        (5, 9, 3, 4, [5, 6]),  # resumed within it
        (4, 4, 4, 1, [4]),
    ],
)
def test_a_trace_has_the_steps_of_its_window(tmp_path, first, last, begin, steps, want):
    run(Profiler(tmp_path / "new" / "profile", begin, steps), first, last)
    assert annotated(tmp_path / "new" / "profile") == want


@pytest.mark.parametrize("begin, steps", [(3, 0), (0, 0), (1, 4), (10, 4)])
def test_outside_of_the_window_nothing_is_done(tmp_path, begin, steps):
    run(Profiler(tmp_path / "profile", begin, steps), 5, 9)
    assert not (tmp_path / "profile").exists()


def test_a_window_of_no_steps_imports_nothing():
    code = (
        "import sys; from eejax.train.profile import Profiler\n"
        "with Profiler('nowhere', 0, 0) as p: p.before(1, None); p.after(1, None)\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize("begin, steps, want", [(3, 1, 1), (3, 4, 4), (8, 1, 1), (7, 9, 2)])
def test_the_work_of_the_window_is_in_the_trace_and_no_other(tmp_path, begin, steps, want):
    """Steps of one loop each, slow and dispatched ahead of the device."""

    @jax.jit
    def slow_step(state):
        def body(_, s):
            return s @ s / jnp.linalg.norm(s)

        return jax.lax.fori_loop(0, 20, body, state), {}

    state = jnp.ones((400, 400))
    with Profiler(tmp_path, begin, steps) as profiler:
        for step in range(1, 9):
            profiler.before(step, state)
            state, _ = slow_step(state)
            profiler.after(step, state)
    (events,) = traces(tmp_path)
    loops = [e for e in events if e.get("name", "").startswith("while") and e["ph"] == "X"]
    assert len(loops) == want


class Failure(Exception):
    pass


def fail(at):
    def each(step):
        if step == at:
            raise Failure(at)

    return each


@pytest.mark.parametrize("at, want", [(3, [3]), (4, [3, 4]), (5, [3, 4, 5])])
def test_an_error_within_the_window_closes_it(tmp_path, at, want):
    with pytest.raises(Failure) as caught:
        run(Profiler(tmp_path, 3, 4), 1, 9, each=fail(at))
    assert annotated(tmp_path) == want  # the one that failed has begun
    assert not getattr(caught.value, "__notes__", None)


def test_an_error_outside_of_the_window_has_no_trace_to_close(tmp_path):
    with pytest.raises(Failure):
        run(Profiler(tmp_path / "profile", 3, 4), 1, 9, each=fail(2))
    assert not (tmp_path / "profile").exists()


def test_an_error_between_steps_closes_the_window(tmp_path):
    state = jnp.ones((8, 8))
    with pytest.raises(KeyboardInterrupt), Profiler(tmp_path, 1, 4) as profiler:
        profiler.before(1, state)
        state, metrics = donating(state)
        profiler.after(1, metrics)
        donating(state)  # what was handed over is gone; it is not asked for again
        raise KeyboardInterrupt
    assert annotated(tmp_path) == [1]


def test_a_device_that_fails_is_what_is_reported(tmp_path):
    class Failing:
        def block_until_ready(self):
            raise Failure("device")

    with pytest.raises(Failure, match="device"), Profiler(tmp_path, 1, 1) as profiler:
        profiler.before(1, None)
        profiler.after(1, Failing())
    assert annotated(tmp_path) == [1]


def test_two_windows_one_after_the_other(tmp_path):
    run(Profiler(tmp_path / "a", 2, 1), 1, 3)
    run(Profiler(tmp_path / "b", 1, 2), 1, 3)
    assert annotated(tmp_path / "a") == [2] and annotated(tmp_path / "b") == [1, 2]


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_traced(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/profile"):
        run(Profiler(tmp_path / "file" / "profile", 1, 1), 1, 1)


LOST = """
import pathlib, shutil, sys
import jax, jax.numpy as jnp
from eejax.train.profile import Profiler
folder = pathlib.Path(sys.argv[1])
try:
    with Profiler(folder, 1, 1) as profiler:
        profiler.before(1, None)
        shutil.rmtree(folder)
        folder.write_text("in the way")
        if sys.argv[2] == "failing":
            raise ValueError("what ended the run")
        profiler.after(1, jnp.ones(3))
except OSError as error:
    print("OSError", error.filename, "directory" in error.strerror)
except ValueError as error:
    print("ValueError", *error.args, str(folder) in error.__notes__[0])
"""


@pytest.mark.parametrize("how", ["whole", "failing"])
def test_a_trace_that_cannot_be_written_is_named_and_hides_no_other_error(tmp_path, how):
    # A process of its own: JAX holds on to a trace that it could not write.
    folder = str(tmp_path / "profile")
    arguments = [sys.executable, "-P", "-c", LOST, folder, how]
    out = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.strip()
    assert (
        out
        == {"whole": f"OSError {folder} True", "failing": "ValueError what ended the run True"}[how]
    )


@pytest.mark.parametrize("begin, steps", [(1, -1), (0, 2), (-3, 1)])
def test_windows_that_are_none_are_refused(begin, steps):
    with pytest.raises(ConfigError, match="begin|steps"):
        Profiler("nowhere", begin, steps)


def test_memory_of_devices_that_do_not_count_is_the_processs_own():
    held = np.ones(40_000_000, np.uint8)  # 40 MB that are in use
    ((name, value),) = device_memory(jax.devices()).items()
    assert name == "memory/host_peak_bytes"
    assert held.nbytes < value < 2**42


def test_memory_of_devices_that_count():
    class Device:
        def __init__(self, number, stats):
            self.id, self._stats = number, stats

        def memory_stats(self):
            return self._stats

    full = {"bytes_in_use": 3, "peak_bytes_in_use": 7, "bytes_limit": 9, "num_allocs": 1}
    assert device_memory([Device(0, full), Device(5, {"bytes_in_use": 4}), Device(6, None)]) == {
        "memory/device_0/bytes_in_use": 3.0,
        "memory/device_0/peak_bytes": 7.0,
        "memory/device_5/bytes_in_use": 4.0,
    }
