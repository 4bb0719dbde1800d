"""`headway runs rm`, `archive` and `sync`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from headway.cli.parser import Parser
from headway.cli.screen import print_json, safe
from headway.errors import DONE, UsageError
from headway.run import Run
from headway.system.text import format_bytes, plural
from headway.watch.housekeeping import archive, check_code, check_idle, remove, size_of
from headway.watch.runs import resolve


def remove_runs(argv: list[str]) -> int:
    parser = _parser(
        "rm",
        "Removes runs that are over, with their checkpoints. Asks first.",
        "examples:\n  headway runs rm x7k2 m3p9\n  headway runs rm x7k2 --yes\n  headway runs rm x7k2 --dry-run\n",
    )
    options = parser.parse_args(argv)
    for run in _agreed(options.runs, options.root, "remove", yes=options.yes, dry_run=options.dry_run):
        remove(run)
        print(safe(f"removed {run.path}"))
    return DONE


def archive_runs(argv: list[str]) -> int:
    parser = _parser(
        "archive",
        "Packs runs that are over into tar files, checks them, and removes the directories. Asks first.",
        "examples:\n  headway runs archive x7k2\n  headway runs archive x7k2 --to /tape/me --yes\n\n"
        "To get one back: tar xf runs/archive/ID.tar -C runs\n",
    )
    parser.add_argument("--to", metavar="DIR", help="where to write them (default: archive/ beside the run)")
    options = parser.parse_args(argv)
    for run in _agreed(options.runs, options.root, "archive", yes=options.yes, dry_run=options.dry_run):
        print(safe(str(archive(run, Path(options.to) if options.to else None))))
    return DONE


def sync_runs(argv: list[str]) -> int:
    parser = Parser(
        "runs sync",
        "Sends the rows that the sinks of a run have missed, for example while a tracker was down.",
        "examples:\n  headway runs sync x7k2\n  headway runs sync x7k2 --sink wandb --from-start\n",
    )
    parser.add_run()
    parser.add_argument(
        "--sink", action="append", default=[], metavar="NAME", help="only this sink; repeatable"
    )
    parser.add_argument("--from-start", action="store_true", help="send all rows again")
    parser.add_json()
    options = parser.parse_args(argv)
    from headway.record.sinks import replay  # late: it imports torch

    fed = {
        run.id: replay(run, options.sink, from_start=options.from_start)
        for run in resolve([options.run], options.root)
    }
    if options.json:
        print_json(fed)
    else:
        for run, sinks in fed.items():
            for name, complete in sinks.items():
                print(safe(f"{run}: {name} has {'all rows' if complete else 'not received all rows'}"))
    return DONE if all(all(sinks.values()) for sinks in fed.values()) else 1


def _parser(verb: str, description: str, examples: str) -> Parser:
    parser = Parser(f"runs {verb}", description, examples)
    parser.add_run("runs", nargs="+")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done; change nothing")
    return parser


def _agreed(
    places: Sequence[str], root: str, what: Literal["remove", "archive"], *, yes: bool, dry_run: bool
) -> Sequence[Run]:
    """Shows the runs with their sizes, asks for confirmation, and returns the runs to work on; none if it is refused.

    Raises `UsageError` if one of them is running.
    """
    # last, the run with the code that a sweep shares
    runs = sorted(resolve(places, root), key=lambda run: run.snapshot_dir.is_dir())
    for run in runs:
        check_idle(run, what)
        check_code(run, leaving=runs)
    sizes = [size_of(run) for run in runs]
    for run, size in zip(runs, sizes, strict=True):
        print(safe(f"{format_bytes(size):>10}  {run.path}"))
    if dry_run:
        return []
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                f"standard input is not a terminal; to {what} {plural(len(runs), 'run')} without a question, add --yes"
            )
        try:
            answer = input(f"{what} {plural(len(runs), 'run')}, {format_bytes(sum(sizes))}? [y/N] ")
        except EOFError:  # Ctrl-D
            answer = ""
            print()
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was changed")
            return []
    return runs
