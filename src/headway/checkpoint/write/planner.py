"""Which rank writes what: torch's planner decides, the ranks exchange JSON, and each writes one safetensors file.

contents, agreed = WritePlanner().agree(exchange, ...)     # on all ranks, before a file is created
agreed.share.header, agreed.share.tensors()                # the bytes of this rank's file, in order
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from headway import __version__
from headway.checkpoint.format import dtypes, tree
from headway.checkpoint.format.dtypes import BY_NAME, NAMES
from headway.checkpoint.format.manifest import FileChecksum, Manifest
from headway.checkpoint.format.tensor_file import header_of, table_of
from headway.dist.collective.exchange import RankExchange
from headway.errors import UsageError
from headway.system.redact import redact_names


@final
@dataclass(frozen=True, kw_only=True)
class RankContents:
    """The state of one rank: its tensors by name, and everything else as JSON."""

    step: int
    tensors: dict[str, torch.Tensor]
    tree: dict[str, Any]
    local: Any
    metrics: Mapping[str, float]


def collect(
    state: Mapping[str, Any], *, step: int, local: object, metrics: Mapping[str, float] | None
) -> RankContents:
    """Splits a state into tensors and JSON; `UsageError` for a value that a checkpoint cannot hold."""
    if type(step) is not int or not 0 <= step < 10**18:
        raise UsageError(f"step={step!r} is not a valid step: give an integer of at least 0")
    packed, tensors = tree.split(state)
    own = None if local is None else tree.to_json(local, "local")
    return RankContents(step=step, tensors=tensors, tree=packed, local=own, metrics=_numbers(metrics or {}))


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the finite metrics: a value that is not finite is never the best."""
    for name, value in metrics.items():
        if type(value) not in (int, float):
            raise UsageError(f"metrics[{name!r}] is {value!r:.80}, not a number: call .item() on a tensor")
    return redact_names({name: value for name, value in metrics.items() if math.isfinite(value)})


@final
class WritePlan:
    """Which tensors this rank writes, and where in its file; on rank 0 also the metadata of all tensors.

    It is valid as long as the tensors of all ranks stay the same, so it is made once and used for many saves.
    """

    def __init__(
        self, number: int, tensors: list[Any], items: list[WriteItem], planner: dcp.DefaultSavePlanner
    ) -> None:
        self.number, self.tensors, self.planner = number, tensors, planner
        self.items = sorted(items, key=_order)
        described = [
            (_label(item), NAMES[_data(item).properties.dtype], _data(item).chunk.sizes)
            for item in self.items
        ]
        self.table, self.ranges = table_of(described)


@final
class RankShare:
    """The part of a save that this rank writes: one safetensors file, if it has any tensors to write."""

    def __init__(self, save: str, plan: WritePlan) -> None:
        self._plan = plan
        self.header = header_of(plan.table, {"format": "pt", "save": save})
        self.size = len(self.header) + plan.ranges[-1][1] if plan.items else 0

    @property
    def names(self) -> list[str]:
        """The names of the tensors that this rank writes, or of which it writes a shard."""
        return [item.index.fqn for item in self._plan.items]

    def tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the offset of each tensor in the file, and the tensor, on its device and with its strides."""
        for item, (begin, _) in zip(self._plan.items, self._plan.ranges, strict=True):
            tensor = self._plan.planner.resolve_data(item)
            about = _data(item)
            assert isinstance(tensor, torch.Tensor)
            if tensor.shape != about.chunk.sizes or tensor.dtype != about.properties.dtype:
                raise UsageError(
                    f"{item.index.fqn!r} changed its shape or type while it was being saved: save between steps"
                )
            yield len(self.header) + begin, tensor.detach()

    def release(self) -> None:
        """Drops the references to the tensors, after they were copied or written."""
        self._plan.planner.state_dict = {}

    def chunks(self, file: str) -> list[list[Any]]:
        """Returns the name of each tensor and its chunk in this file, as in the index."""
        base = len(self.header)
        return [
            [item.index.fqn, {
                "file": file, "bytes": [base + begin, base + end],
                "offsets": list(_data(item).chunk.offsets), "shape": list(_data(item).chunk.sizes),
            }]
            for item, (begin, end) in zip(self._plan.items, self._plan.ranges, strict=True)
        ]  # fmt: skip


@final
@dataclass(frozen=True, kw_only=True)
class AgreedSave:
    """A save that all ranks have agreed on: this rank's share, and, on rank 0, tree and metadata of all ranks."""

    save: str
    share: RankShare
    tree: dict[str, Any] | None
    metadata: Metadata | None

    def index(self, chunks: Iterable[Sequence[Any]]) -> dict[str, Any]:
        """Returns index.json from the chunks of all ranks. Call it on rank 0."""
        assert self.metadata is not None
        index: dict[str, Any] = {}
        for name, about in sorted(self.metadata.state_dict_metadata.items()):
            assert isinstance(about, TensorStorageMetadata)
            index[name] = {"dtype": NAMES[about.properties.dtype], "shape": list(about.size), "chunks": []}
        for name, chunk in chunks:
            index[name]["chunks"].append(chunk)
        return index


