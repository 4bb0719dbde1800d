"""Staging: copies data to a node's own disk before the ranks need it, once per node.

    staged = stage(["/datasets/imagenet", "/datasets/labels.csv"])     # into $SLURM_TMPDIR
    staged.paths                                                       # [.../imagenet, .../labels.csv]

All ranks of a node may call it at once: one copies, the others wait. A file is copied under a hidden name, read back
and compared, and then renamed, so it is never incomplete under its own name. A later start continues where an earlier
one stopped, also within a file. A `SHA256SUMS` in a source is verified.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from headway import schedulers
from headway.data.cache.copier import copy_bytes
from headway.data.shards.checksums import CHUNK_BYTES, update_digest
from headway.data.shards.shard_file import ShardFile
from headway.errors import BadShard, StorageError, UsageError
from headway.system import files, ownership
from headway.system.limits import boot_id
from headway.system.locks import Deadline, FileLock
from headway.system.log import logger
from headway.system.text import format_bytes, format_duration, plural

_THREADS = 8  # files copied at once: a shared file system answers many readers faster than one
_LARGEST_SUMS_BYTES = 1 << 30
_SPACE_FACTOR = 1.01  # of the space needed: file systems need some for themselves
_PROGRESS_PERIOD_S = 5.0
_LOCK_FILE = ".headway-staging.lock"
_PART = re.compile(r"\..+\.[0-9a-f]{12}\.part", re.DOTALL)
"""the name of an incomplete copy, `StagedFile.part`"""

Progress = Callable[[int, int], None]
"""called after each chunk with the bytes that are there so far, and the total"""


@final
@dataclass(frozen=True, kw_only=True)
class StagingResult:
    """What is on the node's disk now."""

    paths: tuple[Path, ...]
    """where the copy of each source is"""
    files: int
    bytes: int
    copied: int
    """bytes that were not there yet"""


def stage(
    sources: Sequence[str | os.PathLike[str]],
    to: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
    threads: int = _THREADS,
    chunk_bytes: int = CHUNK_BYTES,
) -> StagingResult:
    """Copies files and directories to `to`, by default the job's disk on this node, unless they are there already.

    Links in the sources are followed. Too little space, two sources with the same name and a missing source are found
    before anything is copied.

    >>> stage(["/datasets/imagenet"], to="/scratch/me").paths  # doctest: +SKIP
    (PosixPath('/scratch/me/imagenet'),)
    """
    directory = _target_directory(to)
    with files.storage(f"stage to {directory}"), _exclusive(directory):
        staged = list(list_files(sources, directory))
        missing = [file for file in staged if not file.is_staged()]
        _warn_of_unfinished(staged, sources)
        _warn_of_others(staged, directory)
        _check_space(missing, directory)
        total, left = (sum(file.size for file in each) for each in (staged, missing))
        meter = _Meter(total, progress or log_progress())
        meter.add(total - left)
        _copy_all(missing, meter, threads, chunk_bytes)
    return StagingResult(
        paths=tuple(directory / Path(source).name for source in sources),
        files=len(staged),
        bytes=total,
        copied=left,
    )


