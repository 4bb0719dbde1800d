"""The end of the output under `headway run`: the first cause comes last, for any script, and a terminal stays one.

Most ranks here are a few lines of Python that write what torch would.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_until

from headway.launcher.agent.agent import Agent
from headway.launcher.agent.stderr import RankStderr, error_line, is_echo_of_another

FULL = os.environ.get("HEADWAY_FAULTS") == "full"
TOP = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
GONE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9"
def abort_in_teardown():
    sys.stderr.write("terminate called without an active exception\\n")
    sys.stderr.flush()
    os.abort()
def fail():
    raise ValueError("the cause")
"""


@pytest.fixture
def last_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs these lines as ranks, and returns the output from where headway says why the ranks ended."""

    def run(lines: str, *, nproc: int = 2) -> list[str]:
        script = tmp_path / "train.py"
        script.write_text(TOP + lines)
        code = Agent([sys.executable, str(script)], nproc=nproc, cwd=str(tmp_path), grace_s=5.0).run()
        assert code == 1
        text = capfd.readouterr().err
        assert "GONE" not in text.replace("raise RuntimeError(GONE)", "")
        return text[text.rindex("\nheadway: ") + 1 :].splitlines()

    return run


LastLines = Callable[..., list[str]]


def test_the_first_cause_is_last_though_its_rank_ends_later_and_by_a_signal(last_lines: LastLines) -> None:
    """torch's teardown aborts the interpreter that has raised, which may take longer than another rank's echo."""
    found = last_lines("""
if rank == 1:
    import atexit
    atexit.register(abort_in_teardown)
    atexit.register(time.sleep, 1)
    fail()
time.sleep(0.5)
raise RuntimeError(GONE)
""")
    assert re.fullmatch(r"headway: rank 1 of 2 on \S+ \(pid \d+\) failed", found[0])
    assert found[2] == "Traceback (most recent call last):"
    assert found[-1] == "ValueError: the cause"


def test_of_two_causes_the_first_counts_with_what_led_to_it(last_lines: LastLines) -> None:
    found = last_lines("""
if rank == 0:
    time.sleep(0.5)
    raise KeyError("later")
try:
    fail()
except ValueError as error:
    raise OSError("what follows") from error
""")
    assert "rank 1 of 2" in found[0]
    assert found.count("Traceback (most recent call last):") == 2
    assert "ValueError: the cause" in found and found[-1] == "OSError: what follows"


@pytest.mark.parametrize("end", ["sys.exit(0)", "abort_in_teardown()"])
def test_a_rank_that_leaves_early_is_named_below_the_echo(end: str, last_lines: LastLines) -> None:
    found = last_lines(f"""
if rank == 1:
    {end}
time.sleep(0.5)
raise RuntimeError(GONE)
""")
    assert len(found) == 1 and "rank 1 of 2" in found[0], found
    assert found[0].endswith("ended early (it returned, or called sys.exit) while the others still worked")


def test_a_crash_without_a_traceback_shows_the_end_of_its_own_output(last_lines: LastLines) -> None:
    found = last_lines("""
if rank == 0:
    time.sleep(0.3)
    raise RuntimeError(GONE)
print("caught before: Traceback (most recent call last):", file=sys.stderr)
print("what(): 8 vs 4. Mismatch?", file=sys.stderr)
signal.raise_signal(signal.SIGSEGV)
""")
    assert found[0].endswith("crashed in native code (SIGSEGV)"), found
    assert found[-1] == "what(): 8 vs 4. Mismatch?"


def test_a_traceback_that_a_script_has_logged_long_ago_is_not_the_cause() -> None:
    logged = b"Traceback (most recent call last):\n  File 'a'\nOSError: tried again\n"
    rank = RankStderr(descriptor=-1, tail=logged + b"step\n" * 50)
    assert rank.traceback() is None
    rank.add(
        b"[rank3]: Traceback (most recent call last):\r\n[rank3]:   File 'a'\r\n[rank3]: ValueError: x\r\n"
    )
    found = rank.traceback()
    assert found == "Traceback (most recent call last):\n  File 'a'\nValueError: x"
    assert error_line(found) == "ValueError: x"
    assert not is_echo_of_another(found)
    assert is_echo_of_another(
        found.replace("ValueError: x", "torch.distributed.DistBackendError: NCCL socket timeout")
    )


@pytest.mark.skipif(not FULL, reason="imports torch in four new interpreters")
@pytest.mark.parametrize("end", ["raise ValueError('the cause')", "sys.exit(0)"])
def test_of_real_gloo_ranks(end: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"""
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(100):
    if step == 5 and dist.get_rank() == 1: {end}
    dist.all_reduce(torch.ones(10))
