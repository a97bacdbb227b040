"""Available memory of the host."""

from __future__ import annotations

import os
import pathlib
import re

# For each version of control groups: the beginning of their line in /proc/self/cgroup, their
# folder, and the files of a group's limit and use.
GROUPS = (
    ("0::", "sys/fs/cgroup", "memory.max", "memory.current"),
    (
        r"\d+:(?:\w+,)*memory(?:,\w+)*:",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
    ),
)


def free(root: str | os.PathLike = "/") -> int:
    """Return the bytes that this process may still allocate.

    On Linux it is the available memory, or what is left to the process's control groups (a
    container's limit) where that is less. Pages of files that were not used lately count as free in
    both. Where neither can be read, as on macOS, it is half of all memory.

    Args:
      root: the folder in which "proc" and "sys" lie.
    """
    root = pathlib.Path(root)
    if kibibytes := _numbers(root / "proc/meminfo", r"MemAvailable:\s*(\d+)"):
        found = [1024 * kibibytes[0]]
    else:
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]
    for line, top, limit, use in GROUPS:
        for own in re.findall(f"(?m)^{line}(.*)$", _text(root / "proc/self/cgroup")):
            # Limits of parent groups apply too, and a container may see its own group at the top.
            path = pathlib.PurePosixPath(own)
            for group in (root / top / str(p).lstrip("/") for p in (path, *path.parents)):
                most, used = _numbers(group / limit), _numbers(group / use)
                if most and used:  # the limit may be "max"
                    files = _numbers(group / "memory.stat", r"(?:total_)?inactive_file (\d+)")
                    found.append(max(most[0] - used[0] + (files or [0])[-1], 0))
    return min(found)


def _numbers(file: pathlib.Path, line: str = r"(\d+)") -> list[int]:
    """Return the numbers in the lines of a file that match `line`; none if it cannot be read."""
    return [int(n) for n in re.findall(f"(?m)^{line}", _text(file))]


def _text(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
