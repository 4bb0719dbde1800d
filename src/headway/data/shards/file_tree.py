"""Directories as samples, for `pack`: a directory of images per class, or files with equal names (`a.jpg`, `a.txt`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from headway.errors import UsageError
from headway.system.files import storage

_IMAGES = {".jpg", ".jpeg", ".png", ".webp"}


def directory_samples(directory: Path) -> tuple[Iterator[dict[str, Any]], list[str] | None]:
    """Returns the samples in a directory, and the names of its classes, if it has any."""
    if not directory.is_dir():
        raise UsageError(
            f"{directory} is not a directory: give one with a directory of images for each class, or with files"
        )
    with storage(f"list {directory}"):
        here = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    classes = [path for path in here if path.is_dir()]
    files = [path for path in here if path.is_file()]
    if classes and not files:
        return _by_class(classes), [path.name for path in classes]
    if files and not classes:
        return _by_name(files), None
    raise UsageError(
        f"{directory} has {len(classes)} directories and {len(files)} files: expected a directory of images for each "
        "class, or files only"
    )


def _by_class(classes: list[Path]) -> Iterator[dict[str, Any]]:
    for number, path in enumerate(classes):
        for image in sorted(path.rglob("*")):
            if image.suffix.lower() in _IMAGES and image.is_file():
                key = f"{number:06d}/{image.relative_to(path).with_suffix('').as_posix().replace('.', '_')}"
                yield {"__key__": key, image.suffix[1:].lower(): image.read_bytes(), "cls": number}


def _by_name(files: list[Path]) -> Iterator[dict[str, Any]]:
    for key, parts in groupby(sorted(files, key=_key), key=_key):
        yield {"__key__": key} | {path.name.partition(".")[2].lower(): path.read_bytes() for path in parts}


def _key(path: Path) -> str:
    return path.name.partition(".")[0]
