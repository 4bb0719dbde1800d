"""Readers for torch's distributed checkpointing: they read the byte ranges of tensors that a plan asks for.

The caller has verified the files.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from headway.checkpoint.format.directory import CheckpointFile
from headway.checkpoint.format.dtypes import BY_NAME
from headway.checkpoint.format.manifest import TensorEntry
from headway.checkpoint.format.tensor_file import read_slice
from headway.errors import UsageError


class FileOpener(Protocol):
    """What opens the files of a checkpoint by their names."""

    def open(self, name: str, /) -> CheckpointFile: ...


class TensorReader(StorageReader, ABC):
    """Fills tensors, whole or sharded, from named ones; each rank reads only what it has room for."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self.entries = entries

    @abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what a plan lists."""

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fills tensors by the names of their entries, in place; values are converted to their dtypes."""
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self.read_metadata(), False)
        self.read_data(planner.finish_plan(planner.create_local_plan()), planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        return Metadata(state_dict_metadata={name: _metadata(entry) for name, entry in self.entries.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass  # there is nothing to prepare

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        raise UsageError(
            f"a {type(self).__name__} reads the one source it was made for, not {checkpoint_id!r}"
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return False


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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._chunks[item.storage_index][0].file, []).append(item)
        for name, items in sorted(by_file.items()):
            with self._directory.open(name) as file:
                for item in items:
                    chunk, dtype = self._chunks[item.storage_index]
                    target = planner.resolve_tensor(item).detach()
                    read_slice(file, chunk, BY_NAME[dtype], item.storage_offsets, target)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_whole(self, name: str) -> torch.Tensor:
        """Reads one tensor from all its chunks, on the CPU."""
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
