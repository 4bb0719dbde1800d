"""The code that a run was started from: git commit, branch, uncommitted changes.

Recording the code never fails a run: outside a repository, without git, or if git fails or takes too long, the note of
the state explains it. git only reads, and runs nothing that the repository configures (`system/git.py`).
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from headway.system import files
from headway.system.git import (
    LARGEST_COMPARED_BYTES,
    TIMEOUT_S,
    GitFailure,
    Repository,
    open_repository,
    open_submodule,
    without_marks,
)
from headway.system.redact import redact

_MOST_UNTRACKED = 200
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize (\d{1,18})\n"
)
_POINTER_BYTES = 200
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SourceState:
    """The state of the code in a directory, according to git."""

    commit: str | None = None
    """Full hash; None without a repository or before its first commit."""
    branch: str | None = None
    """None when no branch is checked out."""
    dirty: bool | None = None
    """Whether tracked files differ from the commit; None without a repository, or if git could not tell."""
    untracked: tuple[str, ...] = ()
    """Names of untracked files and directories, at most 200."""
    diff: str = ""
    """The tracked changes, with secrets redacted, cut at 10 MB."""
    note: str | None = None
    """Which fields are incomplete, and why."""


def describe(
    cwd: Path,
    *,
    timeout_s: float = TIMEOUT_S,
    longest_diff_bytes: int = LARGEST_COMPARED_BYTES,
    most_untracked: int = _MOST_UNTRACKED,
) -> SourceState:
    """Returns the state of the code in `cwd`; a longer diff or list of untracked names is cut.

    >>> describe(Path("/proc")).commit is None
    True
    """
    notes: list[str] = []
    try:
        with open_repository(cwd, timeout_s=timeout_s) as repository:
            commit = repository.commit()
            changes = _changes(repository, commit, timeout_s, notes)
    except GitFailure as failure:
        return SourceState(note=str(failure))
    if not commit:
        notes.append("no commit yet: the diff holds what is staged")
    if (length := len(changes.diff)) > longest_diff_bytes:
        notes.append(f"the diff is cut at {longest_diff_bytes} of {length} bytes")
    if (count := len(changes.untracked)) > most_untracked:
        notes.append(f"{most_untracked} of {count} untracked names kept")
    return SourceState(
        commit=commit,
        branch=changes.branch,
        dirty=changes.is_dirty or (None if changes.is_unknown else False),
        untracked=tuple(changes.untracked[:most_untracked]),
        diff=redact(changes.diff[:longest_diff_bytes].decode(errors="surrogateescape")),
        note="; ".join(notes) or None,
    )


@final
@dataclass(kw_only=True)
class _Changes:
    """What differs from the commit in a work tree and its submodules, by names below `prefix`."""

    prefix: str = ""
    branch: str | None = None
    is_dirty: bool = False
    is_unknown: bool = False
    """whether git could not tell of all files if they have changed"""
    untracked: list[str] = field(default_factory=list)
    diff: bytes = b""

    def read(self, entries: Iterable[bytes], same: Collection[bytes]) -> None:
        """Reads the output of `git status`; files that are the `same` do not count."""
        self.is_unknown = False
        for entry in entries:
            if entry.startswith(b"# branch.head "):
                branch = entry.removeprefix(b"# branch.head ").decode(errors="backslashreplace")
                self.branch = None if branch == "(detached)" else branch
            elif entry.startswith(b"? "):
                self.untracked.append(self.prefix + entry[2:].decode(errors="backslashreplace"))
            elif entry.startswith((b"1 ", b"u ")):
                self.is_dirty |= entry.split(b" ", 8)[-1] not in same

    def add(self, inner: _Changes) -> None:
        """Adds the changes of a submodule."""
        self.is_dirty |= inner.is_dirty
        self.is_unknown |= inner.is_unknown
        self.untracked += inner.untracked
        self.diff += inner.diff


def _changes(
    repository: Repository, commit: str | None, timeout_s: float, notes: list[str], prefix: str = ""
) -> _Changes:
    """Returns the changes of a work tree. Where git fails, a note says why, and the rest is returned.

    git itself would examine submodules by their own configuration, so each is opened as a repository of its own.
    """
    changes = _Changes(prefix=prefix, is_unknown=True)
    with _noting(notes, prefix), without_marks(repository, timeout_s=timeout_s) as marked:
        same: list[bytes] = []
        with _noting(notes, prefix):
            status = (
                "status",
                "--porcelain=v2",
                "--branch",
                "-z",
                "--ignore-submodules=dirty",
                "--no-renames",
            )
            entries = marked.ask(*status, timeout_s=timeout_s).split(b"\0")
            same = list(_unchanged_lfs_files(marked, entries, timeout_s))
            changes.read(entries, same)
        with _noting(notes, prefix):
            options = ("--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty")
            prefixes = (f"--src-prefix=a/{prefix}", f"--dst-prefix=b/{prefix}")
            left_out = (f":(exclude,literal,top){os.fsdecode(name)}" for name in same)
            base = "HEAD" if commit else "--cached"
            diff = ("diff", *options, *prefixes, base, "--", *left_out)
            changes.diff = marked.ask(*diff, timeout_s=timeout_s)
    with _noting(notes, prefix):
        for module in repository.submodules(timeout_s=timeout_s):
            inner_changes = _Changes(is_unknown=True)
            with _noting(notes, prefix), open_submodule(repository, module, timeout_s=timeout_s) as inner:
                inner_changes = (
                    _changes(inner, inner.commit(), timeout_s, notes, f"{prefix}{module}/")
                    if inner is not None
                    else _Changes()
                )
            changes.add(inner_changes)
    return changes


@contextmanager
def _noting(notes: list[str], prefix: str) -> Iterator[None]:
    try:
        yield
    except GitFailure as failure:
        notes.append(f"{prefix and f'{prefix}: '}{failure}")


def _unchanged_lfs_files(
    repository: Repository, entries: Sequence[bytes], timeout_s: float
) -> Iterator[bytes]:
    """Yields the files that differ from the index only because the filter of Git LFS did not run.

    `git lfs install --local` makes it a setting of the repository. The index has a file of three lines, with the size
    and the checksum of the content.
    """
    until = time.monotonic() + timeout_s
    fields = (entry.split(b" ", 8) for entry in entries if entry.startswith(b"1 .M N"))
    blobs = {name: blob for _, _, _, _, mode, on_disk, _, blob, name in fields if mode == on_disk}
    pointers = _small_blobs(repository, set(blobs.values()), timeout_s)
    for name, blob in blobs.items():
        if found := _POINTER.fullmatch(pointers.get(blob, b"")):
            checksum, size = found[1].decode(), int(found[2])
            if _has_content(repository.root, os.fsdecode(name), checksum, size, until):
                yield name


def _small_blobs(repository: Repository, ids: Collection[bytes], timeout_s: float) -> dict[bytes, bytes]:
    """Returns the content of those blobs that are small enough for a pointer of Git LFS."""
    if not ids:
        return {}
    lines = repository.ask("cat-file", "--batch-check", given=b"\n".join([*ids, b""]), timeout_s=timeout_s)
    facts = [line.split() for line in lines.splitlines()]
    small = [words[0] for words in facts if words[1] == b"blob" and int(words[2]) <= _POINTER_BYTES]
    content = repository.ask("cat-file", "--batch", given=b"\n".join([*small, b""]), timeout_s=timeout_s)
    blobs: dict[bytes, bytes] = {}
    while content:
        header, _, rest = content.partition(b"\n")
        blob, _, size = header.split()
        blobs[blob], content = rest[: int(size)], rest[int(size) + 1 :]
    return blobs


def _has_content(root: Path, name: str, checksum: str, size: int, until: float) -> bool:
    """Whether a file has this size and SHA-256; False if that is not known in time."""
    try:
        with files.open_tree(root) as tree, files.open_inside(tree, name) as file:
            if os.fstat(file.fileno()).st_size != size:
                return False
            digest = hashlib.sha256()
            while (block := file.read(_BLOCK_BYTES)) and time.monotonic() < until:
                digest.update(block)
    except OSError:
        return False  # it cannot be read, so nobody knows
    return digest.hexdigest() == checksum
