"""A fuzzer: genuine files are changed at random, and what headway does with them is judged.

Changes know the format: values of JSON are replaced by hostile ones, and checksums, lengths and archives are made to
fit again, so that a change reaches the code behind the first check.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from headway.errors import HeadwayError

LONGEST_S = 10
MOST_MB = 200

_HOSTILE: list[Any] = [
    None, True, False, -1, 0, 1, 1.5, 2**31, 2**63, 2**64, 10**400, -(10**30), 1e308, float("nan"), float("inf"),
    "", "x", "\x1b[2J\x07", "\u202egpj.exe", "\x9b31m", "\ud800", "../../etc/passwd", "/etc/passwd", "/dev/zero", "a/b",
    "a\nb", "\0", "x" * 20_000, "nan", "2026-11-16T00:00:00+00:00", "2026", "step-000000000001", [], {}, [[]], [0],
    [1, 2], [-1], [2**40], [2**62, 2], {"": []}, {"$tensor": "net.a"}, {"$tensor": "x"}, {"$tuple": 1},
    {"$dict": [[1]]}, {"$float": "nan"}, {"a": {"b": {"c": 1}}},
]  # fmt: skip
_WORDS = [
    b"\x00", b"\xff", b"\x80\x02", b"{", b"}", b"[", b"]", b'"', b",", b":", b"-1", b"1e999", b"NaN", b"null",
    b"\\u001b", b"\x1b[2J", b"__metadata__", b"$tensor", b"../", b"/dev/zero", b"99999999999999999999", b"\n", b"\r",
    b"&a [*a]", b"!!python/object/apply:os.system", b"ustar\x0000", b"PK\x03\x04", b"c__builtin__\neval\n", b"R", b"(",
    b"0", b"b", b".",
]  # fmt: skip
_FIELDS = [(0, 100), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155)]
"""offsets and sizes in a header of tar"""
_TAR_WORDS = [
    b"", b"\xff" * 155, b"7" * 11, b"L", b"x", b"2", b"\x80" + b"\0" * 7 + b"\x7f" * 4, b"../../a", b"\x1b[2Ja.jpg",
]  # fmt: skip


class Violation(AssertionError):
    """What must never happen; no `Exception` handler of a reader takes it for damage."""


def changed(data: bytes, rng: Random) -> bytes:
    """Changes bytes: flips, cuts, copies, and words that readers know."""
    work = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(work) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 64, 512))
        kind = rng.randrange(7)
        if kind == 0 and at < len(work):
            work[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(work):
            work[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, ord("9"), ord("-")))
        elif kind == 2:
            del work[at : at + length]
        elif kind == 3:
            work[at:at] = rng.choice(_WORDS)
        elif kind == 4:
            work[at : at + length] = rng.choice(_WORDS)
        elif kind == 5:
            begin = rng.randrange(len(work) + 1)
            work[at:at] = work[begin : begin + length]
        else:
            work[at : at + length] = rng.randbytes(length)
    return bytes(work)


def changed_value(value: Any, rng: Random) -> Any:
    """Changes plain values: some are replaced, removed, doubled, moved or nested."""
    work = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        holders = list(_holders(work))
        if not holders:
            return rng.choice(_HOSTILE)
        holder = rng.choice(holders)
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        kind = rng.randrange(10)
        if kind < 5:
            holder[key] = rng.choice(_HOSTILE)
        elif kind == 5:
            del holder[key]
        elif kind == 6:
            other = rng.choice(holders)
            holder[key] = rng.choice(list(other.values() if isinstance(other, dict) else other))
        elif kind == 7 and isinstance(holder, dict):
            holder[rng.choice([str(each) for each in _HOSTILE[15:40]] + ["__metadata__", "$tensor"])] = (
                holder.pop(key)
            )
        elif kind == 8:
            for _ in range(rng.choice((2, 60, 150, 3000))):
                holder[key] = [holder[key]]
            return work
        elif isinstance(holder[key], int | float) and abs(holder[key]) < 2**70:
            holder[key] += rng.choice((-1, 1, 8, -holder[key], 2**33))
        work = json.loads(json.dumps(work)) if kind == 6 else work  # no value twice
    return work


def changed_json(data: bytes, rng: Random) -> bytes:
    """Changes a JSON document or JSON lines."""
    if rng.random() < 0.2:
        return changed(data, rng)
    lines = data.splitlines() if data.count(b"\n{") else [data]
    at = rng.randrange(len(lines))
    try:
        lines[at] = json.dumps(changed_value(json.loads(lines[at]), rng)).encode()
    except (ValueError, RecursionError):
        lines[at] = changed(lines[at], rng)
    return b"\n".join(lines) + b"\n"


def changed_safetensors(data: bytes, rng: Random) -> bytes:
    """Changes the header of a safetensors file, whose length then fits."""
    if rng.random() < 0.2:
        return changed(data, rng)
    length = int.from_bytes(data[:8], "little")
    header = changed_json(data[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def changed_torch(data: bytes, rng: Random) -> bytes:
    """Changes members of a zip archive of torch, whose checksums then hold."""
    if rng.random() < 0.3 or not data.startswith(b"PK"):
        return changed(data, rng)
    out = io.BytesIO()
    how = zipfile.ZIP_DEFLATED if rng.random() < 0.1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", how) as new:
        for info in old.infolist():
            member = old.read(info)
            if info.filename.endswith("data.pkl") or rng.random() < 0.05:
                member = changed(member, rng)
            new.writestr(info.filename, member)
    return out.getvalue()


def changed_tar(data: bytes, rng: Random) -> bytes:
    """Changes headers of a tar archive, whose checksums then hold."""
    if rng.random() < 0.3:
        return changed(data, rng)
    work = bytearray(data)
    headers = [at for at in range(0, len(work), 512) if work[at + 257 : at + 262] == b"ustar"]
    for at in rng.sample(headers, min(len(headers), rng.randint(1, 2))):
        field, size = rng.choice(_FIELDS)
        value = rng.choice(_TAR_WORDS)
        work[at + field : at + field + size] = value[:size].ljust(size, b"\0")
        work[at + 148 : at + 156] = b" " * 8
        work[at + 148 : at + 156] = b"%06o\0 " % sum(work[at : at + 512])
    return bytes(work)


CHANGES: dict[str, Callable[[bytes, Random], bytes]] = {
    ".json": changed_json, ".jsonl": changed_json, ".safetensors": changed_safetensors, ".pt": changed_torch,
    ".bin": changed_torch, ".tar": changed_tar,
}  # fmt: skip


def sealed(manifest: bytes, facts: dict[str, bytes]) -> bytes:
    """Returns the manifest of a checkpoint with the checksums of changed files, and its own."""
    try:
        found = json.loads(manifest)
        found.pop("crc32", None)
        for name, data in facts.items():
            found["files"][name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
        text = json.dumps(found, indent=1)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return manifest
    body = text.removesuffix("\n}").encode()
    return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def _holders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)


# --- the judge


_FORBIDDEN = re.compile(
    r"os\.(system|exec|posix_spawn|fork|forkpty|spawn|link|symlink|chown|kill|killpg)|subprocess\.Popen|pty\.spawn"
    r"|socket\.(connect|bind|sendto|getaddrinfo)|webbrowser\.open|ftplib\..*|urllib\.Request|shutil\.unpack_archive"
)
_watched: list[Path] = []
_escapes: list[str] = []
_readable = [
    sys.prefix,
    sys.base_prefix,
    "/proc",
    "/sys",
    "/dev/null",
    "/usr",
    "/etc/localtime",
    str(Path(__file__).parents[2]),
]


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if _FORBIDDEN.fullmatch(event):
        _escapes.append(f"{event}{args!r:.200}")
    elif event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        path = os.path.normpath(os.path.join(_watched[0], os.fsdecode(args[0])))  # noqa: PTH118  before it exists
        writes = bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if "__pycache__" in Path(path).parts:
            return  # a module of headway is imported for the first time
        if not path.startswith((str(_watched[0]), *(() if writes else _readable))):
            _escapes.append(f"open {path!r} {args[1:]}")


sys.addaudithook(_audit)


@contextmanager
def judged(directory: Path) -> Iterator[None]:
    """Raises `Violation` unless the block ends soon, takes little memory, and stays in the directory.

    It may raise a `HeadwayError`, whose message is safe to print.
    """

    def hang(_: int, frame: FrameType | None) -> None:
        raise Violation(f"it takes longer than {LONGEST_S} s, in {frame}")

    before, handler = _peak_mb(reset=True), signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    _watched.append(directory)
    try:
        yield
    except HeadwayError as error:
        unsafe = [c for c in str(error) if not c.isprintable() and c not in "\n\t"]
        if unsafe:
            raise Violation(f"{error!r} has {unsafe}") from error
    finally:
        _watched.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    if _escapes:
        escapes = list(_escapes)
        _escapes.clear()
        raise Violation(f"it leaves its directory: {escapes}")
    if (taken := _peak_mb() - before) > MOST_MB:
        raise Violation(f"it takes {taken:.0f} MB")


def _peak_mb(*, reset: bool = False) -> float:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def tar_of(members: dict[str, bytes]) -> bytes:
    """Returns a tar archive with these members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        yield Path(directory)
