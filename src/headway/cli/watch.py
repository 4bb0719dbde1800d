"""`headway watch`: a live screen of a run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

from headway.cli.parser import Parser
from headway.cli.screen import console, safe, warn
from headway.errors import DONE, UsageError
from headway.record.alerts import EVENTS, AlertChannels, AlertSender, alert_events
from headway.run import Run, has_info, runs_under
from headway.run.info import read_json
from headway.schedulers.base import Queue
from headway.system.log import logger
from headway.watch.alerting import AlertWatch
from headway.watch.runs import resolve, summarize
from headway.watch.terminal import follow, layout, watch
from headway.watch.terminal.screen import Selection
from headway.watch.view import RunView
from headway.watch.web.blocks import to_json

_LOOK_S = 10.0
_EXAMPLES = """\
examples:
  headway watch                              the newest run in runs/ that is running, else the newest
  headway watch x7k2                         a run by the end of its id
  headway watch /scratch/me/runs             all runs there: n and p switch
  headway watch x7k2 --once                  print the screen once
  headway watch x7k2 | tee watch.txt         a line every ten seconds, until the run is over
  headway watch --alert failed --alert silent > watch.txt &
                                             post to $HEADWAY_ALERT_URL when a run of the root
                                             fails or is silent, until this process is ended

keys: q quit, n/p next and previous run, c next curve, up/down a rank and its log, m messages of all ranks.
It only reads the run directory: you can start and quit it at any time without affecting training.
"""


def main(argv: list[str]) -> int:
    parser = Parser(
        "watch", "Shows a run live: state, losses, speed, ranks, checkpoints, messages.", _EXAMPLES
    )
    parser.add_run(nargs="?", metavar="RUN|ROOT", more=", or a directory of runs")
    parser.add_argument("--once", action="store_true", help="print the screen once, as text")
    parser.add_argument("--alert", action="append", choices=(*EVENTS, "all"), default=[], metavar="EVENT",
                        help=f"send an alert when a run fails, stops, is silent or finishes: {', '.join(EVENTS)} or "
                        "all; to $HEADWAY_ALERT_URL or $HEADWAY_ALERT_COMMAND")  # fmt: skip
    parser.add_json()
    options = parser.parse_args(argv)
    runs = list_watched(options.run, options.root)
    if is_root(options.run):
        runs = _running_first(runs)
    problems: list[str] = []
    try:
        # warnings would destroy the live screen: they follow at the end
        with _alerting(options, problems.append if sys.stdout.isatty() else logger.warning):
            _show(runs, options)
    finally:
        for problem in dict.fromkeys(problems):
            logger.warning("%s", problem)
    return DONE


def _alerting(options: argparse.Namespace, report: Callable[[str], object]) -> AbstractContextManager[object]:
    """Sends alerts while the block runs, about the one run or all of a root."""
    if not options.alert:
        return nullcontext()
    if options.json or options.once:
        raise UsageError("--alert watches until the run is over: leave out --once and --json")
    sender = AlertSender(AlertChannels.from_environment(), alert_events(options.alert), report=report)
    return AlertWatch(lambda: _list_again(options), sender)


def _show(runs: Sequence[Run], options: argparse.Namespace) -> None:
    if options.json:
        print(to_json(asdict(RunView(runs[0]).refresh())).decode())
    elif options.once:
        _print_once(runs[0])
    elif sys.stdout.isatty():
        watch(runs, console())
    else:
        _follow(runs[0], options)


def _follow(run: Run, options: argparse.Namespace) -> None:
    """Prints lines about a run until it is over; with alerts about a root, then about the next, until Ctrl-C."""
    if not options.alert or not is_root(options.run):
        follow(RunView(run), _print_line)
        return
    _follow_while_there(run)
    print("alerts continue for all runs of the root, until Ctrl-C", flush=True)
    while True:
        for each in _running(options):
            print(safe(f"now {each.id}"), flush=True)
            _follow_while_there(each)
        _pause()


def _follow_while_there(run: Run) -> None:
    """Prints lines about a run of a root until it is over, or removed; alerts about other runs continue."""
    try:
        follow(RunView(run), _print_line)
    except UsageError as error:
        _print_line(safe(str(error)))


def _print_line(line: str) -> None:
    print(line, flush=True)


def _list_again(options: argparse.Namespace) -> Sequence[Run]:
    """Returns the runs as they are now; runs that cannot be read were named at the start."""
    return list_watched(options.run, options.root, warn=lambda _: None)


def _running(options: argparse.Namespace) -> Sequence[Run]:
    try:
        runs = _list_again(options)
    except UsageError:  # the directory may come back
        return ()
    return [each.run for each in summarize(runs) if each.status.state == "running"]


def _pause() -> None:
    time.sleep(_LOOK_S)


def list_watched(place: str | None, root: str, *, warn: Callable[[str], object] = warn) -> Sequence[Run]:
    """Returns the runs at a place: those of a run or sweep, or all runs of a root, the newest first.

    `warn` is called with a line for each run that cannot be read.
    """
    if place is not None and not is_root(place):
        return resolve([place], root)
    directory = root_at(place, root)
    runs = runs_under(directory, warn=warn)
    if not runs:
        raise UsageError(f"there is no run in {directory}; start one: headway run train.py")
    return runs


def is_root(place: str | None) -> bool:
    """Returns whether a place is a directory of runs, and not a run or a sweep."""
    return place is None or (Path(place).is_dir() and not has_info(Path(place)))


def root_at(place: str | None, root: str) -> Path:
    """Returns the directory of runs at a place, by default `root`; `UsageError` if there is none."""
    directory = Path(root if place is None else place)
    if not directory.is_dir():
        raise UsageError(f"there is no directory {str(directory)!r}; give a run or the directory of the runs")
    return directory


def _running_first(runs: Sequence[Run]) -> Sequence[Run]:
    """Sorts running runs to the front: first those certain to run, then those whose files alone say so.

    Only processes of this machine are certain: the first screen does not wait for a scheduler or a heartbeat.
    """
    candidates = [run for run in runs if _is_recorded_as_running(run)]
    unknown = Queue(note="the scheduler was not queried")
    found = {each.run.path: each.status for each in summarize(candidates, queue=unknown, heartbeat_wait_s=0)}

    def place(run: Run) -> int:
        now = found.get(run.path)
        return 2 if now is None or now.state != "running" else 0 if now.certain else 1

    return sorted(runs, key=place)


def _is_recorded_as_running(run: Run) -> bool:
    attempts = (read_json(run.info_file) or {}).get("attempts") or [{}]
    return bool(attempts[-1].get("status") == "running")


def _print_once(run: Run) -> None:
    screen = console()
    width = min(screen.width, 120)
    height = screen.height if sys.stdout.isatty() else 40
    for line in layout(RunView(run).refresh(), width, height, Selection(has_keys=False)):
        screen.print(line, no_wrap=True, overflow="ignore", crop=False)
