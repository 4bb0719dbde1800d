"""The code that a run was started from: git commit, branch, uncommitted changes.

Recording the code never fails a run: outside a repository, without git, or if git fails or takes too long, the note of
the state explains it. git only reads: no index refresh, no monitor hook, no external diff.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from headway.system.redact import redact

_TIMEOUT_S = 10.0  # per git command: a work tree on a slow file system must not delay a run
_LONGEST_DIFF_BYTES = 10 << 20
_MOST_UNTRACKED = 200
_HOOK_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
_SETTINGS = (  # the user's configuration must neither change what we read nor run a program
    "core.fsmonitor=false",
    "core.safecrlf=false",
    "core.quotePath=false",
    f"core.bigFileThreshold={_LONGEST_DIFF_BYTES}",  # a larger file is named, not compared: no gigabytes in memory
    "diff.autoRefreshIndex=false",  # `git diff` would write the index, whatever GIT_OPTIONAL_LOCKS says
    "diff.noprefix=false",
    "diff.mnemonicPrefix=false",
    "diff.relative=false",
)


@dataclass(frozen=True, kw_only=True)
class SourceState:
    """The state of the code in a directory, according to git."""

    commit: str | None = None
    """Full hash; None without a repository or before its first commit."""
    branch: str | None = None
    """None when no branch is checked out."""
    dirty: bool = False
    """Whether tracked files differ from the commit."""
    untracked: tuple[str, ...] = ()
    """Names of untracked files and directories, at most 200."""
    diff: str = ""
    """The tracked changes, with secrets redacted, cut at 10 MB."""
    note: str | None = None
    """Which fields are incomplete, and why."""


@dataclass(frozen=True, kw_only=True)
class GitAnswer:
    """The output of a git command; `trouble` is why there is none."""

    out: bytes = b""
    code: int = 0
    trouble: str | None = None


def describe(
    cwd: Path,
    *,
    timeout_s: float = _TIMEOUT_S,
    longest_diff_bytes: int = _LONGEST_DIFF_BYTES,
    most_untracked: int = _MOST_UNTRACKED,
) -> SourceState:
    """Returns the state of the code in `cwd`; a longer diff or list of untracked names is cut.

    >>> describe(Path("/proc")).commit is None
    True
    """
    head = git(cwd, "rev-parse", "--verify", "--quiet", "HEAD", timeout_s=timeout_s)
    if head.trouble:
        return SourceState(note=head.trouble)
    commit = head.out.decode().strip() or None
    status = git(cwd, "status", "--porcelain=v2", "--branch", "-z", timeout_s=timeout_s)
    options = ("--no-ext-diff", "--no-textconv", "--no-color", "HEAD" if commit else "--cached")
    diff = git(cwd, "diff", *options, timeout_s=timeout_s)
    length = len(diff.out)
    lines = status.out.decode(errors="backslashreplace").split("\0")
    branch = next((line[14:] for line in lines if line.startswith("# branch.head ")), "(detached)")
    untracked = [line[2:] for line in lines if line.startswith("? ")]
    notes = (
        status.trouble,
        diff.trouble,
        "" if commit else "no commit yet: the diff holds what is staged",
        f"the diff is cut at {longest_diff_bytes} of {length} bytes" if length > longest_diff_bytes else "",
        f"{most_untracked} of {len(untracked)} untracked names kept"
        if len(untracked) > most_untracked
        else "",
    )
    return SourceState(
        commit=commit,
        branch=None if branch == "(detached)" else branch,
        dirty=any(line.startswith(("1 ", "2 ", "u ")) for line in lines),
        untracked=tuple(untracked[:most_untracked]),
        diff=redact(diff.out[:longest_diff_bytes].decode(errors="surrogateescape")),
        note="; ".join(filter(None, notes)) or None,
    )


def git(cwd: Path, *command: str, timeout_s: float = _TIMEOUT_S) -> GitAnswer:
    """Runs a git command in `cwd`; it never raises: the answer has the error.

    >>> "not a git repository" in str(git(Path("/proc"), "rev-parse", "HEAD").trouble)
    True
    """
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    environ = {name: value for name, value in os.environ.items() if name not in _HOOK_VARIABLES}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(cwd), *settings, *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return GitAnswer(trouble=f"git {command[0]} took longer than {timeout_s:g} s")
    except OSError as error:
        return GitAnswer(trouble=f"git could not be started: {error.strerror}")
    complaint = done.stderr.decode(errors="backslashreplace").strip().removeprefix("fatal: ")
    if done.returncode and complaint:
        return GitAnswer(code=done.returncode, trouble=redact(complaint.splitlines()[0]))
    return GitAnswer(out=done.stdout, code=done.returncode)
