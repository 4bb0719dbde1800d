"""A save that all ranks agreed to, from first file to name: every rank writes, rank 0 commits, or nothing stays."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, final

from headway.checkpoint.format import manifest as layout
from headway.checkpoint.format.manifest import FileFact, Manifest
from headway.checkpoint.format.tensor_file import bytes_of
from headway.checkpoint.write import disk, planner
from headway.checkpoint.write.disk import Target
from headway.checkpoint.write.planner import Agreed, Contents, Share
from headway.dist.collective.exchange import RankExchange


class Pen(ABC):
    """Who touches the disk: this process, or its helper. See `writing` for what each of these does."""

    @abstractmethod
    def begin(self, target: Target) -> None: ...

    @abstractmethod
    def write(
        self, target: Target, file: str, share: Share, texts: Mapping[str, bytes]
    ) -> dict[str, FileFact]:
        """Writes a rank's share as `file`, unless it is empty, and its other files."""

    @abstractmethod
    def commit(self, target: Target, documents: Mapping[str, bytes], manifest: Manifest) -> int: ...

    @abstractmethod
    def discard(self, target: Target) -> None: ...


@final
class Direct(Pen):
    """Writes straight from the tensors, in this process."""

    def begin(self, target: Target) -> None:
        disk.begin(target)

    def write(
        self, target: Target, file: str, share: Share, texts: Mapping[str, bytes]
    ) -> dict[str, FileFact]:
        def parts() -> Iterator[memoryview]:
            yield memoryview(share.header)
            for _, tensor in share.tensors():
                if tensor.numel():
                    yield bytes_of(tensor.cpu().resolve_conj().resolve_neg().contiguous())

        tensors = {file: parts()} if share.size else {}
        return disk.write(target, {**tensors, **{name: [memoryview(text)] for name, text in texts.items()}})

    def commit(self, target: Target, documents: Mapping[str, bytes], manifest: Manifest) -> int:
        return disk.commit(target, documents, manifest)

    def discard(self, target: Target) -> None:
        disk.discard(target)


def write_out(exchange: RankExchange, target: Target, contents: Contents, agreed: Agreed, pen: Pen) -> int:
    """Returns the size of the checkpoint when it is whole, on all ranks; or raises on all, and nothing stays."""
    stem = f"rank-{exchange.rank:05d}"

    def write() -> dict[str, Any]:
        own = {} if contents.local is None else {f"{stem}.json": _document(target, contents.local)}
        facts = pen.write(target, f"{stem}.safetensors", agreed.share, own)
        return {
            "files": {name: [fact.bytes, fact.crc32] for name, fact in facts.items()},
            "chunks": agreed.share.chunks(f"{stem}.safetensors"),
        }

    def commit(words: list[dict[str, Any]]) -> list[int]:
        facts = {
            name: FileFact(bytes=size, crc32=crc)
            for word in words
            for name, (size, crc) in word["files"].items()
        }
        documents = {
            layout.INDEX: _document(
                target, agreed.index([chunk for word in words for chunk in word["chunks"]])
            ),
            layout.STATE: _document(target, agreed.tree),
        }
        manifest = planner.manifest(contents, target.save, len(words), facts)
        return [pen.commit(target, documents, manifest)] * len(words)

    def undo() -> None:
        pen.discard(target)

    exchange.from_root(lambda: pen.begin(target), undo)
    return exchange.round(write, commit, undo)


def _document(target: Target, held: object) -> bytes:
    """A JSON file that says which save it belongs to."""
    text = json.dumps(
        {"step": target.step, "save": target.save, "holds": held}, separators=(",", ":"), allow_nan=False
    )
    return text.encode() + b"\n"
