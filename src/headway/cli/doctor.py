"""`headway doctor`: checks this machine, or with --nodes the nodes of a cluster; prints a verdict per line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.status import Status as Spinner
from rich.table import Table
from rich.text import Text

from headway.cli.parser import Parser
from headway.cli.progress import throttled_printer
from headway.cli.screen import EscapingConsole, console, print_json
from headway.cli.target_options import add_target, read_options
from headway.doctor import job
from headway.doctor.checks import CheckResult, examine, line
from headway.errors import UsageError
from headway.launcher.targets import Slurm, target_fields
from headway.run.status import Status

_STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red"}
_TIME = "10:00"
"""time limit of the job, in minutes and seconds, unless --time is given"""
_EXAMPLES = """\
examples:
  headway doctor                                   this machine
  headway doctor --root /scratch/me/runs           and whether runs can be written there
  headway doctor --nodes 4 --gpus-per-node 8       four nodes of the cluster, in a job for this
  headway doctor --nodes 2 --partition gpu --data /data/images --json
  headway submit --doctor --nodes 4 train.py       the same before SCRIPT, in its own job

ok: fine. warn: may cost speed or safety. bad: runs will fail. Exit code 1 if anything is bad, else 0.
"""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if "nodes" in options or options.on is not None:
        return _examine_nodes(options)
    for name in ("data", *(each.name for each in target_fields(Slurm))):
        if getattr(options, name, None):
            raise UsageError(
                f"--{name.replace('_', '-')} is for nodes of a cluster: give their number with --nodes"
            )
    with EscapingConsole(stderr=True).status("examining this machine ..."):  # shown on a terminal only
        report = examine(root=Path(options.root), canary=options.canary)
    _print(report.to_dict(), report.checks, title=f"headway doctor on {report.host}", as_json=options.json)
    return 1 if report.verdict == "bad" else 0


def _parser() -> Parser:
    does = "Checks whether this machine, or nodes of a cluster, are fit to train: a verdict per line."
    parser = Parser("doctor", does, _EXAMPLES)
    parser.add_argument(
        "--root", default="runs", metavar="DIR", help="where runs will be written (default: runs)"
    )
    parser.add_argument("--canary", action=argparse.BooleanOptionalAction, default=True,
                        help="start ranks that test the links between them (takes some seconds)")  # fmt: skip
    parser.add_argument("--data", action="append", metavar="PATH", default=[],
                        help="measure how fast each node reads this file or directory; with --nodes")  # fmt: skip
    parser.add_json()
    add_target(parser, leave_out=job.NOT_FOR_EXAMINATIONS)
    return parser


def _examine_nodes(options: argparse.Namespace) -> int:
    """Submits a job, waits for it and prints what it found; Ctrl-C cancels it."""
    if not options.canary:
        raise UsageError(
            "--no-canary is for this machine: with --nodes, the links between nodes are always tested"
        )
    target = read_options(options, time=_TIME)
    data = [Path(path) for path in options.data]
    submitted = job.submit(target, root=Path(options.root), data=data)
    with EscapingConsole(stderr=True).status("submitted") as spinner:
        try:
            report = job.wait(submitted, _reporter(spinner, str(submitted.run.path)))
        except KeyboardInterrupt:
            submitted.cancel()
            raise
    checks = [CheckResult(**each) for each in report["checks"]]
    hosts = [node["host"] for node in report["nodes"]]
    title = f"headway doctor on {len(hosts)} nodes: {', '.join(hosts)}"
    _print(report, checks, title=title, as_json=options.json)
    return 1 if report["verdict"] == "bad" else 0


def _reporter(spinner: Spinner, place: str) -> Callable[[Status, float], None]:
    """Returns a function that shows the state of the job: beside the spinner, or without a terminal as lines."""
    print_line = throttled_printer()

    def report(now: Status, seconds: float) -> None:
        why = f" ({now.why})" if now.why else ""
        text = f"the examination is {now.state}{why} after {seconds:.0f} s; its run is {place}"
        if sys.stderr.isatty():
            spinner.update(Text(text))
        else:
            print_line(text)

    return report


def _print(facts: dict[str, object], checks: Sequence[CheckResult], *, title: str, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    elif sys.stdout.isatty():
        console().print(table(title, checks))
    else:
        print("\n".join(line(check) for check in checks))


def table(title: str, checks: Sequence[CheckResult]) -> Table:
    """Returns the results as a table for a terminal."""
    made = Table(title=title, box=None, title_justify="left", show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")  # paths must stay whole
    for check in checks:
        detail = Text(check.detail)
        if check.advice:
            detail.append(f"\n{check.advice}", style="italic")
        made.add_row(Text(check.verdict, style=_STYLES[check.verdict]), Text(check.name), detail)
    return made
