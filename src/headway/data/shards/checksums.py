"""The checksum of a shard, in a file of its own beside it: `shard-000000.tar.sum`, one line of JSON.

    {"bytes": 268435456, "crc32": "9a3c0f1e"}

`pack` writes it. Whoever reads a shard from its first byte to its last compares on the way: the node cache when it
copies one, and `headway data check`. A single sample is not worth reading a whole shard for; there, the tar header
before it is checked.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import NamedTuple

from headway.data.shards.shard import File
from headway.errors import BadShard
from headway.system.files import storage, write_atomic

_STEP = 8 * 2**20
_LARGEST = 256  # bytes of such a file


class Checksum(NamedTuple):
    """What a shard was when it was written."""

    bytes: int
    crc32: str


def sum_file(path: Path) -> Path:
    """Where the checksum of a shard is kept."""
    return path.with_name(path.name + ".sum")


def compute(path: Path) -> Checksum:
    """Reads a whole shard."""
    file, crc = File(path), 0
    for start in range(0, len(file), _STEP):
        crc = zlib.crc32(file[start : start + _STEP], crc)
    return Checksum(len(file), f"{crc:08x}")


def read(path: Path) -> Checksum | None:
    """The checksum beside a shard; None where there is none. Raises `BadShard` if it is not one."""
    beside = sum_file(path)
    try:
        with beside.open("rb") as file:
            text = file.read(_LARGEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadShard(f"cannot read {beside}: {error.strerror}") from error
    try:
        match json.loads(text):
            case {"bytes": int(size), "crc32": str(crc)}:
                return Checksum(size, crc)
    except ValueError:
        pass
    raise BadShard(f"{beside} is not a checksum; remove it")


def write(path: Path, checksum: Checksum) -> Path:
    """Puts a checksum beside a shard, for whoever may read the shard."""
    beside = sum_file(path)
    with storage(f"write {beside}"):
        write_atomic(beside, json.dumps(checksum._asdict()).encode() + b"\n")
        beside.chmod(path.stat().st_mode & 0o666)
    return beside


def compare(path: Path, found: Checksum) -> None:
    """Raises `BadShard` when the bytes of a shard are not those that its checksum was made from."""
    stated = read(path)
    if stated is not None and stated != found:
        raise BadShard(
            f"{path} has {found.bytes} bytes with CRC32 {found.crc32}, but {sum_file(path).name} says {stated.bytes} "
            f"bytes with CRC32 {stated.crc32}: it is damaged or was replaced; copy both again"
        )
