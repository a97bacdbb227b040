"""Several processes of one run: how they find each other, agree, and end together.

Every process runs the same program (JAX's multi-controller runtime) and must make the calls of this
module in the same order. In a single process each call does nothing beyond its name and costs
nothing. Process 0 writes, prints and decides where one process must.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import multihost

from eejax.common.axes import DATA
from eejax.common.errors import ConfigError, require, require_given

T = TypeVar("T")

AGAIN = (
    "Its own output says why. Start the same command again in every process: training resumes "
    "from the last checkpoint."
)
_WEEK = 7 * 24 * 3600  # limit of waiting for process 0, which may be tokenizing; a death ends it
_GRACE = 10  # seconds that a failed process waits for others that fail alike
_barriers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Processes:
    """Address by which a process finds the others of its run.

    Without the first three, JAX detects them from the cluster (Slurm, Open MPI, Kubernetes, Cloud
    TPU).

    Attributes:
      coordinator: 'HOST:PORT' of process 0, reachable from all.
      processes: number of processes.
      process: number of this one.
      connect_seconds: time for all of them to start.
      heartbeat_seconds: time without a sign of life after which a process counts as dead and the
        others end.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    connect_seconds: int = 300
    heartbeat_seconds: int = 60

    def __post_init__(self):
        given = {f: getattr(self, f) for f in ("coordinator", "processes", "process")}
        missing = [f for f, value in given.items() if value is None]
        if missing and len(missing) < len(given):
            raise ConfigError(
                f"{', '.join(missing)} missing: coordinator, processes and process are given "
                "together, or none of them in a cluster that JAX detects."
            )
        for name in ("connect_seconds", "heartbeat_seconds"):
            require(getattr(self, name) > 0, name, getattr(self, name), "must be > 0 seconds")
        if self.coordinator is None or self.processes is None or self.process is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        ok = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
        require(ok, "coordinator", self.coordinator, "must be HOST:PORT of process 0")
        require(self.processes > 0, "processes", self.processes, "must be > 0")
        ok = 0 <= self.process < self.processes
        allowed = f"must be the number of this process, 0 to {self.processes - 1}"
        require(ok, "process", self.process, allowed)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0."""
        where = require_given("coordinator", self.coordinator, "must be HOST:PORT of process 0")
        host, _, port = where.rpartition(":")
        return host.strip("[]"), int(port)


def start(how: Processes) -> None:
    """Join this process to its run, before anything touches a device.

    If the processes do not come together, or one dies later, JAX itself ends this process, and the
    last line that is printed says what to do.

    Raises:
      ConfigError: if no cluster is detected or the coordinator cannot be reached.
    """
    if how.coordinator is not None:
        _check_reachable(how)
    where = how.coordinator or "the coordinator that the cluster names"
    _say_at_abort(
        f"error: the processes of this run did not come together at {where} within "
        f"{how.connect_seconds} s. Start all of them, with the same coordinator and processes and "
        "each with its own process, and let the network pass that port."
    )
    # Its SIGTERM handler would keep a process alive that is told to end; the loop has its own.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            how.coordinator,
            how.processes,
            how.process,
            cluster_detection_method=None if how.coordinator is None else "deactivate",
            initialization_timeout=how.connect_seconds,
            heartbeat_timeout_seconds=how.heartbeat_seconds,
            shutdown_timeout_seconds=how.heartbeat_seconds,
        )
    except (ValueError, RuntimeError, OSError) as error:
        if how.coordinator is not None:
            raise ConfigError(f"the processes of this run cannot be joined: {error}") from error
        raise ConfigError(
            "no cluster is detected (Slurm, Open MPI, Cloud TPU, or Kubernetes with the package "
            f"kubernetes): {error} Give coordinator, processes and process."
        ) from error
    _say_at_abort(
        "error: another process of this run has died, unless the lines above say what else ended "
        f"this one. {AGAIN}"
    )


def is_multiprocess() -> bool:
    """Return whether this process was started as one of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def index() -> int:
    """Return the number of this process, 0 in a single process."""
    return jax.process_index() if is_multiprocess() else 0


def is_first() -> bool:
    """Return whether this is process 0, which writes and prints."""
    return index() == 0


def wait(seconds: int = _WEEK) -> None:
    """Wait on the host until every process has called this, because devices must not wait long."""
    if is_multiprocess():
        _barrier(f"eejax/{next(_barriers)}", seconds)


