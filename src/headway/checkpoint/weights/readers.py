"""Readers of weights: checkpoints, safetensors files, Hugging Face directories, and torch files.

All have named tensors, of which each rank reads only the parts that it holds. Nothing in the files can execute: torch
files are read with `weights_only=True`.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from headway.checkpoint.format import dtypes
from headway.checkpoint.format.directory import CheckpointDirectory, CheckpointFile, DamagedCheckpoint
from headway.checkpoint.format.header import HeaderEntry, parse_header
from headway.checkpoint.format.manifest import (
    ITEM_BYTES,
    LARGEST_HEADER_BYTES,
    MANIFEST,
    TensorChunk,
    TensorEntry,
    parse_json,
    read_index,
    read_manifest,
)
from headway.checkpoint.format.tensor_file import read_into
from headway.checkpoint.inspect.foreign import check_archive
from headway.checkpoint.reader import CheckpointReader, TensorReader
from headway.errors import NoValidCheckpoint, UsageError
from headway.system import files

_INDEX = ".index.json"
_NAMES = (
    "model.safetensors",
    "adapter_model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
)
"""files of weights in a Hugging Face directory, in order of preference; several files have an index beside them"""
_INSIDE = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
"""the usual keys of the weights in a torch file that has more than weights"""
_UNREADABLE = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError,
    OverflowError, struct.error,
)  # fmt: skip
"""what torch raises for a damaged file, or for one of another kind: it interprets the bytes of a pickle unchecked"""
_DEEPEST, _MOST_VALUES = 50, 1_000_000
"""of what a torch file describes"""
_COLORS = re.compile(r"\x1b\[[0-9;]*m")  # in messages of torch


@contextmanager
def open_weights(path: Path) -> Iterator[TensorReader]:
    """Opens a checkpoint, a file or a Hugging Face directory; see `Weights.locate`."""
    try:
        with files.storage(f"read {path}"), ExitStack() as stack:
            if (path / MANIFEST).exists():
                directory = stack.enter_context(CheckpointDirectory(path))
                yield CheckpointReader(directory, read_index(directory, read_manifest(directory)))
                return
            found = _find_files(path)
            if any(_is_safetensors(file) for file in found):
                opened = stack.enter_context(WeightFiles(found))
                yield CheckpointReader(opened, opened.entries())
            else:
                yield TorchFileReader(found)
    except DamagedCheckpoint as problem:
        raise NoValidCheckpoint(f"{path} is damaged: {problem}; copy or download it again") from problem


@final
class WeightFiles:
    """Opens safetensors files by name; links are followed, since the Hugging Face cache consists of them."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = {path.name: path.resolve() for path in paths}
        self._directories: dict[Path, CheckpointDirectory] = {}
        self._stack = ExitStack()

    def open(self, name: str, /) -> CheckpointFile:
        path = self._paths[name]
        if path.parent not in self._directories:
            self._directories[path.parent] = self._stack.enter_context(CheckpointDirectory(path.parent))
        return self._directories[path.parent].open(path.name)

    def entries(self) -> dict[str, TensorEntry]:
        """Returns all tensors of the files, from their headers."""
        found: dict[str, TensorEntry] = {}
        for name in self._paths:
            with self.open(name) as file:
                for key, entry in _read_header(file, name).items():
                    if key in found:
                        raise DamagedCheckpoint(f"{name}: tensor {key!r:.100} is also in another file")
                    found[key] = entry
        return found

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def read_stamps(path: Path) -> list[list[str | int]]:
    """Returns name, bytes and modification time of the files that `open_weights` reads, to detect a replacement."""
    found = [path / MANIFEST] if (path / MANIFEST).exists() else _find_files(path)
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in found]


