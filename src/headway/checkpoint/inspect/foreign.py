"""Overviews of torch's .pt files and distributed checkpoints. Nothing in them is executed.

Both are pickles. They are read as data (`opcodes`), so `show` can also list what loading one with pickle would import.
"""

from __future__ import annotations

import errno
import io
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from headway.checkpoint.format.directory import CheckpointDirectory, DamagedCheckpoint
from headway.checkpoint.format.manifest import ITEM_BYTES, are_sizes
from headway.checkpoint.inspect.opcodes import (
    DICT,
    PERSISTENT,
    PickleContents,
    PickledName,
    PickledObject,
    read,
)
from headway.checkpoint.inspect.tables import Overview, TensorSummary

METADATA = ".metadata"  # of torch's distributed checkpoints
ZIP, PICKLE = b"PK\x03\x04", b"\x80"  # the first bytes of torch's files, today and before 1.6

_LARGEST_PICKLE_BYTES = 256 << 20
_LARGEST_OLD_PICKLE_BYTES = 1 << 20  # only to recognize one; torch does not write them
_MOST_NODES = 400_000
_DEEPEST = 100
_MOST_KEY_BITS = 256
_LONGEST_KEY, _LONGEST_NAME = 1000, 2000  # characters; every member of a value has a name of its own
_LEGACY_PICKLES = 4  # a magic number, a version, facts about the machine, the object
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_DICTS = (DICT, PickledName("collections", "OrderedDict"))
_STORAGES = {
    "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL", "ComplexFloat": "C64", "ComplexDouble": "C128",
}  # fmt: skip
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "complex128": "C128", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_SIZES = {**ITEM_BYTES, "C128": 16}
_INSIDE_MODULES = ("_modules", "_parameters", "_buffers")
_EXPECTED = re.compile(  # the types in a state; all other imports of a pickle are shown
    r"collections\.(OrderedDict|defaultdict|Counter)|torch\._utils\._rebuild_\w+|torch\._tensor\._rebuild_from_type_v2"
    r"|torch\.(\w+Storage|Size|device|strided|(b?float|u?int|complex)[0-9]\w*|bool)|torch\.storage\.\w+Storage"
    r"|torch\.serialization\._get_layout|torch\.nn\.parameter\.Parameter|torch\.distributed\.checkpoint\.(metadata\.\w+|filesystem\._StorageInfo)"
    r"|(builtins|__builtin__)\.(dict|list|set|int|float|complex|tuple)|pathlib\.(_local\.)?\w*Path"
)


def read_torch_file(path: Path, stream: BinaryIO) -> Overview:
    """Returns the tensors in a .pt file, by the names they have in it."""
    beginning = stream.read(len(ZIP))
    stream.seek(0)
    if beginning == ZIP:
        kind, found = (
            "torch file",
            read(io.BytesIO(check_archive(stream, path.name)), path.name, _is_expected),
        )
    else:
        kind, found = _read_pickles(stream, path.name)
    return _overview(path, kind, found, list(_tensors_in(found.value, path.name).values()))


def is_pickle(stream: BinaryIO) -> bool:
    """Returns whether a file is a pickle of the oldest protocols, which have no signature."""
    try:
        read(io.BytesIO(stream.read(_LARGEST_OLD_PICKLE_BYTES)), "")
    except DamagedCheckpoint:
        return False
    finally:
        stream.seek(0)
    return True


def read_distributed(path: Path) -> Overview:
    """Returns the tensors in a directory of torch's distributed checkpointing."""
    with (
        CheckpointDirectory(path) as directory,
        os.fdopen(directory.open_descriptor(METADATA), "rb") as stream,
    ):
        found = read(_beginning(stream), METADATA, _is_expected)
    entries = _attributes(found.value).get("state_dict_metadata")
    if not isinstance(entries, PickledObject):
        raise DamagedCheckpoint(f"{METADATA}: it does not describe a checkpoint of torch")
    tensors = [_described(name, entry) for name, entry in entries.pairs if "chunks" in _attributes(entry)]
    return _overview(path, "torch distributed checkpoint", found, tensors)


def _overview(path: Path, kind: str, found: PickleContents, tensors: list[TensorSummary]) -> Overview:
    """Makes the overview, with the unexpected imports and calls that loading the file would make."""
    imports = sorted(str(name) for name in found.names if not _is_expected(str(name)))
    calls = [str(call) for call in found.calls]
    about = {"format": kind, "imports": imports, "calls": calls}
    return Overview(path=path, about=about, tensors=tuple(tensors))


@lru_cache(maxsize=4096)
def _is_expected(name: str) -> bool:
    return _EXPECTED.fullmatch(name) is not None


