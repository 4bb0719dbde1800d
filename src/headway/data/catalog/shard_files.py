"""The shard files of a dataset, given as a directory, a pattern, a list or a name: found, counted and indexed.

Nothing here imports torch, so that commands that list and count answer at once.
"""

from __future__ import annotations

import fnmatch
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import has_magic
from pathlib import Path

from headway.data.catalog.catalog import Catalog, is_name
from headway.data.shards.indexes import index_text
from headway.data.shards.packing import unfinished_marker
from headway.data.shards.shard import count_samples, walk
from headway.data.shards.tar import ShardLimits
from headway.errors import BadShard, UsageError
from headway.system.files import storage, write_atomic
from headway.system.log import logger
from headway.system.retries import retry

_THREADS = 16  # counting mostly waits for the file system
_QUICK_S = 1e-4  # per shard; reading an index from the page cache takes a tenth of it
_WARMUP_SHARDS = 10  # the first one takes longer
_BRACES = re.compile(r"{([^{}]*)}")
_NUMBER_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")

ShardSpec = str | Path | Sequence[str | Path]
"""where shards are: a directory, a pattern, a list of files, directories or patterns, or a name in the catalog"""


def find_shards(name: str, spec: ShardSpec, catalog: Catalog | None = None) -> list[Path]:
    """Finds the shards of a dataset, at least one; `name` is for error messages."""
    text = str(spec)
    if not isinstance(spec, str | Path):
        paths = [path for each in spec for path in _listed(name, Path(each))]
        if twice := [path for path, count in Counter(paths).items() if count > 1]:
            raise UsageError(
                f"dataset {name!r} lists {twice[0]} twice: its samples would be read twice in an epoch"
            )
    elif "://" in text or text.startswith("pipe:"):
        raise UsageError(
            f"dataset {name!r}: {text!r} is not a path; shards are read from file systems: mount or copy them first"
        )
    elif text.count("**") > 1:  # time grows exponentially with them, and files are found several times
        raise UsageError(f"dataset {name!r}: {text!r} has '**' more than once; give it once, or a list")
    elif "::" in text and not retry(f"look at {text}", Path(text).exists):
        raise UsageError(
            f"dataset {name!r}: {text!r} joins paths by '::', as WebDataset does; give a list of them"
        )
    elif retry(f"look at {text}", Path(spec).is_dir):
        paths = _matching(Path(spec), "*.tar")
    elif "{" in text and not retry(f"look at {text}", Path(text).exists):
        paths = sorted(
            {path for each in _expand_braces(name, text) for path in find_shards(name, Path(each))}
        )
    else:
        paths = sorted(_expand(Path(text)))
    if isinstance(spec, str) and is_name(spec):
        paths = _by_name(spec, paths, catalog or Catalog())
    if not paths:
        hint = _suggestion(text) if isinstance(spec, str | Path) else _GIVE_SHARDS
        raise UsageError(f"dataset {name!r}: no shards found at {text!r}; {hint}")
    return paths


def is_pattern(text: str) -> bool:
    """Whether a string may stand for several paths: with wildcards as for `glob`, or with braces."""
    return "{" in text or has_magic(text)


def _listed(name: str, path: Path) -> list[Path]:
    """Returns the files that an entry of a list stands for: a file, or those of a directory or a pattern."""
    if is_pattern(str(path)) and not retry(f"look at {path}", path.exists):
        return find_shards(name, path)
    # shards are not looked at, because there may be many
    if path.suffix != ".tar" and retry(f"look at {path}", path.is_dir):
        return find_shards(name, path)
    return [path]


def _expand_braces(name: str, text: str) -> Iterator[str]:
    """Yields what a pattern with braces stands for, as WebDataset expands it: ranges of numbers, and alternatives.

    >>> list(_expand_braces("train", "{a,b}/shard-{009..010}.tar"))
    ['a/shard-009.tar', 'a/shard-010.tar', 'b/shard-009.tar', 'b/shard-010.tar']
    """
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    choices: Iterable[str] = match[1].split(",")
    if ends := _NUMBER_RANGE.fullmatch(match[1]):
        digits = max(len(end) if end.startswith("0") else 0 for end in ends.groups())
        choices = (f"{number:0{digits}}" for number in range(int(ends[1]), int(ends[2]) + 1))
    elif "," not in match[1]:
        raise UsageError(
            f"dataset {name!r}: {match[0]} in {text!r} is not a range or a choice: write {{000..099}} or {{a,b}}"
        )
    for each in choices:
        yield from _expand_braces(name, text[: match.start()] + each + text[match.end() :])


def _expand(pattern: Path) -> list[Path]:
    """Returns the paths that match a pattern, as `glob` does, including wildcards in directories and `**`."""
    if not has_magic(str(pattern)):
        return [pattern] if retry(f"look at {pattern}", pattern.exists) else []
    wild = has_magic(str(pattern.parent))
    directories = _expand(pattern.parent) if wild else [pattern.parent]
    if pattern.name == "**":
        return [below for directory in directories for below in _tree(directory)]
    if has_magic(pattern.name):
        return [path for each in directories for path in _matching(each, pattern.name, found=wild)]
    return [path for each in directories for path in _expand(each / pattern.name)]


