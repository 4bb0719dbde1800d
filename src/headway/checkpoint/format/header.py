"""Reads the header of a safetensors file, which may come from anybody."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from headway.checkpoint.format.directory import DamagedCheckpoint
from headway.checkpoint.format.manifest import ITEM_BYTES, METADATA, are_sizes, parse_json


@final
@dataclass(frozen=True, kw_only=True)
class HeaderEntry:
    """A tensor, as the header describes it."""

    dtype: str
    """may be one that headway does not know"""
    shape: tuple[int, ...]
    begin: int
    """the first byte, counted from the end of the header"""
    end: int


def parse_header(file: str, text: bytes, data_bytes: int) -> dict[str, HeaderEntry]:
    """Returns the tensors of a file by name; `DamagedCheckpoint` unless they fill the bytes after the header.

    As the format demands, each byte belongs to one tensor: no two share values, and none is cut off or described twice.
    """
    header = parse_json(file, text)
    if not isinstance(header, dict):
        raise DamagedCheckpoint(f"{file}: its header is not a JSON object")
    entries = {name: _entry(file, name, value) for name, value in header.items() if name != METADATA}
    filled = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != filled:
            what = "begins inside another tensor" if entry.begin < filled else "follows bytes of no tensor"
            raise DamagedCheckpoint(f"{file}: tensor {name!r:.100} {what}")
        filled = entry.end
    if filled != data_bytes:
        raise DamagedCheckpoint(f"{file}: {data_bytes} bytes of tensors, {filled} expected")
    return entries


def _entry(file: str, name: str, value: object) -> HeaderEntry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            are_sizes(shape)
            and 0 <= begin <= end
            and (dtype not in ITEM_BYTES or end - begin == math.prod(shape) * ITEM_BYTES[dtype])
        ):
            return HeaderEntry(dtype=dtype, shape=tuple(shape), begin=begin, end=end)
    raise DamagedCheckpoint(f"{file}: the entry of tensor {name!r:.100} is inconsistent")
