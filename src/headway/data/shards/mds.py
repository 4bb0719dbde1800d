"""Datasets of MosaicML Streaming as samples, for `pack`: MDS shards, read by their `index.json` without Streaming.

A shard begins with the number of samples and the offsets of each, 32 bits all. A sample begins with the sizes of those
columns that have no fixed one. Images, text and JSON keep their bytes; pickles are refused, and nothing is executed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.errors import UsageError
from headway.system import files
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
_ARRAY_TYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
                34: "float32", 64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip
"""of arrays that say their type themselves"""


@final
@dataclass(frozen=True, kw_only=True)
class _MdsShard:
    path: Path
    samples: int
    names: Sequence[str]
    encodings: Sequence[str]
    sizes: Sequence[int | None]

    @classmethod
    def of(cls, directory: Path, facts: Any) -> _MdsShard:
        try:
            path = directory / Path(facts["raw_data"]["basename"]).name
            shard = cls(
                path=path,
                samples=facts["samples"],
                names=facts["column_names"],
                encodings=facts["column_encodings"],
                sizes=facts["column_sizes"],
            )
            packed = (facts.get("zip_data") or {}).get("basename")
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{directory / _INDEX} does not describe its shards as MDS does: {error!r}"
            ) from error
        for name, encoding in zip(shard.names, shard.encodings, strict=True):
            if _kind(encoding) not in _EXTENSIONS:
                raise UsageError(
                    f"column {name!r} of {directory} is encoded as {encoding!r}, which is not read: iterate over the "
                    "dataset with Streaming, and give hw.data.pack the samples"
                )
        if not path.is_file():
            unpack = f"unpack {packed}, or copy the shard" if packed else "copy it"
            raise UsageError(f"{path} is missing: {unpack}, and pack again")
        return shard

    def read(self, number: int) -> dict[str, bytes]:
        """Returns the bytes of each column of a sample."""
        with self.path.open("rb") as file:
            file.seek(4 * (1 + number))
            begin, end = np.frombuffer(file.read(8), "<u4").tolist()
            file.seek(begin)
            data = file.read(end - begin)
        free = sum(size is None for size in self.sizes)
        given = iter(np.frombuffer(data, "<u4", free).tolist())
        at, found = 4 * free, {}
        for name, size in zip(self.names, self.sizes, strict=True):
            length = next(given) if size is None else size
            found[name] = data[at : at + length]
            at += length
        if at != len(data):
            raise ValueError(f"it has {len(data)} bytes instead of {at}")
        return found


def is_mds(directory: Path) -> bool:
    """Returns whether a directory has the index of an MDS dataset."""
    shards = _index(directory).get("shards")
    return isinstance(shards, list) and any(
        isinstance(each, dict) and each.get("format") == "mds" for each in shards
    )


def _index(directory: Path) -> dict[str, Any]:
    try:
        found = parse_json(files.read_regular(directory / _INDEX))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def mds_shards(directory: Path) -> list[_MdsShard]:
    """Returns the shards of a dataset, whose samples `mds_sample` reads."""
    index = _index(directory)
    if index.get("version") != _VERSION:
        raise UsageError(f"{directory / _INDEX} has version {index.get('version')!r}: expected {_VERSION}")
    shards = [_MdsShard.of(directory, each) for each in index["shards"]]
    if any(not is_count(each.samples) or each.names != shards[0].names for each in shards):
        raise UsageError(
            f"{directory / _INDEX} has shards with other columns than its first one: pack them apart"
        )
    return shards


def places(shards: Sequence[_MdsShard]) -> Iterator[tuple[int, int]]:
    """Yields shard and number of each sample, in the order of the dataset."""
    for shard, each in enumerate(shards):
        for number in range(each.samples):
            yield shard, number


def mds_sample(shards: Sequence[_MdsShard], shard: int, number: int) -> dict[str, Any]:
    """Returns a sample as `pack` takes it. A column is named by its extension; by NAME.EXTENSION if several have it."""
    source = shards[shard]
    kinds = [_EXTENSIONS[_kind(encoding)] for encoding in source.encodings]
    often = Counter(kinds)
    sample: dict[str, Any] = {"__key__": f"{shard:05d}-{number:06d}"}
    try:
        columns = zip(source.read(number).items(), source.encodings, kinds, strict=True)
        for (name, data), encoding, kind in columns:
            part = kind if often[kind] == 1 else f"{name}.{kind}"
            sample[part] = _value(encoding, data) if kind in ("cls", "npy") else data
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