def _target_directory(to: str | os.PathLike[str] | None) -> Path:
    chosen = schedulers.local_disk() if to is None else to
    if chosen is None:
        raise UsageError("this job has no directory on the node's own disk; give one with --tmp")
    directory = Path(chosen).absolute()
    try:
        with suppress(FileExistsError):
            files.make_dir(directory)
        # the ranks will trust the files in it
        ownership.check_private(directory.resolve(), advice="give a directory of your own, like /tmp/$USER")
        ownership.check_root(directory)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be used for staging: {error.strerror}"
            "; choose another one with --tmp or --pre-to"
        ) from error
    return directory


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Lets one process of this node stage at a time, without a time limit: the lock ends with its process."""
    with FileLock.open(directory / _LOCK_FILE) as lock:
        if not lock.try_acquire():
            logger.info(f"another process is staging to {directory}; waiting for it")
            lock.acquire(Deadline(math.inf), "another process that stages")
        yield


# --- what to copy


@final
@dataclass(frozen=True, kw_only=True)
class StagedFile:
    """One file to be copied."""

    source: Path
    target: Path
    size: int
    mtime_ns: int
    sha256: str | None
    """from the `SHA256SUMS` of the source"""
    boot: str = field(default_factory=boot_id)

    def is_staged(self) -> bool:
        """Whether the current version of the source is staged already."""
        with suppress(OSError):
            status = self.target.lstat()
            return (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)
        return False

    @property
    def part(self) -> Path:
        """Its hidden name until it is complete; it differs for another source, and after a reboot.

        After a power failure, a file may hold fewer bytes than its size states.
        """
        identity = f"{self.source} {self.size} {self.mtime_ns} {self.boot}"
        mark = hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]
        return self.target.with_name(f".{self.target.name}.{mark}.part")


def list_files(sources: Sequence[str | os.PathLike[str]], directory: Path) -> Iterator[StagedFile]:
    """Yields every file in the sources, with the path that it will have."""
    roots: dict[str, Path] = {}
    for source in map(Path, sources):
        if not source.exists():
            raise UsageError(f"there is nothing to stage at {source}")
        if source.name in roots or not source.name:
            raise UsageError(
                f"{source} and {roots.get(source.name)} would have the same name in {directory}: stage them to "
                "two directories"
            )
        roots[source.name] = source
        if source.resolve().is_relative_to(directory) or directory.is_relative_to(source.resolve()):
            raise UsageError(f"{source} and {directory} contain each other: stage to another directory")
        sums = _sha256_sums(source)
        for path in _walk(source, set()):
            name, status = path.relative_to(source), path.stat()
            yield StagedFile(
                source=path,
                target=directory / source.name / name,
                size=status.st_size,
                mtime_ns=status.st_mtime_ns,
                sha256=sums.get(str(name)),
            )


def _walk(path: Path, parents: set[tuple[int, int]]) -> Iterator[Path]:
    """Yields the files below `path`, through links; a link back to one of the `parents` is skipped.

    So are markers of unfinished packing: they may be unreadable for other users, and do not describe the copy.
    """
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise UsageError(
            f"{path} is neither a file nor a directory, and cannot be staged"
            ": leave it out, or stage what is beside it"
        )
    status = path.stat()
    if (status.st_dev, status.st_ino) not in parents:
        # imported late, because it needs numpy, which a start without staging does not
        from headway.data.shards.packing import is_unfinished_marker

        for entry in sorted(path.iterdir()):
            if not is_unfinished_marker(entry):
                yield from _walk(entry, parents | {(status.st_dev, status.st_ino)})


def _sha256_sums(source: Path) -> dict[str, str]:
    """Reads `SHA256SUMS` in a directory, as sha256sum writes it."""
    try:
        lines = (
            files.read_regular(source / "SHA256SUMS", follow=True, most_bytes=_LARGEST_SUMS_BYTES)
            .decode()
            .splitlines()
        )
    except (FileNotFoundError, NotADirectoryError):
        return {}
    pairs = (line.partition(" ") for line in lines)
    return {name[1:].removeprefix("./"): digest.lower() for digest, _, name in pairs if len(digest) == 64}


def _check_space(missing: Sequence[StagedFile], directory: Path) -> None:
    present = sum(file.part.stat().st_size for file in missing if file.part.exists())
    needed = int((sum(file.size for file in missing) - present) * _SPACE_FACTOR)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise StorageError(
            f"staging needs {format_bytes(needed)} more, and {directory} has {format_bytes(free)} free: stage less, "
            "or to a larger disk"
        )


def _warn_of_unfinished(staged: Sequence[StagedFile], sources: Sequence[str | os.PathLike[str]]) -> None:
    """Warns of sources with shards that were not packed completely, because loaders of the copy cannot tell."""
    from headway.data.catalog import warn_of_unfinished  # imported late: see _walk

    shards = [file.source for file in staged if file.source.suffix == ".tar"]
    for source in map(Path, sources):
        warn_of_unfinished(str(source), [path for path in shards if path.is_relative_to(source)])


def _warn_of_others(staged: Sequence[StagedFile], directory: Path) -> None:
    """Warns of files that the sources do not have: loaders would also read shards of an earlier version."""
    targets = {file.target for file in staged}
    parents = {file.target.parent for file in staged}
    parents |= {above for parent in parents for above in parent.parents if above.is_relative_to(directory)}
    parents.discard(directory)  # the user may keep other files there
    found = (path for parent in parents if parent.is_dir() for path in parent.iterdir())
    others = sorted(
        path for path in found if path not in targets and path not in parents and path.name[0] != "."
    )
    if others:
        logger.warning(
            f"{directory} has {plural(len(others), 'file')} that the sources do not have, such as {others[0]}: remove "
            "files of earlier versions of the data"
        )


# --- copying


@final
class _Meter:
    """Counts bytes from several threads, and reports them; `stop` ends all copies after their current chunk."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total = total
        self.stop = False
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> bool:
        with self._lock:
            self._done += count
            self._progress(self._done, self.total)
        return not self.stop


