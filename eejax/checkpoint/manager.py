"""Checkpoints of a run: written in the background, verified when read, none trusted blindly.

A checkpoint is a folder named by its step, holding one Orbax item for each saved tree, a JSON
item `meta`, and CHECKSUMS.json, which is written last:

    checkpoints/1200/{params,training,meta}/...
    checkpoints/1200/CHECKSUMS.json       size and CRC-32 of every file above
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from absl import logging

from eejax.checkpoint.files import write_text
from eejax.common.errors import CheckpointError
from eejax.common.trees import Tree, path_name

META = "meta"
CHECKSUMS = "CHECKSUMS.json"
DAMAGED = "damaged"


class Restored(NamedTuple):
    """What `Checkpoints.restore` read."""

    step: int
    trees: dict[str, Tree]
    metadata: dict[str, Any]


# From a checkpoint's metadata to the trees wanted of it, as shape structs with shardings.
# Raises `CheckpointError` where the checkpoint belongs to something else.
Targets = Callable[[dict[str, Any]], Mapping[str, Tree]]


class _Damaged(Exception):
    """A checkpoint whose files are not what was written."""


class Checkpoints:
    """The checkpoints in `folder`, the newest `keep` of them kept.

    Saving is asynchronous: `save` copies the values to the host and returns. A checkpoint that
    was not finished (a kill, a full disk) is never seen by `steps`.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 3, read_only: bool = False):
        self.folder = pathlib.Path(folder).expanduser().absolute()
        if read_only and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such folder of checkpoints.")
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file where checkpoints go: move it away.")
        self._saving: int | None = None
        self._sealer: threading.Thread | None = None
        self._shapes = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None if read_only else keep,
                create=not read_only,
                cleanup_tmp_directories=not read_only,
            ),
        )

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, trees: Mapping[str, Tree], metadata: Mapping[str, Any]) -> None:
        """Starts writing the checkpoint of `step`; one that exists already is left as it is.

        The trees may be donated or changed as soon as this returns. Raises `CheckpointError`
        where this or the save before it failed.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        items[META] = ocp.args.JsonSave(dict(metadata))
        self._saving = step
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:  # Orbax raises whatever the file system or tensorstore did
            raise self._failed(error) from error
        self._sealer = threading.Thread(target=self._seal, args=(step,), daemon=True)
        self._sealer.start()

    def wait(self) -> None:
        """Waits until everything is written. Raises `CheckpointError` where writing failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        finally:
            if self._sealer is not None:
                self._sealer.join()
                self._sealer = None
        self._saving = None

    def close(self) -> None:
        """Waits for the last save and frees the threads."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._shapes.close()

    def restore(
        self, targets: Targets, *, step: int | None = None, set_aside: bool = False
    ) -> Restored | None:
        """The newest checkpoint that is whole (or that of `step`); None where there is none.

        A damaged checkpoint is reported and the one before it used; with `set_aside` it is
        moved to the folder `damaged` beside the checkpoints, so that its step can be saved anew.

        Raises:
          CheckpointError: the checkpoint of `step` is missing or damaged, every checkpoint is
            damaged, or a whole one is not of the wanted shapes.
        """
        steps = self.steps()
        if step is not None:
            if step not in steps:
                have = ", ".join(map(str, steps)) or "none"
                raise CheckpointError(
                    f"{self.folder} has no checkpoint of step {step}, only {have}."
                )
            steps = [step]
        reports = []
        for candidate in reversed(steps):
            try:
                restored = self._restore(candidate, targets)
            except _Damaged as error:
                reports.append(f"checkpoint {self.folder / str(candidate)} is damaged: {error}")
                logging.warning("%s. Trying the one before it.", reports[-1])
                continue
            if set_aside:
                for damaged in (s for s in steps if s > candidate):
                    self._set_aside(damaged)
            return restored
        if reports:
            raise CheckpointError(
                "no usable checkpoint is left.\n  "
                + "\n  ".join(reports)
                + f"\nRestore {self.folder} from a copy, or start a new run in another workdir."
            )
        return None

    def _restore(self, step: int, targets: Targets) -> Restored:
        sealed = self._verify(step)
        try:
            meta = self._manager.restore(
                step, args=ocp.args.Composite(**{META: ocp.args.JsonRestore()})
            )[META]
            if not isinstance(meta, dict):
                raise ValueError(f"its metadata is {type(meta).__name__}, not an object")
        except Exception as error:
            raise _Damaged(_brief(error)) from error
        wanted = targets(meta)  # its CheckpointError is the caller's to see
        folder = self.folder / str(step)
        try:
            have = {name: self._shapes.metadata(folder / name).tree for name in wanted}
        except Exception as error:
            raise _Damaged(_brief(error)) from error
        for name, tree in wanted.items():
            _compare(folder, name, have[name], tree)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            if sealed:  # the files are what was written, so it is not damage
                raise CheckpointError(
                    f"checkpoint {folder} is whole but cannot be restored: {_brief(error)}"
                ) from error
            raise _Damaged(_brief(error)) from error
        return Restored(step, {name: restored[name] for name in wanted}, meta)

    def _seal(self, step: int) -> None:
        """Writes the checksums of the checkpoint being saved as soon as it is finished."""
        # Orbax's own callback comes before the folder gets its final name.
        while self._manager.is_saving_in_progress():
            time.sleep(0.02)
        folder = self.folder / str(step)
        if not folder.is_dir():
            return  # saving failed, as `wait` will report
        try:
            files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != CHECKSUMS)
            table = {p.relative_to(folder).as_posix(): _checksum(p) for p in files}
            write_text(folder / CHECKSUMS, json.dumps(table, indent=0))
        except OSError as error:
            # The checkpoint is whole; only its later verification is weaker.
            logging.warning("no checksums for checkpoint %s: %s", folder, error)

    def _verify(self, step: int) -> bool:
        """Compares every file with its checksum; False where none were written."""
        folder = self.folder / str(step)
        if not (folder / CHECKSUMS).exists():
            return False
        try:
            table = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
            wrong = [n for n, sum_ in table.items() if _checksum_or_none(folder / n) != sum_]
        except (OSError, ValueError, AttributeError) as error:
            raise _Damaged(f"{CHECKSUMS} cannot be read ({error})") from error
        if wrong:
            state = "missing" if not (folder / wrong[0]).exists() else "not as it was written"
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise _Damaged(f"{wrong[0]} is {state}{more}")
        return True

    def _set_aside(self, step: int) -> None:
        place = self.folder.parent / DAMAGED
        place.mkdir(exist_ok=True)
        target = place / str(step)
        if target.exists():
            shutil.rmtree(target)
        (self.folder / str(step)).rename(target)
        self._manager.reload()
        logging.warning("moved the damaged checkpoint of step %d to %s", step, target)

    def _failed(self, error: Exception) -> CheckpointError:
        """The error of a failed save, its unfinished files removed."""
        step, self._saving = self._saving, None
        for left in self.folder.glob(f"{step}.*tmp*"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            free = f"{shutil.disk_usage(self.folder).free / 1e9:.2f} GB free"
        except OSError:
            free = "free space unknown"
        good = [s for s in self.steps() if s != step]
        last = f"The last good checkpoint is that of step {good[-1]}" if good else "There is none"
        return CheckpointError(
            f"saving the checkpoint of step {step} in {self.folder} failed ({free}): "
            f"{_brief(error)}. {last}; make room and start the same command again to resume."
        )


def _compare(where: pathlib.Path, name: str, have: Tree, want: Tree) -> None:
    """Raises `CheckpointError` naming the first leaves that differ in name, shape or dtype."""
    have, want = _leaves(have), _leaves(want)
    differ = []
    for leaf in sorted(have.keys() | want.keys()):
        if have.get(leaf) != want.get(leaf):
            there, here = have.get(leaf, "nothing"), want.get(leaf, "nothing")
            differ.append(f"{name}/{leaf}: {there} in the checkpoint, {here} wanted")
    if differ:
        more = [f"... and {len(differ) - 5} more"] if len(differ) > 5 else []
        raise CheckpointError(
            f"checkpoint {where} is of another shape:\n  "
            + "\n  ".join(differ[:5] + more)
            + "\nUse the model configuration it was saved with, or another workdir."
        )


def _leaves(tree: Tree) -> dict[str, str]:
    """'float32[4, 8]' for every leaf, by name; containers named alike whatever their type."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in flat}


def _checksum(path: pathlib.Path) -> list[int]:
    """[bytes, CRC-32]."""
    crc, size = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return [size, crc]


def _checksum_or_none(path: pathlib.Path) -> list[int] | None:
    return _checksum(path) if path.is_file() else None


def _brief(error: Exception) -> str:
    """The first line of an error's message, Orbax's and tensorstore's being pages long."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