""")
    command = [sys.executable, "-m", "headway", "run", "--nproc", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert last == "ValueError: the cause" or ("rank 1 of 2" in last and "ended early" in last), done.stderr


# --- terminals


class Terminal:
    """`headway run` at a terminal, in which a test can type."""

    def __init__(self, directory: Path, lines: str, *options: str) -> None:
        (directory / "train.py").write_text(lines)
        self.pid, self.descriptor = pty.fork()
        if not self.pid:
            os.chdir(directory)
            os.execv(sys.executable, [sys.executable, "-m", "headway", "run", *options, "train.py"])
        os.set_blocking(self.descriptor, False)
        self.screen = ""

    def shows(self, words: str) -> None:
        def look() -> bool:
            with suppress(OSError):
                self.screen += os.read(self.descriptor, 1 << 16).decode(errors="replace")
            return words in self.screen

        wait_until(look, f"the screen shows {words!r}", explain=lambda: self.screen)

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def status(self, options: int = 0) -> int:
        """The status of the command, once it has one; with WUNTRACED also if it is stopped."""
        status = wait_until(lambda: os.waitpid(self.pid, options | os.WNOHANG), "it ends", explain=self.read)
        while status == (0, 0):
            time.sleep(0.05)
            status = os.waitpid(self.pid, options | os.WNOHANG)
        return status[1]

    def read(self) -> str:
        with suppress(OSError):
            self.screen += os.read(self.descriptor, 1 << 16).decode(errors="replace")
        return self.screen


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(lines: str, *options: str) -> Terminal:
        opened.append(Terminal(tmp_path, lines, *options))
        return opened[-1]

    yield start
    for each in opened:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)
        os.close(each.descriptor)


def test_one_process_has_the_terminal_as_without_headway(terminal: Callable[..., Terminal]) -> None:
    one = terminal("""
import sys
print("tty", *(each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr)))
while True:
    print("read", input())
""")
    one.shows("tty True True True")
    one.type("first\n")
    one.shows("read first")
    one.type("\x1a")  # Ctrl-Z
    assert os.WIFSTOPPED(one.status(os.WUNTRACED)), "the shell shows its prompt"
    os.kill(one.pid, signal.SIGCONT)
    one.type("second\n")
    one.shows("read second")
    one.type("\x03")  # Ctrl-C
    assert os.waitstatus_to_exitcode(one.status()) == 130


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("1 / 0", 1)]
)
def test_one_process_reads_a_pipe_and_ends_with_its_own_code(end: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import os, sys\nprint(sys.stdin.read())\n{end}\n")
    command = [sys.executable, "-m", "headway", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, input="given", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "given\n")


def test_several_processes_keep_colors_and_progress_bars(terminal: Callable[..., Terminal]) -> None:
    one = terminal(
        """
import os, sys
assert sys.stderr.isatty() and not sys.stdin.isatty()
sys.stderr.write(f"\\x1b[31mrank {os.environ['RANK']}\\r\\n")
""",
        "--nproc",
        "2",
    )
    one.shows("rank 0")
    one.shows("rank 1")
    assert os.waitstatus_to_exitcode(one.status()) == 0
    assert "\x1b[31m" in one.screen and "\r\r" not in one.screen.replace("\r\r\n", "\r\n")
