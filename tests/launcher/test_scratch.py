"""The folders of node agents in /tmp: none outlives its agent for long."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headway.errors import StorageError
from headway.launcher.agent.agent import Agent
from headway.launcher.agent.scratch import scratch_directory

HOLD = """if True:
    import sys
    from headway.launcher.agent.scratch import scratch_directory
    with scratch_directory() as folder:
        (folder / "round-0").mkdir()
        print(folder, flush=True)
        sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # Python remembers its first answer
    return tmp_path


def holder() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    os.utime(folder, (0, 0))  # long ago
    return process, folder


def test_the_next_agent_removes_what_a_killed_one_left(tmp: Path) -> None:
    (killed, left), (living, kept) = holder(), holder()
    killed.kill()
    killed.communicate()
    young = tmp / "headway-agent-young"
    young.mkdir()
    foreign = tmp / "headway-trace-1"
    foreign.mkdir()
    os.utime(foreign, (0, 0))
    (tmp / "headway-agent-link").symlink_to(foreign)
    assert left.exists()
    with scratch_directory() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert not left.exists() and kept.exists() and young.exists() and foreign.exists()
    assert not folder.exists()
    living.communicate("")
    assert not kept.exists()


def test_what_belongs_to_others_is_left_alone(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp / "headway-agent-theirs"
    theirs.mkdir()
    os.utime(theirs, (0, 0))
    monkeypatch.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
    with scratch_directory():
        assert theirs.exists()


def test_an_agent_leaves_nothing(tmp: Path) -> None:
    assert Agent([sys.executable, "-c", "raise SystemExit(3)"], nproc=1).run() == 3
    assert [path.name for path in tmp.iterdir()] == []


def test_no_directory_for_temporary_files_is_an_error_of_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with pytest.raises(StorageError, match="No usable temporary directory"), scratch_directory():
        pass
