"""The processes behind `@ranks` end with pytest, however pytest ends, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import EXIT_LIMIT_S, wait_until

pytestmark = pytest.mark.timeout(300)

_TEST = """
import os, subprocess, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
import headway
from headway.testing import ranks

@ranks(2)
def test_idle_group_stays():
    Path(f"idle-{headway.rank()}").write_text(str(os.getpid()))

@ranks(1)
def test_waits():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path("child").write_text(str(child.pid))
    memory = SharedMemory(create=True, size=64)
    Path("memory").write_text(memory.name)
    Path("busy-0").write_text(str(os.getpid()))
    Path("ready").touch()
    if not Path("quick").exists():
        time.sleep(600)
    memory.close()
    memory.unlink()
    child.kill()
    child.wait()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "test_it.py").write_text(_TEST)
    return tmp_path


def _start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir=.", "-p", "no:cacheprovider"]
    command += ["-p", "headway.testing.plugin"]
    only_ours = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
    }  # plugins that have no part in this take seconds to import
    return subprocess.Popen(
        [*command, "test_it.py"],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder / "tmp")} | only_ours,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _check_nothing_is_left(folder: Path) -> None:
    pids = [int((folder / name).read_text()) for name in ("idle-0", "idle-1", "busy-0", "child")]
    assert len(set(pids)) == 4
    memory = Path("/dev/shm", (folder / "memory").read_text())
    wait_until(
        lambda: not (any(map(psutil.pid_exists, pids)) or memory.exists()),
        "all processes and their shared memory are gone",
        timeout_s=EXIT_LIMIT_S,
        explain=lambda: f"processes {pids}, shared memory: {memory.exists()}",
    )
    allowed = (
        "pytest-of-",
        "torchinductor_",
    )  # the latter comes with torch's compiler, and so with any optimizer
    assert [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(allowed)] == []


def test_nothing_is_left_when_all_is_done(folder: Path) -> None:
    (folder / "quick").touch()
    with _start(folder) as session:
        assert "2 passed" in session.communicate(timeout=120)[0]
    _check_nothing_is_left(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_pytest_is_ended(folder: Path, number: signal.Signals) -> None:
    with _start(folder) as session:
        wait_until(lambda: (folder / "ready").exists() or session.poll() is not None, "the test runs")
        assert session.poll() is None, session.communicate()[0]
        session.send_signal(number)
        session.communicate(timeout=180)
    if number == signal.SIGINT:
        assert session.returncode == pytest.ExitCode.INTERRUPTED
    else:
        assert session.returncode == -number
    _check_nothing_is_left(folder)