@final
class WritePlanner:
    """Agrees on saves with the other ranks. While the tensors stay the same, each save takes one short exchange."""

    def __init__(self) -> None:
        self._plan: WritePlan | None = None

    def agree(
        self, exchange: RankExchange, collect: Callable[[], RankContents], name: Callable[[int], str]
    ) -> tuple[RankContents, AgreedSave]:
        """Collects the contents of all ranks; rank 0 decides which rank writes what, and names the save by its step.

        If a rank cannot save its state, or ranks disagree, all ranks raise.
        """
        collected: list[tuple[RankContents, list[Any]]] = []
        merged: list[dict[str, Any]] = []

        def propose() -> dict[str, Any]:
            mine = collect()
            tensors = [_facts(each, tensor) for each, tensor in mine.tensors.items()]
            collected.append((mine, tensors))
            valid = self._plan.number if self._plan is not None and self._plan.tensors == tensors else None
            return {"step": mine.step, "tree": mine.tree, "plan": valid}

        def decide(proposals: list[dict[str, Any]]) -> list[dict[str, Any]]:
            # only to check that they agree
            tree.merge([{"step": proposal["step"]} for proposal in proposals])
            merged.append(tree.merge([proposal["tree"] for proposal in proposals]))
            plans = {proposal["plan"] for proposal in proposals}
            is_planned = len(plans) == 1 and None not in plans
            return [{"save": name(proposals[0]["step"]), "is_planned": is_planned}] * len(proposals)

        decided = exchange.round(propose, decide)
        contents, tensors = collected[0]
        if not decided["is_planned"]:
            number = self._plan.number + 1 if self._plan else 1
            self._plan = _make_plan(exchange, contents.tensors, tensors, number)
        plan = self._plan
        assert plan is not None
        plan.planner.set_up_planner(contents.tensors, is_coordinator=exchange.rank == 0)
        return contents, AgreedSave(
            save=decided["save"],
            share=RankShare(decided["save"], plan),
            tree=merged[0] if merged else None,
            metadata=plan.planner.metadata if merged else None,
        )


def _facts(name: str, tensor: torch.Tensor) -> Any:
    """Returns the properties of a tensor that a plan depends on; while they are equal, the plan is valid."""
    kind = type(tensor)
    shard: object = None
    if isinstance(tensor, DTensor):
        shard = (tensor.device_mesh, tensor.placements, tensor.to_local().shape)
    elif kind not in (torch.Tensor, torch.nn.Parameter):
        dtypes.check(name, tensor)  # a parameter of a lazy module has no shape
        shard = object()  # equal to no other: torch may shard it in other ways
    return (name, tensor.dtype, tensor.shape, tensor.layout, tensor.device, shard)


def _make_plan(
    exchange: RankExchange, tensors: dict[str, torch.Tensor], facts: list[Any], number: int
) -> WritePlan:
    """Makes a plan with torch's planner: a tensor that all ranks have is written by one of them."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def propose() -> list[Any]:
        for name, tensor in tensors.items():
            dtypes.check(name, tensor)
        planner.set_up_planner(tensors, is_coordinator=exchange.rank == 0)
        return [_to_json(item) for item in planner.create_local_plan().items]

    def decide(proposals: list[list[Any]]) -> list[list[Any]]:
        # only to check that they agree
        tree.merge([{item[0]: item[2:4] for item in items} for items in proposals])
        plans = [SavePlan([_from_json(*item) for item in items]) for items in proposals]
        shared, _ = planner.create_global_plan(plans)
        return [[_to_json(item) for item in plan.items] for plan in shared]

    items = [_from_json(*item) for item in exchange.round(propose, decide)]
    return WritePlan(number, facts, planner.finish_plan(SavePlan(items)).items, planner)


def manifest(
    contents: RankContents, save: str, world_size: int, files: Mapping[str, FileChecksum]
) -> Manifest:
    """Returns the manifest, without the files that rank 0 adds when it commits."""
    return Manifest(
        step=contents.step,
        save=save,
        world_size=world_size,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"headway": __version__, "torch": torch.__version__, "python": platform.python_version()},
        metrics=contents.metrics,
        files=files,
    )


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None  # all other values are in the tree
    return item.tensor_data


def _order(item: WriteItem) -> tuple[Any, ...]:
    """Sorts the widest types first, so that every tensor in the file is aligned."""
    return -_data(item).properties.dtype.itemsize, item.index.fqn, item.index.offset or ()


def _label(item: WriteItem) -> str:
    """Returns the name in the file: the tensor's own, followed by the slice in brackets if it is a chunk."""
    chunk = _data(item).chunk
    if chunk.sizes == _data(item).size:
        return item.index.fqn
    part = ",".join(f"{begin}:{begin + size}" for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{item.index.fqn}[{part}]"


def _to_json(item: WriteItem) -> list[Any]:
    data = _data(item)
    dtype, chunk = NAMES[data.properties.dtype], data.chunk
    return [item.index.fqn, item.type.name, dtype, list(data.size), list(chunk.offsets), list(chunk.sizes)]


def _from_json(
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
