"""What a checkpoint looks like on disk, and whether one is whole. Needs no torch.

    checkpoints/step-000000001000/     exists only when all of it is on disk
        manifest.json                  written last: step, world, versions, and size and CRC32 of every file below
        index.json                     every tensor: type, shape, and where its bytes are
        state.json                     everything that is not a tensor
        rank-00000.safetensors         the tensors that rank 0 wrote        rank-00000.json: what only rank 0 has
    checkpoints/latest                 the newest step, for people; never read by headway
    checkpoints/step-N.corrupt-1/      found damaged, set aside, kept

A CRC tells damage, not forgery. Nothing here is read through a link, and nothing that is read can execute.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

from headway.errors import StorageError
from headway.run import Run, step_name
from headway.system import files

Place = Run | str | os.PathLike[str]

FORMAT = 1  # of the manifest; to be raised when readers of the old form would misunderstand the new one
MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.json"
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "C64": 8, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip

_STEP = re.compile(r"step-([0-9]{12,18})")
_SET_ASIDE = re.compile(r"step-[0-9]{12,18}\.corrupt-[0-9]+")
_FILE = re.compile(r"[a-z0-9-]{1,64}\.(json|safetensors)")
_SEAL = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n}\n')
_SEAL_BYTES = len(b',\n "crc32": "00000000"\n}\n')
_LARGEST_JSON = 1 << 30
_PIECE = 4 << 20
# what an unreadable file may be a sign of: other errors, like a missing permission, are not the checkpoint's fault
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EUCLEAN)


class Damaged(ValueError):
    """Raised inside this room when a checkpoint is not what it says; the message is one problem."""


@final
@dataclass(frozen=True, kw_only=True)
class FileFact:
    """What the manifest says about one file."""

    bytes: int
    crc32: str


@final
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What manifest.json says."""

    step: int
    save: str
    world_size: int
    created: str
    versions: Mapping[str, str | None]
    metrics: Mapping[str, float]
    files: Mapping[str, FileFact]

    def to_bytes(self) -> bytes:
        """The file: JSON whose last entry is the CRC32 of all bytes before that entry."""
        text = json.dumps(
            {
                "format": FORMAT,
                "step": self.step,
                "save": self.save,
                "created": self.created,
                "world": {"size": self.world_size},
                "versions": dict(self.versions),
                "metrics": dict(self.metrics),
                "files": {name: {"bytes": f.bytes, "crc32": f.crc32} for name, f in self.files.items()},
            },
            indent=1,
            allow_nan=False,
        )
        body = text.removesuffix("\n}").encode()
        return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        body, seal = data[:-_SEAL_BYTES], _SEAL.fullmatch(data[-_SEAL_BYTES:])
        if seal is None or f"{zlib.crc32(body):08x}".encode() != seal[1]:
            raise Damaged(f"{MANIFEST}: its checksum does not hold")
        match parse(MANIFEST, data):
            case {"format": int(form)} if form != FORMAT:
                raise Damaged(
                    f"{MANIFEST}: format {form} is not known to this version of headway ({FORMAT} is)"
                )
            case {
                "step": int(step), "save": str(save), "created": str(created), "world": {"size": int(world_size)},
                "versions": dict(versions), "metrics": dict(metrics), "files": dict(listed),
            } if _are_numbers(metrics):  # fmt: skip
                facts = {name: _file_fact(name, fact) for name, fact in listed.items()}
                return cls(
                    step=step, save=save, world_size=world_size, created=created, versions=versions,
                    metrics=metrics, files=facts,
                )  # fmt: skip
        raise Damaged(f"{MANIFEST}: it is not a manifest")


