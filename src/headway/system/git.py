"""Reads git repositories without running anything that they configure.

The configuration of a repository names programs (filters, hooks, monitors, transports), and a repository may come from
anybody. So git reads objects, refs and index where they are, but takes the configuration from a private directory
(`GIT_COMMON_DIR`), which has nothing but `_KEPT_SETTINGS`. What users configured for themselves stays in force, such as
the filter of Git LFS. Remotes are unknown and no protocol is allowed: an object that a partial clone lacks is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, final

from headway.system import files
from headway.system.redact import redact

TIMEOUT_S = 10.0  # per git command: a work tree on a slow file system must not delay a run
LARGEST_COMPARED_BYTES = 10 << 20
_LINKED = ("info", "objects", "packed-refs", "refs", "reftable", "shallow")
"""what git needs of the directory that the worktrees of a repository share"""
_KEPT_SETTINGS = re.compile(
    rb"core\.(attributesfile|autocrlf|checkstat|eol|excludesfile|filemode|ignorecase|precomposeunicode"
    rb"|sparsecheckout|sparsecheckoutcone|symlinks|trustctime)"
    rb"|extensions\.(compatobjectformat|objectformat|refstorage)|index\.sparse"
)
"""settings of a repository that say how its files are stored; none of them runs anything"""
_OVERRIDES = (  # the user's own configuration must neither change what is read nor run a hook or a monitor
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.safecrlf=false",
    "core.quotePath=false",
    f"core.bigFileThreshold={LARGEST_COMPARED_BYTES}",  # a larger file is named, not compared: no gigabytes in memory
    "diff.autoRefreshIndex=false",  # `git diff` would write the index, whatever GIT_OPTIONAL_LOCKS says
    "diff.noprefix=false",
    "diff.mnemonicPrefix=false",
    "diff.relative=false",
    "diff.submodule=short",  # the other formats run git in the submodules
    "gc.auto=0",
    "safe.bareRepository=explicit",  # a clone can bring a bare repository along, as files of its work tree
)
_VARIABLES = {
    "GIT_ALLOW_PROTOCOL": "",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
_LOCATIONS = (  # git sets them for its hooks; they would lead to another repository
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_ATTR_SOURCE",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
)
_SEPARATORS = {"--stage": "\t", "-v": " "}
"""what separates a name from the facts before it, with these options of `git ls-files`"""


class GitFailure(Exception):
    """git cannot be started, refused, or took too long; the message is git's own."""


