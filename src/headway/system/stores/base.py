"""The interface of a store: a flat set of named objects, each of which is written once and then only read.

A key is a relative path with "/" between its parts, like "train/shard-000007.tar". Methods raise `FileNotFoundError`
for a key that does not exist, and `StorageError` if the store fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, final

from headway.errors import UsageError


@final
@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """The metadata of an object."""

    key: str
    size: int
    """bytes"""
    version: str
    """changes when the object does; empty if the store does not report one"""


class Upload(ABC):
    """An object that is being written. No reader sees it before it is committed.

    >>> with store.put("train/shard-000007.tar") as upload:  # doctest: +SKIP
    ...     upload.write(data)
    >>> upload.created  # doctest: +SKIP
    True
    """

    created: bool | None = None
    """whether the object was created; None until the upload is committed, False if the key was taken"""

    @abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""

    @abstractmethod
    def commit(self) -> bool:
        """Creates the object, with all its bytes, unless its key is taken; sets and returns `created`."""

    @abstractmethod
    def abort(self) -> None:
        """Discards the bytes written so far. Does nothing after `commit`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self.created is None:
                self.commit()
        finally:
            self.abort()


class Store(ABC):
    """A set of objects. Implementations hold no open files or connections between two calls."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yields the objects whose keys begin with `prefix`, in the order of their keys."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Returns the metadata of an object."""

    @abstractmethod
    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns the bytes of an object from `start` to `stop`, by default to its end.

        The result is shorter if the object ends before `stop`, and empty if it ends before `start`.
        """

    def put(self, key: str) -> Upload:
        """Begins an object that does not exist yet. Raises `UsageError` if the store is read-only."""
        raise UsageError(f"{self} is read-only: {key} cannot be written to it")


def check_key(key: str) -> str:
    """Returns a key if it is valid, and cannot lead out of its store; else raises `UsageError`.

    >>> check_key("train/shard-000007.tar")
    'train/shard-000007.tar'
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(c < " " or c in "\\\x7f" for c in key):
        raise UsageError(
            f'{key!r:.200} is not a valid key: give a relative path such as "train/shard-000007.tar"'
        )
    return key


def check_range(start: int, stop: int | None) -> None:
    """Raises `UsageError` unless `start` and `stop` can be a range of bytes."""
    if start < 0 or (stop is not None and stop < start):
        raise UsageError(f"bytes {start} to {stop} are not a valid range")
