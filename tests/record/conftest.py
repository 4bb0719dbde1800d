"""Programs to record: each test's program runs in a process of its own, under a pipe or under a real pty."""

from __future__ import annotations

import logging
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from headway.run import Run
from headway.system.log import logger

PREAMBLE = """
import os, sys
from headway.record.rank_logs import rank_log
from headway.run import Run
run = Run.open(sys.argv[1])
"""
HEADLINE = re.compile(
    r"--- attempt (\d+)  \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  rank (\d+)  host \S+  pid \d+ ---"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)  # a run keeps the changes of the repository it is started from
    return Run.create(tmp_path / "runs", name="digits")


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the library logs."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.fixture
def program(run: Run) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code that has `run`, `rank_log`, `os` and `sys` at hand, with its output in pipes."""

    def start(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", PREAMBLE + code, str(run.path)],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=180,
            env={**os.environ, "PYTHONUNBUFFERED": "", **environment},
        )

    return start


@pytest.fixture
def terminal(run: Run) -> Callable[..., str]:
    """Runs such code in a pseudo-terminal, types each of `keys` when its prompt shows; returns what was shown."""

    def start(code: str, keys: Sequence[tuple[str, str]] = ()) -> str:
        pid, fd = pty.fork()
        if pid == 0:
            os.execve(
                sys.executable,
                [sys.executable, "-c", PREAMBLE + code, str(run.path)],
                {**os.environ, "TERM": "xterm-256color"},
            )
        termios.tcsetwinsize(fd, (24, 80))
        shown = ""
        waiting = list(keys)
        deadline = time.monotonic() + 60
        try:
            while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                try:
                    shown += os.read(fd, 65536).decode("utf-8", "replace")
                except OSError:  # Linux says EIO when the last writer is gone
                    break
                if waiting and shown.endswith(waiting[0][0]):
                    os.write(fd, waiting.pop(0)[1].encode())
        finally:
            os.close(fd)
            status = os.waitpid(pid, 0)[1]
        assert status == 0, shown
        assert not waiting, f"{waiting[0][0]!r} was never shown:\n{shown}"
        return shown

    return start


def log_lines(run: Run, rank: int = 0) -> list[str]:
    """The lines of a rank's log without the headlines of its attempts; every line must be whole."""
    text = run.log_file(rank).read_text("utf-8", "surrogateescape")
    assert text.endswith("\n")
    return [line for line in text.splitlines() if not HEADLINE.fullmatch(line)]


@pytest.fixture
def lines(run: Run) -> Callable[..., list[str]]:
    def read(rank: int = 0) -> list[str]:
        return log_lines(run, rank)

    return read
