"""`headway runs`: lists runs and their states."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.control import Control
from rich.text import Text

from headway.cli import housekeeping, samples
from headway.cli.parser import Parser, Verb, natural
from headway.cli.screen import ago, console, number, print_json, warn
from headway.errors import DONE, UsageError
from headway.launcher.sweep import label
from headway.run.rebuild import describe, rebuild
from headway.run.status import State
from headway.system.text import format_duration
from headway.watch.runs import RunSummary, select
from headway.watch.terminal.screen import STATE_COLORS
from headway.watch.view.source import clean

_WATCH_S = 2.0
_EXAMPLES = """\
examples:
  headway runs                            the newest twenty in runs/
  headway runs --state failed lost        what went wrong
  headway runs --name digits -n 100 --root /scratch/me/runs
  headway runs --json
  headway runs --watch                    the list, kept up to date, until Ctrl-C
  headway runs samples RUN --step 37      which samples were in a step
  headway runs rm RUN, archive RUN        remove it, or pack it into a tar file; asks first
  headway runs sync RUN                   send the rows that a tracker has missed
  headway runs rebuild RUN                write a damaged run.json again
  headway watch RUN, report RUN           one run: live in the terminal, or as an HTML file

A run is running if its job is in squeue, its process is alive, or its heartbeat is fresh. A run with none of
these and without an end is lost: it was killed. A stopped run has a checkpoint: restart it to resume.
"""


def main(argv: list[str]) -> int:
    if argv[:1] and argv[0] in VERBS:
        return VERBS[argv[0]](argv[1:])
    if argv[:1] and not argv[0].startswith("-"):
        raise UsageError(
            f"{argv[0]!r} is not a verb of headway runs, which has {', '.join(VERBS)}; to see one run: "
            "headway watch RUN"
        )
    parser = Parser(
        "runs", "Lists runs, the newest first: queued, running, done, stopped, failed, and why.", _EXAMPLES
    )
    parser.add_argument(
        "--root", default="runs", metavar="DIR", help="the directory of the runs (default: runs)"
    )
    parser.add_argument(
        "--state",
        nargs="+",
        choices=get_args(State),
        default=[],
        metavar="STATE",
        help=f"only runs in these states: {', '.join(get_args(State))}",
    )
    parser.add_argument("--name", help="only runs of this name")
    parser.add_argument(
        "-n", dest="most", type=natural, default=20, metavar="N", help="at most N runs (default: 20; 0: all)"
    )
    parser.add_argument("--watch", action="store_true", help="keep the list up to date, until Ctrl-C")
    parser.add_json()
    options = parser.parse_args(argv)
    if options.watch and (options.json or not sys.stdout.isatty()):
        raise UsageError("--watch needs a terminal: leave it out to print the list once")

    def find() -> list[RunSummary]:
        most = options.most or None
        return select(options.root, states=options.state, name=options.name, most=most, warn=warn)

    if options.json:
        print_json([row.to_dict() for row in find()])
    elif options.watch:
        _watch(find, options.root)
    else:
        _show(find(), options.root, console())
    return DONE


def _watch(find: Callable[[], list[RunSummary]], root: str) -> None:
    """Refreshes the list on an alternate screen, until Ctrl-C."""
    screen = console()
    with screen.screen(hide_cursor=True):
        while True:
            with screen.capture() as shown:
                _show(find(), root, screen)
                screen.print(Text(f"{datetime.now():%H:%M:%S}, every {_WATCH_S:g} s; Ctrl-C leaves", "dim"))
            lines = shown.get().splitlines()[: screen.height]
            screen.control(Control.home())
            screen.file.write("\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")
            screen.file.flush()
            time.sleep(_WATCH_S)


def _rebuild(argv: list[str]) -> int:
    parser = Parser(
        "runs rebuild",
        "Writes a damaged run.json again, from the name of the directory, its diagnostics and its settings.",
        "examples:\n  headway runs rebuild runs/digits-2026.11.15-14.30-x7k2\n",
    )
    parser.add_argument("run", metavar="RUN", help="the run directory")
    path = Path(parser.parse_args(argv).run)
    print(describe(path, rebuild(path)))
    return DONE


def _show(rows: Sequence[RunSummary], root: str, screen: Console) -> None:
    if not rows:
        screen.print(f"no such runs in {root}")
        return
    now = datetime.now(UTC)
    lines = [_HEAD] + [_cells(row, now) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    while len(widths) > 2 and sum(widths) + 2 * len(widths) > screen.width:
        widths.pop()  # a narrow terminal: the last columns are the least needed
    screen.print(_line(_HEAD, widths), style="bold", no_wrap=True, overflow="ignore", crop=False)
    for row, cells in zip(rows, lines[1:], strict=True):
        line = _line(cells, widths)
        begin = widths[0] + 2
        line.stylize(STATE_COLORS.get(row.status.state, ""), begin, begin + widths[1])
        screen.print(line, no_wrap=True, overflow="ignore", crop=False)
        if more := "; ".join(filter(None, (row.sweep and label(row.sweep.settings), row.status.why))):
            screen.print(Text(f"    {clean(more)}", "dim"), no_wrap=True, overflow="ellipsis")
    counts = Counter(row.status.state for row in rows)
    screen.print(Text(", ".join(f"{count} {state}" for state, count in counts.items()), "dim"))


_HEAD = ("run", "state", "step", "time", "job", "made", "tries")


def _cells(row: RunSummary, now: datetime) -> tuple[str, ...]:
    cells = (
        row.run.id,
        row.status.state,
        number(row.step),
        format_duration(row.seconds) if row.attempts else "-",
        row.job if row.job and (row.job[0].isdigit() or row.status.state == "running") else "-",
        ago(row.created, now),
        str(row.attempts),
    )
    return tuple(clean(cell, 120) for cell in cells)  # runs may be other users'


def _line(cells: Sequence[str], widths: Sequence[int]) -> Text:
    return Text("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip())


VERBS: dict[str, Verb] = {
    "archive": housekeeping.archive_runs,
    "rebuild": _rebuild,
    "rm": housekeeping.remove_runs,
    "samples": samples.main,
    "sync": housekeeping.sync_runs,
}
"""the verbs of `headway runs`, which lists runs if none is given"""
