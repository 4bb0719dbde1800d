"""Verification: is every file of a checkpoint there, with the bytes and the contents that its manifest says?"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection
from pathlib import Path

from headway.checkpoint.format.directory import CheckpointDirectory, DamagedCheckpoint
from headway.checkpoint.format.manifest import INDEX, Manifest, read_document, read_index, read_manifest

_MOST_LOOKS = 4
"""at a checkpoint that changes while it is read; a step is replaced once, where its stage ends"""


def verify(directory: str | os.PathLike[str]) -> list[str]:
    """Returns what is wrong with a checkpoint, one line per problem; an empty list if it is valid. Checks every byte.

    >>> verify("runs/digits-2026.11.15-14.30-x7k2/checkpoints/step-000000001000")  # doctest: +SKIP
    []
    """
    path, problems = Path(directory).absolute(), list[str]()
    for _ in range(_MOST_LOOKS):
        save, problems = check(path)
        if not problems or read_save(path) == save:
            break  # else a later save has replaced it while it was read
    return problems


def check(path: Path, *, rank: int = 0, size: int = 1) -> tuple[str | None, list[str]]:
    """Returns which save is at a path, None if it does not say, and the problems of one rank's part of its files."""
    save = None
    try:
        with CheckpointDirectory(path, announced=rank > 0) as directory:
            manifest = read_manifest(directory)
            save, names = manifest.save, list(manifest.files)[rank::size]
            return save, check_files(directory, manifest, names) or check_contents(directory, manifest, names)
    except DamagedCheckpoint as problem:
        return save, [str(problem)]


def read_save(path: Path) -> str | None:
    """Returns which save is at a path: a step that was replaced has the same name. None if it does not say."""
    try:
        with CheckpointDirectory(path) as directory:
            return read_manifest(directory).save
    except DamagedCheckpoint:
        return None


def check_files(directory: CheckpointDirectory, manifest: Manifest, names: Collection[str]) -> list[str]:
    """Returns the problems of these files: missing, or of another size or checksum than the manifest says."""
    problems = []
    for name in names:
        try:
            size, crc = _measure(directory, name)
        except DamagedCheckpoint as problem:
            problems.append(str(problem))
            continue
        expected = manifest.files[name]
        if size != expected.bytes:
            problems.append(f"{name}: {size} bytes, {expected.bytes} expected")
        elif crc != expected.crc32:
            problems.append(f"{name}: CRC32 {crc}, {expected.crc32} expected")
    return problems


def check_contents(directory: CheckpointDirectory, manifest: Manifest, names: Collection[str]) -> list[str]:
    """Returns what is inconsistent in these files, though their bytes are those that the manifest lists."""
    problems = []
    for name in names:
        try:
            if name == INDEX:
                read_index(directory, manifest)
            elif name.endswith(".json"):
                read_document(directory, manifest, name)
        except DamagedCheckpoint as problem:
            problems.append(str(problem))
    return problems


def _measure(directory: CheckpointDirectory, name: str) -> tuple[int, str]:
    size = crc = 0
    with directory.open(name) as file:
        for chunk in file.chunks():
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, f"{crc:08x}"
