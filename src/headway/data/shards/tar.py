"""The files of a tar archive (ustar, GNU, PAX), found by walking its headers and never extracted.

    for name, offset, size in members(data, "x.tar"):
        ...

Names are never used as paths. Links, devices and sparse files are refused, and so are files above the `ShardLimits`.
Memory and time are bounded by the length of the archive, even if it is malicious.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headway.errors import BadShard

BLOCK_BYTES = 512
NAME_BYTES = 100  # for the name in a header; longer names have a header of their own
OCTAL_LIMIT_BYTES = 8**11  # from this size on, a size does not fit into the header's octal digits
_ZEROS = bytes(BLOCK_BYTES)
RECORD_BYTES = 20 * BLOCK_BYTES  # archives are padded to a multiple of it, also empty ones
_MAX_PADDING_BYTES = 2**20  # zeros after the last file; more mean that the archive was not completely written
_MAX_NAME_BYTES = 2**20
_FILE, _DIRECTORY, _LONG_NAME, _LONG_LINK, _PAX, _PAX_ALL = b"0\0007", b"5", b"L", b"K", b"x", b"g"


class Readable(Protocol):
    """Bytes, mapped bytes, or a file that is read in pieces."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> bytes: ...


class TarMember(NamedTuple):
    """One file in a tar archive."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class ShardLimits:
    """What a shard from an untrusted source may cost; above a limit, the sample or the shard is bad.

    limits = hw.data.ShardLimits(pixels=400_000_000)        # photos of up to 400 megapixels
    loader = hw.data.ShardLoader("shards", batch_size=64, limits=limits)
    """

    member_bytes: int = 2**30
    """bytes of one file in a shard"""
    members: int = 10_000_000
    """files in a shard"""
    text_bytes: int = 2**24
    """bytes of one text, number or JSON value, which take many times as much memory when parsed"""
    pixels: int = 100_000_000
    """width x height of an image"""
    ratio: int = 500
    """decoded bytes per byte of an image, above 16 MB of decoded bytes: a photograph has about 10"""
    frames: int = 10_000
    """frames in one image, of which the first is used"""
    scans: int = 100
    """scans of a progressive JPEG: the time to decode it grows with them, and not with its size"""


def members(
    data: Readable, where: str, limits: ShardLimits | None = None, *, offset: int = 0
) -> Iterator[TarMember]:
    """Yields the files of a tar archive, from the header at `offset` on; raises `BadShard` if it is not one."""
    limits = limits or ShardLimits()
    name, size_given, seen = "", None, 0
    while True:
        header = data[offset : offset + BLOCK_BYTES]
        if header == _ZEROS:
            _check_end(data, offset, where)
            return
        if len(header) < BLOCK_BYTES:
            raise BadShard(
                f"{where} ends at byte {len(data)} without an end marker: it was truncated; copy it again"
            )
        kind, size = header[156:157], header_size(header, offset, where)
        if kind in _FILE and size_given is not None and size_given != size:
            size = _agreed(size, size_given, offset, where)
        start = offset + BLOCK_BYTES
        offset = start + -(-size // BLOCK_BYTES) * BLOCK_BYTES
        if start + size > len(data):
            raise BadShard(
                f"{where} has a file of {size} bytes at byte {start}, but ends at byte {len(data)}: it was truncated; "
                "copy it again"
            )
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_ALL):
            if size > _MAX_NAME_BYTES:
                raise BadShard(
                    f"{where} has a name of {size} bytes at byte {start}; at most {_MAX_NAME_BYTES} are allowed"
                    "; create it again with shorter names"
                )
            if kind == _LONG_NAME:
                name = _text(data[start : start + size])
            elif kind == _PAX:
                name, size_given = _pax(data[start : start + size], name, where, start)
            continue
        name = name or _name(header)
        if kind in _FILE:
            seen += 1
            if size > limits.member_bytes or seen > limits.members:
                raise over_limit(f"{where}: {name!r}, file {seen} with {size} bytes,", limits)
            yield TarMember(name, start, size)
        elif kind != _DIRECTORY:
            raise BadShard(
                f"{where}: {name!r} is a link, device or sparse file (type {kind!r}); pack files only"
            )
        name, size_given = "", None


def _check_end(data: Readable, offset: int, where: str) -> None:
    """Refuses an end marker that is followed by more than padding: files after it would be lost silently."""
    rest = len(data) - offset
    if rest > (_MAX_PADDING_BYTES if offset else RECORD_BYTES) or data[offset : offset + rest].strip(b"\0"):
        raise BadShard(
            f"{where} is damaged: its end marker is at byte {offset}, but {rest} bytes follow, more than padding; it "
            "has a hole of zeros, or is several tar files in one; copy or create it again"
        )


def over_limit(what: str, limits: ShardLimits) -> BadShard:
    """Returns the error for something that exceeds the limits."""
    return BadShard(
        f"{what} exceeds {limits}; if that is intended, raise the limit with ShardLoader(limits=...)"
    )


def header_size(header: bytes, offset: int, where: str) -> int:
    """Returns the size that a header states, after validating the header's checksum."""
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
            f"{where} has no tar header at byte {offset}: it is not a tar file, or damaged; create it again"
        )
    return value


def possible_names(blocks: bytes) -> Iterator[str]:
    """Yields the names that a file may have, given the blocks up to its header: the name in the header, and the one in
    a PAX or GNU header right before it, which some writers use for every name."""
    yield _name(blocks[-BLOCK_BYTES:])
    before, value = blocks[-3 * BLOCK_BYTES : -2 * BLOCK_BYTES], blocks[-2 * BLOCK_BYTES : -BLOCK_BYTES]
    with suppress(BadShard):  # the block before is not a header
        value = value[: header_size(before, 0, "")]
        if before[156:157] == _PAX:
            yield _pax(value, "", "", 0)[0]
        elif before[156:157] == _LONG_NAME:
            yield _text(value)


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
            raise BadShard(f"{where} has a damaged PAX header at byte {start}; create it again")
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
    """Refuses a size in the header that contradicts the PAX record: readers differ in which of them they use."""
    if given < OCTAL_LIMIT_BYTES:
        raise BadShard(
            f"{where}: the header at byte {offset} has two sizes, {size} and {given}; create it again"
        )
    return given


def _until_zero(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _text(name: bytes) -> str:
    return _until_zero(name).decode("utf-8", "surrogateescape")
