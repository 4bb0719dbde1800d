"""Datasets of MosaicML Streaming as samples, for `pack`: MDS shards, read by their `index.json` without Streaming.

A shard begins with the number of samples and their offsets, 32 bits each. A sample begins with the sizes of the columns
that have no fixed size. Images, text and JSON keep their bytes; pickles are refused, and nothing is executed.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.errors import UsageError
from headway.system import files
from headway.system.files import open_regular, storage
from headway.system.jsonlines import is_count, parse_json

_INDEX = "index.json"
_VERSION = 2
_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_FLOATS = ("float16", "float32", "float64")
_EXTENSIONS = {
    **dict.fromkeys(("jpeg", "jpeg_array", "jpegarray"), "jpg"),
    **dict.fromkeys(("str", "str_int", "str_float", "str_decimal"), "txt"),
    **dict.fromkeys(("int", *_SCALARS), "cls"),
    **dict.fromkeys(("ndarray", *_FLOATS), "npy"),
    "png": "png",
    "json": "json",
    "bytes": "bin",
}
"""what a column becomes, by its encoding"""
_BY_HAND = "iterate over the dataset with Streaming, and give hw.data.pack the samples"
_ARRAY_TYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
                34: "float32", 64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip
"""of arrays that begin with their type"""


@final
@dataclass(frozen=True, kw_only=True)
class MdsShard:
    """A shard whose table of samples matches the index."""

    path: Path
    samples: int
    names: Sequence[str]
    encodings: Sequence[str]
    sizes: Sequence[int | None]
    parts: Sequence[str]
    """what the columns are called in a sample that is packed"""

    @classmethod
    def of(cls, directory: Path, facts: Any) -> MdsShard:
        try:
            name, samples = Path(facts["raw_data"]["basename"]), facts["samples"]
            columns = facts["column_names"], facts["column_encodings"], facts["column_sizes"]
            packed = (facts.get("zip_data") or {}).get("basename")
        except (KeyError, TypeError, AttributeError) as error:
            raise _malformed(directory, repr(error)) from error
        if facts.get("format") != "mds":
            raise _malformed(directory, f"the format of {name} is {facts.get('format')!r}")
        if not is_count(samples):
            raise _malformed(directory, f"{name} has {samples!r} samples")
        if name.is_absolute() or ".." in name.parts:
            raise _malformed(directory, f"{name} is not a path below that directory")
        _check_columns(directory, *columns)
        path, parts = directory / name, _part_names(directory, *columns[:2])
        if not path.is_file():
            unpack = f"unpack {packed}, or copy the shard" if packed else "copy it"
            raise UsageError(f"{path} is missing: {unpack}, and pack again")
        _check_table(path, samples)
        names, encodings, sizes = columns
        return cls(path=path, samples=samples, names=names, encodings=encodings, sizes=sizes, parts=parts)

    def read(self, number: int) -> list[bytes]:
        """Returns the bytes of each column of a sample."""
        with open_regular(self.path, follow=True) as file:
            file.seek(4 * (1 + number))
            begin, end = np.frombuffer(file.read(8), "<u4").tolist()
            file.seek(begin)
            data = file.read(end - begin)
        free = sum(size is None for size in self.sizes)
        given = iter(np.frombuffer(data, "<u4", free).tolist())
        at, found = 4 * free, list[bytes]()
        for size in self.sizes:
            length = next(given) if size is None else size
            found.append(data[at : at + length])
            at += length
        if at != len(data):
            raise ValueError(f"it has {len(data)} bytes instead of {at}")
        return found


def _malformed(directory: Path, what: str) -> UsageError:
    return UsageError(f"{directory / _INDEX} does not describe its shards as MDS does: {what}")


def _check_columns(directory: Path, names: Any, encodings: Any, sizes: Any) -> None:
    columns = names, encodings, sizes
    if not all(isinstance(each, list) for each in columns) or len({len(each) for each in columns}) > 1:
        raise _malformed(
            directory, "column_names, column_encodings and column_sizes are not lists of equal length"
        )
    for each in (*names, *encodings):
        if not isinstance(each, str):
            raise _malformed(directory, f"{each!r} in column_names or column_encodings is not text")
    for size in sizes:
        if size is not None and not is_count(size):
            raise _malformed(directory, f"{size!r} in column_sizes is not a number of bytes")
    for name, encoding in zip(names, encodings, strict=True):
        if _kind(encoding) not in _EXTENSIONS:
            raise UsageError(
                f"column {name!r} of {directory} is encoded as {encoding!r}, which is not supported: {_BY_HAND}"
            )


def _part_names(directory: Path, names: Sequence[str], encodings: Sequence[str]) -> list[str]:
    """Names columns by their extensions; by NAME.EXTENSION if several have it.

    Names that begin with two underscores are metadata in samples, and not packed: there, underscores are left out.
    """
    kinds = [_EXTENSIONS[_kind(encoding)] for encoding in encodings]
    often, parts, owners = Counter(kinds), list[str](), dict[str, str]()
    for name, kind in zip(names, kinds, strict=True):
        own = name.strip("_") if name.startswith("__") else name
        parts.append(kind if often[kind] == 1 else f"{own}.{kind}")
        lower = parts[-1].lower()  # as readers know it
        if lower in owners:
            raise UsageError(
                f"columns {owners[lower]!r} and {name!r} of {directory} would both be packed as {lower!r}: {_BY_HAND}"
            )
        owners[lower] = name
    return parts


def _check_table(path: Path, samples: int) -> None:
    """Compares a shard's own table of samples with the index, and its end with the size of the file."""
    with storage(f"read {path}"), open_regular(path, follow=True) as file:
        size, count = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(4), "little")
        if count != samples:
            raise UsageError(
                f"{path} has {count} samples in {size} bytes, but {_INDEX} has {samples}: copy both again"
            )
        file.seek(4 * (1 + count))
        end = int.from_bytes(file.read(4), "little")
    if size != end or size < 4 * (2 + count):
        raise UsageError(f"{path} has {size} bytes, but its table of samples ends at {end}: copy it again")


