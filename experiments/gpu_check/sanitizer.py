"""Run the kernels' small cases under a tool of compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

ERROR = 9
"""Exit status of a tool that found something."""


class SanitizerReport(NamedTuple):
    """Result of a tool's run.

    Attributes:
      status: its exit status: 0, `ERROR`, or that of a failure of its own.
      summary: the last line of its report, or the end of its errors.
    """

    status: int
    summary: str


def run(tool: str, ops: Sequence[str], seconds: float | None = None) -> SanitizerReport | None:
    """Run each op's small cases once under a tool such as "memcheck".

    Returns:
      The report; None where compute-sanitizer is not installed.

    Raises:
      subprocess.TimeoutExpired: after `seconds`.
    """
    command = shutil.which("compute-sanitizer")
    if command is None:
        return None
    cases = ["-P", "-m", "eejax.experiments.bench_kernels", "--once", f"--ops={','.join(ops)}"]
    done = subprocess.run(
        [command, f"--tool={tool}", f"--error-exitcode={ERROR}", sys.executable, *cases],
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("=====")]
    return SanitizerReport(done.returncode, lines[-1] if lines else done.stderr[-500:])
