"""`pytest --cpu-times=40` lists the tests and the files that used most CPU, themselves and through their processes.

CPU time says what a test costs on a machine that is busy with other things, where `--durations` says how long it
waited. What a fixture of a session costs is counted for the first test that asks for it. Daemons that leave the family,
as those of SLURM do, are not counted.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_used = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "list the N tests and files that used most CPU (0: all)"
    parser.addoption("--cpu-times", type=int, metavar="N", help=help)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.config.getoption("cpu_times") is not None:
        item.config.stash[_used] = family_cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if (before := item.config.stash.get(_used, None)) is not None:
        item.config.stash[_used] = now = family_cpu_s()
        report.cpu_s = now - before  # pytest-xdist sends all attributes of a report
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (most := config.getoption("cpu_times")) is None:
        return
    tests: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tests[report.nodeid] += getattr(report, "cpu_s", 0.0)
    files: dict[str, float] = defaultdict(float)
    for test, seconds in tests.items():
        files[test.partition("::")[0]] += seconds
    for what, used in (("files", files), ("tests", tests)):
        terminalreporter.section(f"{what} by CPU time, {sum(used.values()):.0f} s in all")
        ranked = sorted(used.items(), key=lambda each: -each[1])
        for name, seconds in ranked[: most or None]:
            terminalreporter.write_line(f"{seconds:8.2f}s {name}")


def family_cpu_s() -> float:
    """Returns the CPU seconds of this process, of its children that have ended, and of all that live below it."""
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in ended) + _living_ticks() / _TICKS_PER_S


def _living_ticks() -> int:
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        children[int(fields[1])].append(int(entry.name))
        # utime, stime, and those of children that have ended
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    below, total = [os.getpid()], 0
    while below:
        for child in children[below.pop()]:
            total += ticks[child]
            below.append(child)
    return total
