"""`headway data`: lists, makes, checks and measures datasets and their shards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from headway.cli.parser import Positional, above_zero, dispatch, natural, parse, positive, require_path
from headway.cli.progress import show_progress, throttled_printer
from headway.cli.screen import EscapingConsole, console, plain_table, print_json, safe
from headway.data.catalog import Catalog, Dataset
from headway.errors import DONE, UsageError
from headway.system.text import format_bytes, plural

if TYPE_CHECKING:
    from headway.data.tools import Benchmark

_Datasets = Annotated[tuple[str, ...], Positional("DATASET")]

_USAGE = """\
usage: headway data VERB [OPTIONS] ...

  ls      list the datasets of the catalog, as a tree
  count   count the samples of datasets
  add     add a dataset: make its directory, and link shards into it
  pack    pack a directory of images, or of files that share names, into shards
  index   write an index beside shards that have none: for DALI, and to start faster
  check   read all shards; report what is damaged, misnamed or not decodable
  bench   measure reading, decoding and the loader on these shards
  stage   copy data to this node's own disk, once, before the ranks need it
  stubs   write a Python module of dataset names, for completion in editors

examples:
  headway data ls --split train
  headway data add public rgb laion train --shards '/lustre/laion/*.tar'
  headway data pack imagenet/train shards/train --shard-mb 512
  headway data check laion /scratch/new/*.tar
  headway data bench laion --threads 8 --need 2000

A dataset is a name of the catalog (laion, laion/val, public/rgb/laion/val), a
directory, a pattern or a shard. The root of the catalog is --root, data_root under
[tool.headway] in pyproject.toml, $HEADWAY_DATA or ~/.headway/data: the first that
is set. `headway data VERB --help` explains a verb.
"""


def main(argv: list[str]) -> int:
    verbs = {
        "ls": _ls,
        "count": _count,
        "add": _add,
        "pack": _pack,
        "index": _index,
        "check": _check,
        "bench": _bench,
        "stage": _stage,
        "stubs": _stubs,
    }
    return dispatch("data", verbs, _USAGE, argv)


def _stage(argv: list[str]) -> int:
    from headway.cli import stage

    return stage.main(argv)


@dataclass(frozen=True, kw_only=True)
class _DataOptions:
    root: Path | None = None
    """root of the catalog"""
    json: bool = False
    """print JSON"""

    def catalog(self) -> Catalog:
        return Catalog(self.root and require_path(self.root, "directory"))


# --- listing


@dataclass(frozen=True, kw_only=True)
class DataListOptions(_DataOptions):
    """Lists the datasets of the catalog as a tree, with their shards and bytes."""

    confidentiality: str | None = None
    """only these, like public"""
    modality: str | None = None
    """only these, like rgb"""
    split: str | None = None
    """only these, like train"""


def _ls(argv: list[str]) -> int:
    options = parse(DataListOptions, argv, verb="data ls")
    catalog = options.catalog()
    datasets = catalog.datasets(
        confidentiality=options.confidentiality, modality=options.modality, split=options.split
    )
    facts = [(dataset, dataset.shards(), dataset.bytes()) for dataset in datasets]
    if options.json:
        rows = [
            {"name": dataset.key, "path": str(dataset.path), "shards": len(shards), "bytes": held}
            for dataset, shards, held in facts
        ]
        print_json({"root": str(catalog.root), "origin": catalog.origin, "datasets": rows})
        return DONE
    if not datasets and (options.confidentiality or options.modality or options.split):
        print(f"{catalog.root}: no such datasets; see all: headway data ls")
        return DONE
    console().print(tree(catalog, [(dataset, len(shards), held) for dataset, shards, held in facts]))
    return DONE


def tree(catalog: Catalog, facts: list[tuple[Dataset, int, int]]) -> Tree:
    """Returns the catalog as a tree for a terminal."""
    made = Tree(Text.assemble((str(catalog.root), "bold"), f"  (root from {catalog.origin})"))
    if not facts:
        made.add("none; make one: headway data add CONFIDENTIALITY MODALITY NAME SPLIT")
    nodes: dict[tuple[str, ...], Tree] = {(): made}
    for dataset, shards, held in facts:
        *homes, split = dataset.key.split("/")
        for depth, name in enumerate(homes, 1):
            place = tuple(homes[:depth])
            if place not in nodes:
                nodes[place] = nodes[place[:-1]].add(Text(name, style="bold" if depth == 3 else ""))
        nodes[tuple(homes)].add(
            f"{split:<8} {shards:>6,} {'shard ' if shards == 1 else 'shards'}  {format_bytes(held):>9}"
        )
    return made


@dataclass(frozen=True, kw_only=True)
class CountOptions(_DataOptions):
    """Counts the samples of datasets: from an index where there is one, else by reading the shards."""

    datasets: _Datasets = ()
    """names, directories, patterns or shards; all of the catalog if none is given"""


def _count(argv: list[str]) -> int:
    from headway.data.catalog import count_shards

    options = parse(CountOptions, argv, verb="data count")
    catalog = options.catalog()
    if options.datasets:
        found = _found(options.datasets, catalog, "count")
    else:
        found = {dataset.key: dataset.shards() for dataset in catalog.datasets()}
    rows = {
        name: (
            len(paths),
            sum(show_progress(count_shards(paths, compare=True), len(paths), f"counting {name}")),
        )
        for name, paths in found.items()
    }
    if options.json:
        print_json({name: {"shards": n, "samples": samples} for name, (n, samples) in rows.items()})
        return DONE
    table = plain_table("dataset", "shards", "samples", numbers=("shards", "samples"))
    for name, (shards, samples) in rows.items():
        table.add_row(safe(name), f"{shards:,}", f"{samples:,}")
    if len(rows) > 1:
        table.add_row("all", f"{sum(n for n, _ in rows.values()):,}", f"{sum(s for _, s in rows.values()):,}")
    console().print(table)
    return DONE


def _found(names: tuple[str, ...], catalog: Catalog, verb: str) -> dict[str, list[Path]]:
    """Finds shards by name; those that the shell expanded from a pattern form one entry."""
    from headway.data.catalog import find_shards, is_pattern, warn_of_unfinished

    if not names:
        raise UsageError(f"give a name, directory, pattern or shard; see: headway data {verb} --help")
    single = [
        name for name in names if name.endswith(".tar") and (Path(name).exists() or not is_pattern(name))
    ]
    files = [require_path(Path(name), "file") for name in single]
    others = {name: find_shards(name, name, catalog) for name in names if Path(name) not in files}
    found = others | ({str(files[0].parent): files} if files else {})
    for name, paths in found.items():
        warn_of_unfinished(name, paths)
    return found


# --- making


@dataclass(frozen=True, kw_only=True)
class AddOptions(_DataOptions):
    """Makes the directory of a new dataset in the catalog; with --shards, links shards into it."""

    confidentiality: Annotated[str, Positional("CONFIDENTIALITY")]
    """like public or private"""
    modality: Annotated[str, Positional("MODALITY")]
    """like rgb"""
    name: Annotated[str, Positional("NAME")]
    """like laion"""
    split: Annotated[str, Positional("SPLIT")]
    """like train"""
    shards: str | None = None
    """directory or pattern of shards to link; they stay where they are"""


def _add(argv: list[str]) -> int:
    from headway.data.catalog import find_shards, warn_of_unfinished

    options = parse(AddOptions, argv, verb="data add")
    catalog = Catalog(options.root)  # makes the directory if needed
    shards = find_shards(options.name, Path(options.shards)) if options.shards else []
    warn_of_unfinished(options.name, shards)
    dataset = catalog.add(
        options.confidentiality, options.modality, options.name, options.split, shards=shards
    )
    if options.json:
        print_json({"name": dataset.key, "path": str(dataset.path), "linked": len(shards)})
    else:
        print(
            f"{dataset.key}: {dataset.path}" + (f", {plural(len(shards), 'shard')} linked" if shards else "")
        )
    return DONE


@dataclass(frozen=True, kw_only=True)
class PackOptions(_DataOptions):
    """Packs a directory into shards with index and checksums, in random order.

    The directory has one directory of images for each class, or nothing but files: a.jpg and a.json are one sample.
    An MDS dataset of MosaicML Streaming is packed by its columns.
    """

    directory: Annotated[Path, Positional("DIR")]
    """the files to pack"""
    out: Annotated[Path, Positional("OUT")]
    """where to write the shards: a directory that has none"""
    shard_mb: Annotated[int, positive] = 256
    """largest size of a shard, in megabytes"""
    shuffle: bool = True
    """shuffle the samples; a loader mixes a sample only with those that are stored near it"""
    seed: Annotated[int, natural] = 0
    """seed of the random order"""
    follow_links: bool = False
    """also pack what links that lead out of the directory point to"""


def _pack(argv: list[str]) -> int:
    from headway.data.shards import pack

    options = parse(PackOptions, argv, verb="data pack")
    screen = EscapingConsole(stderr=True)
    with screen.status("packing ...") as status:  # shown on a terminal only
        report = status.update if screen.is_terminal else throttled_printer()
        paths = pack(
            options.directory,
            options.out,
            shard_size=options.shard_mb * 10**6,
            shuffle=options.shuffle,
            seed=options.seed,
            follow_links=options.follow_links,
            done=lambda path: report(f"{path.name} is done"),
        )
    held = sum(path.stat().st_size for path in paths)
    if options.json:
        print_json({"out": str(options.out), "shards": len(paths), "bytes": held})
    else:
        print(f"{options.out}: {plural(len(paths), 'shard')}, {format_bytes(held)}")
    return DONE


@dataclass(frozen=True, kw_only=True)
class IndexOptions(_DataOptions):
    """Writes DALI's index beside shards that have none; headway does not need it, but starts faster with it."""

    datasets: _Datasets
    """names, directories, patterns or shards"""
    overwrite: bool = False
    """also replace an index that exists"""
    checksums: bool = False
    """also write checksums beside shards whose samples have none; reads all of them"""


def _index(argv: list[str]) -> int:
    from headway.data.catalog import write_indexes
    from headway.data.shards import checksums

    options = parse(IndexOptions, argv, verb="data index")
    written = {}
    for name, paths in _found(options.datasets, options.catalog(), "index").items():
        done = show_progress(
            write_indexes(paths, overwrite=options.overwrite), len(paths), f"indexing {name}"
        )
        written[name] = sum(path is not None for path in done)
        for path in show_progress(paths if options.checksums else [], len(paths), f"summing {name}"):
            stated = checksums.read(path)
            if stated is None or not stated.samples:
                found = checksums.compute(path)
                checksums.compare(path, found)
                checksums.write(path, found)
    if options.json:
        print_json(written)
    else:
        print(
            "\n".join(
                f"{name}: {plural(number, 'index', 'indexes')} written" for name, number in written.items()
            )
        )
    return DONE


@dataclass(frozen=True, kw_only=True)
class StubsOptions(_DataOptions):
    """Writes a Python module with the names of all datasets, for completion in editors."""

    out: Annotated[Path, Positional("FILE.py")]
    """the module, like datasets.py"""


def _stubs(argv: list[str]) -> int:
    from headway.data.catalog import write_stubs

    options = parse(StubsOptions, argv, verb="data stubs")
    require_path(options.out.parent, "directory")
    number = write_stubs(options.catalog(), options.out)
    if options.json:
        print_json({"file": str(options.out), "datasets": number})
    else:
        print(f"{options.out}: {plural(number, 'dataset')}")
    return DONE


# --- checking and measuring


@dataclass(frozen=True, kw_only=True)
class CheckOptions(_DataOptions):
    """Reads whole datasets: checks tar structure, names, index and checksums, and decodes every sample.

    Prints the problems of each shard. Exit code 0 if there are none, else 1. Also warns of datasets that are sorted by
    class, whose batches would have too few classes in training.
    """

    datasets: _Datasets
    """names, directories, patterns or shards"""
    unique: bool = False
    """also report names that occur in several shards of a dataset"""


def _check(argv: list[str]) -> int:
    from headway.data.tools import check_label_order, check_shard, find_duplicates

    options = parse(CheckOptions, argv, verb="data check")
    found = _found(options.datasets, options.catalog(), "check")
    paths = [path for shards in found.values() for path in shards]
    with ThreadPoolExecutor(thread_name_prefix="headway check") as pool:
        checked = show_progress(pool.map(check_shard, paths), len(paths), "checking shards")
        problems = {str(path): list(found) for path, found in zip(paths, checked, strict=True)}
    for shards in found.values() if options.unique else []:
        for key, places in find_duplicates(shards):
            others = ", ".join(place.name for place in places[1:])
            problems[str(places[0])].append(f"{places[0]}: {key!r} is also in {others}")
    bad = {path: lines for path, lines in problems.items() if lines}
    dependence = {name: check_label_order(shards) for name, shards in found.items()}
    warnings = {
        name: f"{text}: for training, write them in random order" for name, text in dependence.items() if text
    }
    if options.json:
        print_json({"shards": len(paths), "problems": bad, "warnings": warnings})
    else:
        for name, text in warnings.items():
            print(safe(f"{name}: warning: {text}"))
        for line in (line for lines in bad.values() for line in lines):
            print(safe(line))
        print(f"{plural(len(paths), 'shard')}: " + (f"{len(bad)} with problems" if bad else "no problems"))
    return 1 if bad else DONE


@dataclass(frozen=True, kw_only=True)
class BenchOptions(_DataOptions):
    """Measures reading, decoding and the loader, and reports which of them is the bottleneck."""

    datasets: _Datasets
    """names, directories, patterns or shards"""
    threads: Annotated[int | None, positive] = None
    """threads that read and decode (default: one per core)"""
    batch_size: Annotated[int, positive] = 64
    """samples of a batch"""
    seconds: Annotated[float, above_zero] = 3.0
    """approximate duration of each stage of the measurement"""
    need: Annotated[float | None, above_zero] = None
    """samples per second that training consumes"""


def _bench(argv: list[str]) -> int:
    from headway.data.tools import run_benchmark

    options = parse(BenchOptions, argv, verb="data bench")
    found = _found(options.datasets, options.catalog(), "bench")
    paths = [path for shards in found.values() for path in shards]
    with EscapingConsole(stderr=True).status("measuring ..."):  # shown on a terminal only
        seen = run_benchmark(
            paths, threads=options.threads, batch_size=options.batch_size, seconds=options.seconds
        )
    if options.json:
        print_json(seen.to_dict() | {"verdict": seen.verdict(options.need)})
        return DONE
    console().print(rates(seen))
    print(seen.verdict(options.need))
    return DONE


def rates(seen: Benchmark) -> Table:
    """Returns the measurement as a table for a terminal."""
    numbers = "samples/s", "bytes/s", "of the limit"
    table = plain_table("stage", *numbers, numbers=numbers)
    limit = min(seen.read, seen.decode)
    for name, rate in (("read", seen.read), ("decode", seen.decode), ("loader", seen.load)):
        part = f"{rate / limit:.0%}" if name == "loader" else ""
        table.add_row(name, f"{rate:,.0f}", format_bytes(round(rate * seen.sample_bytes)), part)
    table.add_row("memcpy, one thread", "", format_bytes(round(seen.memcpy)), "")
    table.add_row("first batch", f"{seen.first_batch:.2f} s", "", "")
    return table
