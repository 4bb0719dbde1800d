"""`headway doctor`: examines this machine, with a verdict per line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.cli.parser import parse
from headway.cli.screen import console
from headway.doctor.checks import CheckResult, MachineReport, examine

_STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What this machine is and whether it is fit to train: a verdict per line.

    ok: fine. warn: may cost speed or safety. bad: runs will fail. Exit code 1 if anything is bad, else 0.
    """

    root: Path = Path("runs")
    """where runs are to be written"""
    canary: bool = True
    """start ranks that try the links between them (takes some seconds)"""
    json: bool = False
    """print facts for programs"""


def main(argv: list[str]) -> int:
    options = parse(DoctorOptions, argv, verb="doctor")
    with Console(stderr=True).status("examining this machine ..."):  # shown on a terminal only
        report = examine(root=options.root, canary=options.canary)
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    elif sys.stdout.isatty():
        console().print(table(report))
    else:
        print("\n".join(line(check) for check in report.checks))
    return 1 if report.verdict == "bad" else 0


def line(check: CheckResult) -> str:
    """A check as one line of plain text."""
    advice = f"  -> {check.advice}" if check.advice else ""
    return f"{check.verdict:<4}  {check.name:<12}  {check.detail}{advice}"


def table(report: MachineReport) -> Table:
    """The report for a terminal."""
    made = Table(title=f"headway doctor on {report.host}", box=None, title_justify="left", show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")  # paths must stay whole
    for check in report.checks:
        detail = Text(check.detail)
        if check.advice:
            detail.append(f"\n{check.advice}", style="italic")
        made.add_row(Text(check.verdict, style=_STYLES[check.verdict]), Text(check.name), detail)
    return made
