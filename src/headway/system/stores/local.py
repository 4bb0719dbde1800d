"""A store in a local or mounted directory. Keys are paths below it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import final

from headway.system import files
from headway.system.stores.base import ObjectInfo, Store, Upload, check_key, check_range

_PART_SUFFIX = ".part"


@final
class LocalStore(Store):
    """The files below a directory. Hidden files are not objects: uploads are hidden until they are committed.

    >>> LocalStore("/datasets/imagenet").get("train-000000.tar", 0, 512)  # doctest: +SKIP
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).absolute()

    def __str__(self) -> str:
        return str(self._root)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with files.storage(f"list {self._root}"):
            found = sorted(self._keys(self._root, prefix))
        yield from (self.head(key) for key in found)

    def head(self, key: str) -> ObjectInfo:
        path = self._root / check_key(key)
        with files.storage(f"read {path}", passing=FileNotFoundError):
            status = path.stat()
        return ObjectInfo(key=key, size=status.st_size, version=f"{status.st_mtime_ns}-{status.st_ino}")

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(start, stop)
        path = self._root / check_key(key)
        with files.storage(f"read {path}", passing=FileNotFoundError), path.open("rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def put(self, key: str) -> LocalUpload:
        path = self._root / check_key(key)
        with files.storage(f"write {path}"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return LocalUpload(path)

    def _keys(self, directory: Path, prefix: str) -> Iterator[str]:
        for entry in os.scandir(directory):
            key = Path(entry.path).relative_to(self._root).as_posix()
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if key.startswith(prefix) or prefix.startswith(f"{key}/"):
                    yield from self._keys(Path(entry.path), prefix)
            elif key.startswith(prefix) and entry.is_file():
                yield key


@final
class LocalUpload(Upload):
    """A hidden file beside the one that it becomes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_PART_SUFFIX}")
        self._fd = files.open_private(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(self, data: bytes | memoryview) -> None:
        with files.storage(f"write {self._path}"):
            files.write_fully(self._fd, data)

    def commit(self) -> bool:
        with files.storage(f"write {self._path}"):
            os.fsync(self._fd)
            self.created = files.publish_file(self._part, self._path)
        return self.created

    def abort(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._part.unlink(missing_ok=True)
