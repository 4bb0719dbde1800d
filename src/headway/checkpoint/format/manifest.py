"""Parsers of manifest.json and index.json, which check the contents. Needs no torch.

A CRC detects damage, not forgery: values that are read here cannot execute anything or point outside of their files.
"""

from __future__ import annotations

import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, final

from headway.checkpoint.format.directory import CheckpointDirectory, DamagedCheckpoint, step_dir
from headway.errors import NewerFormat
from headway.system.files import LARGEST_BYTES

FORMAT = 1  # of the manifest; raise it when readers of the old format would misread the new one
MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.json"
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "C64": 8, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
LARGEST_HEADER_BYTES = 100_000_000  # of a safetensors file: the limit of safetensors itself
METADATA = "__metadata__"
"""the key of a safetensors header that is not a tensor"""
_MOST_ELEMENTS = (1 << 63) - 1  # of a tensor of torch
_MOST_SHARDED_DIMS = 6  # of a tensor: there are 2 ** 6 corners of a chunk to compare

_FILE = re.compile(r"[a-z0-9-]{1,64}\.(json|safetensors)")
_SEAL = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n}\n')
_SEAL_BYTES = len(b',\n "crc32": "00000000"\n}\n')


@final
@dataclass(frozen=True, kw_only=True)
class FileChecksum:
    """Size and CRC32 of one file, as in the manifest."""

    bytes: int
    crc32: str


@final
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of manifest.json."""

    step: int
    save: str
    world_size: int
    created: str
    versions: Mapping[str, str | None]
    metrics: Mapping[str, float]
    files: Mapping[str, FileChecksum]

    def to_bytes(self) -> bytes:
        """Encodes the file: JSON whose last entry is the CRC32 of all bytes before that entry."""
        text = json.dumps(
            {
                "format": FORMAT,
                "step": self.step,
                "save": self.save,
                "created": self.created,
                "world": {"size": self.world_size},
                "versions": dict(self.versions),
                "metrics": dict(self.metrics),
                "files": {name: {"bytes": f.bytes, "crc32": f.crc32} for name, f in self.files.items()},
            },
            indent=1,
            allow_nan=False,
        )
        body = text.removesuffix("\n}").encode()
        return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        body, seal = data[:-_SEAL_BYTES], _SEAL.fullmatch(data[-_SEAL_BYTES:])
        if seal is None:
            _refuse_newer(data)  # a newer format may have its checksum elsewhere
        if seal is None or f"{zlib.crc32(body):08x}".encode() != seal[1]:
            raise DamagedCheckpoint(f"{MANIFEST}: its checksum is wrong")
        match parse_json(MANIFEST, data):
            case {"format": int(form)} if form != FORMAT:
                _refuse_newer(data)
                raise DamagedCheckpoint(f"{MANIFEST}: format {form} is not valid: {FORMAT} is expected")
            case {
                "step": int(step), "save": str(save), "created": str(created), "world": {"size": int(world_size)},
                "versions": dict(versions), "metrics": dict(metrics), "files": dict(listed),
            } if _are_numbers(metrics):  # fmt: skip
                facts = {name: _file_fact(name, fact) for name, fact in listed.items()}
                return cls(
                    step=step, save=save, world_size=world_size, created=created, versions=versions,
                    metrics=metrics, files=facts,
                )  # fmt: skip
        raise DamagedCheckpoint(f"{MANIFEST}: it is not a manifest")


def _refuse_newer(data: bytes) -> None:
    """Raises `NewerFormat` if this is the manifest of a newer version."""
    try:
        match json.loads(data):
            case {"format": int(form)} if form > FORMAT:
                raise NewerFormat(
                    f"{MANIFEST} has format {form}, written by a newer headway; this version reads format {FORMAT}: "
                    "upgrade headway to load it"
                )
    except (ValueError, RecursionError):
        return  # not JSON: damaged


@final
@dataclass(frozen=True, kw_only=True)
class TensorChunk:
    """A slice of a tensor: its place in the tensor, and the place of its bytes in a file."""

    file: str
    begin: int
    end: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@final
@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A whole tensor of the checkpoint, with its chunks from all ranks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_manifest(directory: CheckpointDirectory) -> Manifest:
    try:
        manifest = Manifest.from_bytes(directory.read(MANIFEST, LARGEST_BYTES))
    except NewerFormat as error:
        raise NewerFormat(f"{directory.path}: {error}") from None
    if step_dir(directory.path.parent, manifest.step).name != directory.path.name.partition(".corrupt-")[0]:
        raise DamagedCheckpoint(
            f"{MANIFEST}: it belongs to step {manifest.step}, not to {directory.path.name}"
        )
    for name in (INDEX, STATE):
        if name not in manifest.files:
            raise DamagedCheckpoint(f"{MANIFEST}: it does not list {name}")
    return manifest


def read_index(directory: CheckpointDirectory, manifest: Manifest) -> dict[str, TensorEntry]:
    """Returns the tensors of a checkpoint; every byte range is inside its file, every chunk inside its tensor."""
    listed = read_document(directory, manifest, INDEX)
    if not isinstance(listed, dict):
        raise DamagedCheckpoint(f"{INDEX}: it is not an index")
    return {name: _entry(name, value, manifest) for name, value in listed.items()}


def read_document(directory: CheckpointDirectory, manifest: Manifest, name: str) -> Any:
    """Returns the contents of a JSON file of this save."""
    match parse_json(name, directory.read(name)):
        case {"step": manifest.step, "save": manifest.save, "holds": held}:
            return held
    raise DamagedCheckpoint(f"{name}: it does not belong to this save")


def parse_json(name: str, data: bytes) -> Any:
    """Parses JSON; `DamagedCheckpoint` if it is not valid."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{name}: it is not JSON: {error}") from error


