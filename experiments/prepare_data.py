"""Tokenize the text of an experiment as `eejax train` would, with several processes.

    eejax prepare-data --config=configs/demo.py --workdir=runs/mine \\
        --config.data.source='/data/text/**/*.txt' --workers=8

Give both commands the same --config and --workdir. After Ctrl-C, SIGTERM or any other end, the same
command resumes. --verify reads the packed data once more and packs nothing. Exit status: 0 done, 1
a problem that the message names, 128 + signal when stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import NoReturn

from absl import flags
from ml_collections import config_flags
from tqdm import tqdm

from eejax.common.paths import expanded
from eejax.experiments import launch

config_flags.DEFINE_config_file(
    "config", None, "The experiment: a config file, or the name of an installed one."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made if it does not exist.")
_WORKERS = flags.DEFINE_integer(
    "workers", None, "Processes that tokenize; by default one for each core.", lower_bound=1
)
_VERIFY = flags.DEFINE_bool("verify", False, "Only check that the packed data is undamaged.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")
flags.mark_flags_as_required(["config", "workdir"])


class _Stopped(BaseException):
    """Error that a signal raises; committed work needs no cleanup."""


def main() -> None:
    # Imported late: --help needs no JAX.
    from eejax.checkpoint.files import only_user
    from eejax.checkpoint.model import TOKENIZER
    from eejax.common.errors import DataError
    from eejax.train import inputs

    experiment = launch.configured(_WORKDIR.value)
    config, workdir = experiment.data, expanded(_WORKDIR.value)
    bar = None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        if _VERIFY.value:
            dataset = inputs.find(config, workdir, TOKENIZER)
            if dataset is None:
                raise DataError(f"nothing is packed for this configuration and {workdir} yet.")
            print("the checksum holds", file=sys.stderr)
        else:
            os.makedirs(workdir, exist_ok=True)
            bar = _Bar()
            with only_user(workdir):
                dataset = inputs.prepare(
                    config,
                    experiment.model.vocab_size,
                    workdir,
                    TOKENIZER,
                    workers=_WORKERS.value or _cores(),
                    progress=bar.update,
                )
    except _Stopped as stopped:
        print("stopped: the same command resumes", file=sys.stderr)
        sys.exit(128 + stopped.args[0])
    finally:
        if bar is not None:
            bar.close()
    parts = getattr(dataset, "datasets", (dataset,))
    results = [_summary(one) for one in parts]
    if _JSON.value:
        print(json.dumps(results[0] if len(results) == 1 else results))
    else:
        print("\n\n".join(map(_table, results)))


def _stop(number: int, _: object) -> NoReturn:
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, signal.SIG_DFL)  # a second one ends at once, and loses nothing more
    raise _Stopped(number)


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _summary(dataset) -> dict:
    splits = {
        name: {
            "documents": len(split.documents),
            "tokens": len(split),
            "bytes": split.nbytes,
            "bytes_per_token": split.nbytes / len(split),
        }
        for name, split in dataset.splits.items()
    }
    return {"splits": splits, "folder": dataset.path, "fingerprint": dataset.fingerprint}


def _table(result: dict) -> str:
    from eejax.common.tables import table

    rows = [
        [
            name,
            *(f"{split[k]:,}" for k in ("documents", "tokens", "bytes")),
            f"{split['bytes_per_token']:.3f}",
        ]
        for name, split in result["splits"].items()
    ]
    shown = table(["split", "documents", "tokens", "bytes", "bytes/token"], rows)
    return f"{shown}\n\nfolder       {result['folder']}\nfingerprint  {result['fingerprint']}"


class _Bar:
    """Progress bar; lines at intervals without a terminal."""

    def __init__(self, *, every_seconds: float = 10.0):
        self._terminal, self._every = sys.stderr.isatty(), every_seconds
        self._begin = self._bar = None

    def update(self, progress) -> None:
        now = time.monotonic()
        if self._begin is None or progress.bytes < self._seen:  # the next of several data sets
            self.close()
            # The speed is that of this process, without the work of an earlier one.
            self._begin = self._last = now
            self._first = progress
            self._bar = tqdm(
                total=progress.total_bytes,
                initial=progress.bytes,
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                disable=not self._terminal,
            )
        self._seen = progress.bytes
        seconds = max(now - self._begin, 1e-9)
        speed = f"{(progress.tokens - self._first.tokens) / seconds:,.0f} tokens/s"
        documents = f"{progress.documents:,} documents"
        if self._terminal:
            self._bar.set_postfix_str(f"{documents}, {speed}", refresh=False)
            self._bar.update(progress.bytes - self._bar.n)
        elif now - self._last >= self._every:
            self._last = now
            line = f"{documents}  {progress.bytes / 1e6:,.1f} MB  {speed}"
            print(line + self._left(progress, seconds), file=sys.stderr, flush=True)

    def _left(self, progress, seconds: float) -> str:
        from eejax.train.metrics import duration

        done, total = progress.bytes - self._first.bytes, progress.total_bytes or 0
        if done <= 0 or total <= progress.bytes:
            return ""
        return f"  {duration(seconds / done * (total - progress.bytes))} left"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


if __name__ == "__main__":
    launch.run(main)
