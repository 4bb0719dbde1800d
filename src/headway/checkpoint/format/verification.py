"""Verification: does a checkpoint have every file of its manifest, with the right bytes and valid contents?"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection
from pathlib import Path

from headway.checkpoint.format import tree
from headway.checkpoint.format.directory import CheckpointDirectory, DamagedCheckpoint, MovedCheckpoint
from headway.checkpoint.format.manifest import (
    INDEX,
    STATE,
    Manifest,
    read_document,
    read_index,
    read_manifest,
)

_MOST_TRIES = 4
"""attempts to read a checkpoint that changes meanwhile; a step is replaced at most once, when its stage ends"""


def verify(directory: str | os.PathLike[str]) -> list[str]:
    """Returns what is wrong with a checkpoint, one line per problem; an empty list if it is valid. Checks every byte.

    >>> verify("runs/digits-2026.11.15-14.30-x7k2/checkpoints/step-000000001000")  # doctest: +SKIP
    []
    """
    path, problems = Path(directory).absolute(), list[str]()
    for _ in range(_MOST_TRIES):
        save, problems = check(path)
        if not problems or read_save(path) == save:
            break  # otherwise a later save replaced it while it was read
    return problems


def check(path: Path, *, rank: int = 0, size: int = 1) -> tuple[str | None, list[str]]:
    """Returns the name of the save at a path, None if unknown, and the problems in one rank's part of its files."""
    save = None
    try:
        with CheckpointDirectory(path, announced=rank > 0) as directory:
            manifest = read_manifest(directory)
            save, names = manifest.save, list(manifest.files)[rank::size]
            return save, find_problems(directory, manifest, names)
    except MovedCheckpoint as problem:
        return None, [str(problem)]  # it is unknown which save has the problem: callers check again
    except DamagedCheckpoint as problem:
        return save, [str(problem)]


def read_save(path: Path) -> str | None:
    """Returns the name of the save at a path, which changes when a step is replaced; None if it is unknown."""
    try:
        with CheckpointDirectory(path) as directory:
            return read_manifest(directory).save
    except DamagedCheckpoint:
        return None


def find_problems(directory: CheckpointDirectory, manifest: Manifest, names: Collection[str]) -> list[str]:
    """Returns the problems of these files; their contents are checked only if all bytes are right."""
    return check_files(directory, manifest, names) or check_contents(directory, manifest, names)


def check_files(directory: CheckpointDirectory, manifest: Manifest, names: Collection[str]) -> list[str]:
    """Returns the problems of these files: missing, or with another size or checksum than in the manifest."""
    problems = []
    for name in names:
        expected = manifest.files[name]
        try:
            size, crc = measure(directory, name, expected.bytes)
        except MovedCheckpoint:
            raise
        except DamagedCheckpoint as problem:
            problems.append(str(problem))
            continue
        if size != expected.bytes:
            problems.append(f"{name}: {size} bytes, {expected.bytes} expected")
        elif crc != expected.crc32:
            problems.append(f"{name}: CRC32 {crc}, {expected.crc32} expected")
    return problems


def check_contents(directory: CheckpointDirectory, manifest: Manifest, names: Collection[str]) -> list[str]:
    """Returns the inconsistencies in these files, whose bytes are right."""
    problems = []
    entries = None
    for name in names:
        try:
            if name in (INDEX, STATE) and entries is None:
                entries = read_index(directory, manifest)
            if name == STATE:
                tree.check(read_document(directory, manifest, name), entries or {})
            elif name.endswith(".json") and name != INDEX:
                tree.join(read_document(directory, manifest, name), {}, file=name)
        except MovedCheckpoint:
            raise
        except DamagedCheckpoint as problem:
            problems.append(str(problem))
    return problems


def measure(directory: CheckpointDirectory, name: str, expected: int) -> tuple[int, str]:
    """Returns size and CRC32 of a file; the CRC32 is that of nothing if the size is not the expected one."""
    size = crc = 0
    with directory.open(name) as file:
        if file.bytes != expected:  # a sparse file of a terabyte would be read for half an hour
            return file.bytes, f"{crc:08x}"
        for chunk in file.chunks(expected):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, f"{crc:08x}"
