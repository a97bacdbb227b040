"""Kernels, copies and seconds of a program on the GPU, read from a trace of JAX's profiler."""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

COPIES = ("MemcpyD2H", "MemcpyH2D", "MemcpyD2D")
MAX_NAMES = 15
"""Kernels whose names are reported."""


def of_run(folder: pathlib.Path, run: Callable[[], Any]) -> dict[str, Any]:
    """Trace a run into a folder, and return the trace's figures, as `of_events` does."""
    import jax

    shutil.rmtree(folder, ignore_errors=True)
    with jax.profiler.trace(str(folder)):
        run()
    files = sorted(folder.glob("plugins/profile/*/*.trace.json.gz"))
    if not files:
        raise FileNotFoundError(f"{folder}: the profiler wrote no trace.json.gz")
    return of_events(read(files[-1]))


def read(path: pathlib.Path) -> list[Mapping[str, Any]]:
    """Read the events of a trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def of_events(events: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the work on the streams of GPUs.

    Returns:
      kernels: their number; copies: by their kind; busy_ms: milliseconds in which a stream worked;
      host_waits: number of times that the host waited for the device; names: the kernels that took
      longest, each with its number and milliseconds; threads: of all events, by thread.
    """
    process, thread = {}, {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            process[event["pid"]] = event["args"]["name"]
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            thread[event["pid"], event["tid"]] = event["args"]["name"]
    count, seconds = collections.Counter(), collections.Counter()
    spans, threads, waits = [], collections.Counter(), 0
    for event in events:
        if event.get("ph") != "X":
            continue
        where = process.get(event["pid"], ""), thread.get((event["pid"], event["tid"]), "")
        threads["/".join(where)] += 1
        name = event["name"]
        waits += "Await" in name or "BlockHostUntil" in name
        # Other lines of a device repeat its streams' events by module and operation.
        if "GPU" not in where[0] or not where[1].startswith("Stream"):
            continue
        kind = next((k for k in COPIES if name.lower().startswith(k.lower())), name)
        count[kind] += 1
        seconds[kind] += event.get("dur", 0.0)
        spans.append((event["ts"], event["ts"] + event.get("dur", 0.0)))
    kernels = {n: c for n, c in count.items() if n not in COPIES and not n.startswith("Memset")}
    longest = sorted(kernels, key=lambda n: -seconds[n])[:MAX_NAMES]
    return dict(
        kernels=sum(kernels.values()),
        copies={k: count[k] for k in COPIES},
        busy_ms=_union(spans) / 1e3,
        host_waits=waits,
        names={n[:90]: [count[n], round(seconds[n] / 1e3, 4)] for n in longest},
        threads=dict(threads.most_common(12)),
    )


def _union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans, which several streams may share."""
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total
