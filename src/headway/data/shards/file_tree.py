"""Folders as samples, for `pack`: one folder of images per class, or files that share a name (`a.jpg`, `a.json`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from headway.errors import UsageError
from headway.system.files import storage

_IMAGES = {".jpg", ".jpeg", ".png", ".webp"}


def folder_samples(folder: Path) -> tuple[Iterator[dict[str, Any]], list[str] | None]:
    """The samples of a folder, and the names of its classes, if it has any."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder: give one folder of images for each class, or one of files"
        )
    with storage(f"list {folder}"):
        here = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    classes = [path for path in here if path.is_dir()]
    files = [path for path in here if path.is_file()]
    if classes and not files:
        return _by_class(classes), [path.name for path in classes]
    if files and not classes:
        return _by_name(files), None
    raise UsageError(
        f"{folder} has {len(classes)} folders and {len(files)} files: expected one folder of images for each class, or "
        "nothing but files"
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
