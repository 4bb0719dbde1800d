"""What is in a checkpoint, or in a file of others, without loading it. Needs no torch."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from headway.checkpoint.format import manifest as layout
from headway.checkpoint.format.manifest import ITEM_BYTES, Damaged, Entry, Folder
from headway.checkpoint.inspect import foreign
from headway.checkpoint.inspect.tables import Overview, Tensor
from headway.errors import NoValidCheckpoint, UsageError
from headway.run import has_info

_LARGEST_HEADER = 100_000_000  # as safetensors itself has it


def find(path: Path) -> list[Path]:
    """The checkpoints that a path means, newest first: one, all of a run, or all in a directory of them."""
    path = path.absolute()
    if not path.is_dir():
        raise UsageError(
            f"{path} is neither a checkpoint nor a run: give a directory, or a .safetensors or .pt file to show"
        )
    if (path / layout.MANIFEST).exists() or path.name.startswith("step-"):
        return [path]
    parent = path / "checkpoints" if has_info(path) else path
    found = [layout.step_dir(parent, step) for step in reversed(layout.steps(parent))]
    if not found:
        raise UsageError(f"{parent} has no checkpoints")
    return found


def look(path: Path) -> Overview:
    """The table of a checkpoint, of the newest one of a run, or of what others wrote: safetensors, .pt, torch's DCP."""
    path = path.absolute()
    try:
        if path.is_dir():
            if os.path.lexists(path / foreign.METADATA) and not os.path.lexists(path / layout.MANIFEST):
                return foreign.look_at_distributed(path)
            path = find(path)[0]
            return _look_at_checkpoint(path)
        return _look_at_file(path)
    except Damaged as problem:
        raise NoValidCheckpoint(f"{path} is damaged: {problem}") from problem


def _look_at_checkpoint(path: Path) -> Overview:
    with Folder(path) as folder:
        manifest = layout.read_manifest(folder)
        if problems := layout.check_files(folder, manifest, [layout.INDEX]):
            raise Damaged(problems[0])
        entries = layout.read_index(folder, manifest)
    about = {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "created": manifest.created,
        "versions": dict(manifest.versions),
        "metrics": dict(manifest.metrics),
        "files": {name: fact.bytes for name, fact in manifest.files.items()},
    }
    return Overview(path=path, about=about, tensors=tuple(map(_line, entries, entries.values())))


def _line(name: str, entry: Entry) -> Tensor:
    return Tensor(name=name, dtype=entry.dtype, shape=entry.shape, bytes=entry.bytes)


def _look_at_file(path: Path) -> Overview:
    with _opened(path) as stream:
        beginning = stream.read(8)
        if beginning.startswith((foreign.ZIP, foreign.PICKLE)):
            stream.seek(0)
            return foreign.look_at_torch(path, stream)
        length = int.from_bytes(beginning, "little")
        if not 2 <= length <= min(_LARGEST_HEADER, os.fstat(stream.fileno()).st_size - 8):
            raise UsageError(
                f"{path} is neither a safetensors nor a torch file: only these and checkpoints can be shown"
            )
        header = layout.parse(path.name, stream.read(length))
    return Overview(
        path=path, about={}, tensors=tuple(sorted(_plain(header, path.name), key=lambda t: t.name))
    )


def _opened(path: Path) -> BinaryIO:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"{path} is neither a checkpoint nor a file")
    return os.fdopen(fd, "rb")


def _plain(header: object, file: str) -> Iterable[Tensor]:
    if not isinstance(header, dict):
        raise Damaged(f"{file}: its header is not a table")
    for name, value in header.items():
        match value:
            case _ if name == "__metadata__":
                continue
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
                type(size) is int and size >= 0 for size in shape
            ):
                if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
                    raise Damaged(f"{file}: tensor {name!r:.100} cannot be what it says")
                yield Tensor(name=name, dtype=dtype, shape=tuple(shape), bytes=end - begin)
            case _:
                raise Damaged(f"{file}: tensor {name!r:.100} cannot be what it says")
