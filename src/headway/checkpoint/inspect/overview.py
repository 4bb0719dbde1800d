"""Overviews of checkpoints and of other tools' files, without loading them. Needs no torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from headway.checkpoint.format.directory import (
    CheckpointDirectory,
    DamagedCheckpoint,
    checkpoints_at,
    list_steps,
    step_dir,
)
from headway.checkpoint.format.header import parse_header
from headway.checkpoint.format.manifest import (
    INDEX,
    LARGEST_HEADER_BYTES,
    MANIFEST,
    TensorEntry,
    read_index,
    read_manifest,
)
from headway.checkpoint.format.verification import check_files
from headway.checkpoint.inspect import foreign
from headway.checkpoint.inspect.listing import CheckpointSummary, list_checkpoints
from headway.checkpoint.inspect.tables import Overview, TensorSummary
from headway.errors import NoValidCheckpoint, UsageError
from headway.run.paths import step_of


def find(path: Path) -> list[Path]:
    """Returns the checkpoints that a path means, newest first: one, all of a run, or all in a directory."""
    path = path.absolute()
    if not os.path.lexists(path):
        raise UsageError(f"there is no file or directory {str(path)!r}: give a checkpoint or a run")
    if not path.is_dir():
        raise UsageError(
            f"{path} is neither a checkpoint nor a run: give a directory, or a .safetensors or .pt file to show"
        )
    if _is_one(path):
        return [path]
    parent = checkpoints_at(path)
    found = [step_dir(parent, step) for step in reversed(list_steps(parent))]
    if not found:
        raise UsageError(f"{parent} has no checkpoints: choose another run; to list runs: headway runs")
    return found


def list_all(path: Path) -> list[CheckpointSummary]:
    """Returns all checkpoints of a run, or of a directory of checkpoints; an empty list for anything else."""
    path = path.absolute()
    return list_checkpoints(path) if path.is_dir() and not _is_one(path) else []


def _is_one(path: Path) -> bool:
    """Returns whether a path means one checkpoint, valid or damaged; the name of a run may begin like one, too."""
    return os.path.lexists(path / MANIFEST) or step_of(path.name.partition(".corrupt-")[0]) is not None


def read(path: Path) -> Overview:
    """Returns the overview of a checkpoint, of the newest one of a run, or of a safetensors or torch file."""
    path = path.absolute()
    try:
        if path.is_dir():
            if os.path.lexists(path / foreign.METADATA) and not os.path.lexists(path / MANIFEST):
                return foreign.read_distributed(path)
            path = find(path)[0]
            return _read_checkpoint(path)
        return _read_file(path)
    except DamagedCheckpoint as problem:
        raise NoValidCheckpoint(
            f"{path} is damaged: {problem}. To find a valid checkpoint: headway checkpoint verify RUN"
        ) from problem


def _read_checkpoint(path: Path) -> Overview:
    with CheckpointDirectory(path) as directory:
        manifest = read_manifest(directory)
        if problems := check_files(directory, manifest, [INDEX]):
            raise DamagedCheckpoint(problems[0])
        entries = read_index(directory, manifest)
    about = {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "created": manifest.created,
        "versions": dict(manifest.versions),
        "metrics": dict(manifest.metrics),
        "files": {name: fact.bytes for name, fact in manifest.files.items()},
    }
    return Overview(path=path, about=about, tensors=tuple(map(_summary, entries, entries.values())))


def _summary(name: str, entry: TensorEntry) -> TensorSummary:
    return TensorSummary(name=name, dtype=entry.dtype, shape=entry.shape, bytes=entry.bytes)


def _read_file(path: Path) -> Overview:
    with _open(path) as stream:
        beginning = stream.read(9)
        length = int.from_bytes(beginning[:8], "little")
        after = os.fstat(stream.fileno()).st_size - 8
        limit = min(LARGEST_HEADER_BYTES, after)
        stream.seek(0)
        # a safetensors file may begin like a pickle, but its ninth byte opens a JSON object
        if not (2 <= length <= limit and beginning.endswith(b"{")):
            if beginning.startswith((foreign.ZIP, foreign.PICKLE)) or foreign.is_pickle(stream):
                return foreign.read_torch_file(path, stream)
            if not 2 <= length <= limit:
                raise UsageError(
                    f"{path} is neither a safetensors nor a torch file: only these and checkpoints can be shown"
                )
        stream.seek(8)
        entries = parse_header(path.name, stream.read(length), after - length)
    summaries = (
        TensorSummary(name=name, dtype=entry.dtype, shape=entry.shape, bytes=entry.end - entry.begin)
        for name, entry in sorted(entries.items())
    )
    return Overview(path=path, about={}, tensors=tuple(summaries))


def _open(path: Path) -> BinaryIO:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(
            f"{path} is neither a checkpoint nor a file: give a run, one of its checkpoints, or a file of weights"
        )
    return os.fdopen(fd, "rb")
