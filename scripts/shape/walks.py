"""Walks: the calls of headway's functions that one thing takes, counted while it happens.

Each walk is a small program as a user would write it. It runs in processes of its own in which every call of a function
of headway is recorded, with its time; marks that the program sets say between which calls the thing happened.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
WALKS = ("step", "log-point", "save", "sample", "submit", "failure")
TITLES = {
    "step": "a step",
    "log-point": "a log point",
    "save": "a save of 322 parameters, waited for",
    "sample": "a sample of a ShardLoader",
    "submit": "`submit --dry-run`",
    "failure": "a rank fails, until `headway run` has ended",
}


@dataclass(frozen=True)
class Walk:
    title: str
    calls: int
    functions: int
    files: Counter[str]


def walk(name: str, root: Path) -> Walk:
    if name not in WALKS:
        raise SystemExit(f"shape: there is no walk {name!r}; there are {', '.join(WALKS)}")
    with tempfile.TemporaryDirectory(prefix="shape-") as place:
        calls = _run(name, root.resolve(), Path(place))
    samples = 32 if name == "sample" else 1
    if name == "log-point":  # what a step with one takes beyond an ordinary step
        calls = calls - _walk_calls("step", root)
    files: Counter[str] = Counter()
    for (file, _), count in calls.items():
        files[file] += count
    return Walk(TITLES[name], round(calls.total() / samples), len(calls), files)


def _walk_calls(name: str, root: Path) -> Counter[tuple[str, str]]:
    with tempfile.TemporaryDirectory(prefix="shape-") as place:
        return _run(name, root.resolve(), Path(place))


def _run(name: str, root: Path, place: Path) -> Counter[tuple[str, str]]:
    """Runs the program of a walk in `place` and returns the calls between its marks, by file and function."""
    scripts = HERE / "programs"
    commands = {
        "submit": ["-m", "headway", "submit", "--dry-run", "--time", "1:00:00", "train.py"],
        "failure": ["-m", "headway", "run", "--nproc", "2", "train.py"],
    }
    program = {"submit": "failure", "log-point": "step", "save": "step"}.get(name, name)
    (place / "train.py").write_text((scripts / f"{program}.py").read_text())
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(HERE / "recorder"), str(root / "src"))),
        "SHAPE_TRACE": str(place / "trace"),
        "SHAPE_PACKAGE": str(root / "src" / "headway"),
        "SHAPE_WALK": name,
    }
    (place / "trace").mkdir()
    command = [sys.executable, *commands.get(name, ["train.py"])]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
    if (done.returncode != 0) != (name == "failure"):
        raise SystemExit(
            f"shape: the walk {name!r} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return _between_marks(place / "trace", everywhere=name in ("submit", "failure"))


def _between_marks(trace: Path, *, everywhere: bool) -> Counter[tuple[str, str]]:
    """Counts the calls from the mark `begin` to `end`, where there are such, in the process that set them or in all."""
    processes = []
    for path in trace.iterdir():
        lines = [line.split("\t") for line in path.read_text().splitlines()]
        processes.append([(int(time), file, function) for time, file, function in lines])
    marked = [events for events in processes if any(not file for _, file, _ in events)]
    marks = {function: time for events in marked for time, file, function in events if not file}
    begin, end = marks.get("begin", 0), marks.get("end", sys.maxsize)
    return Counter(
        (file, function)
        for events in (processes if everywhere else marked)
        for time, file, function in events
        if file and begin < time < end
    )
