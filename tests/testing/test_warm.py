"""Processes that are forked for tests are like those that start anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm

PROGRAM = """
import atexit, os, pathlib, signal, sys, threading, time
atexit.register(lambda: print("at the end", flush=True))
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread", flush=True))).start()
stop = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT).__name__
print(sys.argv[1:], __name__, pathlib.Path.cwd().name, os.environ["WORD"], "HOME" in os.environ, stop)
print(sys.stdin.read(), sorted(os.listdir("/proc/self/fd"))[:3], file=sys.stderr)
import beside
exec(os.environ["HOW"])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "beside.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


@pytest.mark.parametrize("kind", ["script", "-c", "-m"])
@pytest.mark.parametrize(
    "how",
    [
        "",
        "sys.exit(3)",
        "sys.exit('no')",
        "raise KeyboardInterrupt",
        "1 / 0",
        "sys.excepthook = lambda *_: sys.exit(4); 1 / 0",
        "os._exit(300)",
        "os.abort()",
    ],
)
def test_it_ends_and_says_as_any_other(kind: str, how: str, script: Path) -> None:
    program = {"script": [str(script)], "-c": ["-c", PROGRAM], "-m": ["-m", "program"]}[kind]
    environ = {"HOW": how, "WORD": "said", "PYTHONPATH": str(script.parent), "PYTHONUNBUFFERED": "1"}
    ended = [
        start(
            [sys.executable, *program, "one", "two"],
            env=environ,
            cwd=script.parent / "sub",
            input="in",
            capture_output=True,
            text=True,
        )
        for start in (subprocess.run, warm.run)
    ]
    usual, forked = ((done.returncode, done.stdout, done.stderr.splitlines()) for done in ended)
    assert usual[:2] == forked[:2]
    assert usual[2][0] == forked[2][0] and usual[2][-1] == forked[2][-1]


def test_it_is_a_child_that_hears_signals() -> None:
    command = [sys.executable, "-c", "import os, time; print(os.getpid(), os.getppid()); time.sleep(60)"]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == f"{process.pid} {os.getpid()}\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
