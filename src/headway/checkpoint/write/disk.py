"""The steps of a save on disk, which run in a rank or in its writer process. Needs no torch.

    begin     mkdir .tmp-OWNER-STEP-TOKEN                            rank 0
    write     write, fsync rank-N.*                                  every rank
    commit    write, fsync index, state and manifest; fsync the      rank 0, when all ranks have written
              directory; rename it and `latest`; fsync their parent

If a step fails before the rename, `discard` removes everything; after a kill, the next `begin` does. A checkpoint that
is replaced by a later save of the same step is first renamed to .old-OWNER-STEP-TOKEN. If the later one is not
committed, it gets its name back; otherwise it is renamed to .del-OWNER-STEP-TOKEN, as by retention, and deleted.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from headway.checkpoint.format.directory import step_dir
from headway.checkpoint.format.manifest import MANIFEST, FileChecksum, Manifest
from headway.errors import UsageError
from headway.run import lock
from headway.system import files
from headway.system.failpoints import failpoint

_CHUNK_BYTES = 8 << 20
_SMALL_BYTES = 1 << 20
_UNFINISHED_LATEST = re.compile(r"\.latest\.[0-9a-f]{16}\.tmp")


@final
@dataclass(frozen=True, kw_only=True)
class SaveTarget:
    """One save on disk: where it is written, and its final name. Its fields can be sent as JSON."""

    parent: str
    owner: str
    """part of the name of unfinished saves, so that only those of the same run are removed"""
    step: int
    save: str
    """the name of the directory while it is hidden"""
    fence: lock.Fence | None
    """the lock of the run: nothing is committed after it is lost"""
    replaces: bool = False
    """whether this save may replace an earlier checkpoint of its step"""

    @property
    def hidden(self) -> Path:
        return Path(self.parent, self.save)

    @property
    def replaced(self) -> Path:
        """The hidden name of a checkpoint that this one replaces."""
        return self.hidden.with_name(self.save.replace(".tmp-", ".old-", 1))

    @property
    def final(self) -> Path:
        return step_dir(Path(self.parent), self.step)


def hidden_name(owner: str, step: int) -> str:
    """Returns a new hidden name for a save that is being written."""
    return f".tmp-{owner}-{step}-{secrets.token_hex(8)}"


def begin(target: SaveTarget) -> None:
    """Creates the hidden directory, and removes the remains of killed saves of this owner."""
    parent = Path(target.parent)
    with files.storage(f"begin to save step {target.step} in {parent}"):
        if target.fence is not None:
            target.fence.check()  # first: the checkpoints there may be those of a newer attempt
        _check_new(target)
        for directory in reversed([each for each in (parent, *parent.parents) if not each.is_dir()]):
            with suppress(FileExistsError):  # another process saves below it, too
                files.make_dir(directory)
            files.sync_dir(directory.parent)
        sweep(parent, target.owner)
        failpoint("checkpoint.before_directory")
        files.make_dir(target.hidden)
        failpoint("checkpoint.after_directory")


def write(target: SaveTarget, contents: Mapping[str, Iterable[memoryview]]) -> dict[str, FileChecksum]:
    """Writes files into the hidden directory and syncs them."""
    with files.storage(f"save step {target.step} in {target.parent}"):
        files.retry_until_visible(target.hidden.lstat)  # rank 0 has created it; another host may see it late
        facts = {name: write_file(target.hidden / name, parts) for name, parts in contents.items()}
        failpoint("checkpoint.rank_written")
    return facts


def commit(target: SaveTarget, documents: Mapping[str, bytes], manifest: Manifest) -> int:
    """Completes the checkpoint and renames it to its final name. Returns its size."""
    parent = Path(target.parent)
    latest = parent / f".latest.{secrets.token_hex(8)}.tmp"
    try:
        with files.storage(f"commit step {target.step} in {parent}"):
            facts = dict(manifest.files)
            for name, data in documents.items():
                facts[name] = write_file(target.hidden / name, [memoryview(data)])
            sealed = replace(manifest, files=dict(sorted(facts.items()))).to_bytes()
            failpoint("checkpoint.before_manifest")
            files.write_new(target.hidden / MANIFEST, sealed)
            failpoint("checkpoint.after_manifest")
            files.write_new(latest, f"{target.final.name}\n".encode())
            files.sync_dir(target.hidden)
            failpoint("checkpoint.before_rename")
            if target.fence is not None:
                target.fence.check()
            _check_new(target)
            _give_name(target)
            failpoint("checkpoint.after_rename")
            with suppress(IsADirectoryError):  # it is for people, and somebody has given a directory its name
                latest.rename(parent / "latest")
            failpoint("checkpoint.after_latest")
            files.sync_dir(parent)
            if target.replaces:
                put_back(parent, target.owner)
            failpoint("checkpoint.committed")
    finally:
        with suppress(OSError):  # the next save removes it
            latest.unlink()
    return len(sealed) + sum(fact.bytes for fact in facts.values())


def _give_name(target: SaveTarget) -> None:
    """Renames the hidden directory; one with that name is hidden first, since rename cannot replace a directory."""
    if not target.replaces or not os.path.lexists(target.final):
        target.hidden.rename(target.final)
        return
    try:
        target.final.rename(target.replaced)
        failpoint("checkpoint.replacing")
        target.hidden.rename(target.final)
    except OSError:
        put_back(Path(target.parent), target.owner)
        raise


def put_back(parent: Path, owner: str) -> None:
    """Renames hidden checkpoints of this owner back, and removes those that have been replaced."""
    hidden = re.compile(rf"\.old-{re.escape(owner)}-([0-9]+)-[0-9a-f]{{16}}")
    for path in parent.iterdir():
        if found := hidden.fullmatch(path.name):
            _put_back(path, step_dir(parent, int(found[1])))


def _put_back(old: Path, final: Path) -> None:
    if not os.path.lexists(final):
        old.rename(final)
        files.sync_dir(final.parent)
        return
    with suppress(OSError):  # the next save tries again
        gone = old.rename(old.with_name(old.name.replace(".old-", ".del-", 1)))
        files.sync_dir(gone.parent)  # a partly removed directory must never get its name back
        shutil.rmtree(gone, ignore_errors=True)


def discard(target: SaveTarget) -> None:
    """Removes the files of a failed save, and gives a checkpoint that it was to replace its name back.

    If that fails, the next save does it. Checkpoints that another save has hidden are not touched: another process may
    hold the run by now.
    """
    with suppress(OSError):
        if target.replaces and target.replaced.exists():
            _put_back(target.replaced, target.final)
    shutil.rmtree(target.hidden, ignore_errors=True)


def sweep(parent: Path, owner: str) -> None:
    """Removes the remains of killed saves and deletions of this owner, and nothing else."""
    put_back(parent, owner)
    leftover = re.compile(rf"\.(tmp|del)-{re.escape(owner)}-[0-9]+-[0-9a-f]{{16}}")
    for path in parent.iterdir():
        if leftover.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif _UNFINISHED_LATEST.fullmatch(path.name):
            path.unlink(missing_ok=True)


def write_file(path: Path, parts: Iterable[memoryview]) -> FileChecksum:
    """Writes and syncs a new file; returns size and checksum of the bytes that were passed in."""
    size = 0
    failpoint("checkpoint.before_file")
    fd = files.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with _Checksum() as checksum:
            for piece in _pieces(parts):
                checksum.add(piece)
                _write(fd, piece)
                if sys.platform == "linux":  # starts writing to the disk now, and not at the fsync
                    os.posix_fadvise(fd, size, len(piece), os.POSIX_FADV_DONTNEED)
                size += len(piece)
        failpoint("checkpoint.before_fsync")
        os.fsync(fd)
    finally:
        os.close(fd)
    failpoint("checkpoint.after_file")
    return FileChecksum(bytes=size, crc32=f"{checksum.value:08x}")


@final
class _Checksum:
    """The CRC32 of pieces, computed in a thread while they are written, at most one piece behind."""

    def __init__(self) -> None:
        self.value = 0
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: Future[None] | None = None

    def add(self, piece: memoryview) -> None:
        if self._last is not None:
            self._last.result()
        self._last = self._thread.submit(self._update, piece) if len(piece) >= _SMALL_BYTES else None
        if self._last is None:
            self._update(piece)

    def _update(self, piece: memoryview) -> None:
        self.value = zlib.crc32(piece, self.value)

    def __enter__(self) -> _Checksum:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()


def _pieces(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yields the same bytes in pieces of a good size: small parts are joined, large ones are sliced without a copy."""
    joined = bytearray()
    for part in parts:
        small = len(part) < _SMALL_BYTES
        if not small or len(joined) + len(part) > _CHUNK_BYTES:
            yield memoryview(joined)
            joined = bytearray()
        if small:
            joined += part
        else:
            yield from (part[begin : begin + _CHUNK_BYTES] for begin in range(0, len(part), _CHUNK_BYTES))
    yield memoryview(joined)


def _write(fd: int, piece: memoryview) -> None:
    for half in (piece[: len(piece) // 2], piece[len(piece) // 2 :]):
        files.write_fully(fd, half)
        failpoint("checkpoint.mid_file")


def _check_new(target: SaveTarget) -> None:
    if not target.replaces and os.path.lexists(target.final):
        raise UsageError(
            f"{target.final} exists already, and a checkpoint is never overwritten: save another step"
        )
