"""`Catalog`: datasets by name. There is no registry; where they lie is what they are:

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
from difflib import get_close_matches
from pathlib import Path
from typing import final

from headway.errors import UsageError
from headway.system import environment
from headway.system.files import storage

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


@final
@dataclass(frozen=True, order=True)
class Dataset:
    """One split of a dataset."""

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
        with storage(f"list {self.path}"):
            return sorted(self.path.glob("*.tar"))

    def bytes(self) -> int:
        """Of all its shards."""
        with storage(f"list {self.path}"):
            return sum(path.stat().st_size for path in self.path.glob("*.tar"))


@final
class Catalog:
    """The datasets below a root.

        catalog = hw.data.Catalog("/data")
        catalog.datasets(confidentiality="public", split="train")
        catalog["laion"].shards()          # also "laion/val", "public/rgb/laion", "public/rgb/laion/val"
        hw.data.Mix({"laion": 0.5, "datacomp": 0.5}, catalog=catalog)

    A name without a split means the only one, or `train`. `origin` tells what decided on the root.
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
        """All datasets, or those that fit, sorted."""
        with storage(f"list {self.root}"):
            found = list(_below([self.root], (confidentiality, modality, name, split)))
        return sorted(_dataset(path) for path in found)

    def __getitem__(self, name: str) -> Dataset:
        """The dataset of a name; one that is not there, or not the only one, is refused with what there is."""
        found = self.get(name)
        if found is None:
            known = sorted({dataset.name for dataset in self.datasets()})
            near = get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known[:20]) or 'none at all'}"
            )
            raise UsageError(
                f"{name!r} is neither a path here nor a dataset in {self.root} (root from {self.origin}): {hint}"
            )
        return found

    def get(self, name: str) -> Dataset | None:
        """The dataset of a name, if there is one."""
        if not is_name(name):
            return None
        confidentiality, modality, dataset, split = _parts(name)
        fits = self.datasets(confidentiality=confidentiality, modality=modality, name=dataset, split=split)
        if len({fit.path.parent for fit in fits}) == 1 and len(fits) > 1:
            fits = [fit for fit in fits if fit.split == "train"] or fits
        if len(fits) > 1:
            raise UsageError(
                f"{name!r} may be {' or '.join(fit.key for fit in fits)} in {self.root}: give the full name"
            )
        return fits[0] if fits else None

    def add(
        self, confidentiality: str, modality: str, name: str, split: str, *, shards: Sequence[Path] = ()
    ) -> Dataset:
        """Makes the folder of a dataset, unless it is there, for shards to be put in; `shards` are linked into it."""
        parts = (confidentiality, modality, name, split)
        for part in parts:
            if not _PART.fullmatch(part):
                raise UsageError(
                    f"{part!r} cannot be part of a dataset's name: use letters, digits and _ . + - and begin with a "
                    "letter, a digit or _"
                )
        path = self.root.joinpath(*parts)
        there = sorted({shard.name for shard in shards} & {entry.name for entry in path.glob("*")})
        if there:
            raise UsageError(f"{path} has {there[0]} already: shards of one dataset have names of their own")
        with storage(f"make {path}"):
            path.mkdir(parents=True, exist_ok=True)
            for shard in shards:
                for file in (shard, *_beside(shard)):
                    (path / file.name).symlink_to(file.resolve())
        return _dataset(path)


def _beside(shard: Path) -> list[Path]:
    """The index and the checksum of a shard, where it has them."""
    kept = (
        shard.with_suffix(".idx"),
        shard.with_name(f"{shard.name}.idx"),
        shard.with_name(f"{shard.name}.sum"),
    )
    return [path for path in kept if path.is_file()]


def is_name(text: str) -> bool:
    """Whether a text can be the name of a dataset: one to four plain words with slashes between."""
    parts = text.split("/")
    return len(parts) <= 4 and all(_PART.fullmatch(part) for part in parts)


def _dataset(path: Path) -> Dataset:
    confidentiality, modality, name, split = path.parts[-4:]
    return Dataset(confidentiality, modality, name, split, path)


def _parts(name: str) -> list[str | None]:
    """Confidentiality, modality, dataset and split of a name; None where it does not say."""
    words: list[str | None] = [*name.split("/")]
    if len(words) < 3:
        words = [None, None, *words]
    return [*words, None][:4]


def _below(folders: list[Path], wanted: tuple[str | None, ...]) -> Iterator[Path]:
    """Folders as many levels below as there are wanted names; None stands for any."""
    if not wanted:
        yield from folders
        return
    for folder in folders:
        if wanted[0] is not None:
            names = [wanted[0]] if (folder / wanted[0]).is_dir() else []
        elif folder.is_dir():
            names = [
                entry.name for entry in os.scandir(folder) if entry.is_dir() and _PART.fullmatch(entry.name)
            ]
        else:
            names = []
        yield from _below([folder / name for name in names], wanted[1:])


# --- the root


def _root(given: str | Path | None) -> tuple[Path, str]:
    """The root, and what decided on it."""
    if given is not None:
        return Path(given).expanduser(), "the argument"
    project = _from_pyproject(Path.cwd())
    if project is not None:
        return project
    if os.environ.get(environment.DATA):
        return Path(os.environ[environment.DATA]).expanduser(), "$HEADWAY_DATA"
    return Path.home() / ".headway" / "data", "the default"


def _from_pyproject(start: Path) -> tuple[Path, str] | None:
    """`data_root` of the nearest pyproject.toml that has one; a relative path counts from that file."""
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if not file.is_file():
            continue
        try:
            root = tomllib.loads(file.read_text("utf-8")).get("tool", {}).get("headway", {}).get("data_root")
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read data_root from {file}: {error}") from error
        if root is None:
            continue
        if not isinstance(root, str):
            raise UsageError(f"data_root in {file} is {root!r}: give a path in quotes")
        return folder / Path(root).expanduser(), str(file)
    return None
