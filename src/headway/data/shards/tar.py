"""The files of a tar archive (ustar, GNU, PAX), found header by header and never extracted.

    for name, offset, size in members(data, "x.tar"):
        ...

Names are only names. Links, devices and sparse files are refused; so is what is beyond the `Limits`. Memory and time
are bounded by the length of the archive, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headway.errors import BadShard

BLOCK = 512
_ZEROS = bytes(BLOCK)
_LARGEST_NAME = 2**20
BEYOND_OCTAL = 8**11  # such a size does not fit the header of a file
_FILE, _DIRECTORY, _LONG_NAME, _LONG_LINK, _PAX, _PAX_ALL = b"0\0007", b"5", b"L", b"K", b"x", b"g"


class Readable(Protocol):
    """Bytes, mapped bytes, or a file that is read piece by piece."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> bytes: ...


class Member(NamedTuple):
    """One file in a shard."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is taken from a file that somebody else made; above, a sample or a shard is bad."""

    member_bytes: int = 2**30
    """bytes of one file in a shard"""
    members: int = 10_000_000
    """files in a shard"""
    text_bytes: int = 2**24
    """bytes of one text, number or JSON, which take many times as much when they are read"""
    pixels: int = 100_000_000
    """width x height of an image"""
    ratio: int = 500
    """decoded bytes for each byte of an image, where they are more than 16 MB: a photograph has about 10"""
    frames: int = 10_000
    """pictures in one image, of which the first is taken"""
    scans: int = 100
    """passes over a progressive JPEG: the time to decode it grows with them, and not with its size"""


def members(data: Readable, where: str, limits: Limits | None = None) -> Iterator[Member]:
    """The files of a tar archive; raises `BadShard` where it is not one."""
    limits = limits or Limits()
    offset, name, size_given, seen = 0, "", None, 0
    while True:
        header = data[offset : offset + BLOCK]
        if header == _ZEROS:
            return
        if len(header) < BLOCK:
            raise BadShard(
                f"{where} ends at byte {len(data)} without an end mark: it was cut off; copy it again"
            )
        kind, size = header[156:157], size_in(header, offset, where)
        if kind in _FILE and size_given is not None and size_given != size:
            size = _agreed(size, size_given, offset, where)
        start = offset + BLOCK
        offset = start + -(-size // BLOCK) * BLOCK
        if start + size > len(data):
            raise BadShard(
                f"{where} has a file of {size} bytes at byte {start}, but ends at byte {len(data)}: it was cut off; "
                "copy it again"
            )
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_ALL):
            if size > _LARGEST_NAME:
                raise BadShard(f"{where}: a name of {size} bytes at byte {start}")
            if kind == _LONG_NAME:
                name = _text(data[start : start + size])
            elif kind == _PAX:
                name, size_given = _pax(data[start : start + size], name, where, start)
            continue
        name = name or _name(header)
        if kind in _FILE:
            seen += 1
            if size > limits.member_bytes or seen > limits.members:
                raise beyond(f"{where}: {name!r}, file {seen} with {size} bytes,", limits)
            yield Member(name, start, size)
        elif kind != _DIRECTORY:
            raise BadShard(
                f"{where}: {name!r} is a link, device or sparse file (type {kind!r}); pack files only"
            )
        name, size_given = "", None


def beyond(what: str, limits: Limits) -> BadShard:
    """More than a shard may have."""
    return BadShard(f"{what} is beyond the limits: {limits}. If it is meant to be so, give larger Limits")


def size_in(header: bytes, offset: int, where: str) -> int:
    """The size that a header states, after checking that it is a header at all."""
    try:
        stated = int(_until_zero(header[148:156]).strip() or b"-1", 8)
        size = header[124:136]
        if size[0] & 0x80:  # GNU's binary form, for sizes that do not fit eleven octal digits
            value = int.from_bytes(size[1:], "big")
        else:
            value = int(_until_zero(size).strip() or b"0", 8)
    except (ValueError, IndexError):
        stated = value = -1
    if stated != sum(header) - sum(header[148:156]) + 8 * 32 or value < 0:
        raise BadShard(
            f"{where} has no tar header at byte {offset}: not a tar file, or damaged; make it again"
        )
    return value


def _name(header: bytes) -> str:
    name, prefix = _until_zero(header[:100]), b""
    if header[257:263] == b"ustar\0":
        prefix = _until_zero(header[345:500])
    return _text(prefix + b"/" + name if prefix else name)


def _pax(records: bytes, name: str, where: str, start: int) -> tuple[str, int | None]:
    size, at = None, 0
    while at < len(records):
        digits = records[at : at + 8].partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        if not len(digits) + 1 < length <= len(records) - at:
            raise BadShard(f"{where} has a damaged PAX header at byte {start}; make it again")
        keyword, _, value = records[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if keyword.startswith(b"GNU.sparse"):
            raise BadShard(f"{where} has a sparse file at byte {start}; pack files only")
        if keyword == b"path":
            name = _text(value)
        elif keyword == b"size" and value.isdigit() and len(value) < 20:
            size = int(value)
        at += length
    return name, size


def _agreed(size: int, given: int, offset: int, where: str) -> int:
    """Where a file has a size in its header and another one in a PAX record, readers differ in what comes next."""
    if given < BEYOND_OCTAL:
        raise BadShard(
            f"{where}: the header at byte {offset} has two sizes, {size} and {given}; make it again"
        )
    return given


def _until_zero(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _text(name: bytes) -> str:
    return _until_zero(name).decode("utf-8", "surrogateescape")
