"""Which checkpoints to keep, and the removal of the others, which is safe to kill at any time."""

from __future__ import annotations

import errno
import secrets
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from headway.checkpoint.format.directory import (
    CheckpointDirectory,
    CheckpointRoot,
    DamagedCheckpoint,
    list_steps,
    resolve_root,
    step_dir,
)
from headway.checkpoint.format.manifest import Manifest, read_manifest
from headway.errors import NewerFormat, UsageError
from headway.run import Run
from headway.system import files
from headway.system.failpoints import failpoint

_IN_USE = (errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY)


@final
@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints are kept: those that at least one of these rules selects.

    >>> Retention(keep_last=2, keep_every=10_000, keep_best="val/loss")
    Retention(keep_last=2, keep_every=10000, keep_best='val/loss', best='min')
    """

    keep_last: int = 3
    """the newest ones; at least 2, in case the newest is damaged, and so that the one that a run was resumed from is
    kept until two newer ones exist"""
    keep_every: int | None = None
    """those whose step is a multiple of this"""
    keep_best: str | None = None
    """the one with the best value of this metric, as given to `save(metrics=...)`; the newest if several are equal"""
    best: Literal["min", "max"] = "min"
    """whether the smallest or the largest value is the best"""

    def __post_init__(self) -> None:
        if type(self.keep_last) is not int or self.keep_last < 2:
            raise UsageError(
                f"keep_last={self.keep_last!r:.80}: give a whole number of at least 2, in case the newest is damaged"
            )
        if self.keep_every is not None and (type(self.keep_every) is not int or self.keep_every < 1):
            raise UsageError(f"keep_every={self.keep_every!r} is not a valid number of steps: give 1 or more")
        if self.best not in ("min", "max"):
            raise UsageError(f"best={self.best!r} is not valid: use 'min' or 'max'")

    def kept(self, manifests: dict[int, Manifest]) -> set[int]:
        """Returns which of the existing steps to keep."""
        steps = sorted(manifests)
        keep = set(steps[-self.keep_last :])
        if self.keep_every is not None:
            keep |= {step for step in steps if step % self.keep_every == 0}
        return keep | self.best_of(manifests)

    def best_of(self, manifests: dict[int, Manifest]) -> set[int]:
        """Returns a set of the step with the best value; an empty one if no checkpoint has the metric."""
        sign = -1 if self.best == "min" else 1
        name = self.keep_best
        values = [(sign * m.metrics[name], step) for step, m in manifests.items() if name in m.metrics]  # type: ignore[index]
        return {max(values)[1]} if values else set()


def prune(where: CheckpointRoot, retention: Retention) -> list[Path]:
    """Removes the checkpoints that need not be kept and returns their paths. Call it on one rank, between saves.

    A checkpoint is renamed before its files are removed, so that a kill never leaves a half-deleted one under its name.
    Directories without a valid manifest are neither counted nor removed. If a removal fails, it only warns. `RunLocked`
    if another process holds the run.

        rules = hw.checkpoint.Retention(keep_last=3, keep_best="val/loss", best="min")
        removed = hw.checkpoint.prune("checkpoints", rules)
    """
    if isinstance(where, Run):
        where.check_owner()
    parent, owner = resolve_root(where)
    manifests = read_manifests(parent)
    keep = retention.kept(manifests)
    removed = []
    for step in sorted(manifests.keys() - keep):  # the oldest first
        path = step_dir(parent, step)
        try:
            _remove(path, path.with_name(f".del-{owner}-{step}-{secrets.token_hex(8)}"))
        except OSError as error:
            warnings.warn(
                f"{path} could not be removed: {error.strerror}; it is kept", RuntimeWarning, stacklevel=2
            )
        else:
            removed.append(path)
    return removed


def _remove(path: Path, hidden: Path) -> None:
    failpoint("retention.before_rename")
    path.rename(hidden)
    failpoint("retention.after_rename")
    files.sync_dir(path.parent)
    failpoint("retention.before_delete")
    shutil.rmtree(hidden, ignore_errors=True)  # as much as possible
    _warn_of_rest(hidden)
    failpoint("retention.after_delete")


def _warn_of_rest(hidden: Path) -> None:
    """Warns if the rest of a directory cannot be removed, unless a reader on NFS has files in it open."""
    try:
        shutil.rmtree(hidden)
    except OSError as error:
        if error.errno not in _IN_USE:
            warnings.warn(
                f"{hidden} could not be removed, and still takes space: {error.strerror}; the next save tries again",
                RuntimeWarning,
                stacklevel=4,
            )


def read_manifests(parent: Path) -> dict[int, Manifest]:
    """Returns the manifests of all checkpoints that have a valid one, by step."""
    found = {}
    for step in list_steps(parent):
        try:
            with CheckpointDirectory(step_dir(parent, step)) as directory:
                found[step] = read_manifest(directory)
        except (DamagedCheckpoint, NewerFormat):
            continue  # `find_valid` renames or refuses it
    return found
