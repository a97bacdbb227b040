"""Work that all worker processes of one test run share: the first does it, the others wait."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import filelock


def folder_once(tmp_path_factory, name: str, fill: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """The folder `name` of this test run, which `fill` writes once.

    A worker that fails leaves no mark, so that the next one that asks begins anew.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder within that of the run
        base = base.parent
    folder, mark = base / f"shared-{name}", base / f"shared-{name}.done"
    with filelock.FileLock(base / f"shared-{name}.lock"):
        if not mark.exists():
            folder.mkdir(exist_ok=True)
            fill(folder)
            mark.touch()
    return folder
