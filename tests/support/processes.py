"""Several processes of one run on this machine, four devices each."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEVICES = "--xla_force_host_platform_device_count"


class Group:
    """The processes, and what each has written so far."""

    def __init__(self, processes, files):
        self.processes, self.files = processes, files

    def err(self, i):
        return self.files[i][1].read_text()

    def out(self, i):
        return self.files[i][0].read_text()

    def wait(self, seconds=120):
        """Their exit codes. A process that does not end in time is a failure of the test."""
        deadline = time.monotonic() + seconds
        return [p.wait(timeout=max(0.1, deadline - time.monotonic())) for p in self.processes]

    def until(self, condition, seconds=120):
        """Waits until the condition holds, while all of them run."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [i for i, p in enumerate(self.processes) if p.poll() is not None]
            assert not ended, "\n".join(map(self.err, ended))
            assert time.monotonic() < deadline, "the processes do not get on"
            time.sleep(0.005)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def start(folder, *command, n=2, heartbeat=3, connect=60, only=None):
    """`python *command` n times, with the flags that make them one run; ended on the way out.

    only: numbers of the processes that are started, by default all.
    """
    flags = re.sub(rf"{DEVICES}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    environment = os.environ | {"XLA_FLAGS": f"{flags} {DEVICES}=4"}
    folder.mkdir(parents=True, exist_ok=True)
    coordinator, processes, files = f"127.0.0.1:{free_port()}", [], []
    try:
        for i in range(n) if only is None else only:
            files.append((folder / f"{i}.out", folder / f"{i}.err"))
            with open(files[-1][0], "w") as out, open(files[-1][1], "w") as err:
                processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            *command,
                            f"--coordinator={coordinator}",
                            f"--processes={n}",
                            f"--process={i}",
                            f"--heartbeat_seconds={heartbeat}",
                            f"--connect_seconds={connect}",
                        ],
                        cwd=ROOT,
                        env=environment,
                        stdout=out,
                        stderr=err,
                    )
                )
        yield Group(processes, files)
    finally:
        for process in processes:
            process.kill()
            process.wait()