def _copy_all(missing: Sequence[StagedFile], meter: _Meter, threads: int, chunk_bytes: int) -> None:
    parts = {file.part for file in missing}
    for parent in sorted({file.target.parent for file in missing}):
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in {*parent.glob(".*.part")} - parts:
            if _PART.fullmatch(other.name) and stat.S_ISREG(other.lstat().st_mode):
                other.unlink()
    with ThreadPoolExecutor(threads, thread_name_prefix="headway-staging") as pool:
        futures = [pool.submit(_copy, file, meter, chunk_bytes) for file in missing]
        try:
            for future in futures:
                future.result()
        except BaseException:
            meter.stop = True  # the other files keep their parts for the next start
            pool.shutdown(cancel_futures=True)
            raise


def _copy(file: StagedFile, meter: _Meter, chunk_bytes: int) -> None:
    """Copies one file to the disk, compares it, and then renames it."""

    def on_chunk(_: int, size: int) -> bool:
        return meter.add(size)

    with os.fdopen(files.open_private(file.part, os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as part:
        try:
            source, present = ShardFile(file.source), ShardFile(file.part)
            digest, start = hashlib.sha256(), len(present)
            update_digest(digest, present, meter.add)  # what an earlier start left
            end = copy_bytes(
                source, part.fileno(), digest, start=start, chunk_bytes=chunk_bytes, on_chunk=on_chunk
            )
            if start and not meter.stop and file.sha256 not in (None, digest.hexdigest()):
                meter.add(-end)  # the earlier start left other bytes: copy again from the beginning
                digest = hashlib.sha256()
                end = copy_bytes(source, part.fileno(), digest, chunk_bytes=chunk_bytes, on_chunk=on_chunk)
        except (BadShard, UsageError) as error:
            raise StorageError(f"{error}; check that file system") from error
        if meter.stop:
            return
        part.truncate(end)
        os.fsync(part.fileno())
        try:
            _verify(file, part.fileno(), end, digest.hexdigest())
        except StorageError:
            file.part.unlink()
            raise
    os.utime(file.part, ns=(file.mtime_ns, file.mtime_ns))
    file.part.replace(file.target)


def _verify(file: StagedFile, fd: int, end: int, digest: str) -> None:
    """Compares the bytes on the disk with those that were read, and both with the expected size and checksum."""
    status = file.source.stat()
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns) or end != file.size:
        raise StorageError(
            f"{file.source} changed while it was copied: stage again when it no longer changes"
        )
    if file.sha256 not in (None, digest):
        raise StorageError(
            f"{file.source} is damaged: its SHA256SUMS states {file.sha256}, but it has {digest}"
            "; copy or download it again"
        )
    if sys.platform == "linux":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # read the disk, not the page cache
    stored = hashlib.sha256()
    update_digest(stored, ShardFile(file.part))
    if stored.hexdigest() != digest:
        raise StorageError(f"{file.target} does not hold what was written to it: do not use that disk")


def log_progress(
    period_s: float = _PROGRESS_PERIOD_S, clock: Callable[[], float] = time.monotonic
) -> Progress:
    """Returns a progress callback that logs one line every few seconds, and none before the first period."""
    began = logged = clock()
    first: int | None = None

    def log(done: int, total: int) -> None:
        nonlocal logged, first
        first = done if first is None else first
        now = clock()
        if now - logged >= period_s:
            logged = now
            rate = (done - first) / (now - began)
            left = f", {format_duration((total - done) / rate)} left" if rate else ""
            logger.info(f"staged {format_bytes(done)} of {format_bytes(total)}, {format_bytes(rate)}/s{left}")

    return log
