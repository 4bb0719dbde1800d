from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headway.run.source import SourceState, describe


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, untouched by the configuration of whoever runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    path = tmp_path / "project"
    path.mkdir()
    (tmp_path / ".gitconfig").write_text(
        "[user]\nname = me\nemail = me@example.org\n[init]\ndefaultBranch = main\n"
    )
    git(path, "init", "-q")
    (path / "train.py").write_text("lr = 1\n")
    git(path, "add", ".")
    git(path, "commit", "-qm", "first")
    return path


def git(path: Path, *command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=path, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_clean_repository(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    assert describe(repository) == SourceState(commit=head, branch="main", dirty=False)


def test_changes_untracked_files_and_a_directory_below(repository: Path) -> None:
    (repository / "train.py").write_text("lr = 2\n")
    (repository / "notes with spaces é.txt").touch()
    (repository / "package").mkdir()
    (repository / "package" / "a.py").touch()
    state = describe(repository / "package")
    assert state.dirty
    assert "-lr = 1\n+lr = 2\n" in state.diff
    assert state.diff.startswith("diff --git a/train.py b/train.py")
    assert state.untracked == ("notes with spaces é.txt", "package/")
    assert state.note is None


def test_detached_head_and_staged_change(repository: Path) -> None:
    git(repository, "checkout", "-q", "--detach")
    (repository / "train.py").write_text("lr = 2\n")
    git(repository, "add", ".")
    state = describe(repository)
    assert (state.branch, state.dirty) == (None, True)
    assert "+lr = 2" in state.diff


def test_repository_without_commits(repository: Path) -> None:
    git(repository, "update-ref", "-d", "HEAD")
    state = describe(repository)
    assert (state.commit, state.branch, state.dirty) == (None, "main", True)
    assert "+lr = 1" in state.diff
    assert state.note and "no commit yet" in state.note


def test_outside_a_repository(tmp_path: Path) -> None:
    state = describe(tmp_path)
    assert state.commit is None and not state.dirty and state.diff == ""
    assert state.note and "not a git repository" in state.note


def test_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert describe(repository).note == "git could not be started: No such file or directory"


def test_a_git_that_hangs(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert describe(repository, timeout_s=0.3).note == "git rev-parse took longer than 0.3 s"


def test_repository_of_another_user_is_a_note(repository: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a repository away")
    os.chown(repository, 65534, 65534)
    os.chown(repository / ".git", 65534, 65534)
    state = describe(repository)
    assert state.commit is None
    assert state.note and "dubious ownership" in state.note


def test_odd_configuration_changes_nothing_and_runs_nothing(repository: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for name, value in {
        "diff.external": f"touch {marker}",
        "core.fsmonitor": f"touch {marker}",
        "core.pager": f"touch {marker}",
        "diff.noprefix": "true",
        "color.ui": "always",
        "status.showUntrackedFiles": "all",
        "diff.odd.textconv": f"touch {marker};",
    }.items():
        git(repository, "config", name, value)
    (repository / ".gitattributes").write_text("*.py diff=odd\n")
    (repository / "train.py").write_text("lr = 2\n")
    state = describe(repository)
    assert state.diff.startswith("diff --git a/train.py b/train.py")
    assert "\n+lr = 2\n" in state.diff
    assert state.untracked == (".gitattributes",)
    assert not marker.exists()


def test_variables_of_a_hook_do_not_lead_astray(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert describe(repository).commit is not None


def test_nothing_is_written(repository: Path) -> None:
    os.utime(repository / "train.py", (1e9, 1e9))  # makes git want to refresh its index
    before = {path: path.stat().st_mtime_ns for path in repository.rglob("*")}
    assert not describe(repository).dirty
    assert {path: path.stat().st_mtime_ns for path in repository.rglob("*")} == before


def test_much_is_cut_and_said_to_be(repository: Path) -> None:
    (repository / "train.py").write_text("x\n" * 1000)
    for number in range(5):
        (repository / f"new-{number}").touch()
    state = describe(repository, longest_diff_bytes=100, most_untracked=2)
    assert len(state.diff) == 100
    assert len(state.untracked) == 2
    assert state.note and "diff is cut at 100 of" in state.note and "2 of 5 untracked" in state.note


def test_bytes_of_any_encoding_survive(repository: Path) -> None:
    (repository / "train.py").write_bytes(b"name = 'M\xfcller'\n")
    assert b"+name = 'M\xfcller'\n" in describe(repository).diff.encode(errors="surrogateescape")


def test_a_huge_file_is_named_not_compared(repository: Path) -> None:
    (repository / "train.py").write_text("a line of text\n" * 800_000)
    assert "Binary files a/train.py and b/train.py differ" in describe(repository).diff


def test_secrets_in_the_diff(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "canary-in-env")
    (repository / "train.py").write_text('api_key = "canary-by-name"\nx = "canary-in-env"\n')
    assert "canary" not in describe(repository).diff


def test_read_only_repository_without_a_home(
    repository: Path, run_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "train.py").write_text("lr = 2\n")
    monkeypatch.delenv("HOME")
    subprocess.run(["chmod", "-R", "a-w", repository], check=True)
    code = "from headway.run.source import *; print(describe(Path('.')))"
    try:
        done = run_python(code, cwd=repository, bound=True)
    finally:
        subprocess.run(["chmod", "-R", "u+w", repository], check=True)
    assert "branch='main', dirty=True" in done.stdout and "note=None" in done.stdout
