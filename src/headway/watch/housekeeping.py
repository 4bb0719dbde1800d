"""Removes and archives runs that are over. Nobody can train in a run meanwhile, and nothing is lost half-way."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.errors import StorageError, UsageError
from headway.run import Run
from headway.system import files
from headway.watch.runs import summarize

_BUSY = ("running", "queued")


def size_of(run: Run) -> int:
    """Returns the bytes of all files of a run."""
    total = 0
    for directory, _, names in os.walk(run.path):
        for name in names:
            path = Path(directory, name)
            total += path.lstat().st_size if os.path.lexists(path) else 0
    return total


def check_idle(run: Run) -> None:
    """Raises `UsageError` if a run is running, or queued, or cannot be known not to be."""
    (summary,) = summarize([run])
    if summary.status.state in _BUSY:
        raise UsageError(f"{run.id} is {summary.status.state}: wait until it has ended, or stop it first")


def remove(run: Run) -> None:
    """Removes a run that is over. A process that is killed meanwhile leaves a directory `.headway-*.tmp`.

    >>> remove(Run.open("runs/digits-2026.11.15-14.30-x7k2"))
    """
    with _idle(run), files.storage(f"remove {run.path}"):
        hidden = run.path.with_name(f".headway-{run.id}.tmp")
        run.path.rename(hidden)
    with files.storage(f"remove {hidden}"):
        shutil.rmtree(hidden)


def archive(run: Run, directory: Path | None = None) -> Path:
    """Packs a run that is over into a tar file, by default in `archive` beside it, checks that, and removes the run.

    >>> archive(Run.open("runs/digits-2026.11.15-14.30-x7k2"))
    PosixPath('runs/archive/digits-2026.11.15-14.30-x7k2.tar')
    """
    target = (directory or run.path.parent / "archive") / f"{run.id}.tar"
    if target.exists():
        raise UsageError(f"{target} exists already: move it away first")
    partial = target.with_name(f".{target.name}.tmp")
    with _idle(run), files.storage(f"write {target}"):
        target.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(files.open_private(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                tar.add(run.path, arcname=run.id)
            file.flush()
            os.fsync(file.fileno())
        _compare(partial, run.path)
        partial.rename(target)
        files.sync_dir(target.parent)
    remove(run)
    return target


@contextmanager
def _idle(run: Run) -> Iterator[None]:
    check_idle(run)
    with run.lock():
        yield


def _compare(packed: Path, directory: Path) -> None:
    """Raises `StorageError` unless the tar file has every file of the directory with all its bytes."""
    on_disk = {
        path.relative_to(directory.parent).as_posix(): path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    with tarfile.open(packed) as tar:
        inside = {member.name: member.size for member in tar if member.isfile()}
        # of files that are hard links to each other, all but the first are names of it
        inside |= {each.name: inside.get(each.linkname, -1) for each in tar.getmembers() if each.islnk()}
    lock = f"{directory.name}/lock/"  # its heartbeat goes on
    missing = [
        name for name, size in on_disk.items() if inside.get(name) != size and not name.startswith(lock)
    ]
    if missing:
        packed.unlink()
        raise StorageError(f"{packed} lacks {missing[0]} or a part of it; {directory} is kept")
