"""The layout of a safetensors file, and reading tensors from one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from headway.checkpoint.format.directory import CheckpointFile, DamagedCheckpoint
from headway.checkpoint.format.manifest import ITEM_BYTES, TensorChunk


def table_of(entries: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[str, list[tuple[int, int]]]:
    """Returns the table of a safetensors header for (name, type, shape), and the byte ranges after the header."""
    listed: dict[str, Any] = {}
    ends = [0]
    for name, dtype, shape in entries:
        ends.append(ends[-1] + math.prod(shape) * ITEM_BYTES[dtype])
        listed[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends[-2:]}
    return json.dumps(listed, separators=(",", ":")), list(pairwise(ends))


def header_of(table: str, metadata: dict[str, str]) -> bytes:
    """Encodes the header of a safetensors file: its table and metadata."""
    prefix = json.dumps({"__metadata__": metadata}, separators=(",", ":"))
    text = f"{prefix[:-1]},{table[1:]}" if table != "{}" else prefix
    data = text.encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def read_slice(
    file: CheckpointFile, chunk: TensorChunk, dtype: torch.dtype, start: Sequence[int], target: torch.Tensor
) -> None:
    """Fills `target` with the slice of its shape that begins at `start` in the chunk. Reads whole rows."""
    if not target.numel():
        return
    rows = target.shape[0] if target.dim() else 1
    row_bytes = (chunk.end - chunk.begin) // (chunk.shape[0] if chunk.shape else 1)
    begin = chunk.begin + (start[0] * row_bytes if chunk.shape else 0)
    whole_rows = tuple(target.shape[1:]) == chunk.shape[1:]
    if whole_rows and target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype:
        read_into(file, begin, bytes_of(target))
        return
    buffer = torch.empty(rows * row_bytes, dtype=torch.uint8)
    read_into(file, begin, bytes_of(buffer))
    part = buffer.view(dtype).view(rows, *chunk.shape[1:]) if chunk.shape else buffer.view(dtype).view(())
    for dim in range(1, target.dim()):
        part = part.narrow(dim, start[dim], target.shape[dim])
    target.copy_(part)


def read_into(file: CheckpointFile, begin: int, view: memoryview) -> None:
    """Fills a view with the bytes from `begin` on; `DamagedCheckpoint` if the file ends before."""
    while view:
        got = file.read_into(view[: 1 << 30], begin)
        if not got:
            raise DamagedCheckpoint(f"{file.name}: it ends before byte {begin + len(view)}")
        view, begin = view[got:], begin + got


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU."""
    flat = tensor.view(-1)  # of one element, it may have any stride
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data
