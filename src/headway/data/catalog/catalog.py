"""`Catalog`: datasets by name. There is no registry; the path of a dataset is its name:

    ROOT/<confidentiality>/<modality>/<dataset>/<split>/shard-000000.tar
    ROOT/public/rgb/laion/train/shard-000000.tar

The root is, in this order, the argument, `data_root` under `[tool.headway]` in the nearest pyproject.toml,
$HEADWAY_DATA, or ~/.headway/data.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.errors import UsageError, closest
from headway.system import environment, files
from headway.system.files import storage
from headway.system.log import logger
from headway.system.retries import retry
from headway.system.text import plural, shorten_list

_NAME_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_ANY = (None, None, None, None)  # confidentiality, modality, dataset, split


@final
@dataclass(frozen=True, order=True)
class Dataset:
    """One split of a dataset.

    for dataset in hw.data.Catalog("/data").datasets(split="train"):
        print(dataset.key, len(dataset.shards()), dataset.bytes())
    """

    confidentiality: str
    modality: str
    name: str
    split: str
    path: Path

    @property
    def key(self) -> str:
        """Its full name: `public/rgb/laion/train`."""
        return f"{self.confidentiality}/{self.modality}/{self.name}/{self.split}"

    def shards(self) -> list[Path]:
        """Lists its shards, sorted."""
        with storage(f"list {self.path}"):
            names = retry(f"list {self.path}", lambda: [path.name for path in self.path.iterdir()])
            return sorted(self.path / name for name in names if name.endswith(".tar") and name[0] != ".")

    def bytes(self) -> int:
        """Returns the total bytes of its shards that exist: links may lead to files that were removed."""
        shards, sizes = self.shards(), list[int]()
        with storage(f"list {self.path}"):
            for path in shards:
                with suppress(FileNotFoundError):
                    sizes.append(path.stat().st_size)
        if len(sizes) < len(shards):
            logger.warning(
                f"{self.key}: {len(shards) - len(sizes)} of {plural(len(shards), 'shard')} in {self.path} link to "
                "files that are gone"
            )
        return sum(sizes)


@final
class Catalog:
    """The datasets below a root directory.

        catalog = hw.data.Catalog("/data")
        catalog.datasets(confidentiality="public", split="train")
        catalog["laion"].shards()          # also "laion/val", "public/rgb/laion", "public/rgb/laion/val"
        hw.data.Mix({"laion": 0.5, "datacomp": 0.5}, catalog=catalog)

    A name without a split means the only split, or `train`. `origin` says where the root was configured.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self.root, self.origin = _root(root)

    def datasets(
        self,
        *,
        confidentiality: str | None = None,
        modality: str | None = None,
        name: str | None = None,
        split: str | None = None,
    ) -> list[Dataset]:
        """Lists all datasets, or those that match, sorted."""
        found, unreadable = self._find((confidentiality, modality, name, split))
        if unreadable:
            logger.warning(f"{_cannot_read(unreadable)}; datasets in there are left out")
        return found

    def _find(self, wanted: tuple[str | None, ...]) -> tuple[list[Dataset], list[Path]]:
        """Returns the datasets that match, and the directories that this user cannot read."""
        unreadable: list[Path] = []
        with storage(f"list {self.root}"):
            found = list(_below([self.root], wanted, unreadable))
        return sorted(_dataset(path) for path in found), unreadable

    def __getitem__(self, name: str) -> Dataset:
        """Returns the dataset of a name; an unknown or ambiguous name raises `UsageError`, which lists known names."""
        found = self.get(name)
        if found is None:
            datasets, unreadable = self._find(_ANY)
            known = sorted({dataset.name for dataset in datasets})
            near = closest(name, known)
            hint = f"did you mean {near!r}?" if near else f"it has {shorten_list(known, 20) or 'none'}"
            hint += f"; {_cannot_read(unreadable)}" if unreadable else ""
            raise UsageError(
                f"{name!r} is neither a path here nor a dataset in {self.root} (root from {self.origin}): {hint}"
            )
        return found

    def get(self, name: str) -> Dataset | None:
        """Returns the dataset of a name; None if there is none."""
        if not is_name(name):
            return None
        fits = self._find(tuple(_parts(name)))[0]
        if len({fit.path.parent for fit in fits}) == 1 and len(fits) > 1:
            fits = [fit for fit in fits if fit.split == "train"] or fits
        if len(fits) > 1:
            raise UsageError(
                f"{name!r} matches {' and '.join(fit.key for fit in fits)} in {self.root}: give the full name"
            )
        return fits[0] if fits else None

    def add(
        self, confidentiality: str, modality: str, name: str, split: str, *, shards: Sequence[Path] = ()
    ) -> Dataset:
        """Creates the directory of a dataset, unless it exists, and links `shards` into it."""
        parts = (confidentiality, modality, name, split)
        for part in parts:
            if not _NAME_PART.fullmatch(part):
                raise UsageError(
                    f"{part!r} is not a valid part of a dataset's name: use letters, digits and _ . + -, and begin "
                    "with a letter, a digit or _"
                )
        path = self.root.joinpath(*parts)
        files = [file for shard in shards for file in (shard, *_side_files(shard))]
        _check_names(path, files)
        with storage(f"create {path}"):
            path.mkdir(parents=True, exist_ok=True)
            _link(files, path)
        return _dataset(path)


