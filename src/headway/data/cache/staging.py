"""Staging: copies data to a node's own disk before the ranks need it, once per node.

    staged = stage(["/datasets/imagenet", "/datasets/labels.csv"])     # into $SLURM_TMPDIR
    staged.paths                                                       # [.../imagenet, .../labels.csv]

All ranks of a node may call it at once: one copies, the others wait. A file is there whole or not at all: it is copied
under a hidden name, read back and compared, and then renamed. Whoever starts again goes on where the last one ended,
also within a file. A `SHA256SUMS` in a source is checked on the way.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway import schedulers
from headway.errors import StorageError, UsageError
from headway.system import files
from headway.system.limits import boot_id

_CHUNK = 8 << 20
_READERS = 8
"""files copied at once: a shared file system answers many readers faster than one"""
_SPARE = 1.01  # of the space needed: file systems need some for themselves
_EVERY = 5.0  # seconds between two lines about progress
_LOCK = ".headway-staging.lock"

Progress = Callable[[int, int], None]
"""called now and then with the bytes that are there and the bytes in all"""


@final
@dataclass(frozen=True, kw_only=True)
class Item:
    """One file to be copied."""

    source: Path
    target: Path
    size: int
    mtime_ns: int
    sha256: str | None
    """what the source's own list says it must be"""

    def is_there(self) -> bool:
        """Whether it was staged before, from the source as it is now."""
        try:
            facts = self.target.lstat()
        except OSError:
            return False
        return (facts.st_size, facts.st_mtime_ns) == (self.size, self.mtime_ns)

    @property
    def part(self) -> Path:
        """Its hidden name until it is whole: another source, or another start of the machine, has another one."""
        mark = hashlib.sha256(f"{self.source} {self.size} {self.mtime_ns} {boot_id()}".encode()).hexdigest()[
            :12
        ]
        return self.target.with_name(f".{self.target.name}.{mark}.part")


@final
@dataclass(frozen=True, kw_only=True)
class Staged:
    """What is on the node's disk now."""

    paths: tuple[Path, ...]
    """where each source is"""
    files: int
    bytes: int
    copied: int
    """bytes that were not there yet"""


def stage(
    sources: Sequence[str | os.PathLike[str]],
    to: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
) -> Staged:
    """Copies files and folders to `to`, by default $SLURM_TMPDIR, unless they are there already.

    Links in the sources are followed: what they lead to is copied. Too little space, two sources of one name and a
    source that is not there are found before anything is copied.

    >>> stage(["/datasets/imagenet"], to="/scratch/me").paths  # doctest: +SKIP
    (PosixPath('/scratch/me/imagenet'),)
    """
    folder = _folder(to)
    with files.storage(f"stage to {folder}"), _alone(folder):
        items = _items(sources, folder)
        missing = [item for item in items if not item.is_there()]
        _check_space(missing, folder)
        meter = _Meter(sum(item.size for item in items), progress or _lines())
        meter.add(sum(item.size for item in items) - sum(item.size for item in missing))
        _copy_all(missing, meter)
    return Staged(
        paths=tuple(folder / Path(source).name for source in sources),
        files=len(items),
        bytes=meter.total,
        copied=sum(item.size for item in missing),
    )


def _folder(to: str | os.PathLike[str] | None) -> Path:
    chosen = schedulers.local_disk() if to is None else to
    if chosen is None:
        raise UsageError("this job has no directory on the node's own disk; give one with --tmp")
    folder = Path(chosen).absolute()
    try:
        with suppress(FileExistsError):
            files.make_dir(folder)
        owner = folder.stat().st_uid
    except OSError as error:
        raise UsageError(f"{folder} cannot be used for staging: {error.strerror}") from error
    if owner != os.geteuid():
        raise UsageError(
            f"{folder} belongs to another user: give a folder of your own, like {folder / 'staged'}"
        )
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of this node at a time. On a disk of the node's own, file locks hold, and die with their owner."""
    fd = files.open_private(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is staging to {folder}; waiting for it")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _items(sources: Sequence[str | os.PathLike[str]], folder: Path) -> list[Item]:
    """Every file that is asked for, with the name it will have."""
    items: list[Item] = []
    roots: dict[str, Path] = {}
    for source in map(Path, sources):
        if not source.exists():
            raise UsageError(f"there is nothing to stage at {source}")
        if source.name in roots or not source.name:
            raise UsageError(
                f"{source} and {roots.get(source.name)} would have one name in {folder}; stage them to two folders"
            )
        roots[source.name] = source
        if source.resolve().is_relative_to(folder) or folder.is_relative_to(source.resolve()):
            raise UsageError(f"{source} and {folder} lie in each other; stage to another folder")
        known = _sums(source)
        for path in _walk(source, set()):
            name = path.relative_to(source)
            facts = path.stat()
            items.append(
                Item(
                    source=path,
                    target=folder / source.name / name,
                    size=facts.st_size,
                    mtime_ns=facts.st_mtime_ns,
                    sha256=known.get(str(name)),
                )
            )
    return items


def _walk(path: Path, inside: set[tuple[int, int]]) -> Iterator[Path]:
    """The files below `path`, through links; `inside` are the folders around it, for links that lead back."""
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise UsageError(f"{path} is neither a file nor a folder, and cannot be staged")
    facts = path.stat()
    if (facts.st_dev, facts.st_ino) not in inside:
        for entry in sorted(path.iterdir()):
            yield from _walk(entry, inside | {(facts.st_dev, facts.st_ino)})


def _sums(source: Path) -> dict[str, str]:
    """What `SHA256SUMS` in a folder says, as sha256sum writes it."""
    try:
        lines = (source / "SHA256SUMS").read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    pairs = (line.partition(" ") for line in lines)
    return {name[1:].removeprefix("./"): digest for digest, _, name in pairs if len(digest) == 64}


def _check_space(missing: Sequence[Item], folder: Path) -> None:
    there = sum(item.part.stat().st_size for item in missing if item.part.exists())
    needed = int((sum(item.size for item in missing) - there) * _SPARE)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"staging needs {needed / 1e9:.2f} GB more, and {folder} has {free / 1e9:.2f} GB free: stage less, or to a "
            "larger disk"
        )


