"""Checkpoints of a run, written in the background and verified when read.

A checkpoint is a folder named by its step, holding one Orbax item for each saved tree, a JSON item
`meta`, and CHECKSUMS.json, which is written last:

    checkpoints/1200/{params,training,meta}/...
    checkpoints/1200/CHECKSUMS.json       size and CRC-32 of every file above

Every leaf has a folder of its own, in which a stack of layers has a file for each layer. So some of
the leaves, and the lower layers of a stack, can be read and verified without the rest.

Several processes of a run (`sharding.distributed`) share the folder and make the same calls. Each
writes and reads what its devices hold; process 0 verifies, decides what is damaged, and seals.
"""

from __future__ import annotations

import errno
import json
import math
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

from eejax.checkpoint.files import finished_steps, write_text
from eejax.common.errors import CheckpointError, remedy
from eejax.common.paths import expanded
from eejax.common.trees import Tree, path_name
from eejax.sharding import distributed

META = "meta"
STACK = "layers"  # leaves below this name of a tree's first level are stacked by layer
CHECKSUMS = "CHECKSUMS.json"
DAMAGED = "damaged"
UNFINISHED = ".orbax-checkpoint-tmp"  # suffix of the folders that Orbax is still writing
# System errors that are recognised by their texts.
QUOTED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)


class Restored(NamedTuple):
    """The result of `Checkpoints.restore`."""

    step: int
    trees: dict[str, Tree]
    metadata: dict[str, Any]


# Maps a checkpoint's metadata to the trees to read, as shape structs with shardings. Raises
# `CheckpointError` if the checkpoint belongs to something else.
Targets = Callable[[dict[str, Any]], Mapping[str, Tree]]


class _Damaged(Exception):
    """A checkpoint whose files differ from what was written."""


class _TreeHandler(ocp.PyTreeCheckpointHandler):
    """A handler without OCDBT, which packs all leaves into common files that are merged at the
    end."""

    def finalize(self, directory) -> None:
        """Do nothing: there is nothing to merge, and Orbax's own handler would warn."""