def _check_names(path: Path, files: Sequence[Path]) -> None:
    """Refuses files with equal names, before any of them is linked."""
    existing, before = {entry.name for entry in path.glob("*")}, dict[str, Path]()
    for file in files:
        if file.name in existing:
            raise UsageError(f"{path} already has {file.name}: rename the shard, as names must differ")
        if file.name in before:
            raise UsageError(
                f"{before[file.name]} and {file} have the same name, and cannot both be linked into {path}: rename "
                "one, or add them as two datasets"
            )
        before[file.name] = file


def _link(files: Sequence[Path], directory: Path) -> None:
    """Links all files into a directory, or none."""
    made: list[Path] = []
    try:
        for file in files:
            (directory / file.name).symlink_to(file.resolve())
            made.append(directory / file.name)
    except OSError:
        for link in made:
            link.unlink()
        raise


def _side_files(shard: Path) -> list[Path]:
    """Returns the index and the checksum beside a shard, where they exist."""
    paths = (
        shard.with_suffix(".idx"),
        shard.with_name(f"{shard.name}.idx"),
        shard.with_name(f"{shard.name}.sum"),
    )
    return [path for path in paths if path.is_file()]


def is_name(text: str) -> bool:
    """Whether a string can be the name of a dataset: one to four words, separated by slashes."""
    parts = text.split("/")
    return len(parts) <= 4 and all(_NAME_PART.fullmatch(part) for part in parts)


def _dataset(path: Path) -> Dataset:
    confidentiality, modality, name, split = path.parts[-4:]
    return Dataset(confidentiality, modality, name, split, path)


def _parts(name: str) -> list[str | None]:
    """Returns confidentiality, modality, dataset and split of a name; None for what it omits."""
    words: list[str | None] = [*name.split("/")]
    if len(words) < 3:
        words = [None, None, *words]
    return [*words, None][:4]


def _below(directories: list[Path], wanted: tuple[str | None, ...], unreadable: list[Path]) -> Iterator[Path]:
    """Yields the directories below that match the wanted names, one per level; None stands for any name.

    Those that this user cannot read are added to `unreadable`: permissions differ between levels of confidentiality.
    """
    for directory in directories:
        try:
            names = _names(directory, wanted)
        except PermissionError:
            unreadable.append(directory)
            continue
        if not wanted:
            yield directory
        yield from _below([directory / name for name in names], wanted[1:], unreadable)


def _names(directory: Path, wanted: tuple[str | None, ...]) -> list[str]:
    """Lists the wanted directories in a directory, which may not exist; the directory of a dataset has none."""
    if wanted and wanted[0] is not None:
        return [wanted[0]] if (directory / wanted[0]).is_dir() else []
    if not directory.is_dir():
        return []
    with os.scandir(directory) as entries:
        found = [Path(entry) for entry in entries] if wanted else []
    return [path.name for path in found if _NAME_PART.fullmatch(path.name) and _may_be_directory(path)]


def _may_be_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except PermissionError:  # a link into a directory without permission: reported when it is listed
        return True


def _cannot_read(directories: Sequence[Path]) -> str:
    return f"you have no permission to read {shorten_list(directories, 4)}"


# --- the root


def _root(argument: str | Path | None) -> tuple[Path, str]:
    """Returns the root, and where it was configured."""
    if argument is not None:
        return Path(argument).expanduser(), "the argument"
    project = _from_pyproject(Path.cwd())
    if project is not None:
        return project
    if os.environ.get(environment.DATA):
        return Path(os.environ[environment.DATA]).expanduser(), "$HEADWAY_DATA"
    return Path.home() / ".headway" / "data", "the default"


def _from_pyproject(start: Path) -> tuple[Path, str] | None:
    """Reads `data_root` from the nearest pyproject.toml that has one; a relative path starts at that file."""
    for directory in (start, *start.parents):
        file = directory / "pyproject.toml"
        if not file.is_file():
            continue
        try:
            root = (
                tomllib.loads(files.read_regular(file, follow=True).decode())
                .get("tool", {})
                .get("headway", {})
                .get("data_root")
            )
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"cannot read data_root from {file}: {error}; correct that file, or give the root"
            ) from error
        if root is None:
            continue
        if not isinstance(root, str):
            raise UsageError(f"data_root in {file} is {root!r}: give a path in quotes")
        return directory / Path(root).expanduser(), str(file)
    return None
