"""Bytes of tensors, to files and from them."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from headway import files
from headway.checkpoint.layout import ITEM_BYTES, Chunk, Damaged, FileFact
from headway.failpoints import failpoint

_PIECE = 8 << 20  # checksummed and written while it is in the cache
_SMALL = 1 << 20


def write_file(path: Path, parts: Iterable[memoryview]) -> FileFact:
    """Writes a new file down to the disk; its size and checksum are those of the bytes as they were handed over."""
    size = crc = 0
    failpoint("checkpoint.before_file")
    fd = files.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with ThreadPoolExecutor(max_workers=1) as beside:
            for piece in _pieces(parts):
                checksum = beside.submit(zlib.crc32, piece, crc)  # while the same bytes are written
                _write(fd, piece)
                size, crc = size + len(piece), checksum.result()
        failpoint("checkpoint.before_fsync")
        os.fsync(fd)
    finally:
        os.close(fd)
    failpoint("checkpoint.after_file")
    return FileFact(bytes=size, crc32=f"{crc:08x}")


def _pieces(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces of a good size: small parts are joined, large ones are cut and not copied."""
    joined = bytearray()
    for part in parts:
        small = len(part) < _SMALL
        if not small or len(joined) + len(part) > _PIECE:
            yield memoryview(joined)
            joined = bytearray()
        if small:
            joined += part
        else:
            yield from (part[begin : begin + _PIECE] for begin in range(0, len(part), _PIECE))
    yield memoryview(joined)


def _write(fd: int, piece: memoryview) -> None:
    for half in (piece[: len(piece) // 2], piece[len(piece) // 2 :]):
        while half:
            half = half[os.write(fd, half) :]
        failpoint("checkpoint.mid_file")


def header_of(
    entries: Sequence[tuple[str, str, Sequence[int]]], about: dict[str, str]
) -> tuple[bytes, list[tuple[int, int]]]:
    """The header of a safetensors file with these (name, type, shape), and the bytes of each in the file."""
    listed: dict[str, Any] = {"__metadata__": about}
    ends = [0]
    for name, dtype, shape in entries:
        ends.append(ends[-1] + math.prod(shape) * ITEM_BYTES[dtype])
        listed[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends[-2:]}
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [(len(header) + begin, len(header) + end) for begin, end in pairwise(ends)]


def read_box(fd: int, chunk: Chunk, dtype: torch.dtype, start: Sequence[int], target: torch.Tensor) -> None:
    """Fills `target` with the box of its shape that begins at `start` in the chunk. Whole rows are read."""
    if not target.numel():
        return
    rows = target.shape[0] if target.dim() else 1
    row_bytes = (chunk.end - chunk.begin) // (chunk.shape[0] if chunk.shape else 1)
    begin = chunk.begin + (start[0] * row_bytes if chunk.shape else 0)
    whole_rows = tuple(target.shape[1:]) == chunk.shape[1:]
    if whole_rows and target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype:
        _read_into(fd, chunk.file, begin, bytes_of(target))
        return
    buffer = torch.empty(rows * row_bytes, dtype=torch.uint8)
    _read_into(fd, chunk.file, begin, bytes_of(buffer))
    box = buffer.view(dtype).view(rows, *chunk.shape[1:]) if chunk.shape else buffer.view(dtype).view(())
    for dim in range(1, target.dim()):
        box = box.narrow(dim, start[dim], target.shape[dim])
    target.copy_(box)


def _read_into(fd: int, name: str, begin: int, view: memoryview) -> None:
    while view:
        got = os.preadv(fd, [view[: 1 << 30]], begin)
        if not got:
            raise Damaged(f"{name}: it ends before byte {begin + len(view)}")
        view, begin = view[got:], begin + got


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data
