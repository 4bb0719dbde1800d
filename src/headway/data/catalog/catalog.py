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
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.errors import UsageError, closest
from headway.system import environment
from headway.system.files import storage
from headway.system.retries import retry
from headway.system.text import shorten_list

_NAME_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


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
        """Returns the bytes of all its shards."""
        with storage(f"list {self.path}"):
            return sum(path.stat().st_size for path in self.shards())


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
        with storage(f"list {self.root}"):
            found = list(_below([self.root], (confidentiality, modality, name, split)))
        return sorted(_dataset(path) for path in found)

    def __getitem__(self, name: str) -> Dataset:
        """Returns the dataset of a name; an unknown or ambiguous name raises `UsageError` with what there is."""
        found = self.get(name)
        if found is None:
            known = sorted({dataset.name for dataset in self.datasets()})
            near = closest(name, known)
            hint = f"did you mean {near!r}?" if near else f"it has {shorten_list(known, 20) or 'none'}"
            raise UsageError(
                f"{name!r} is neither a path here nor a dataset in {self.root} (root from {self.origin}): {hint}"
            )
        return found

    def get(self, name: str) -> Dataset | None:
        """Returns the dataset of a name; None if there is none."""
        if not is_name(name):
            return None
        confidentiality, modality, dataset, split = _parts(name)
        fits = self.datasets(confidentiality=confidentiality, modality=modality, name=dataset, split=split)
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
        existing = sorted({shard.name for shard in shards} & {entry.name for entry in path.glob("*")})
        if existing:
            raise UsageError(f"{path} already has {existing[0]}: rename the shard, as names must differ")
        with storage(f"create {path}"):
            path.mkdir(parents=True, exist_ok=True)
            for shard in shards:
                for file in (shard, *_side_files(shard)):
                    (path / file.name).symlink_to(file.resolve())
        return _dataset(path)


def _side_files(shard: Path) -> list[Path]:
    """Returns the index and the checksum beside a shard, where they exist."""
    paths = (
        shard.with_suffix(".idx"),
        shard.with_name(f"{shard.name}.idx"),
        shard.with_name(f"{shard.name}.sum"),
    )
    return [path for path in paths if path.is_file()]


def is_name(text: str) -> bool:
    """Whether a text can be the name of a dataset: one to four words, separated by slashes."""
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


def _below(directories: list[Path], wanted: tuple[str | None, ...]) -> Iterator[Path]:
    """Yields the directories below that match the wanted names, one per level; None stands for any name."""
    if not wanted:
        yield from directories
        return
    for directory in directories:
        if wanted[0] is not None:
            names = [wanted[0]] if (directory / wanted[0]).is_dir() else []
        elif directory.is_dir():
            entries = os.scandir(directory)
            names = [entry.name for entry in entries if entry.is_dir() and _NAME_PART.fullmatch(entry.name)]
        else:
            names = []
        yield from _below([directory / name for name in names], wanted[1:])


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
            root = tomllib.loads(file.read_text("utf-8")).get("tool", {}).get("headway", {}).get("data_root")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot read data_root from {file}: {error}; correct that file, or give the root"
            ) from error
        if root is None:
            continue
        if not isinstance(root, str):
            raise UsageError(f"data_root in {file} is {root!r}: give a path in quotes")
        return directory / Path(root).expanduser(), str(file)
    return None