@final
class TorchFileReader(TensorReader):
    """Reads from files of `torch.save`; their tensors stay in the files until they are needed."""

    def __init__(self, paths: list[Path]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for path in paths:
            self._tensors |= _tensors_of(path)
        super().__init__({name: _whole(tensor) for name, tensor in self._tensors.items()})

    def read_items(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        for item in items:
            part, target = self._tensors[item.storage_index.fqn], planner.resolve_tensor(item).detach()
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, size)
            target.copy_(part)
            planner.commit_tensor(item, target)


def _find_files(path: Path) -> list[Path]:
    if path.is_file():
        return _indexed(path) if path.name.endswith(_INDEX) else [path]
    for name in _NAMES:
        if (path / f"{name}{_INDEX}").is_file():
            return _indexed(path / f"{name}{_INDEX}")
        if (path / name).is_file():
            return [path / name]
    indexes = sorted(path.glob(f"*.safetensors{_INDEX}"))  # an export has the name of its model
    if len(indexes) == 1:
        return _indexed(indexes[0])
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(file.name for file in found[:3])
        raise UsageError(
            f"{path} has several safetensors files ({names}, ...) and no single index: give one of the files"
        )
    raise UsageError(f"{path} is not a directory of weights: it has none of {', '.join(_NAMES)}: give a file")


def _indexed(index: Path) -> list[Path]:
    match parse_json(index.name, files.read_regular(index, follow=True)):
        case {"weight_map": dict(where)} if all(_is_plain_name(name) for name in where.values()):
            return [index.with_name(name) for name in sorted(set(where.values()))]
    raise DamagedCheckpoint(f"{index.name}: it is not an index of weights")


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and name.isprintable()


def _is_safetensors(path: Path) -> bool:
    if not path.is_file():
        raise DamagedCheckpoint(f"{path.name}: there is no such file")
    with files.open_regular(path, follow=True) as file:
        # the header begins at byte 8, with a brace that no zip or pickle has there
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"


def _read_header(file: CheckpointFile, name: str) -> dict[str, TensorEntry]:
    size = int.from_bytes(_read(file, 0, 8), "little")
    if not 2 <= size <= min(LARGEST_HEADER_BYTES, file.bytes - 8):
        raise DamagedCheckpoint(f"{name}: it is not a safetensors file")
    first = 8 + size
    listed = parse_header(name, _read(file, 8, size), file.bytes - first)
    return {key: _placed(name, key, entry, first) for key, entry in listed.items()}


def _read(file: CheckpointFile, begin: int, size: int) -> bytes:
    buffer = bytearray(size)
    read_into(file, begin, memoryview(buffer))
    return bytes(buffer)


def _placed(file: str, name: str, entry: HeaderEntry, first: int) -> TensorEntry:
    if entry.dtype not in ITEM_BYTES:
        raise UsageError(
            f"{file} has tensor {name!r:.100} of type {entry.dtype!r:.20}, which cannot be loaded: convert it to "
            "another type, such as BF16"
        )
    begin, end = first + entry.begin, first + entry.end
    chunk = TensorChunk(file=file, begin=begin, end=end, offsets=(0,) * len(entry.shape), shape=entry.shape)
    return TensorEntry(dtype=entry.dtype, shape=entry.shape, chunks=(chunk,))


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a torch file by name; if it has more than weights, those of a usual key."""
    try:
        with files.open_regular(path, follow=True) as file:
            zipped = file.read(4) == b"PK\x03\x04"
            if zipped:
                check_archive(file, path.name)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except _UNREADABLE as error:
        text = _COLORS.sub("", str(error)).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        raise UsageError(
            f"{path} cannot be read safely as weights ({reason:.150}): see what is in it with headway checkpoint show "
            f"{path}, and save its state dict alone"
        ) from error
    for _ in range(2):  # such as {"state_dict": {"model": ...}}
        if not isinstance(loaded, Mapping) or any(isinstance(v, torch.Tensor) for v in loaded.values()):
            break
        inside = [
            key for key in _INSIDE if isinstance(loaded.get(key), Mapping) and _flatten(loaded[key], path)
        ]
        if not inside:
            break
        loaded = loaded[inside[0]]
    tensors = _flatten(loaded, path)
    if not tensors:
        raise UsageError(
            f"{path} has no named tensors: save a state dict, torch.save(net.state_dict(), path)"
        )
    return tensors


def _flatten(loaded: object, path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors in nested dicts by name. A small file can describe a huge value, which has limits here."""
    found: dict[str, torch.Tensor] = {}
    todo: list[tuple[str, object, int]] = [("", loaded, 0)]
    seen = 0
    while todo:
        name, value, depth = todo.pop()
        seen += 1
        if depth > _DEEPEST or seen > _MOST_VALUES:
            limit = (
                "is nested too deeply, or contains itself"
                if depth > _DEEPEST
                else f"has more than {_MOST_VALUES:,} values"
            )
            raise UsageError(f"{path} {limit}: save a state dict alone, torch.save(net.state_dict(), path)")
        if isinstance(value, Mapping):
            todo += [
                (f"{name}.{key}" if name else str(key), part, depth + 1)
                for key, part in reversed(list(value.items()))
            ]
        elif isinstance(value, torch.Tensor) and name and dtypes.problem(value) is None:
            found[name] = value
    return found


def _whole(tensor: torch.Tensor) -> TensorEntry:
    shape: Any = tuple(tensor.shape)
    chunk = TensorChunk(file="", begin=0, end=0, offsets=(0,) * len(shape), shape=shape)
    return TensorEntry(dtype=dtypes.NAMES[tensor.dtype], shape=shape, chunks=(chunk,))
