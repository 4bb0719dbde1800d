"""`Chunk`: a few samples of a batch that one thread loads, with the bytes and the time that they took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headway.data.quarantine import QuarantinedSample

SampleLocation = tuple[int, int, int, int]
"""dataset, epoch, shard, sample"""


@dataclass(slots=True)
class Chunk:
    """A few consecutive samples of a batch."""

    thread: int
    values: list[Any] = field(default_factory=list)
    count: int = 0
    """number of values, set when the batch is assembled"""
    size: int = 0
    """bytes in memory, at most"""
    read: int = 0
    """bytes in the shards"""
    read_retries: int = 0
    bad: list[QuarantinedSample] = field(default_factory=list)
    substitutes: set[int] = field(default_factory=set)
    """the numbers of the values that replace bad samples"""
    labels: list[tuple[int, int, int, int]] = field(default_factory=list)
    """dataset, shard, sample and label, while `LabelWatch` needs them"""
    busy_s: float = 0.0
    """CPU time of all phases, including that of a process that reads for the thread"""
    transform_s: float = 0.0
    times: list[tuple[float, ...]] = field(default_factory=list)
    """for a few samples at a time: when reading began, and when reading, decoding and any transform ended"""


def memory_bytes(value: Any) -> int:
    """Returns the approximate size of a value in bytes. Optimized, because it runs for each sample."""
    kind = type(value)
    if kind is dict:
        size = 0
        for part in value.values():
            inner = type(part)
            if inner is np.ndarray:
                size += part.nbytes
            elif inner is str:
                size += len(part)
            else:
                size += 8 if inner is int else memory_bytes(part)
        return size
    if kind is np.ndarray or kind is torch.Tensor:
        return int(value.nbytes)
    if kind is str or kind is bytes:
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(memory_bytes, value.values()))
    if isinstance(value, np.ndarray | torch.Tensor):
        return int(value.nbytes)
    return sum(map(memory_bytes, value)) if isinstance(value, list | tuple) else 8
