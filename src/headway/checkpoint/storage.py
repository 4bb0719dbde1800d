"""torch's distributed checkpointing on files that are what they say: its planners above, safetensors and JSON below.

`Writer` makes a checkpoint in a hidden directory and gives it its name only when every byte of every rank is on disk:

    mkdir .tmp-OWNER-STEP-TOKEN      rank 0
    write, fsync rank-N.*            every rank; an error on one is an error on all, and nothing stays
    write, fsync index, state        rank 0, when all ranks have written
    write, fsync manifest; fsync the directory; rename it; fsync its parent; replace `latest`

`Reader` reads the byte ranges that a plan asks for; it trusts nothing that `layout.verify` has not seen.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata as packages
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from headway import files
from headway.checkpoint import layout, tree
from headway.checkpoint.dtypes import BY_NAME, NAMES
from headway.checkpoint.layout import Entry, FileFact, Folder, Manifest
from headway.checkpoint.raw import bytes_of, header_of, read_box, write_file
from headway.errors import UsageError
from headway.failpoints import failpoint
from headway.runlock import RunLock

_UNFINISHED_LATEST = re.compile(r"\.latest\.[0-9a-f]{16}\.tmp")  # as files.write_atomic names it


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """What one rank brings to a save, besides the tensors."""

    step: int
    tree: dict[str, Any]
    shapes: dict[str, list[Any]]
    local: Any
    metrics: Mapping[str, float]


@final
class Writer(StorageWriter):
    """Writes one checkpoint; `owner` marks what is unfinished, so that only its own leftovers are ever removed."""

    def __init__(self, parent: Path, contents: Contents, *, owner: str, lock: RunLock | None = None) -> None:
        self._parent, self._contents, self._owner, self._lock = parent, contents, owner, lock
        self._rank = 0
        self._world_size = 1
        self._tree: dict[str, Any] = {}
        self._directory: Path | None = None

    # --- phase one: agree, and write

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._rank = kwargs["rank"]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        about = {"step": self._contents.step}
        brought = {"tree": self._contents.tree, "shapes": self._contents.shapes, "about": about}
        return dataclasses.replace(plan, storage_data=brought)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._world_size = len(plans)
        self._tree = tree.merge([plan.storage_data["tree"] for plan in plans])
        for facts in ("shapes", "about"):
            tree.merge([plan.storage_data[facts] for plan in plans])  # only to see that they agree
        self._check_new()
        with files.storage(f"begin to save step {self._contents.step} in {self._parent}"):
            if not self._parent.is_dir():
                files.make_dir(self._parent)
                files.sync_dir(self._parent.parent)
            sweep(self._parent, self._owner)
            name = f".tmp-{self._owner}-{self._contents.step}-{secrets.token_hex(8)}"
            failpoint("checkpoint.before_directory")
            self._directory = self._parent / name
            files.make_dir(self._directory)
            failpoint("checkpoint.after_directory")
        return [dataclasses.replace(plan, storage_data=name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        directory = self._parent / plan.storage_data
        stem = f"rank-{self._rank:05d}"
        results = []
        with files.storage(f"save step {self._contents.step} in {self._parent}"):
            if plan.items:
                results.append(self._write_tensors(directory, f"{stem}.safetensors", plan, planner))
            if self._contents.local is not None:
                data = _json(
                    {"step": self._contents.step, "save": plan.storage_data, "holds": self._contents.local}
                )
                results.append(
                    _result(f"{stem}.json", write_file(directory / f"{stem}.json", [memoryview(data)]), [])
                )
            failpoint("checkpoint.rank_written")
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_tensors(self, directory: Path, name: str, plan: SavePlan, planner: SavePlanner) -> WriteResult:
        items = sorted(
            plan.items, key=lambda item: (-_item_bytes(item), item.index.fqn, item.index.offset or ())
        )
        about = {"format": "pt", "save": plan.storage_data}
        header, ranges = header_of([_described_item(item) for item in items], about)

        def parts() -> Iterator[memoryview]:
            yield memoryview(header)
            for item in items:
                yield from _tensor_bytes(item, planner)

        fact = write_file(directory / name, parts())
        chunks = [
            [item.index.fqn, {"file": name, **_placed(item, *place)}]
            for item, place in zip(items, ranges, strict=True)
        ]
        return _result(name, fact, chunks)

    # --- phase two, on rank 0: everything is written, or nothing ever was

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._directory is not None
        step, save = self._contents.step, self._directory.name
        written = [result for rank in results for result in rank]
        facts = {
            result.index.fqn: FileFact(bytes=result.size_in_bytes, crc32=result.storage_data["crc32"])
            for result in written
        }
        index = _index(metadata, [chunk for result in written for chunk in result.storage_data["chunks"]])
        with files.storage(f"commit step {step} in {self._parent}"):
            for name, data in (
                (layout.INDEX, _json({"step": step, "save": save, "holds": index})),
                (layout.STATE, _json({"step": step, "save": save, "holds": self._tree})),
            ):
                facts[name] = write_file(self._directory / name, [memoryview(data)])
            failpoint("checkpoint.before_manifest")
            files.write_new(self._directory / layout.MANIFEST, self._manifest(facts).to_bytes())
            failpoint("checkpoint.after_manifest")
            files.sync_dir(self._directory)
            failpoint("checkpoint.before_rename")
            self._publish()

    def _publish(self) -> None:
        assert self._directory is not None
        final = layout.step_dir(self._parent, self._contents.step)
        self._check_new()
        if self._lock is not None:
            self._lock.check()
        self._directory.rename(final)
        self._directory = None  # from here on it is not ours to remove
        failpoint("checkpoint.after_rename")
        files.sync_dir(self._parent)
        failpoint("checkpoint.committed")
        with files.storage(f"name {final}, which is saved, in {self._parent / 'latest'}"):
            files.write_atomic(self._parent / "latest", f"{final.name}\n".encode())
            failpoint("checkpoint.after_latest")

    def _check_new(self) -> None:
        if os.path.lexists(final := layout.step_dir(self._parent, self._contents.step)):
            raise UsageError(f"{final} exists already: a checkpoint is never overwritten; save another step")

    def _manifest(self, facts: dict[str, FileFact]) -> Manifest:
        assert self._directory is not None
        return Manifest(
            step=self._contents.step,
            save=self._directory.name,
            world_size=self._world_size,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={
                "headway": _version("headway"),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            metrics=self._contents.metrics,
            files=dict(sorted(facts.items())),
        )

    def discard(self) -> None:
        """Removes what a failed save has made. What cannot be removed now is removed by the next save."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        raise UsageError(f"a Writer writes the one checkpoint it was made for, not {checkpoint_id!r}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return False  # torch must not choose this backend by the look of a path