def _tree(directory: Path, above: frozenset[Path] = frozenset()) -> list[Path]:
    """Returns a directory and all directories below it; a link to one of those `above` is not followed."""
    if (real := directory.resolve()) in above:
        return []
    names = [path for path in _matching(directory, "*", found=True) if retry(f"look at {path}", path.is_dir)]
    return [directory, *(below for path in names for below in _tree(path, above | {real}))]


def _matching(directory: Path, pattern: str, *, found: bool = False) -> list[Path]:
    """Returns the files of a directory that match a pattern, sorted.

    `glob` treats a directory that cannot be read as empty, and an incomplete list as complete; this function retries
    and then fails. A directory that was only `found` by a pattern may belong to another user, and is left out.
    """
    try:
        names = retry(f"list {directory}", lambda: [path.name for path in directory.iterdir()])
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if found and isinstance(error, PermissionError):
            logger.warning(f"{directory} is left out: {error.strerror}")
            return []
        raise UsageError(f"cannot list {directory}: {error.strerror}; check its permissions") from error
    matching = [name for name in fnmatch.filter(names, pattern) if not name.startswith(".")]
    return sorted(directory / name for name in matching)


_GIVE_SHARDS = "give a directory, a pattern or a list"


def _suggestion(text: str) -> str:
    """Suggests subdirectories that have shards: users forget train or val."""
    below = sorted({str(path.parent) for path in Path(text).glob("*/*.tar")})[:5]
    return f"there are some in {', '.join(below)}" if below else _GIVE_SHARDS


def _by_name(name: str, here: list[Path], catalog: Catalog) -> list[Path]:
    """Returns the shards of a name in the catalog, or those found at that path; both at once are refused."""
    dataset = catalog.get(name)
    if not here:
        return [] if dataset is None and Path(name).is_dir() else catalog[name].shards()
    if dataset is not None and dataset.path.resolve() != here[0].parent.resolve():
        raise UsageError(
            f"{name!r} is a directory here and a dataset at {dataset.path}: write './{name}' or {dataset.key!r}"
        )
    return here


def warn_of_unfinished(name: str, paths: Sequence[Path]) -> None:
    """Warns that a dataset is incomplete, because it is being packed, or packing was interrupted."""
    packs = {(path.parent, path.name.rpartition("-")[0]) for path in paths}
    for marker in sorted(unfinished_marker(*pack) for pack in packs):
        if retry(f"look for {marker}", marker.exists):
            logger.warning(
                f"dataset {name!r}: packing into {marker.parent} was interrupted, or is under way: its shards are not "
                f"all of the data; pack again, or remove {marker.name} if that is intended"
            )


def count_shards(
    paths: Sequence[Path],
    limits: ShardLimits | None = None,
    *,
    quick_s: float = _QUICK_S,
    damaged: dict[Path, str] | None = None,
    compare: bool = False,
) -> Iterator[int]:
    """Yields the number of samples of each shard, as it becomes known.

    With `compare`, indexes that do not match their shards are refused; this opens each shard.
    With `damaged`, shards that cannot be counted are added to it, with the reason, and have 0 samples.

    Shards are counted in this thread while each takes at most `quick_s`, and by a thread pool from then on: a task for
    a pool costs about as much as reading one index.
    """

    def count(path: Path) -> int:
        try:
            return count_samples(path, limits, compare=compare)
        except BadShard as error:
            if damaged is None:
                raise
            damaged[path] = str(error)
            return 0

    began, done = time.perf_counter(), 0
    while done < len(paths) and time.perf_counter() - began <= quick_s * (done + _WARMUP_SHARDS):
        yield count(paths[done])
        done += 1
    paths = paths[done:]
    size = 1 + len(paths) // (4 * _THREADS)
    groups = [paths[at : at + size] for at in range(0, len(paths), size)]
    with ThreadPoolExecutor(_THREADS, "headway count") as pool:
        for counts in pool.map(lambda group: [count(path) for path in group], groups):
            yield from counts


def index(shards: ShardSpec, *, overwrite: bool = False, catalog: Catalog | None = None) -> list[Path]:
    """Writes DALI's text index beside each shard that has none, and returns the paths of those written.

    headway works without an index, but starts faster with one, and DALI needs it. Shards with spaces in the names of
    their files cannot have one, and are skipped.

        hw.data.index("/data/laion/*.tar")
    """
    written = write_indexes(find_shards("index", shards, catalog), overwrite=overwrite)
    return [path for path in written if path is not None]


def write_indexes(paths: Sequence[Path], *, overwrite: bool) -> Iterator[Path | None]:
    """Writes the index of each shard, and yields its path; None if it existed or the shard cannot have one."""
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
        target.chmod(path.stat().st_mode & 0o666)  # the same permissions as the shard
    return target
