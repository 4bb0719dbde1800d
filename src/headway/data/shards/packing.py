"""`pack`: writes samples into tar shards that WebDataset, DALI and headway read, with index and checksum files."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import IO, Any

import numpy as np

from headway.data.shards import checksums
from headway.data.shards.entries import SampleEntry, SamplePart, iterate_samples
from headway.data.shards.file_tree import directory_samples, shuffled
from headway.data.shards.indexes import index_text
from headway.data.shards.label_order import LABEL, LabelOrder
from headway.data.shards.tar import BLOCK_BYTES, RECORD_BYTES, TarMember
from headway.errors import BadShard, UsageError
from headway.system.files import storage
from headway.system.locks import FileLock, is_unsupported
from headway.system.log import logger

_MAX_LABELS = 100_000  # whose order is checked
_MARKER_SUFFIX = ".packing"


def pack(
    source: Iterable[Mapping[str, Any]] | str | Path,
    out: str | Path,
    *,
    shard_size: int = 256 * 2**20,
    name: str = "shard",
    shuffle: bool | None = None,
    seed: int = 0,
    follow_links: bool = False,
    done: Callable[[Path], None] | None = None,
) -> list[Path]:
    """Writes samples into `out/shard-000000.tar` and so on, at most `shard_size` bytes each, and returns the paths.

    A sample is a dict: `__key__`, and for each extension bytes, text, a number, an array (`npy`) or anything that JSON
    can hold (`json`), of Python, numpy or torch. `source` may also be a directory. One with a directory of images per
    class is packed as `jpg` and `cls`, with classes numbered in the order of their names, which `classes.json` lists;
    in one with files only, `a.jpg` and `a.json` are one sample. MDS datasets of Streaming are packed by their columns.
    Links that lead out of the directory are refused, unless `follow_links`.
    `done` is called with each finished shard. If packing is interrupted, loaders warn that shards are missing.

    The samples of a directory are shuffled by `seed`, because a loader mixes samples only with those that are stored
    near them; `shuffle=False` keeps the order of their names. Other samples are written in the given order;
    `shuffle=True` shuffles them, if they are a list.

        samples = ({"__key__": f"{i:06d}", "jpg": jpeg, "cls": label} for i, (jpeg, label) in enumerate(items))
        hw.data.pack(samples, "out")
    """
    out = Path(out)
    if shard_size < RECORD_BYTES:
        raise UsageError(f"shard_size={shard_size}: use at least {RECORD_BYTES} bytes")
    _check_free(out, name)
    order = None if shuffle is False else seed
    samples: Iterable[Mapping[str, Any]]
    classes: list[str] | None = None
    if isinstance(source, str | Path):
        samples, classes = directory_samples(Path(source), order, out, follow_links=follow_links)
    else:
        samples = _ordered(source, order, required=bool(shuffle))
    labels, paths = LabelOrder(), list[Path]()
    if shuffle is None and not isinstance(source, str | Path):
        samples = _watched(samples, labels)
    with storage(f"write shards to {out}"):
        if isinstance(source, str | Path):
            samples = _some(samples, source)
        out.mkdir(parents=True, exist_ok=True)
        with _exclusive(out, name):
            if classes is not None:
                (out / "classes.json").write_text(json.dumps(classes))
            for path in _shards(samples, out, shard_size, name):
                paths.append(path)
                if done is not None:
                    done(path)
    if dependence := labels.dependence():
        logger.warning(
            f"{out}: {dependence}; shuffle the samples before packing them, or batches have few classes"
        )
    return paths


def unfinished_marker(directory: Path, name: str) -> Path:
    """Returns the path of the file that marks shards as incomplete; it stays if packing is interrupted."""
    return directory / f".{name}{_MARKER_SUFFIX}"


def is_unfinished_marker(path: Path) -> bool:
    """Whether a file marks the shards beside it as incomplete, and is not data itself."""
    return path.name.startswith(".") and path.name.endswith(_MARKER_SUFFIX)


def _check_free(out: Path, name: str) -> None:
    if any(out.glob(f"{name}-*.tar")):
        raise UsageError(
            f"{out} already has shards named {name}-*.tar: choose another directory, or remove them"
        )


@contextmanager
def _exclusive(out: Path, name: str) -> Iterator[None]:
    """Lets one process at a time pack shards of a name into a directory, if the file system has locks.

    All ranks of a script that packs missing data would write the same files. The locked file stays if packing ends
    early, so that these shards are not taken for all of the data.
    """
    marker = unfinished_marker(out, name)
    with FileLock.open(marker) as lock:
        if not _try_lock(lock):
            raise UsageError(
                f"another process is packing shards named {name} into {out}: wait for it, or pack on one rank only"
            )
        finished = False
        try:
            _check_free(out, name)  # another process may have packed them meanwhile
            os.ftruncate(lock.fd, 0)
            os.write(lock.fd, b"The shards beside this file are not all of the data.\n")
            yield
            finished = True
        finally:
            begun = os.fstat(lock.fd).st_size > 0
            if finished or not (begun and any(out.glob(f"{name}-*.tar"))):
                marker.unlink(missing_ok=True)


def _try_lock(lock: FileLock) -> bool:
    try:
        return lock.try_acquire()
    except OSError as error:
        if not is_unsupported(error):
            raise
        return True


def _ordered(
    source: Iterable[Mapping[str, Any]], seed: int | None, *, required: bool
) -> Iterable[Mapping[str, Any]]:
    """Returns samples in packing order: shuffles a list if required."""
    if not required:
        return source
    if not isinstance(source, Sequence):
        raise UsageError(
            f"shuffle=True with a {type(source).__name__}, which yields samples one by one: give a list, or shuffle "
            "the data that it reads"
        )
    return shuffled(source, seed)


def _some(samples: Iterable[Mapping[str, Any]], source: str | Path) -> Iterator[Mapping[str, Any]]:
    """Returns the samples of a directory; refuses one that has none."""
    waiting = iter(samples)
    first = next(waiting, None)
    if first is None:
        raise UsageError(f"{source} has no samples: give a directory with images, files or MDS shards")
    return chain([first], waiting)


def _watched(samples: Iterable[Mapping[str, Any]], labels: LabelOrder) -> Iterator[Mapping[str, Any]]:
    """Yields the samples, and adds their labels to `labels` as if all were stored in one shard."""
    for number, sample in enumerate(samples):
        if number < _MAX_LABELS and isinstance(sample.get(LABEL), Integral):
            labels.add(0, number, int(sample[LABEL]))
        yield sample


def _shards(samples: Iterable[Mapping[str, Any]], out: Path, shard_size: int, name: str) -> Iterator[Path]:
    """Yields the paths of the shards; each appears under its name when it is complete."""
    waiting = iter(samples)
    sample = next(waiting, None)
    number = 0
    while sample is not None:
        path = out / f"{name}-{number:06d}.tar"
        entries: list[SampleEntry] = []
        crc, sums = 0, list[int]()
        staged = path.with_name(f".{path.name}.tmp")
        try:
            with staged.open("wb") as file:
                while sample is not None:
                    entry, data = _member_bytes(sample)
                    if entries and file.tell() + len(data) + RECORD_BYTES > shard_size:
                        break
                    if entries and entries[-1].key == entry.key:
                        raise UsageError(
                            f"two consecutive samples have the __key__ {entry.key!r}: give each sample its own"
                        )
                    start = file.tell()
                    file.write(data)
                    crc = zlib.crc32(data, crc)
                    sums.append(checksums.sum_sample(data[at : at + size] for _, at, size in entry.parts))
                    parts = tuple(part._replace(offset=part.offset + start) for part in entry.parts)
                    entries.append(replace(entry, parts=parts))
                    sample = next(waiting, None)
                checksum = _finish(file, crc)._replace(samples=checksums.join_sums(sums))
            index = index_text(entries)
            if index is not None:
                path.with_suffix(".idx").write_text(index, "utf-8", "surrogateescape")
            staged.replace(path)
            checksums.write(path, checksum)
        finally:
            staged.unlink(missing_ok=True)
        yield path
        number += 1


def _finish(file: IO[bytes], crc: int) -> checksums.Checksum:
    size = file.tell() + 2 * BLOCK_BYTES
    end = bytes(2 * BLOCK_BYTES + -size % RECORD_BYTES)
    file.write(end)
    file.flush()
    os.fsync(file.fileno())
    return checksums.Checksum(file.tell(), f"{zlib.crc32(end, crc):08x}")


def _member_bytes(sample: Mapping[str, Any]) -> tuple[SampleEntry, bytes]:
    """Encodes a sample as tar members, with the offsets of its parts counted from the first header."""
    key = sample.get("__key__")
    if not isinstance(key, str) or not key or "." in key.rpartition("/")[2] or key.startswith("/"):
        raise UsageError(
            f"__key__={key!r}: give every sample its own name, without a dot after the last slash"
        )
    data, parts = bytearray(), []
    for extension, value in sample.items():
        if _is_metadata(extension):
            continue
        if extension.startswith("__"):
            raise UsageError(
                f"{extension!r} of sample {key!r} begins with two underscores, as metadata does: rename it"
            )
        raw = _encoded(extension, value, key)
        info = tarfile.TarInfo(f"{key}.{extension}")
        info.size, info.mode = len(raw), 0o644
        data += info.tobuf(tarfile.PAX_FORMAT)
        parts.append(SamplePart(extension.lower(), len(data), len(raw)))
        data += raw + bytes(-len(raw) % BLOCK_BYTES)
    if not parts:
        raise UsageError(f"sample {key!r} has no parts: give at least one, such as txt=...")
    entry = SampleEntry(key, tuple(parts))
    _check_found(entry, [extension for extension in sample if not _is_metadata(extension)])
    return entry, bytes(data)


def _is_metadata(name: str) -> bool:
    """Whether a name is metadata and not a part: `__key__`, or the `__url__` that WebDataset adds."""
    return name.startswith("__") and name.endswith("__")


def _check_found(entry: SampleEntry, extensions: Sequence[str]) -> None:
    """Refuses a sample that readers of the shard would skip, or find under another name."""
    names = [f"{entry.key}.{extension}" for extension in extensions]
    files = [TarMember(name, *part[1:]) for name, part in zip(names, entry.parts, strict=True)]
    try:
        found = [*iterate_samples(files, f"__key__={entry.key!r}")]
    except BadShard as error:
        raise UsageError(str(error)) from error
    if found != [entry] or any("\0" in name or name.endswith(".") for name in names):
        raise UsageError(
            f"__key__={entry.key!r} with {', '.join(map(repr, extensions))} would not be found by readers: give a name "
            "that does not end with a slash or lie between double underscores, and extensions without a slash"
        )


def _encoded(extension: str, value: Any, key: str) -> bytes:
    """Returns the bytes of a part; `decode` restores the same value, if the extension has a decoder."""
    kind = extension.rpartition(".")[2]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    if kind == "npy":
        return _npy(np.asarray(value), extension, key)
    value = _plain(value) if _is_scalar(value) else value
    if kind == "json":
        return json.dumps(value, default=_plain).encode()
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if kind in ("cls", "index") and isinstance(value, float) and not whole:
        raise UsageError(
            f"{extension!r} of sample {key!r} is {value}, and is read as a whole number: use json or txt"
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(int(value) if kind in ("cls", "index") else value).encode()
    if hasattr(value, "__array__"):
        raise UsageError(
            f"{extension!r} of sample {key!r} is an array: use the extension npy (or {extension}.npy), or give bytes"
        )
    raise UsageError(
        f"{extension!r} of sample {key!r} is of type {type(value).__name__}: give bytes, text, a number, an array as "
        "npy, or anything as json"
    )


def _is_scalar(value: Any) -> bool:
    """Whether a value is a number of numpy or torch."""
    return hasattr(value, "__array__") and getattr(value, "shape", None) == ()


def _plain(value: Any) -> Any:
    """Returns numbers and arrays of numpy and torch as plain numbers and lists."""
    if not hasattr(value, "tolist"):
        raise UsageError(f"json cannot hold a value of type {type(value).__name__}: convert it first")
    return value.tolist()


def _npy(array: np.ndarray[Any, Any], extension: str, key: str) -> bytes:
    if array.dtype.hasobject:
        raise UsageError(
            f"{extension!r} of sample {key!r} holds Python objects: convert it to numbers, or use json"
        )
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()
