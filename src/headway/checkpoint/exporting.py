"""A checkpoint, from however many ranks, as one plain safetensors file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from headway import files
from headway.checkpoint import layout, tree
from headway.checkpoint.layout import Damaged, Folder
from headway.checkpoint.raw import bytes_of, header_of
from headway.checkpoint.storage import Reader
from headway.checkpoint.writing import write_file
from headway.errors import NoValidCheckpoint, UsageError


def export(directory: str | os.PathLike[str], out: str | os.PathLike[str], *, part: str | None = None) -> int:
    """Writes the tensors of a checkpoint into one new safetensors file and returns its size; one tensor at a time.

    `part` takes only that part of the state, and leaves its name out of the names of the tensors.

    >>> export(path, "net.safetensors", part="net")  # doctest: +SKIP
    """
    source, target = Path(directory).absolute(), Path(out).absolute()
    if os.path.lexists(target):
        raise UsageError(f"{target} exists already; choose another name, or remove it")
    if problems := layout.verify(source):
        raise NoValidCheckpoint(f"{source} is damaged: {'; '.join(problems[:5])}. Take another checkpoint")
    try:
        with Folder(source) as folder:
            manifest = layout.read_manifest(folder)
            reader = Reader(folder, manifest)
            names = _chosen(layout.read_part(folder, manifest, layout.STATE), reader, part, source)
            return _write(reader, names, target, {"format": "pt", "step": str(manifest.step)})
    except Damaged as problem:
        raise NoValidCheckpoint(f"{source} was damaged while it was read: {problem}") from problem


def _chosen(state: dict[str, object], reader: Reader, part: str | None, source: Path) -> dict[str, str]:
    """The name in the checkpoint -> the name in the file, for the tensors to write."""
    if part is None:
        return {name: name for name in reader.entries}
    if part not in state or not (names := tree.names_in(state[part])):
        parts = ", ".join(repr(name) for name in state if tree.names_in(state[name]))
        raise UsageError(f"{source} has no tensors in a part {part!r}: the parts with tensors are {parts}")
    return {name: name.removeprefix(f"{part}.") for name in names}


def _write(reader: Reader, names: dict[str, str], target: Path, about: dict[str, str]) -> int:
    order = sorted(names, key=lambda name: (-layout.ITEM_BYTES[reader.entries[name].dtype], name))
    entries = [(names[name], reader.entries[name].dtype, reader.entries[name].shape) for name in order]
    header, _ = header_of(entries, about)

    def parts() -> Iterator[memoryview]:
        yield memoryview(header)
        for name in order:
            tensor = reader.read_whole(name)
            if tensor.numel():
                yield bytes_of(tensor)

    staged = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    with files.storage(f"write {target}"):
        try:
            size = write_file(staged, parts()).bytes
            staged.rename(target)
            files.sync_dir(target.parent)
        finally:
            staged.unlink(missing_ok=True)
    return size
