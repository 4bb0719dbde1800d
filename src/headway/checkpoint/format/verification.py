"""Verification: is every file of a checkpoint there, with the bytes and the contents that its manifest says?"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection
from pathlib import Path

from headway.checkpoint.format.directory import CheckpointDirectory, DamagedCheckpoint
from headway.checkpoint.format.manifest import INDEX, Manifest, read_document, read_index, read_manifest


def verify(directory: str | os.PathLike[str]) -> list[str]:
    """Returns what is wrong with a checkpoint, one line per problem; an empty list if it is valid. Checks every byte.

    >>> verify("runs/digits-2026.11.15-14.30-x7k2/checkpoints/step-000000001000")  # doctest: +SKIP
    []
    """
    try:
        with CheckpointDirectory(Path(directory).absolute()) as opened:
            manifest = read_manifest(opened)
            names = manifest.files
            return check_files(opened, manifest, names) or check_contents(opened, manifest, names)
    except DamagedCheckpoint as problem:
        return [str(problem)]


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