@final
@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor: where it is in the tensor, and where its bytes are."""

    file: str
    begin: int
    end: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of the checkpoint: the whole of it, over all ranks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@final
class Folder:
    """An open checkpoint directory. What is opened in it is a regular file, and never behind a link.

    `announced`: another rank has seen it, so it is there, even if this host's file system does not show it yet.
    """

    def __init__(self, path: Path, *, announced: bool = False) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = (
                files.retry_until_visible(lambda: os.open(path, flags)) if announced else os.open(path, flags)
            )
        except OSError as error:
            raise _unreadable(path.name, path, error) from error

    def open(self, name: str) -> int:
        """A descriptor to read from; the caller closes it."""
        # O_NONBLOCK: a pipe in the place of a file must not stop us
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            raise _unreadable(name, self.path, error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Damaged(f"{name}: it is not a regular file")
        return fd

    def read(self, name: str) -> bytes:
        """A JSON file as a whole."""
        fd = self.open(name)
        try:
            size = os.fstat(fd).st_size
            if size > _LARGEST_JSON:
                raise Damaged(f"{name}: {size} bytes are too many")
            return b"".join(pieces(fd, name, self.path))
        finally:
            os.close(fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def home(where: Place) -> tuple[Path, str]:
    """The directory of all checkpoints of a run, and whose unfinished ones may be removed in it."""
    if isinstance(where, Run):
        return where.checkpoints_dir, where.id
    return Path(where).absolute(), "path"


def steps(parent: Path) -> list[int]:
    """The steps that have a checkpoint, whole or not, oldest first."""
    return sorted(int(found[1]) for name in _names(parent) if (found := _STEP.fullmatch(name)))


def any_traces(parent: Path) -> bool:
    """Whether there are checkpoints, or were some that have been set aside."""
    return any(_STEP.fullmatch(name) or _SET_ASIDE.fullmatch(name) for name in _names(parent))


def step_dir(parent: Path, step: int) -> Path:
    return parent / step_name(step)


def read_manifest(folder: Folder) -> Manifest:
    manifest = Manifest.from_bytes(folder.read(MANIFEST))
    if step_dir(folder.path.parent, manifest.step).name != folder.path.name.partition(".corrupt-")[0]:
        raise Damaged(f"{MANIFEST}: it belongs to step {manifest.step}, not to {folder.path.name}")
    for name in (INDEX, STATE):
        if name not in manifest.files:
            raise Damaged(f"{MANIFEST}: it lists no {name}")
    return manifest


def verify(directory: str | os.PathLike[str]) -> list[str]:
    """What is wrong with a checkpoint: one line per problem, none if it is whole. Every byte is checked.

    >>> verify("runs/digits-2026.11.15-14.30-x7k2/checkpoints/step-000000001000")  # doctest: +SKIP
    []
    """
    try:
        with Folder(Path(directory).absolute()) as folder:
            manifest = read_manifest(folder)
            names = manifest.files
            return check_files(folder, manifest, names) or check_contents(folder, manifest, names)
    except Damaged as problem:
        return [str(problem)]


def check_files(folder: Folder, manifest: Manifest, names: Collection[str]) -> list[str]:
    """The problems of these files: missing, of another size, or with other bytes than the manifest says."""
    problems = []
    for name in names:
        try:
            size, crc = _measure(folder, name)
        except Damaged as problem:
            problems.append(str(problem))
            continue
        fact = manifest.files[name]
        if size != fact.bytes:
            problems.append(f"{name}: {size} bytes, {fact.bytes} expected")
        elif crc != fact.crc32:
            problems.append(f"{name}: its bytes have CRC32 {crc}, {fact.crc32} expected")
    return problems


def check_contents(folder: Folder, manifest: Manifest, names: Collection[str]) -> list[str]:
    """What cannot be true in these files, though their bytes are those that the manifest promises."""
    problems = []
    for name in names:
        try:
            if name == INDEX:
                read_index(folder, manifest)
            elif name.endswith(".json"):
                read_part(folder, manifest, name)
        except Damaged as problem:
            problems.append(str(problem))
    return problems


def read_index(folder: Folder, manifest: Manifest) -> dict[str, Entry]:
    """The tensors of a checkpoint; every byte range is inside its file, every chunk inside its tensor."""
    listed = read_part(folder, manifest, INDEX)
    if not isinstance(listed, dict):
        raise Damaged(f"{INDEX}: it is not an index")
    return {name: _entry(name, value, manifest) for name, value in listed.items()}


def read_part(folder: Folder, manifest: Manifest, name: str) -> Any:
    """What a JSON file of this save holds."""
    match parse(name, folder.read(name)):
        case {"step": manifest.step, "save": manifest.save, "holds": held}:
            return held
    raise Damaged(f"{name}: it does not belong to this save")


def parse(name: str, data: bytes) -> Any:
    """JSON, or `Damaged`."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name}: it is not JSON: {error}") from error


def pieces(fd: int, name: str, where: Path) -> Iterator[bytes]:
    """The bytes of an open file, piece by piece."""
    while True:
        try:
            piece = os.read(fd, _PIECE)
        except OSError as error:
            raise _unreadable(name, where, error) from error
        if not piece:
            return
        yield piece


def _measure(folder: Folder, name: str) -> tuple[int, str]:
    size = crc = 0
    fd = folder.open(name)
    try:
        for piece in pieces(fd, name, folder.path):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    finally:
        os.close(fd)
    return size, f"{crc:08x}"


def _entry(name: str, value: object, manifest: Manifest) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "chunks": list(listed)} if (
            dtype in ITEM_BYTES and _are_sizes(shape)
        ):
            chunks = tuple(_chunk(name, chunk, dtype, shape, manifest) for chunk in listed)
            if sum(math.prod(chunk.shape) for chunk in chunks) == math.prod(shape):
                return Entry(dtype=dtype, shape=tuple(shape), chunks=chunks)
    raise Damaged(f"{INDEX}: tensor {name!r:.100} cannot be what it says")


def _chunk(name: str, value: object, dtype: str, whole: list[int], manifest: Manifest) -> Chunk:
    match value:
        case {
            "file": str(file),
            "bytes": [int(begin), int(end)],
            "offsets": list(offsets),
            "shape": list(shape),
        } if (
            file in manifest.files
            and _are_sizes(offsets)
            and _are_sizes(shape)
            and len(offsets) == len(shape) == len(whole)
            and all(o + s <= w for o, s, w in zip(offsets, shape, whole, strict=True))
            and 0 <= begin <= end <= manifest.files[file].bytes
            and end - begin == math.prod(shape) * ITEM_BYTES[dtype]
        ):
            return Chunk(file=file, begin=begin, end=end, offsets=tuple(offsets), shape=tuple(shape))
    raise Damaged(f"{INDEX}: a chunk of tensor {name!r:.100} cannot be where it says")


def _file_fact(name: str, value: object) -> FileFact:
    match value:
        case {"bytes": int(size), "crc32": str(crc)} if (
            size >= 0 and _FILE.fullmatch(name) and name != MANIFEST
        ):
            return FileFact(bytes=size, crc32=crc)
    raise Damaged(f"{MANIFEST}: it lists {name!r:.100}, which is no file of a checkpoint")


def _are_sizes(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _are_numbers(values: dict[Any, Any]) -> bool:
    return all(type(value) in (int, float) for value in values.values())


def _names(parent: Path) -> list[str]:
    try:
        return [path.name for path in parent.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(
            f"{parent} cannot be read: {error.strerror}; check its mount and permissions"
        ) from error


def _unreadable(name: str, where: Path, error: OSError) -> Damaged | StorageError:
    if error.errno in _DAMAGE:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        return Damaged(f"{name}: {reason}")
    return StorageError(
        f"{name} in {where} cannot be read: {error.strerror}; check its mount and permissions"
    )
