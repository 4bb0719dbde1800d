"""The checksum of a shard, in a file of its own beside it: `shard-000000.tar.sum`, one line of JSON.

    {"bytes": 268435456, "crc32": "9a3c0f1e"}

`pack` writes it. Whatever reads a whole shard compares the checksum: the node cache when it copies one, and
`headway data check`. When a single sample is read, only its tar header is checked.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, final

from headway.data.shards.retries import read_start
from headway.data.shards.shard import ShardFile
from headway.errors import BadShard
from headway.system.files import storage, write_atomic

CHUNK_BYTES = 8 * 2**20
_MAX_FILE_BYTES = 256


class Digest(Protocol):
    """A checksum that is computed piece by piece: `Crc32`, or one of hashlib's."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


@final
class Crc32:
    """CRC32 with the interface of hashlib."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def update_digest(
    digest: Digest, data: ShardFile | memoryview, on_chunk: Callable[[int], object] = lambda _: None
) -> None:
    """Feeds all bytes of a file or of memory to a digest; `on_chunk` is called with the size of each chunk."""
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        digest.update(chunk)
        on_chunk(len(chunk))


class Checksum(NamedTuple):
    """Size and CRC32 of a shard when it was written."""

    bytes: int
    crc32: str


def checksum_path(path: Path) -> Path:
    """Returns the path of the checksum file beside a shard."""
    return path.with_name(path.name + ".sum")


def compute(path: Path) -> Checksum:
    """Computes the checksum of a shard by reading all of it."""
    file, crc = ShardFile(path), Crc32()
    update_digest(crc, file)
    return Checksum(len(file), crc.hexdigest())


def read(path: Path) -> Checksum | None:
    """Reads the checksum beside a shard; None if there is none. Raises `BadShard` if it is not valid."""
    beside = checksum_path(path)
    text = read_start(beside, _MAX_FILE_BYTES)
    if text is None:
        return None
    try:
        match json.loads(text):
            case {"bytes": int(size), "crc32": str(crc)}:
                return Checksum(size, crc)
    except ValueError:
        pass
    raise BadShard(f"{beside} is not a valid checksum file; remove it")


def write(path: Path, checksum: Checksum) -> Path:
    """Writes a checksum beside a shard, with the shard's permissions."""
    beside = checksum_path(path)
    with storage(f"write {beside}"):
        write_atomic(beside, json.dumps(checksum._asdict()).encode() + b"\n")
        beside.chmod(path.stat().st_mode & 0o666)
    return beside


def compare(path: Path, found: Checksum) -> None:
    """Raises `BadShard` if the checksum beside a shard states another one."""
    stated = read(path)
    if stated is not None and stated != found:
        raise BadShard(
            f"{path} has {found.bytes} bytes with CRC32 {found.crc32}, but {checksum_path(path).name} states "
            f"{stated.bytes} bytes with CRC32 {stated.crc32}: it is damaged or was replaced; copy both again"
        )
