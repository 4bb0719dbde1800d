"""Directories as samples, for `pack`: images per class, files with equal names (`a.jpg`, `a.txt`), or MDS shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from headway.data.shards.decode import IMAGES
from headway.data.shards.mds import MdsShard, is_mds, mds_sample, mds_shards
from headway.errors import UsageError
from headway.system.files import storage
from headway.system.log import logger
from headway.system.text import plural

T = TypeVar("T")

_IMAGES = {f".{extension}" for extension in IMAGES}
_MAX_KINDS = 5  # extensions of skipped files that a warning lists


def directory_samples(
    directory: Path, seed: int | None, out: Path, *, follow_links: bool
) -> tuple[Iterator[dict[str, Any]], list[str] | None]:
    """Returns the samples in a directory, and the names of its classes, if it has any.

    They are shuffled by `seed`; if it is None, they are sorted by name. The output directory `out` is not a class.
    A link that leads out of the directory is refused unless `follow_links`.
    """
    if not directory.is_dir():
        raise UsageError(
            f"{directory} is not a directory: give one with a directory of images for each class, or with files"
        )
    inside = None if follow_links else directory
    if is_mds(directory):
        for path in directory.rglob("*"):
            _check_link(path, inside)
        return _by_place(mds_shards(directory), seed), None
    with storage(f"list {directory}"):
        output = out.resolve()
        skipped = output.name if output.parent == directory.resolve() else None
        entries = sorted(path for path in directory.iterdir() if path.name[0] != "." and path.name != skipped)
    for path in entries:
        _check_link(path, inside)
    classes = [path for path in entries if path.is_dir()]
    files = [path for path in entries if path.is_file()]
    if classes and not files:
        return _by_class(classes, seed, inside), [path.name for path in classes]
    if files and not classes:
        return _by_name(files, seed), None
    raise UsageError(
        f"{directory} has {len(classes)} directories and {len(files)} files: expected a directory of images for each "
        "class, or files only"
    )


def shuffled(items: Iterable[T], seed: int | None) -> Iterable[T]:
    """Returns the items in an order that depends on the seed; as they are, if it is None."""
    if seed is None:
        return items
    listed = list(items)
    Random(seed).shuffle(listed)
    return listed


def _check_link(path: Path, inside: Path | None) -> None:
    """Refuses a link that leads out of the directory `inside`: what it points to would be packed, such as a key."""
    if inside is not None and path.is_symlink() and not path.resolve().is_relative_to(inside.resolve()):
        raise UsageError(
            f"{path} is a link to {path.readlink()}, outside {inside}: remove it, or pack what links point to with "
            "--follow-links (follow_links=True)"
        )


def _by_class(classes: list[Path], seed: int | None, inside: Path | None) -> Iterator[dict[str, Any]]:
    for number, name in shuffled(_images(classes, inside), seed):
        image = classes[number] / name
        yield {
            "__key__": _class_key(number, name),
            image.suffix[1:].lower(): image.read_bytes(),
            "cls": number,
        }


def _images(classes: list[Path], inside: Path | None) -> Iterator[tuple[int, str]]:
    """Yields the class number and the path within the class directory of each image; hidden files are skipped
    silently."""
    others = Counter[str]()
    for number, path in enumerate(classes):
        keys: set[str] = set()
        for image in sorted(path.rglob("*")):
            name = image.relative_to(path).as_posix()
            if name.startswith(".") or "/." in name or not image.is_file():
                continue
            if image.suffix.lower() not in _IMAGES:
                others[image.suffix or image.name] += 1
            else:
                _check_link(image, inside)
                key = _class_key(number, name)
                if key in keys:
                    raise UsageError(f"{image} has the __key__ {key!r} of another image: rename one of them")
                keys.add(key)
                yield number, name
    if others:
        kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common(_MAX_KINDS))
        logger.warning(
            f"{classes[0].parent}: {plural(others.total(), 'file')} left out ({kinds}); only images that end with "
            f"{', '.join(sorted(_IMAGES))} are packed"
        )


def _class_key(number: int, name: str) -> str:
    return f"{number:06d}/{Path(name).with_suffix('').as_posix().replace('.', '_')}"


def _by_name(files: list[Path], seed: int | None) -> Iterator[dict[str, Any]]:
    groups = ((key, list(parts)) for key, parts in groupby(sorted(files, key=_key), key=_key))
    for key, parts in shuffled(groups, seed):
        for path in parts:
            if _extension(path).startswith("__"):
                raise UsageError(
                    f"the extension of {path} begins with two underscores, as metadata does: rename it"
                )
        yield {"__key__": key} | {_extension(path): path.read_bytes() for path in parts}


def _by_place(shards: Sequence[MdsShard], seed: int | None) -> Iterator[dict[str, Any]]:
    places = ((shard, number) for shard, source in enumerate(shards) for number in range(source.samples))
    for shard, number in shuffled(places, seed):
        yield mds_sample(shards, shard, number)


def _key(path: Path) -> str:
    return path.name.partition(".")[0]


def _extension(path: Path) -> str:
    return path.name.partition(".")[2].lower()