def _entry(name: str, value: object, manifest: Manifest) -> TensorEntry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "chunks": list(listed)} if (
            dtype in ITEM_BYTES and are_sizes(shape)
        ):
            chunks = [_chunk(name, chunk, dtype, shape, manifest) for chunk in listed]
            filled = tuple(
                chunk for chunk in chunks if chunk.begin < chunk.end
            )  # some ranks have an empty one
            if not covers(filled, shape):
                raise DamagedCheckpoint(f"{INDEX}: the chunks of tensor {name!r:.100} do not cover it once")
            return TensorEntry(dtype=dtype, shape=tuple(shape), chunks=filled)
    raise DamagedCheckpoint(f"{INDEX}: the entry of tensor {name!r:.100} is inconsistent")


def covers(chunks: Sequence[TensorChunk], whole: Sequence[int]) -> bool:
    """Returns whether chunks, each inside a tensor of this shape, cover all of it and do not overlap.

    If each corner of a chunk is a corner of an even number of them, except the corners of the tensor, every element is
    in an odd number of chunks. If the chunks also have as many elements as the tensor, that number is 1.
    """
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(whole):
        return False
    dims = [dim for dim, size in enumerate(whole) if any(chunk.shape[dim] != size for chunk in chunks)]
    if len(dims) > _MOST_SHARDED_DIMS:
        return False
    odd: set[tuple[int, ...]] = set()
    for chunk in chunks if dims else ():
        ends = [(chunk.offsets[dim], chunk.offsets[dim] + chunk.shape[dim]) for dim in dims]
        odd.symmetric_difference_update(product(*ends))
    return not dims or odd == set(product(*((0, whole[dim]) for dim in dims)))


def _chunk(name: str, value: object, dtype: str, whole: list[int], manifest: Manifest) -> TensorChunk:
    match value:
        case {
            "file": str(file),
            "bytes": [int(begin), int(end)],
            "offsets": list(offsets),
            "shape": list(shape),
        } if (
            file in manifest.files
            and are_sizes(offsets)
            and are_sizes(shape)
            and len(offsets) == len(shape) == len(whole)
            and all(o + s <= w for o, s, w in zip(offsets, shape, whole, strict=True))
            and 0 <= begin <= end <= manifest.files[file].bytes
            and end - begin == math.prod(shape) * ITEM_BYTES[dtype]
        ):
            return TensorChunk(file=file, begin=begin, end=end, offsets=tuple(offsets), shape=tuple(shape))
    raise DamagedCheckpoint(f"{INDEX}: a chunk of tensor {name!r:.100} is inconsistent")


def _file_fact(name: str, value: object) -> FileChecksum:
    match value:
        case {"bytes": int(size), "crc32": str(crc)} if (
            size >= 0 and _FILE.fullmatch(name) and name != MANIFEST
        ):
            return FileChecksum(bytes=size, crc32=crc)
    raise DamagedCheckpoint(
        f"{MANIFEST}: it lists {name!r:.100}, which is not a valid file name of a checkpoint"
    )


def are_sizes(values: Iterable[object]) -> bool:
    """Returns whether all values are integers of at least 0, and not too large, as in the shape of a tensor.

    Otherwise a few bytes could describe a number of elements that takes hours to compute, or that cannot be printed.
    """
    elements = 1
    for value in values:
        if type(value) is not int or value < 0:
            return False
        elements *= max(value, 1)
        if elements > _MOST_ELEMENTS:
            return False
    return True


def _are_numbers(values: dict[Any, Any]) -> bool:
    return all(type(value) in (int, float) and abs(value) <= sys.float_info.max for value in values.values())
