"""The checksums of a shard, in a file beside it: `shard-000000.tar.sum`, one line of JSON.

    {"bytes": 268435456, "crc32": "9a3c0f1e", "samples": "0b31c7e29a3c0f1e..."}

`crc32` is of the whole shard. Code that reads all of a shard compares it: the node cache when it copies one, and
`headway data check`. `samples` has eight digits for the parts of each sample, compared when that sample is read. Files
of earlier versions lack it; then the whole shard is compared when it is opened.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol, final

from headway.data.shards.entries import group_samples
from headway.data.shards.shard_file import ShardFile, open_file
from headway.data.shards.tar import members
from headway.errors import BadShard
from headway.system.files import storage, write_atomic
from headway.system.retries import read_start, retry

CHUNK_BYTES = 8 * 2**20
_MAX_FILE_BYTES = 256  # without the checksums of samples
_BYTES_PER_DIGIT = 64  # of a shard, at least: a sample has eight digits, and a header of 512 bytes


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
    """Size and CRC32 of a shard when it was written, and of each of its samples."""

    bytes: int
    crc32: str
    samples: str = ""
    """eight hexadecimal digits for each sample"""

    def sample_sums(self) -> array[int]:
        sums = array("I", bytes.fromhex(self.samples))
        if sys.byteorder == "little":
            sums.byteswap()
        return sums


def checksum_path(path: Path) -> Path:
    """Returns the path of the checksum file beside a shard."""
    return path.with_name(path.name + ".sum")


def sum_sample(parts: Iterable[bytes | memoryview]) -> int:
    """Returns the CRC32 of the parts of a sample, one after the other."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def join_sums(sums: Iterable[int]) -> str:
    """Returns the checksums of samples as they are written."""
    return "".join(f"{crc:08x}" for crc in sums)


def sum_file(file: ShardFile) -> Checksum:
    """Computes the checksum of a whole shard by reading all of it."""
    crc = Crc32()
    update_digest(crc, file)
    return Checksum(len(file), crc.hexdigest())


def compute(path: Path) -> Checksum:
    """Computes all checksums of a shard by reading all of it."""
    file = open_file(path)
    entries = group_samples(members(file, str(path)), str(path))
    sums = (
        sum_sample(file.read(part.offset, part.offset + part.size) for part in entries.parts(number))
        for number in range(len(entries))
    )
    return sum_file(file)._replace(samples=join_sums(sums))


def read(path: Path) -> Checksum | None:
    """Reads the checksums beside a shard; None if there are none. Raises `BadShard` if they are not valid."""
    beside = checksum_path(path)
    size = retry(f"look at {path}", path.stat).st_size
    text = read_start(beside, _MAX_FILE_BYTES + size // _BYTES_PER_DIGIT)
    if text is None:
        return None
    try:
        match json.loads(text):
            case {"bytes": int(stated), "crc32": str(crc), "samples": str(samples)}:
                if len(bytes.fromhex(samples)) % 4 == 0:
                    return Checksum(stated, crc, samples)
            case {"bytes": int(stated), "crc32": str(crc)}:
                return Checksum(stated, crc)
    except (ValueError, RecursionError):
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
    """Raises `BadShard` if the file beside a shard states another checksum of the whole shard."""
    stated = read(path)
    if stated is not None and stated[:2] != found[:2]:
        raise mismatch(
            path,
            f"has {found.bytes} bytes with CRC32 {found.crc32}",
            f"{stated.bytes} bytes with CRC32 {stated.crc32}",
        )


def mismatch(path: Path, found: str, stated: str) -> BadShard:
    """Returns the error for a shard that does not match its checksum file."""
    return BadShard(
        f"{path} {found}, but {checksum_path(path).name} states {stated}: it is damaged or was replaced; copy both "
        "again"
    )