def broadcast_value(value: T) -> T:
    """Return the `value` of process 0, which must be picklable."""
    if not is_multiprocess():
        return value
    data = np.frombuffer(pickle.dumps(value) if is_first() else b"", np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    # A power of two, because each length compiles a program.
    padded = np.zeros(1 << max(10, size.bit_length()), np.uint8)
    padded[: len(data)] = data
    return pickle.loads(multihost_utils.broadcast_one_to_all(padded)[:size].tobytes())


def broadcast_from_process_zero(do: Callable[[], T]) -> T:
    """Return `do()` of process 0, which alone calls it while the others wait; all raise its
    error."""
    if not is_multiprocess():
        return do()
    made: list[T] = []  # empty if `do` failed
    error = None
    if is_first():
        try:
            made.append(do())
        except Exception as caught:
            error = caught
    wait()
    made, said = broadcast_value((made, _sendable(error)))
    if error is not None:
        raise error
    if said is not None:
        raise said
    return made[0]


def any_process(flag: bool) -> bool:
    """Return whether the flag of any process is set."""
    if not is_multiprocess():
        return flag
    return bool(multihost_utils.process_allgather(np.int32(flag)).max())


class MaxVote:
    """The maximum of a number over all processes, computed without waiting.

    `cast` enqueues a tiny computation behind the work of the devices; its result is the same in all
    processes.
    """

    def __init__(self, mesh: Mesh):
        self._shape = (mesh.size,)
        self._each = NamedSharding(mesh, P(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))

    def cast(self, value: int) -> jax.Array:
        """Return the largest `value` of all processes, to be fetched later."""
        mine = np.full(1, value, np.int32)
        return self._largest(jax.make_array_from_callback(self._shape, self._each, lambda _: mine))


def shard(mesh: Mesh) -> tuple[int, int]:
    """Return (index, count), the part of a batch's rows that lies on this process's devices.

    It is (0, 1), all rows, if they are not one of `count` equal parts: pipeline stages on several
    hosts read the same rows, and this also serves a mesh of any other order.
    """
    size = mesh.shape[DATA]
    places = NamedSharding(mesh, P(DATA)).addressable_devices_indices_map((size,))
    rows = [where[0] for where in places.values() if where is not None]
    return part_of({own.indices(size)[0] for own in rows}, size)


def part_of(chosen: Collection[int], size: int) -> tuple[int, int]:
    """Return (index, count), which of `count` equal parts of range(size) `chosen` is.

    It is (0, 1), the whole range, if it is none.
    """
    n, first = len(chosen), min(chosen, default=0)
    if not n or set(chosen) != set(range(first, first + n)) or size % n or first % n:
        return 0, 1
    return first // n, size // n


def check_mesh(mesh: Mesh) -> None:
    """Raise `ConfigError` if several processes run and `mesh` lacks some of their devices."""
    if is_multiprocess() and mesh.size != jax.device_count():
        sizes = tuple(mesh.shape.values())
        raise ConfigError(
            f"mesh (data, pipe, model) = {sizes} takes {mesh.size} of the {jax.device_count()} "
            f"devices of {jax.process_count()} processes: several processes use all of their "
            "devices. Make the mesh as large, or start fewer processes."
        )


def peer_failure_message(error: BaseException) -> str | None:
    """Return the message for an `error` that another process's end caused, else None."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, jax.errors.JaxRuntimeError):
        cause = cause.__cause__
    if (
        cause is None
        or not jax.distributed.is_initialized()
        or str(cause).startswith("RESOURCE_EXHAUSTED")
    ):
        return None
    line = (str(cause).splitlines() or [""])[0][:200]
    return f"another process of this run has died, or cannot be reached ({line}). {AGAIN}"


def exit_process(status: int, *, alone: bool) -> None:
    """End this process after an error was printed, and soon the others too.

    Processes that fail alike end together. If the others do not fail, or with `alone`, this one
    ends at once: an orderly end would wait for processes that wait for this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if not alone and wait_for_peers():
        sys.exit(status)
    os._exit(status)


def wait_for_peers() -> bool:
    """Wait a moment for the other processes to fail alike, and return whether they did.

    If this process is ended meanwhile, it prints nothing more.
    """
    _say_at_abort("")
    with contextlib.suppress(Exception):
        _barrier("eejax/leave", _GRACE)
        return True
    return False


def _barrier(name: str, seconds: int) -> None:
    multihost.get_barrier_sync_fn()(key=name, timeout_ms=seconds * 1000)


def _sendable(error: Exception | None) -> Exception | None:
    """Return the error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # the error's class may raise anything
        return RuntimeError(f"process 0: {type(error).__name__}: {error}")


def _check_reachable(how: Processes) -> None:
    """Raise `ConfigError` if the coordinator cannot be reached.

    JAX would end the process with a stack trace instead.
    """
    host, port = how.address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"coordinator = {how.coordinator!r}: no such host ({error}). Give a name or address "
            "of the host of process 0."
        ) from error
    if how.process == 0:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
        except OSError as error:
            raise ConfigError(
                f"coordinator = {how.coordinator!r}: port {port} cannot be used here ({error}). "
                "Choose another port, the same in all processes."
            ) from error
        return
    deadline, problem = time.monotonic() + how.connect_seconds, None
    while time.monotonic() < deadline:
        for family, kind, protocol, _, address in found:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.settimeout(5)
                    probe.connect(address)
                    return
            except OSError as error:
                problem = error
        time.sleep(0.2)
    raise ConfigError(
        f"coordinator = {how.coordinator!r}: nothing answers there after {how.connect_seconds} s "
        f"({problem}). Start process 0 too, give the address of its host, and let the network "
        "pass that port."
    )


_last_words: bytes | None = None


def _say_at_abort(line: str) -> None:
    """Make `line` the last one that this process prints if the runtime aborts it.

    When another process is dead, the runtime ends this one from a C++ thread, whatever Python does;
    there is no exception to catch. It calls abort(), which runs the handler of SIGABRT in that
    thread, outside Python's lock, so Python code may run in it. Python's own signal handlers would
    wait for the main thread, which waits for the dead process.
    """
    global _last_words
    if _last_words is None:
        set_handler = ctypes.CDLL(None).signal
        set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        set_handler(signal.SIGABRT, ctypes.cast(_at_abort, ctypes.c_void_p))
    _last_words = f"{line}\n".encode() if line else b""


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _at_abort(_: int) -> None:
    os.write(2, _last_words or b"")
    os._exit(1)