def is_mds(directory: Path) -> bool:
    """Whether a directory has the index of an MDS dataset."""
    shards = _index(directory).get("shards")
    return isinstance(shards, list) and any(
        isinstance(each, dict) and each.get("format") == "mds" for each in shards
    )


def _index(directory: Path) -> dict[str, Any]:
    try:
        found = parse_json(files.read_regular(directory / _INDEX, follow=True))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def mds_shards(directory: Path) -> list[MdsShard]:
    """Returns the shards of a dataset, whose samples `mds_sample` reads."""
    index = _index(directory)
    if index.get("version") != _VERSION:
        raise UsageError(f"{directory / _INDEX} has version {index.get('version')!r}: expected {_VERSION}")
    shards, paths = [MdsShard.of(directory, each) for each in index["shards"]], set[Path]()
    for shard in shards:
        if (shard.names, shard.parts) != (shards[0].names, shards[0].parts):
            raise UsageError(
                f"{directory / _INDEX} has shards with other columns than its first one: pack them separately"
            )
        if shard.path in paths:
            raise UsageError(f"{directory / _INDEX} has {shard.path} twice: remove one of the two")
        paths.add(shard.path)
    return shards


def mds_sample(shards: Sequence[MdsShard], shard: int, number: int) -> dict[str, Any]:
    """Returns a sample in the form that `pack` takes."""
    source = shards[shard]
    sample: dict[str, Any] = {"__key__": f"{shard:05d}-{number:06d}"}
    try:
        for part, data, encoding in zip(source.parts, source.read(number), source.encodings, strict=True):
            sample[part] = _value(encoding, data) if part.rpartition(".")[2] in ("cls", "npy") else data
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise UsageError(
            f"sample {number} of {source.path} is damaged: {error}; copy the shard again"
        ) from error
    return sample


def _kind(encoding: str) -> str:
    return encoding.partition(":")[0]


def _value(encoding: str, data: bytes) -> Any:
    """Decodes a number or an array."""
    kind, *settings = encoding.split(":")
    if kind != "ndarray":
        number = np.frombuffer(data, "<i8" if kind == "int" else np.dtype(kind).newbyteorder("<"), 1)[0]
        return int(number) if kind not in _FLOATS else np.asarray(number)
    at = 0
    if settings:
        dtype = settings[0]
    else:
        dtype, at = _ARRAY_TYPES[data[0]], 1
    if len(settings) > 1:
        shape = [int(size) for size in settings[1].split(",")]
    else:
        dimensions, size = data[at] >> 2, 2 ** (data[at] & 3)
        shape = np.frombuffer(data, f"<u{size}", dimensions, at + 1).tolist()
        at += 1 + dimensions * size
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), math.prod(shape), at).reshape(shape)