class Checkpoints:
    """The checkpoints in `folder`, the newest `keep` of them kept.

    Saving is asynchronous: `save` copies the values to the host and returns. `steps` never lists a
    checkpoint that was not finished (after a kill, or with a full disk).
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 3, read_only: bool = False):
        self.folder = expanded(folder).absolute()
        if read_only and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such folder of checkpoints.")
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file where checkpoints go: move it away.")
        if not read_only:
            # Left by a killed process. Orbax would remove them in a thread without waiting for it.
            distributed.broadcast_from_process_zero(lambda: self._remove_unfinished("*"))
        self._saving: int | None = None
        self._sealer: threading.Thread | None = None
        self._trees = _TreeHandler(use_ocdbt=False)
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        for kind in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
            registry.add(None, kind, self._trees)
        self._metadata = ocp.JsonCheckpointHandler()
        for kind in (ocp.args.JsonSave, ocp.args.JsonRestore):
            registry.add(None, kind, self._metadata)
        self._manager = ocp.CheckpointManager(
            self.folder,
            handler_registry=registry,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None if read_only else keep,
                create=not read_only,
            ),
        )

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, trees: Mapping[str, Tree], metadata: Mapping[str, Any]) -> None:
        """Start to write the checkpoint of `step`, unless it exists.

        The trees may be donated or changed as soon as this returns. Raises `CheckpointError` if
        this or the previous save failed.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        items: dict[str, ocp.args.CheckpointArgs] = {
            name: ocp.args.PyTreeSave(tree, save_args=_save_args(tree))
            for name, tree in trees.items()
        }
        items[META] = ocp.args.JsonSave(dict(metadata))
        self._saving = step
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:  # Orbax raises any error of the file system or tensorstore
            raise self._failed(error) from error
        if distributed.is_first():
            self._sealer = threading.Thread(target=self._seal, args=(step,), daemon=True)
            self._sealer.start()

    def wait(self) -> None:
        """Wait until all processes have written everything.

        Raises `CheckpointError` if writing failed.
        """
        self._finish()
        distributed.wait()

    def _finish(self) -> None:
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
        """Wait for this process's writes, and free the threads."""
        try:
            self._finish()
        finally:
            self._manager.close()
            self._trees.close()

    def restore(
        self,
        targets: Targets,
        *,
        step: int | None = None,
        set_aside: bool = False,
        partial: bool = False,
    ) -> Restored | None:
        """Read the newest checkpoint that is whole (or that of `step`); None if there is none.

        Only the wanted trees, which may be none, are read and verified. With `partial` they may
        lack leaves that were saved, and want fewer layers of a stack: the rest is neither read nor
        verified. A damaged checkpoint is reported and the one before it used; with `set_aside` it
        is moved to the folder `damaged` beside the checkpoints, so that its step can be saved
        again.

        Raises:
          CheckpointError: if the checkpoint of `step` is missing or damaged, every checkpoint is
            damaged, a whole one is not of the wanted shapes, or the running save failed.
        """
        self._finish()
        steps = distributed.broadcast_value(self.steps())
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
                restored = self._restore(candidate, targets, partial)
            except _Damaged as error:
                reports.append(f"checkpoint {self.folder / str(candidate)} is damaged: {error}")
                logging.warning("%s. Trying the one before it.", reports[-1])
                continue
            if set_aside:
                self._set_aside([s for s in steps if s > candidate])
            return restored
        if reports:
            raise CheckpointError(
                "no usable checkpoint is left.\n  "
                + "\n  ".join(reports)
                + f"\nRestore {self.folder} from a copy, or start a new run in another workdir."
            )
        return None

    def _restore(self, step: int, targets: Targets, partial: bool) -> Restored:
        folder = self.folder / str(step)
        meta = distributed.broadcast_from_process_zero(lambda: self._read_metadata(step))
        wanted = targets(meta)  # its CheckpointError goes to the caller
        if not wanted:
            return Restored(step, {}, meta)
        intact = distributed.broadcast_from_process_zero(
            lambda: self._examine(step, wanted, partial)
        )
        items = {
            name: ocp.args.PyTreeRestore(
                tree, restore_args=_restore_args(tree, partial), partial_restore=partial
            )
            for name, tree in wanted.items()
        }
        restored, failure = None, None
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            failure = error
        if distributed.any_process(failure is not None) or restored is None:
            why = _brief(failure) if failure else "another process could not read it"
            if intact:  # the files are as they were written, so it is not damage
                raise CheckpointError(
                    f"checkpoint {folder} is whole but cannot be restored: {why}"
                ) from failure
            raise _Damaged(why) from failure
        return Restored(step, {name: restored[name] for name in wanted}, meta)

    def _read_metadata(self, step: int) -> dict[str, Any]:
        self._verify(step, lambda file: file.split("/")[0] == META or "/" not in file)
        try:
            file = self.folder / str(step) / META
            # Orbax's annotations require etils' paths, but its code takes any.
            meta = self._metadata.restore(file)  # pyright: ignore[reportArgumentType]
            if not isinstance(meta, dict):
                raise ValueError(f"its metadata is {type(meta).__name__}, not an object")
        except Exception as error:
            raise _Damaged(_brief(error)) from error
        return meta

    def _examine(self, step: int, wanted: Mapping[str, Tree], partial: bool) -> bool:
        """Return whether the wanted files are as they were written, with those shapes."""
        folder = self.folder / str(step)
        try:
            have = {
                name: self._trees.metadata(folder / name).tree  # pyright: ignore[reportArgumentType]
                for name in wanted
            }
        except Exception as error:
            raise _Damaged(_brief(error)) from error
        for name, tree in wanted.items():
            _compare(folder, name, have[name], tree, partial)

        def every(file):
            return file.split("/")[0] in wanted

        return self._verify(step, _needed(wanted) if partial else every)

    def _seal(self, step: int) -> None:
        """Write the checksums of the checkpoint being saved as soon as it is finished."""
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

    def _verify(self, step: int, needed: Callable[[str], bool]) -> bool:
        """Compare needed files with their checksums, and return whether there are checksums."""
        folder = self.folder / str(step)
        if not (folder / CHECKSUMS).exists():
            return False
        try:
            table = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
            wrong = [
                name
                for name, sum_ in table.items()
                if needed(name) and _checksum_or_none(folder / name) != sum_
            ]
        except (OSError, ValueError, AttributeError) as error:
            raise _Damaged(f"{CHECKSUMS} cannot be read ({error})") from error
        if wrong:
            state = "missing" if not (folder / wrong[0]).exists() else "not as it was written"
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise _Damaged(f"{wrong[0]} is {state}{more}")
        return True

    def _set_aside(self, steps: list[int]) -> None:
        place = self.folder.parent / DAMAGED

        def move() -> None:
            for step in steps:
                place.mkdir(exist_ok=True)
                target = place / str(step)
                if target.exists():
                    shutil.rmtree(target)
                (self.folder / str(step)).rename(target)
                logging.warning("moved the damaged checkpoint of step %d to %s", step, target)

        if steps:
            distributed.broadcast_from_process_zero(move)
            self._manager.reload()

    def _remove_unfinished(self, steps: str) -> None:
        for left in self.folder.glob(f"{steps}{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)

    def _failed(self, error: Exception) -> CheckpointError:
        """Return the error of a failed save, and remove its unfinished files."""
        step, self._saving = self._saving, None
        self._remove_unfinished(str(step))
        try:
            free = f"{shutil.disk_usage(self.folder).free / 1e9:.2f} GB free"
        except OSError:
            free = "free space unknown"
        # Orbax's own list has lost the step that the new one would have replaced.
        good = [s for s in finished_steps(self.folder) if s != step]
        last = (
            f"The last good checkpoint is that of step {good[-1]}"
            if good
            else "No checkpoint is finished yet"
        )
        cause = _os_error(error)
        why = _brief(error) if cause is None or cause.filename else cause.strerror
        fix = "" if cause is None else f"{remedy(cause)}, and "
        return CheckpointError(
            f"saving the checkpoint of step {step} in {self.folder} failed ({free}): "
            f"{why}. {last}; {fix}start the same command again."
        )


def _save_args(tree: Tree) -> Tree:
    """Return options that write a file for each layer of a stack."""

    def one(path, _):
        return ocp.SaveArgs(shard_axes=(0,) if _stacked(path_name(path)) else ())

    return jax.tree_util.tree_map_with_path(one, tree)


def _restore_args(tree: Tree, partial: bool) -> Tree:
    def one(a):
        return ocp.ArrayRestoreArgs(
            sharding=a.sharding, global_shape=a.shape, dtype=a.dtype, strict=not partial
        )

    return jax.tree.map(one, tree)


def _stacked(leaf: str) -> bool:
    return leaf.split("/")[0] == STACK


def _needed(wanted: Mapping[str, Tree]) -> Callable[[str], bool]:
    """Return whether a file of the checkpoint, 'params/layers.attn.q/7.0.0.0', is wanted.

    The first number of a stack's file is that of its layer.
    """
    layers = {}  # number of wanted layers by leaf folder
    for item, tree in wanted.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = path_name(path)
            place = f"{item}/{name.replace('/', '.')}"
            layers[place] = leaf.shape[0] if _stacked(name) else math.inf

    def needed(file: str) -> bool:
        place, _, name = file.rpartition("/")
        if file.split("/")[0] not in wanted:
            return False
        first = name.split(".")[0]
        # Files without a number describe a tree or a leaf.
        return not first.isdigit() or int(first) < layers.get(place, 0)

    return needed


def _compare(where: pathlib.Path, name: str, have: Tree, want: Tree, partial: bool) -> None:
    """Raise `CheckpointError` naming the first leaves that differ in name, shape or dtype."""
    have, want = _leaves(have), _leaves(want)
    differ = []
    for leaf in sorted(want if partial else have.keys() | want.keys()):
        there, here = have.get(leaf), want.get(leaf)
        if partial and there and _stacked(leaf) and here[1][0] <= there[1][0]:
            there = (there[0], (here[1][0], *there[1][1:]))
        if there != here:

            def show(a):
                return f"{a[0]}{list(a[1])}" if a else "nothing"

            differ.append(f"{name}/{leaf}: {show(there)} in the checkpoint, {show(here)} wanted")
    if differ:
        more = [f"... and {len(differ) - 5} more"] if len(differ) > 5 else []
        raise CheckpointError(
            f"checkpoint {where} is of another shape:\n  "
            + "\n  ".join(differ[:5] + more)
            + "\nUse the model configuration it was saved with, or another workdir."
        )


def _leaves(tree: Tree) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (dtype, shape) of every leaf by name; container types do not matter."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path): (str(leaf.dtype), tuple(leaf.shape)) for path, leaf in flat}


def _checksum(path: pathlib.Path) -> list[int]:
    """Return [bytes, CRC-32] of a file."""
    crc, size = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return [size, crc]


def _checksum_or_none(path: pathlib.Path) -> list[int] | None:
    return _checksum(path) if path.is_file() else None


def _os_error(error: BaseException) -> OSError | None:
    """Find the operating system's error behind one that Orbax or tensorstore raised.

    tensorstore raises its own errors, which only quote the text of the system's.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause
        cause = cause.__cause__
    found = next((n for n in QUOTED if os.strerror(n) in str(error)), None)
    return None if found is None else OSError(found, os.strerror(found))


def _brief(error: Exception) -> str:
    """Return the first line of an error's message; those of Orbax and tensorstore fill pages."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
