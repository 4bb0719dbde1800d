"""`ReadBack`: what a save has written is read once, when it is first saved, and compared with what it was to be.

The checksums of a manifest prove that a file has the bytes that were written. They do not prove that the storage
returns them, that these are the bits of the tensors, at the places that the index names, or that the rest of the state
can be decoded. So each rank reads the tensors that it has written, and no save had before, through the code that loads
them: in the background if the save is, one at a time, on the host, without a collective.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.checkpoint.format import tree
from headway.checkpoint.format.directory import CheckpointDirectory, CheckpointFile, DamagedCheckpoint
from headway.checkpoint.format.manifest import FileChecksum, TensorChunk
from headway.checkpoint.format.tensor_file import read_slice
from headway.checkpoint.format.verification import measure
from headway.checkpoint.write import comparison
from headway.checkpoint.write.comparison import TensorFacts
from headway.checkpoint.write.planner import RankContents, RankShare
from headway.errors import StorageError, UsageError


@final
class TensorProof:
    """The tensors of one save that are new in it: their dtypes, shapes and checksums, taken before they are copied."""

    def __init__(self, expected: Mapping[str, TensorFacts], names: Set[str] = frozenset[str]()) -> None:
        self.expected = expected
        self.names = names
        """all parts and tensors of the save"""

    def check(self, save: Path, file: str, share: RankShare, written: FileChecksum | None) -> None:
        """Reads this rank's file and compares it; raises `StorageError` if the storage has changed its bytes.

        `UsageError` if a tensor is another one than was given, although the bytes are those that were written.
        """
        if not self.expected or written is None:
            return
        try:
            with CheckpointDirectory(save) as directory:
                different = self._find_difference(directory, file, share)
                if different is None:
                    return
                if measure(directory, file, written.bytes) == (written.bytes, written.crc32):
                    raise UsageError(
                        f"{different!r} differs when it is read back from a checkpoint: it has changed while it was "
                        "being saved, or tensors of its type cannot be saved; let only the training thread change it, "
                        "and let state_dict() return a plain tensor"
                    )
        except DamagedCheckpoint as problem:
            raise StorageError(_changed(save, file)) from problem
        raise StorageError(_changed(save, file))

    def _find_difference(self, directory: CheckpointDirectory, file: str, share: RankShare) -> str | None:
        with directory.open(file) as opened:
            for name, about in share.chunks(file):
                if (before := self.expected.get(name)) is not None:
                    read = _read(opened, _chunk(about), before.dtype)
                    if comparison.describe_tensor(read) != before:
                        return str(name)
        return None


@final
class ReadBack:
    """Which parts and tensors of a run have been proven."""

    def __init__(self) -> None:
        self._proven = set[str]()

    def check_tree(self, state: Mapping[str, Any], contents: RankContents) -> None:
        """Raises `UsageError` if the values of new parts, or those beside new tensors, change when they are decoded."""
        if contents.tensors.keys() <= self._proven and state.keys() <= self._proven:
            return
        empty = {  # nothing may hold a tensor once it is saved
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in contents.tensors.items()
        }
        decoded = tree.join(json.loads(json.dumps(contents.tree)), empty)
        path = comparison.find_difference(_outline(dict(state)), _outline(decoded))
        if path is not None:
            raise UsageError(
                f"{path!r} changes when it is saved and loaded: convert it to tensors, dicts, lists, tuples, strings, "
                "numbers, True, False or None"
            )

    def begin(self, state: Mapping[str, Any], contents: RankContents, share: RankShare) -> TensorProof:
        """Describes the new tensors of this rank's share, before training changes them."""
        new = [name for name in share.names if name not in self._proven]
        expected = {name: comparison.describe_tensor(_local(contents.tensors[name])) for name in new}
        return TensorProof(expected, contents.tensors.keys() | state.keys())

    def complete(self, proof: TensorProof) -> None:
        """Notes that a save is complete, so that all ranks have proven it."""
        self._proven |= proof.names


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _outline(state: Any) -> Any:
    return comparison.describe(state, of_tensor=lambda tensor: (tensor.dtype, tuple(tensor.shape)))


def _chunk(about: Mapping[str, Any]) -> TensorChunk:
    begin, end = about["bytes"]
    return TensorChunk(
        file=about["file"], begin=begin, end=end, offsets=tuple(about["offsets"]), shape=tuple(about["shape"])
    )


def _read(file: CheckpointFile, chunk: TensorChunk, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(chunk.shape, dtype=dtype)
    read_slice(file, chunk, dtype, (0,) * len(chunk.shape), tensor)
    return tensor


def _changed(save: Path, file: str) -> str:
    return (
        f"{file} in {save.parent} has other bytes when it is read than were written: the disk or its file system is "
        "damaged; check it, or save to another one"
    )
