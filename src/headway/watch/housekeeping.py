"""Removes and archives runs that are over. A lock keeps others from training in them, and a crash loses no data."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from headway import schedulers
from headway.errors import StorageError, UsageError
from headway.launcher.enqueue import remove_dead_links
from headway.run import Run, runs_under
from headway.run.info import DAMAGED, read_json
from headway.run.job_record import is_over_for_good
from headway.schedulers.base import JobIds
from headway.system import files, ownership
from headway.system.text import shorten_list
from headway.watch.runs import summarize, summary_of

_BUSY = ("running", "queued")
_NAMED = 3
"""how many runs a refusal names"""


def size_of(run: Run) -> int:
    """Returns the bytes of all files of a run."""
    total = 0
    for directory, _, names in os.walk(run.path):
        for name in names:
            path = Path(directory, name)
            total += path.lstat().st_size if os.path.lexists(path) else 0
    return total


def check_idle(run: Run, what: Literal["remove", "archive"]) -> None:
    """Raises `UsageError` if a run is running or queued, or may be."""
    now = summary_of(run).status
    by_hand = f"once you know that it is not there: rm -r {shlex.quote(str(run.path))}"
    if not now.certain and now.state != "running" and not is_over_for_good(run):
        advice = by_hand if what == "remove" else "try again when the scheduler answers"
        raise UsageError(f"{run.id} may be in the queue ({now.why}); {advice}")
    if now.state in _BUSY:
        raise UsageError(f"{run.id} is {now.state}: wait until it has ended, or stop it first")
    ids = JobIds.from_submission(read_json(run.submission_file) or {})
    if ids is None or now.state == "done" or is_over_for_good(run):
        return
    scheduler = schedulers.load(ids.scheduler)
    if scheduler.health(os.environ) is None:  # an empty queue proves nothing here
        advice = by_hand if what == "remove" else "archive it on a machine of the cluster"
        raise UsageError(
            f"{run.id} may be in the queue ({scheduler.label} cannot be queried on this machine); {advice}"
        )


def check_code(run: Run, *, leaving: Sequence[Run] = ()) -> None:
    """Raises `UsageError` if runs that are not done use the copy of the code in this run, which their sweep shares.

    `leaving` are the runs that are removed together with it.
    """
    if not run.snapshot_dir.is_dir():
        return
    gone = {run.path, *(each.path for each in leaving)}
    users = [each for each in runs_under(run.path.parent) if each.path not in gone and _uses_code(each, run)]
    open_runs = [each.run.id for each in summarize(users) if each.status.state != "done"]
    if open_runs:
        raise UsageError(
            f"{run.id} holds the code of runs that are not done ({shorten_list(open_runs, _NAMED)}): remove all of "
            "them together, or wait for these"
        )


def _uses_code(run: Run, holder: Run) -> bool:
    """Returns whether a run of the same user uses the copy of the code in `holder`; others may claim to."""
    try:
        if run.path.lstat().st_uid != holder.path.lstat().st_uid:
            return False
        tree = run.info()["code"]["snapshot"]["tree"]
        return Path(tree).resolve() == holder.snapshot_dir.resolve()
    except (OSError, *DAMAGED):  # it has no copy, was removed meanwhile, or its record may hold anything
        return False


def remove(run: Run) -> None:
    """Removes a run that is over. If the process is killed meanwhile, a directory `.headway-*.tmp` remains.

    >>> remove(Run.open("runs/digits-2026.11.15-14.30-x7k2"))
    """
    with _idle(run, "remove"):
        hidden = _hide(run)
    _delete(hidden)


def archive(run: Run, directory: Path | None = None) -> Path:
    """Packs a run that is over into a tar file, by default in `archive` beside it; checks the file and removes the run.

    >>> archive(Run.open("runs/digits-2026.11.15-14.30-x7k2"))
    PosixPath('runs/archive/digits-2026.11.15-14.30-x7k2.tar')
    """
    target = (directory or run.path.parent / "archive") / f"{run.id}.tar"
    if target.exists():
        raise UsageError(f"{target} exists already: move it away first")
    with _idle(run, "archive"), files.storage(f"write {target}"):
        target.parent.mkdir(mode=0o700, exist_ok=True)
        if directory is None:  # a directory that the user chose is trusted
            _check_own(target.parent)
        _pack(run, target)
        hidden = _hide(run)  # under the same lock: what a start in between writes would not be in the archive
    _delete(hidden)
    return target


def _hide(run: Run) -> Path:
    """Renames a run whose lock is held, so that it is no longer found; returns its new path."""
    hidden = run.path.with_name(f".headway-{run.id}.tmp")
    with files.storage(f"remove {run.path}"):
        run.path.rename(hidden)
    return hidden


def _delete(hidden: Path) -> None:
    with files.storage(f"remove {hidden}"):
        shutil.rmtree(hidden)
    remove_dead_links(hidden.parent)


def _pack(run: Run, target: Path) -> None:
    """Writes a run to a tar file, which gets its name when it is complete; an incomplete one is removed."""
    partial = target.with_name(f".{target.name}-{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(files.open_private(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                tar.add(run.path, arcname=run.id)
            file.flush()
            os.fsync(file.fileno())
        _compare(partial, run)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    files.sync_dir(target.parent)


def _check_own(directory: Path) -> None:
    """Raises `UsageError` if other users can remove files of a directory, or have replaced it by a link."""
    try:
        if directory.is_symlink():
            ownership.check_owner(directory)
        ownership.check_root(directory)
    except UsageError as error:
        raise UsageError(
            f"{directory} is not safe for the only copy of a run ({error}); choose another: --to DIR"
        ) from error


@contextmanager
def _idle(run: Run, what: Literal["remove", "archive"]) -> Iterator[None]:
    if run.path.is_symlink():
        raise UsageError(f"{run.path} is a link: give the run itself, {run.path.resolve()}")
    check_idle(run, what)
    check_code(run)
    with run.lock():
        yield


def _compare(packed: Path, run: Run) -> None:
    """Raises `StorageError` unless the tar file has every file of the run in full size."""
    on_disk = {
        f"{run.id}/{path.relative_to(run.path).as_posix()}": path.stat().st_size
        for path in run.path.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    with tarfile.open(packed) as tar:
        inside = {member.name: member.size for member in tar if member.isfile()}
        # hard links are stored as the name of the first file
        inside |= {each.name: inside.get(each.linkname, -1) for each in tar.getmembers() if each.islnk()}
    lock = f"{run.id}/lock/"  # its heartbeat keeps changing
    missing = [
        name for name, size in on_disk.items() if inside.get(name) != size and not name.startswith(lock)
    ]
    if missing:
        raise StorageError(f"{packed} lacks {missing[0]} or a part of it; {run.path} is kept")