@final
class _Meter:
    """Counts bytes from several threads, and tells whoever wants to know, not too often."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total = total
        self.stop = False
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress(self._done, self.total)


def _copy_all(missing: Sequence[Item], meter: _Meter) -> None:
    parts = {item.part for item in missing}
    for parent in sorted({item.target.parent for item in missing}):
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stale in {*parent.glob(".*.part")} - parts:
            stale.unlink()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="headway-staging") as readers:
        futures = [readers.submit(_copy, item, meter) for item in missing]
        try:
            for future in futures:
                future.result()
        except BaseException:
            meter.stop = True  # the others leave what they have for the next start
            readers.shutdown(cancel_futures=True)
            raise


def _copy(item: Item, meter: _Meter) -> None:
    """One file, down to the disk, compared, and then under its name."""
    with os.fdopen(files.open_private(item.part, os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as part:
        digest = hashlib.sha256()
        resumed = _read(part, digest, meter)
        _fill(item, part, digest, meter)
        if meter.stop:
            return
        # an earlier start may have left rubbish
        if resumed and item.sha256 not in (None, digest.hexdigest()):
            meter.add(-part.tell())
            part.seek(0)
            digest = hashlib.sha256()
            _fill(item, part, digest, meter)
        try:
            _check(item, part, digest.hexdigest())
        except StorageError:
            item.part.unlink()
            raise
    os.utime(item.part, ns=(item.mtime_ns, item.mtime_ns))
    item.part.replace(item.target)


def _fill(item: Item, part: io.FileIO, digest: hashlib._Hash, meter: _Meter) -> None:
    """The rest of a file, from where the part is now."""
    with _reading(item.source):
        source = item.source.open("rb", buffering=0)
    with source:
        source.seek(part.tell())
        while not meter.stop:
            with _reading(item.source):
                chunk = source.read(_CHUNK)
            if not chunk:
                break
            digest.update(chunk)
            view = memoryview(chunk)
            while view:
                view = view[part.write(view) :]
            meter.add(len(chunk))
    part.truncate()
    os.fsync(part.fileno())


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Tells trouble with the source from trouble with the node's disk."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{source} cannot be read: {error.strerror}; look at that file system") from error


def _check(item: Item, part: io.FileIO, digest: str) -> None:
    """Compares what is on the disk with what was read, and both with what they should be."""
    facts = item.source.stat()
    if (facts.st_size, facts.st_mtime_ns) != (item.size, item.mtime_ns) or part.tell() != item.size:
        raise StorageError(f"{item.source} changed while it was copied; stage again when it is at rest")
    if item.sha256 not in (None, digest):
        raise StorageError(f"{item.source} is damaged: its SHA256SUMS says {item.sha256}, and it is {digest}")
    if sys.platform == "linux":
        os.posix_fadvise(part.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read the disk, not the memory
    part.seek(0)
    again = hashlib.sha256()
    _read(part, again)
    if again.hexdigest() != digest:
        raise StorageError(f"{item.target} does not hold what was written to it: that disk cannot be trusted")


def _read(part: io.FileIO, digest: hashlib._Hash, meter: _Meter | None = None) -> bool:
    """Reads on to the end; whether there was anything."""
    before = part.tell()
    while chunk := part.read(_CHUNK):
        digest.update(chunk)
        if meter:
            meter.add(len(chunk))
    return part.tell() > before


def _lines() -> Progress:
    """A plain line every few seconds, and none if it takes no longer than that."""
    begin = told = time.monotonic()
    first: int | None = None

    def show(done: int, total: int) -> None:
        nonlocal told, first
        first = done if first is None else first
        now = time.monotonic()
        if now - told >= _EVERY:
            told = now
            rate = (done - first) / (now - begin)
            left = f", {(total - done) / rate:.0f} s left" if rate else ""
            _say(f"staged {done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s{left}")

    return show


def _say(text: str) -> None:
    print(f"headway: {text}", file=sys.stderr, flush=True)
