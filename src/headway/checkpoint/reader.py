"""The reader of torch's distributed checkpointing for headway's files: it reads the byte ranges that a plan asks for.

The caller has verified the checkpoint.
"""

from __future__ import annotations

import os
from typing import Any, final

import torch
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

from headway.checkpoint.format.directory import CheckpointDirectory
from headway.checkpoint.format.dtypes import BY_NAME
from headway.checkpoint.format.manifest import Manifest, TensorEntry, read_index
from headway.checkpoint.format.tensor_file import read_slice
from headway.errors import UsageError


@final
class CheckpointReader(StorageReader):
    """Reads from one verified checkpoint directory; use it in a `with directory` block."""

    def __init__(self, directory: CheckpointDirectory, manifest: Manifest) -> None:
        self._directory = directory
        self.entries = read_index(directory, manifest)
        self._chunks = {
            MetadataIndex(name, torch.Size(chunk.offsets)): (chunk, entry.dtype)
            for name, entry in self.entries.items()
            for chunk in entry.chunks
        }

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

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        raise UsageError(
            f"a CheckpointReader reads the one checkpoint it was made for, not {checkpoint_id!r}"
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return False


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=BY_NAME[entry.dtype]),
        size=torch.Size(entry.shape),
        chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape)) for c in entry.chunks],
    )
