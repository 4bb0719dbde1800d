"""Writes a checkpoint that all ranks have agreed on: every rank writes its files, rank 0 commits, or nothing is left.

`write_checkpoint` determines the order; a `CheckpointWriter` accesses the disk, in this process or in another.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from headway.checkpoint.format.manifest import INDEX, STATE, FileChecksum, Manifest
from headway.checkpoint.format.tensor_file import bytes_of
from headway.checkpoint.write import disk, planner
from headway.checkpoint.write.disk import SaveTarget
from headway.checkpoint.write.planner import AgreedSave, RankContents, RankShare
from headway.checkpoint.write.read_back import TensorProof
from headway.dist.collective.exchange import RankExchange


@final
@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A complete checkpoint: how long training waited for it, how long it took, and its size in bytes.

    `stall_s` is the time in `save`, including the wait for the previous save, plus the time in which a CUDA device
    copied and did nothing else; the two may overlap.

        for saved in saver.finished():
            print(saved.path, f"{saved.bytes / saved.total_s / 1e9:.1f} GB/s, training waited {saved.stall_s:.2f} s")
    """

    path: Path
    step: int
    stall_s: float
    total_s: float
    bytes: int


class CheckpointWriter(ABC):
    """Writes to the disk, in this process or through another one. See `disk` for what each method does."""

    @abstractmethod
    def begin(self, target: SaveTarget) -> None: ...

    @abstractmethod
    def write(
        self, target: SaveTarget, file: str, share: RankShare, documents: Mapping[str, bytes]
    ) -> dict[str, FileChecksum]:
        """Writes a rank's share as `file`, unless it is empty, and its JSON documents."""

    @abstractmethod
    def commit(self, target: SaveTarget, documents: Mapping[str, bytes], manifest: Manifest) -> int: ...

    @abstractmethod
    def discard(self, target: SaveTarget) -> None: ...


@final
class InProcessWriter(CheckpointWriter):
    """Writes in this process, directly from the tensors."""

    def begin(self, target: SaveTarget) -> None:
        disk.begin(target)

    def write(
        self, target: SaveTarget, file: str, share: RankShare, documents: Mapping[str, bytes]
    ) -> dict[str, FileChecksum]:
        def parts() -> Iterator[memoryview]:
            yield memoryview(share.header)
            for _, tensor in share.tensors():
                if tensor.numel():
                    yield bytes_of(tensor.cpu().resolve_conj().resolve_neg().contiguous())

        tensors = {file: parts()} if share.size else {}
        return disk.write(
            target, {**tensors, **{name: [memoryview(data)] for name, data in documents.items()}}
        )

    def commit(self, target: SaveTarget, documents: Mapping[str, bytes], manifest: Manifest) -> int:
        return disk.commit(target, documents, manifest)

    def discard(self, target: SaveTarget) -> None:
        disk.discard(target)


def write_checkpoint(
    exchange: RankExchange,
    target: SaveTarget,
    contents: RankContents,
    agreed: AgreedSave,
    writer: CheckpointWriter,
    proof: TensorProof,
) -> int:
    """Writes a checkpoint; returns its size once it is complete. If any rank fails, all raise and nothing is left."""
    stem = f"rank-{exchange.rank:05d}"

    def write() -> dict[str, Any]:
        own = {} if contents.local is None else {f"{stem}.json": _document(target, contents.local)}
        file = f"{stem}.safetensors"
        checksums = writer.write(target, file, agreed.share, own)
        proof.check(target.hidden, file, agreed.share, checksums.get(file))
        return {
            "files": {name: [checksum.bytes, checksum.crc32] for name, checksum in checksums.items()},
            "chunks": agreed.share.chunks(file),
        }

    def commit(written: list[dict[str, Any]]) -> list[int]:
        checksums = {
            name: FileChecksum(bytes=size, crc32=crc)
            for rank in written
            for name, (size, crc) in rank["files"].items()
        }
        documents = {
            INDEX: _document(target, agreed.index([chunk for rank in written for chunk in rank["chunks"]])),
            STATE: _document(target, agreed.tree),
        }
        manifest = planner.manifest(contents, target.save, len(written), checksums)
        return [writer.commit(target, documents, manifest)] * len(written)

    def undo() -> None:
        writer.discard(target)

    exchange.from_root(lambda: writer.begin(target), undo)
    return exchange.round(write, commit, undo)


def _document(target: SaveTarget, held: object) -> bytes:
    """Encodes a JSON file that names the save to which it belongs."""
    text = json.dumps(
        {"step": target.step, "save": target.save, "holds": held}, separators=(",", ":"), allow_nan=False
    )
    return text.encode() + b"\n"
