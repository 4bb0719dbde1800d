"""Writes a module with the names of all datasets, for completion: `laion.train` is `"public/rgb/laion/train"`."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from itertools import chain, count, groupby
from pathlib import Path

from headway.data.catalog.catalog import Catalog, Dataset
from headway.errors import UsageError
from headway.system import files
from headway.system.files import storage

_MARK = "Made by `headway data stubs`"


def stub_text(datasets: Sequence[Dataset], root: Path) -> str:
    """Returns the module: a class per dataset, a string per split. Names that Python does not allow are changed."""
    homes = [list(splits) for _, splits in groupby(sorted(datasets), key=lambda dataset: dataset.path.parent)]
    about = f'"""Names of the datasets in {root}, for completion. {_MARK}: do not edit, run it again."""'
    blocks = [f"{about}\n\nfrom typing import Final"]
    for name, splits in zip(_identifiers([splits[0].name for splits in homes]), homes, strict=True):
        where = splits[0].key.rpartition("/")[0]
        names = _identifiers([dataset.split for dataset in splits])
        lines = [f'    {n}: Final = "{dataset.key}"' for n, dataset in zip(names, splits, strict=True)]
        blocks.append("\n".join([f"class {name}:", f'    """{where}"""', "", *lines]))
    return "\n\n\n".join(blocks) + "\n"


def write_stubs(catalog: Catalog, out: Path) -> int:
    """Writes the module to a file, and returns the number of datasets in it."""
    if out.suffix != ".py" or not out.stem.isidentifier():
        raise UsageError(f"{out} is not a module that Python can import: give a file like datasets.py")
    datasets = catalog.datasets()
    if not datasets:
        raise UsageError(
            f"no datasets in {catalog.root} (root from {catalog.origin}): add one with headway data add"
        )
    if out.exists() and _MARK not in files.read_regular(out, follow=True).decode():
        raise UsageError(
            f"{out} was not written by headway data stubs and is not overwritten: choose another file"
        )
    with storage(f"write {out}"):
        out.write_text(stub_text(datasets, catalog.root), "utf-8")
    return len(datasets)


def _identifiers(names: Sequence[str]) -> list[str]:
    """Converts names to valid identifiers; those that would be equal get numbers.

    >>> _identifiers(["laion-2b", "laion_2b", "class", "22k"])
    ['laion_2b', 'laion_2b_2', 'class_', '_22k']
    """
    made: list[str] = []
    for name in names:
        plain = re.sub(r"\W", "_", name, flags=re.ASCII)
        plain = f"_{plain}" if plain[0].isdigit() else plain
        plain = f"{plain}_" if keyword.iskeyword(plain) else plain
        numbered = chain([plain], (f"{plain}_{number}" for number in count(2)))
        made.append(next(each for each in numbered if each not in made))
    return made