def check_archive(stream: BinaryIO, name: str) -> bytes:
    """Returns the pickle in a zip archive of torch; `DamagedCheckpoint` if it is not as torch writes it.

    A compressed member of some kilobytes could fill the memory, and torch checks no CRC.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            (member,) = [about for about in members if re.fullmatch(r"[^/]*/data\.pkl", about.filename)]
            packed = [about for about in members if about.compress_type != zipfile.ZIP_STORED]
            if packed or member.file_size > _LARGEST_PICKLE_BYTES:
                raise DamagedCheckpoint(
                    f"{name}: {(*packed, member)[0].filename!r:.100} is too large or compressed, unlike any that torch "
                    "writes"
                )
            return archive.read(member)  # checks its CRC, too
    except DamagedCheckpoint:
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DamagedCheckpoint(f"{name}: a member of it begins before the file") from error
    except (zipfile.BadZipFile, ValueError, RuntimeError, EOFError, struct.error, zlib.error) as error:
        raise DamagedCheckpoint(f"{name}: it is not a zip archive of torch: {error}") from error


def _read_pickles(stream: BinaryIO, name: str) -> tuple[str, PickleContents]:
    """Reads a file of torch before 1.6, which is several pickles, or a single pickle of another program."""
    beginning = _beginning(stream)
    first = read(beginning, name, _is_expected)
    if first.value != _LEGACY_MAGIC:
        return "pickle, not written by torch", first
    return "torch file", [read(beginning, name, _is_expected) for _ in range(_LEGACY_PICKLES - 1)][-1]


def _beginning(stream: BinaryIO) -> io.BytesIO:
    return io.BytesIO(stream.read(_LARGEST_PICKLE_BYTES))


def _attributes(thing: object) -> dict[str, object]:
    """Returns the attributes that an object would get, by name."""
    state = thing.state if isinstance(thing, PickledObject) else None
    pairs = state.pairs if isinstance(state, PickledObject) else ()
    return {key: value for key, value in pairs if isinstance(key, str)}


def _described(name: object, entry: object) -> TensorSummary:
    """Returns a tensor of a distributed checkpoint."""
    match _attributes(entry):
        case {
            "properties": PickledObject(state=(PickledName(_, dtype), *_)),
            "size": PickledObject(args=(tuple(shape),)),
        }:
            return _tensor(_label(name), _DTYPES.get(dtype, dtype), shape)
    raise DamagedCheckpoint(f"{METADATA}: the entry of tensor {_label(name):.100} is inconsistent")


def _label(key: object) -> str:
    """Returns a key as part of a name. Only strings and integers up to a limit are printed: others may be huge."""
    if isinstance(key, str):
        return key[:_LONGEST_KEY]
    return str(key) if isinstance(key, int) and key.bit_length() < _MOST_KEY_BITS else "?"


def _tensor(name: str, dtype: str, shape: tuple[Any, ...]) -> TensorSummary:
    if not are_sizes(shape):
        raise DamagedCheckpoint(f"tensor {name!r:.100} has no valid shape")
    return TensorSummary(name=name, dtype=dtype, shape=shape, bytes=math.prod(shape) * _SIZES.get(dtype, 0))


def _tensors_in(value: object, file: str) -> dict[str, TensorSummary]:
    """Returns the tensors in a pickled value. A small pickle can describe a huge value: there is a limit."""
    found: dict[str, TensorSummary] = {}
    todo, listed = [(value, "", 0)], 1
    while todo:
        value, name, depth = todo.pop()
        tensor = _as_tensor(value, name)
        if tensor is not None:
            found[name] = tensor
            continue
        # counted before they are named: a value may hold itself, and a million others
        members = list(islice(_members(value), _MOST_NODES))
        listed += len(members)
        if listed > _MOST_NODES or depth > _DEEPEST or len(name) > _LONGEST_NAME:
            raise DamagedCheckpoint(f"{file}: it describes more than can be shown")
        todo += [(inner, _inside(name, key), depth + 1) for key, inner in reversed(members)]
    return found


def _as_tensor(value: object, name: str) -> TensorSummary | None:
    match value:
        case PickledObject(
            what=PickledName("torch._utils", "_rebuild_tensor_v2"),
            args=(PickledObject() as storage, _, tuple(shape), *_),
        ):
            return _tensor(name, _storage_type(storage), shape)
        case PickledObject(
            what=PickledName("torch._utils", "_rebuild_tensor_v3"),
            args=(_, _, tuple(shape), _, _, _, PickledName(_, dtype), *_),
        ):
            return _tensor(name, _DTYPES.get(dtype, dtype), shape)
    return None


def _members(value: object) -> Iterable[tuple[object, object]]:
    """Returns the members of a value by name; None for the name if the value only wraps another."""
    match value:
        case tuple():
            return enumerate(value)
        case PickledObject(
            what=PickledName("torch._tensor", "_rebuild_from_type_v2"),
            args=(PickledName() as how, _, tuple(args), *_),
        ):
            return [(None, PickledObject(how, args))]
        case PickledObject(
            what=PickledName("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state"),
            args=(tensor, *_),
        ):
            return [(None, tensor)]
        case PickledObject(what=what):  # attributes of a state dict are not part of the state
            attributes = [] if what in _DICTS else _attributes(value).items()
            return [*value.pairs, *enumerate(value.parts), *attributes]
    return ()


def _inside(name: str, key: object) -> str:
    if key is None or key in _INSIDE_MODULES:
        return name
    return f"{name}.{_label(key)}".lstrip(".")


def _storage_type(storage: PickledObject) -> str:
    """Returns the dtype of a tensor by its storage: ("storage", torch.FloatStorage, key, device, size)."""
    match storage:
        case PickledObject(what=PickledName() as how, args=((_, PickledName(_, kind), *_),)) if (
            how == PERSISTENT
        ):
            return _STORAGES.get(kind.removesuffix("Storage"), kind)
    return "unknown"
