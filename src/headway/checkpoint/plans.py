"""torch's save plans as JSON: what each rank has, and what each is to write."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from headway.checkpoint.dtypes import BY_NAME, NAMES


def to_json(plan: SavePlan) -> dict[str, Any]:
    return {"items": [_item_to_json(item) for item in plan.items], "storage": plan.storage_data}


def from_json(value: dict[str, Any]) -> SavePlan:
    return SavePlan([_item_from_json(*item) for item in value["items"]], storage_data=value["storage"])


def _item_to_json(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None
    chunk = data.chunk
    dtype = NAMES[data.properties.dtype]
    return [item.index.fqn, item.type.name, dtype, list(data.size), list(chunk.offsets), list(chunk.sizes)]


def _item_from_json(
    name: str, kind: str, dtype: str, size: list[int], offsets: list[int], sizes: list[int]
) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(offsets)),
        type=WriteItemType[kind],
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            properties=TensorProperties(dtype=BY_NAME[dtype]),
            size=torch.Size(size),
        ),
    )
