"""What code a run was started from: git commit, branch, uncommitted changes.

Recording the code never fails a run: outside a repository, without git, or when git refuses or takes too
long, the state says so in its note. git only reads: no index refresh, no monitor hook, no external diff.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from headway.system.redact import redact

_PATIENCE = 10.0  # seconds per git command: a work tree on a slow file system must not hold up a run
_MOST_DIFF = 10 * 1024 * 1024  # bytes
_MOST_UNTRACKED = 200  # names
_HOOK_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
_UNTROUBLED = (  # a user's configuration must not change what we read or run a program while we read
    "core.fsmonitor=false",
    "core.safecrlf=false",
    "core.quotePath=false",
    f"core.bigFileThreshold={_MOST_DIFF}",  # a larger file is named, not compared: no gigabytes in memory
    "diff.autoRefreshIndex=false",  # `git diff` would write the index, whatever GIT_OPTIONAL_LOCKS says
    "diff.noprefix=false",
    "diff.mnemonicPrefix=false",
    "diff.relative=false",
)


@dataclass(frozen=True, kw_only=True)
class SourceState:
    """The code in a directory, as far as git knows it."""

    commit: str | None = None
    """Full hash; None without a repository or before its first commit."""
    branch: str | None = None
    """None when no branch is checked out."""
    dirty: bool = False
    """Whether tracked files differ from the commit."""
    untracked: tuple[str, ...] = ()
    """Names of what git does not know, a directory as one name, at most 200."""
    diff: str = ""
    """The tracked changes, with secrets redacted, cut at 10 MB."""
    note: str | None = None
    """What is missing above, and why."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What git said; `trouble` is why it could not."""

    out: bytes = b""
    code: int = 0
    trouble: str | None = None


def describe(cwd: Path) -> SourceState:
    """Asks git about the code in `cwd`.

    >>> describe(Path("/proc")).commit is None
    True
    """
    head = git(cwd, "rev-parse", "--verify", "--quiet", "HEAD")
    if head.trouble:
        return SourceState(note=head.trouble)
    commit = head.out.decode().strip() or None
    status = git(cwd, "status", "--porcelain=v2", "--branch", "-z")
    diff = git(cwd, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD" if commit else "--cached")
    lines = status.out.decode(errors="backslashreplace").split("\0")
    branch = next((line[14:] for line in lines if line.startswith("# branch.head ")), "(detached)")
    untracked = [line[2:] for line in lines if line.startswith("? ")]
    notes = (
        status.trouble,
        diff.trouble,
        "" if commit else "no commit yet: the diff holds what is staged",
        f"the diff is cut at {_MOST_DIFF} of {len(diff.out)} bytes" if len(diff.out) > _MOST_DIFF else "",
        f"{_MOST_UNTRACKED} of {len(untracked)} untracked names kept"
        if len(untracked) > _MOST_UNTRACKED
        else "",
    )
    return SourceState(
        commit=commit,
        branch=None if branch == "(detached)" else branch,
        dirty=any(line.startswith(("1 ", "2 ", "u ")) for line in lines),
        untracked=tuple(untracked[:_MOST_UNTRACKED]),
        diff=redact(diff.out[:_MOST_DIFF].decode(errors="surrogateescape")),
        note="; ".join(filter(None, notes)) or None,
    )


def git(cwd: Path, *command: str, patience: float | None = None) -> Answer:
    """One git command in `cwd`, given `patience` seconds; whatever goes wrong is part of the answer.

    >>> "not a git repository" in str(git(Path("/proc"), "rev-parse", "HEAD").trouble)
    True
    """
    patience = _PATIENCE if patience is None else patience
    settings = [part for setting in _UNTROUBLED for part in ("-c", setting)]
    environ = {name: value for name, value in os.environ.items() if name not in _HOOK_VARIABLES}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(cwd), *settings, *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(trouble=f"git {command[0]} took longer than {patience:g} s")
    except OSError as error:
        return Answer(trouble=f"git could not be started: {error.strerror}")
    complaint = done.stderr.decode(errors="backslashreplace").strip().removeprefix("fatal: ")
    if done.returncode and complaint:
        return Answer(code=done.returncode, trouble=redact(complaint.splitlines()[0]))
    return Answer(out=done.stdout, code=done.returncode)
