"""Readers that fill tensors by name from a checkpoint or files; torch's planner decides what each rank reads.

The caller has verified the files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Protocol, final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from headway.checkpoint.format.directory import CheckpointFile
from headway.checkpoint.format.dtypes import BY_NAME
from headway.checkpoint.format.manifest import TensorEntry
from headway.checkpoint.format.tensor_file import read_slice


class FileOpener(Protocol):
    """Opens the files of a checkpoint by name."""

    def open(self, name: str, /) -> CheckpointFile: ...


class TensorReader(ABC):
    """Fills tensors, whole or sharded, from stored ones by name; each rank reads only the parts that it holds."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self.entries = entries

    @abstractmethod
    def read_items(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        """Reads the items of a plan into the tensors of its planner."""

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fills tensors by the names of their entries, in place; values are converted to their dtypes."""
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        metadata = Metadata(
            state_dict_metadata={name: _metadata(entry) for name, entry in self.entries.items()}
        )
        planner.set_up_planner(dict(tensors), metadata, False)
        self.read_items(planner.finish_plan(planner.create_local_plan()).items, planner)


@final
class CheckpointReader(TensorReader):
    """Reads from safetensors files; use it while the directory that opens them is open."""

    def __init__(self, directory: FileOpener, entries: Mapping[str, TensorEntry]) -> None:
        super().__init__(entries)
        self._directory = directory
        self._chunks = {
            MetadataIndex(name, torch.Size(chunk.offsets)): (chunk, entry.dtype)
            for name, entry in self.entries.items()
            for chunk in entry.chunks
        }

    def read_items(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        by_file: dict[str, list[ReadItem]] = {}
        for item in items:
            by_file.setdefault(self._chunks[item.storage_index][0].file, []).append(item)
        for name, in_file in sorted(by_file.items()):
            with self._directory.open(name) as file:
                for item in in_file:
                    chunk, dtype = self._chunks[item.storage_index]
                    target = planner.resolve_tensor(item).detach()
                    read_slice(file, chunk, BY_NAME[dtype], item.storage_offsets, target)
                    planner.commit_tensor(item, target)

    def read_whole(self, name: str) -> torch.Tensor:
        """Reads a whole tensor from all its chunks, on the CPU."""
        entry = self.entries[name]
        whole = torch.empty(entry.shape, dtype=BY_NAME[entry.dtype])
        for chunk in entry.chunks:
            target = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
                target = target.narrow(dim, offset, size)
            with self._directory.open(chunk.file) as file:
                read_slice(file, chunk, whole.dtype, (0,) * len(chunk.shape), target)
        return whole


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=BY_NAME[entry.dtype]),
        size=torch.Size(entry.shape),
        chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape)) for c in entry.chunks],
    )