@final
class Reader(StorageReader):
    """Reads from one verified checkpoint directory; use it in a `with folder` block."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder = folder
        self.entries = layout.read_index(folder, manifest)
        self._chunks = {
            MetadataIndex(name, torch.Size(chunk.offsets)): (chunk, entry.dtype)
            for name, entry in self.entries.items()
            for chunk in entry.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        return Metadata(state_dict_metadata={name: _described(entry) for name, entry in self.entries.items()})

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
            fd = self._folder.open(name)
            try:
                for item in items:
                    chunk, dtype = self._chunks[item.storage_index]
                    target = planner.resolve_tensor(item).detach()
                    read_box(fd, chunk, BY_NAME[dtype], item.storage_offsets, target)
                    planner.commit_tensor(item, target)
            finally:
                os.close(fd)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_whole(self, name: str) -> torch.Tensor:
        """One tensor, from all its chunks, on the CPU."""
        entry = self.entries[name]
        whole = torch.empty(entry.shape, dtype=BY_NAME[entry.dtype])
        for chunk in entry.chunks:
            target = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
                target = target.narrow(dim, offset, size)
            fd = self._folder.open(chunk.file)
            try:
                read_box(fd, chunk, whole.dtype, (0,) * len(chunk.shape), target)
            finally:
                os.close(fd)
        return whole

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        raise UsageError(f"a Reader reads the one checkpoint it was made for, not {checkpoint_id!r}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return False


def sweep(parent: Path, owner: str) -> None:
    """Removes what killed saves and deletions of this owner have left, and of nobody else."""
    leftover = re.compile(rf"\.(tmp|del)-{re.escape(owner)}-[0-9]+-[0-9a-f]{{16}}")
    for path in parent.iterdir():
        if leftover.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif _UNFINISHED_LATEST.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _tensor_bytes(item: WriteItem, planner: SavePlanner) -> Iterator[memoryview]:
    found = planner.resolve_data(item)
    assert isinstance(found, torch.Tensor) and item.tensor_data is not None
    tensor = found.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.shape != item.tensor_data.chunk.sizes or tensor.dtype != item.tensor_data.properties.dtype:
        raise UsageError(
            f"{item.index.fqn!r} changed its shape or type while it was saved; save between steps"
        )
    if tensor.numel():
        yield bytes_of(tensor)


def _described_item(item: WriteItem) -> tuple[str, str, Sequence[int]]:
    assert item.tensor_data is not None
    return _label(item), NAMES[item.tensor_data.properties.dtype], item.tensor_data.chunk.sizes


def _placed(item: WriteItem, begin: int, end: int) -> dict[str, Any]:
    """A chunk as the index has it."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return {"bytes": [begin, end], "offsets": list(chunk.offsets), "shape": list(chunk.sizes)}


def _label(item: WriteItem) -> str:
    """The name in the file: the tensor's own, with the part it is in brackets if it is not all of it."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    part = ",".join(f"{begin}:{begin + size}" for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{item.index.fqn}[{part}]"


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype.itemsize


def _result(name: str, fact: FileFact, chunks: list[list[Any]]) -> WriteResult:
    """One result per file; all of it is JSON."""
    about = {"crc32": fact.crc32, "chunks": chunks}
    return WriteResult(index=MetadataIndex(name), size_in_bytes=fact.bytes, storage_data=about)


def _index(metadata: Metadata, chunks: list[list[Any]]) -> dict[str, Any]:
    index: dict[str, Any] = {}
    for name, about in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(about, TensorStorageMetadata)
        index[name] = {"dtype": NAMES[about.properties.dtype], "shape": list(about.size), "chunks": []}
    for name, chunk in chunks:
        index[name]["chunks"].append(chunk)
    return index


def _described(entry: Entry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=BY_NAME[entry.dtype]),
        size=torch.Size(entry.shape),
        chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape)) for c in entry.chunks],
    )


def _version(package: str) -> str | None:
    with suppress(packages.PackageNotFoundError):
        return packages.version(package)
    return None


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"