@final
@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository and its work tree; see `open_repository` and `create_repository`."""

    root: Path
    """the work tree"""
    git_dir: Path
    common_dir: Path | None = None
    """the private directory with the settings; None for a repository of our own"""
    index: Path | None = None
    """another index than the repository's own; see `without_marks`"""

    def ask(
        self,
        *command: str,
        timeout_s: float = TIMEOUT_S,
        given: bytes = b"",
        into: BinaryIO | None = None,
        status: int = 0,
    ) -> bytes:
        """Runs a git command in the work tree and returns its output, or writes it `into` a file.

        `given` is its standard input, and `status` a second exit status that is no failure.
        """
        variables = {"GIT_DIR": str(self.git_dir), "GIT_WORK_TREE": str(self.root)}
        if self.common_dir is not None:
            variables["GIT_COMMON_DIR"] = str(self.common_dir)
        if self.index is not None:
            variables["GIT_INDEX_FILE"] = str(self.index)
        return _run(self.root, command, variables, timeout_s, given=given, into=into, status=status)

    def list_files(self, *options: str, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Returns the names that `git ls-files` prints, each with what a format puts before it.

        A name that leaves the work tree is a `GitFailure`: git would read, and headway copy, whatever it leads to.
        """
        out = os.fsdecode(self.ask("ls-files", "-z", *options, timeout_s=timeout_s))
        separator = next((_SEPARATORS[option] for option in options if option in _SEPARATORS), None)
        entries = (entry.partition(separator) if separator else ("", "", entry) for entry in out.split("\0"))
        listed = {name: facts for facts, _, name in entries if name}
        if odd := next((name for name in listed if not _is_safe_name(name.removesuffix("/"))), None):
            raise GitFailure(
                f"its index has a file named {odd!r}, which git never writes: somebody tampered with it"
            )
        return listed

    def commit(self) -> str | None:
        """Returns the full hash of the commit that is checked out; None before the first one."""
        return self.ask("rev-parse", "--verify", "--quiet", "HEAD", status=1).decode().strip() or None

    def submodules(self, *, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Returns the path and the commit of each submodule."""
        listed = self.list_files("--stage", timeout_s=timeout_s)
        return {name: facts.split()[1] for name, facts in listed.items() if facts.startswith("160000 ")}


@contextmanager
def open_repository(directory: Path, *, timeout_s: float = TIMEOUT_S) -> Iterator[Repository]:
    """Opens the repository that a directory belongs to, to read it; `GitFailure` if there is none.

    >>> with open_repository(Path("src")) as repository:  # doctest: +SKIP
    ...     repository.root
    PosixPath('/home/me/project')
    """
    root = _path_of(directory, "--show-toplevel", timeout_s)
    if not directory.resolve().is_relative_to(root):  # its core.worktree leads elsewhere
        raise GitFailure(f"the work tree of its repository is {root}")
    git_dir = _path_of(directory, "--absolute-git-dir", timeout_s)
    settings = _run(directory, ("config", "-z", "--list"), {}, timeout_s)
    try:
        common = git_dir
        with suppress(FileNotFoundError):
            common = git_dir / os.fsdecode(files.read_regular(git_dir / "commondir")).rstrip("\n")
        private = tempfile.TemporaryDirectory(prefix="headway-git-")
    except OSError as error:
        raise GitFailure(f"{git_dir} could not be read: {error}") from error
    with private as name:
        try:
            for entry in filter(lambda entry: os.path.lexists(common / entry), _LINKED):
                (Path(name) / entry).symlink_to(common.resolve() / entry)
            (Path(name) / "config").write_bytes(_configuration(settings))
        except OSError as error:
            raise GitFailure(f"{git_dir} could not be linked in {name}: {error}") from error
        yield Repository(root=root, git_dir=git_dir, common_dir=Path(name))


@contextmanager
def open_submodule(
    outer: Repository, name: str, *, timeout_s: float = TIMEOUT_S
) -> Iterator[Repository | None]:
    """Opens a submodule by its name in the index; None if it is not checked out, or not a directory but a link."""
    root = outer.root / name
    if root.resolve() != root or not os.path.lexists(root / ".git"):
        yield None
        return
    with open_repository(root, timeout_s=timeout_s) as inner:
        if inner.root != root:  # git looked further up
            raise GitFailure(f"{root} is not a repository: {root / '.git'} is damaged")
        yield inner


@contextmanager
def without_marks(repository: Repository, *, timeout_s: float = TIMEOUT_S) -> Iterator[Repository]:
    """Yields the repository with an index in which no file on the disk has a mark that says not to look at it.

    `git update-index --assume-unchanged` and `--skip-worktree` set them, and git then never reports a change.
    """
    listed = repository.list_files("-v", timeout_s=timeout_s)
    marked = [name for name, mark in listed.items() if mark.islower() or mark == "S"]
    present = [os.fsencode(name) for name in marked if os.path.lexists(repository.root / name)]
    if not present:
        yield repository
        return
    with tempfile.TemporaryDirectory(prefix="headway-git-") as private:
        index = Path(private) / "index"
        try:
            shutil.copyfile(repository.git_dir / "index", index)
        except OSError as error:
            raise GitFailure(f"the index in {repository.git_dir} could not be copied: {error}") from error
        copied = replace(repository, index=index)
        for mark in ("--no-assume-unchanged", "--no-skip-worktree"):  # git clears one at a time
            copied.ask("update-index", mark, "-z", "--stdin", given=b"\0".join(present), timeout_s=timeout_s)
        yield copied


def create_repository(root: Path, *, commit: str) -> Repository:
    """Makes an empty repository in a directory, for a commit of this hash and what it refers to."""
    object_format = () if len(commit) == 40 else ("--object-format=sha256",)  # older versions lack the option
    _run(root, ("init", "--quiet", "--template=", *object_format), {}, TIMEOUT_S)
    return Repository(root=root, git_dir=root / ".git")


def _is_safe_name(name: str) -> bool:
    """Whether a name stays below the work tree, and outside `.git`. `git ls-files` prints whatever the index has."""
    parts = name.split("/")
    return all(part not in ("", ".", "..") and part.lower() != ".git" for part in parts)


def _path_of(directory: Path, option: str, timeout_s: float) -> Path:
    out = _run(directory, ("rev-parse", option), {}, timeout_s)
    return Path(os.fsdecode(out).removesuffix("\n"))


def _configuration(settings: bytes) -> bytes:
    """Returns the text of a configuration file with those settings that may be kept."""
    lines = [b"[core]", b"repositoryformatversion = 1", b"bare = false"]
    for setting in settings.split(b"\0"):
        name, has_value, value = setting.partition(b"\n")
        if _KEPT_SETTINGS.fullmatch(name):
            section, _, key = name.partition(b".")
            quoted = value if has_value else b"true"
            for plain, escaped in ((b"\\", b"\\\\"), (b'"', b'\\"'), (b"\n", b"\\n")):
                quoted = quoted.replace(plain, escaped)
            lines.append(b'[%s]\n%s = "%s"' % (section, key, quoted))
    return b"\n".join([*lines, b""])


def _run(
    directory: Path,
    command: tuple[str, ...],
    variables: dict[str, str],
    timeout_s: float,
    *,
    given: bytes = b"",
    into: BinaryIO | None = None,
    status: int = 0,
) -> bytes:
    overrides = [part for setting in _OVERRIDES for part in ("-c", setting)]
    environ = {name: value for name, value in os.environ.items() if name not in _LOCATIONS}
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *overrides, *command],
            env=environ | _VARIABLES | variables,
            input=given,
            stdout=subprocess.PIPE if into is None else into,
            stderr=subprocess.PIPE,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise GitFailure(f"git {command[0]} took longer than {timeout_s:g} s") from None
    except OSError as error:
        raise GitFailure(f"git could not be started: {error.strerror}") from error
    if done.returncode not in (0, status):
        complaint = done.stderr.decode(errors="backslashreplace").strip().removeprefix("fatal: ")
        raise GitFailure(
            redact(complaint.splitlines()[0])
            if complaint
            else f"git {command[0]} ended with status {done.returncode}"
        )
    return done.stdout or b""
