"""Which files are the shards: from folders, patterns, lists and names; their samples counted, indexes written.

Nothing here imports torch: commands that list and count answer at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from headway.data.catalog.catalog import Catalog, is_name
from headway.data.order.mix import Shards
from headway.data.shards.shard import Limits, count_samples, index_text, walk
from headway.errors import UsageError
from headway.system.files import storage, write_atomic

_THREADS = 16  # most of counting is waiting for the file system
_QUICK = 1e-4  # seconds for a shard; an index that the system has in memory is read in a tenth of that
_GRACE = 10  # shards: the first one finds nothing prepared


def paths_of(name: str, where: Shards, catalog: Catalog | None = None) -> list[Path]:
    """The shards of a dataset, at least one, given as a folder, a pattern, a list, or a name of the catalogue."""
    if not isinstance(where, str | Path):
        paths = [Path(path) for path in where]
    elif "://" in str(where) or str(where).startswith("pipe:"):
        raise UsageError(
            f"dataset {name!r}: {str(where)!r} is not a path; shards are read from file systems only"
        )
    elif str(where).count("**") > 1:  # takes longer with the power of them, and finds files several times
        raise UsageError(f"dataset {name!r}: {str(where)!r} has '**' more than once; give it once, or a list")
    elif Path(where).is_dir():
        paths = sorted(Path(where).glob("*.tar"))
    else:
        paths = sorted(Path(path) for path in glob(str(where), recursive=True))  # noqa: PTH207 - may be absolute
    if isinstance(where, str) and is_name(where):
        paths = _named(where, paths, catalog or Catalog())
    if not paths:
        instead = (
            _instead(str(where)) if isinstance(where, str | Path) else "give a folder, a pattern or a list"
        )
        raise UsageError(f"dataset {name!r}: no shards found at {str(where)!r}; {instead}")
    return paths


def _instead(place: str) -> str:
    """What may have been meant: people forget to say train or val, or know WebDataset's braces."""
    if "{" in place:
        return f"braces are not understood: write {re.sub(r'{[^}]*}', '*', place)!r}, or give a list"
    below = sorted({str(path.parent) for path in Path(place).glob("*/*.tar")})[:5]
    return f"there are some in {', '.join(below)}" if below else "give a folder, a pattern or a list"


def _named(name: str, here: list[Path], catalog: Catalog) -> list[Path]:
    """The shards of a name in the catalogue, or those found under that name here; both at once are refused."""
    dataset = catalog.get(name)
    if not here:
        return [] if dataset is None and Path(name).is_dir() else catalog[name].shards()
    if dataset is not None and dataset.path.resolve() != here[0].parent.resolve():
        raise UsageError(
            f"{name!r} is a folder here and a dataset at {dataset.path}: write './{name}' or {dataset.key!r}"
        )
    return here


def counts(paths: Sequence[Path], limits: Limits | None = None) -> Iterator[int]:
    """How many samples each shard has, as it becomes known.

    One after the other, as long as each is quick: to hand it to a thread would take longer.
    """
    began, done = time.perf_counter(), 0
    while done < len(paths) and time.perf_counter() - began <= _QUICK * (done + _GRACE):
        yield count_samples(paths[done], limits)
        done += 1
    paths = paths[done:]
    some = 1 + len(paths) // (4 * _THREADS)  # at a time: handing over one takes as long as reading its index
    parts = [paths[at : at + some] for at in range(0, len(paths), some)]
    with ThreadPoolExecutor(_THREADS, "headway count") as pool:
        for each in pool.map(lambda part: [count_samples(path, limits) for path in part], parts):
            yield from each


def index(shards: Shards, *, overwrite: bool = False, catalog: Catalog | None = None) -> list[Path]:
    """Writes DALI's text index beside each shard that has none, and returns the paths of those written.

    Not needed for headway, which walks shards without one; it saves the walk, and DALI needs it. Shards with spaces in
    their names cannot have one, and are left out.

        hw.data.index("/data/laion/*.tar")
    """
    written = indexes(paths_of("index", shards, catalog), overwrite=overwrite)
    return [path for path in written if path is not None]


def indexes(paths: Sequence[Path], *, overwrite: bool) -> Iterator[Path | None]:
    """Writes the index of each shard, and gives its path as it is done; None where it was there or cannot be."""
    with ThreadPoolExecutor(_THREADS, "headway index") as pool:
        yield from pool.map(lambda path: _write_index(path, overwrite), paths)


def _write_index(path: Path, overwrite: bool) -> Path | None:
    if path.with_suffix(".idx").exists() and not overwrite:
        return None
    text = index_text(walk(path))
    if text is None:
        return None
    target = path.with_suffix(".idx")
    with storage(f"write {target}"):
        write_atomic(target, text.encode("utf-8", "surrogateescape"))
        target.chmod(path.stat().st_mode & 0o666)  # who may read the shard may read its index
    return target
