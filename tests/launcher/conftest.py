from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.dist.control.signals import STOP_REQUESTS
from headway.system.log import install_handler


def git(path: Path, *command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=path, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, untouched by the configuration of whoever runs the tests; we stand in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    (tmp_path / ".gitconfig").write_text(
        "[user]\nname = me\nemail = me@example.org\n[init]\ndefaultBranch = main\n[protocol.file]\nallow = always\n"
    )
    path = tmp_path / "project"
    path.mkdir()
    git(path, "init", "-q")
    (path / "train.py").write_text("import model\nprint('v1', model.size)\n")
    (path / "model.py").write_text("size = 1\n")
    git(path, "add", ".")
    git(path, "commit", "-qm", "first")
    monkeypatch.chdir(path)
    return path


@pytest.fixture(autouse=True)
def messages() -> None:
    """Messages go to standard error, as in every process that headway starts."""
    install_handler()


@pytest.fixture(autouse=True)
def _handlers_of_signals() -> Iterator[None]:
    """Programs of a job handle signals until their process ends; where a test calls one, the next test must not see."""
    before = {number: signal.getsignal(number) for number in (*STOP_REQUESTS, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
