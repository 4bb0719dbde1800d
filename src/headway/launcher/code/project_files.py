"""Selects the files that are the code of a run.

In a git work tree these are the files that git tracks, submodules included, as they are on the disk now, and those
untracked files that the code may need: small sources and settings. Elsewhere it is the directory without caches,
results and data. Files that are left out are listed, so that nobody learns from a failed job that `data/` was missing.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePath
from typing import TypeVar, final

from headway.errors import UsageError
from headway.run import has_info
from headway.system.git import GitFailure, Repository, open_repository, open_submodule
from headway.system.text import format_bytes

GIT_TIMEOUT_S = 120.0
"""git may take long in a large work tree, and no submission works without its answer"""
_UNTRACKED_MAX_BYTES = 1 << 20
"""size of a file that git does not track; a larger one is hardly source code"""
_MAX_NAMED = 50
_MAX_FILES = 50_000
_IMPORTABLE = re.compile(r"\.(py|pyi|so)")
_SOURCE = re.compile(
    r"\.(py|pyi|so|pyx|ipynb|c|cc|cpp|cu|cuh|h|hpp|sh|yaml|yml|json|toml|cfg|conf|ini|csv|txt|jinja|j2)"
)
_NOISE = re.compile(
    r"\.(git|hg|svn|venv|tox|nox|eggs|idea|vscode|DS_Store|ipynb_checkpoints|(mypy|ruff|pytest)_cache)"
    r"|__pycache__|node_modules|.*\.(pyc|egg-info)"
)
_RESULTS = re.compile(
    "build|checkpoints|data|datasets|dist|lightning_logs|logs|mlruns|outputs|runs|tmp|wandb"
)
T = TypeVar("T")

_CLOSED = "no permission to read it"


@final
@dataclass(frozen=True, kw_only=True)
class ProjectFiles:
    """The files to copy, by their names below `root`, and what a user should know about them."""

    root: Path
    commit: str | None = None
    names: tuple[str, ...]
    added: tuple[str, ...] = ()
    """the names that git does not track"""
    generated: tuple[str, ...] = ()
    """those of them that git ignores: nobody can commit them"""
    left_out: tuple[str, ...] = ()
    """the names that are not copied, each with the reason"""
    submodules: dict[str, str] = field(default_factory=dict)
    note: str | None = None

    @property
    def named_left_out(self) -> list[str]:
        """The first names that are not copied, and how many more there are."""
        names = sorted(self.left_out)
        more = len(names) - _MAX_NAMED
        return [*names[:_MAX_NAMED], *([f"and {more} more"] if more > 0 else [])]

    def without_generated(self) -> ProjectFiles:
        """Returns the files without those that git ignores, which no commit has."""
        generated = set(self.generated)
        return replace(
            self,
            names=tuple(name for name in self.names if name not in generated),
            added=tuple(name for name in self.added if name not in generated),
            generated=(),
            left_out=(*self.left_out, *(f"{name} (ignored by git)" for name in self.generated)),
        )

    def check_size(self, limit_bytes: int) -> None:
        """Refuses to copy files that are too large, or too many, to be code."""
        sizes = {name: os.lstat(self.root / name).st_size for name in self.names}
        if sum(sizes.values()) > limit_bytes or len(sizes) > _MAX_FILES:
            largest = max(sizes, key=lambda name: sizes[name])
            raise UsageError(
                f"the code in {self.root} has more than the {format_bytes(limit_bytes)} or {_MAX_FILES} files that a "
                f"copy may have (largest: {largest}, {format_bytes(sizes[largest])}): keep data elsewhere, or run the "
                "code where it is with --dirty live"
            )


def gather(script: Path, *, limit: int) -> ProjectFiles:
    """Returns the code that `script` belongs to, which may be a directory to start a module in. `limit` is in bytes.

    >>> gather(Path("train.py"), limit=10**9).root
    PosixPath('/home/me/project')
    """
    directory = script if script.is_dir() else script.parent
    try:
        with open_repository(directory) as repository:
            if _is_home(repository.root):
                raise GitFailure(f"the repository is all of {repository.root}")
            code = _work_tree(repository)
    except GitFailure as failure:
        return _directory(directory, limit, note=str(failure))
    if script.is_file():
        code = _with_script(code, str(script.relative_to(code.root)))
    code.check_size(limit)
    return code


def is_noise(name: str) -> bool:
    """Whether a name is that of a cache, an environment or a repository, which nobody runs or reads."""
    return _NOISE.fullmatch(name) is not None


def is_importable(entry: os.DirEntry[str]) -> bool:
    """Whether a file or directory is Python code."""
    is_module = _IMPORTABLE.fullmatch(PurePath(entry.name).suffix) is not None
    return is_module or os.path.lexists(f"{entry.path}/__init__.py")


def _with_script(code: ProjectFiles, name: str) -> ProjectFiles:
    """Adds a script that git ignores: it is code nevertheless, and not generated."""
    if name not in code.names:
        code = replace(code, names=(*code.names, name), added=(*code.added, name))
    return replace(code, generated=tuple(each for each in code.generated if each != name))


def _work_tree(repository: Repository) -> ProjectFiles:
    """Returns the files that git tracks, and the new files that matter; submodules are work trees, too."""
    root = repository.root
    modules = _asked(repository, lambda: repository.submodules(timeout_s=GIT_TIMEOUT_S))
    names = {name for name in _names(repository, "--cached") if name not in modules}
    names, left_out = _files_on_disk(root, names)
    added, generated, unwanted = _new_files(repository)
    left_out += unwanted
    for module in modules:
        try:
            with open_submodule(repository, module) as opened:
                inner = opened and _work_tree(opened)
        except GitFailure as failure:
            left_out.append(f"{module}/ ({failure})")
            continue
        if inner is None:
            left_out.append(f"{module}/ (a submodule that is not checked out)")
            continue
        names |= {f"{module}/{name}" for name in inner.names}
        added += [f"{module}/{name}" for name in inner.added]
        generated += [f"{module}/{name}" for name in inner.generated]
        left_out += [f"{module}/{name}" for name in inner.left_out]
    return ProjectFiles(
        root=root,
        commit=_asked(repository, repository.commit),
        names=tuple(sorted(names | set(added))),
        added=tuple(sorted(added)),
        generated=tuple(sorted(generated)),
        left_out=tuple(left_out),
        submodules=modules,
    )


def _files_on_disk(root: Path, names: Iterable[str]) -> tuple[set[str], list[str]]:
    """Returns those of the tracked names that are files or links now; others are deleted, and that is not yet
    committed. What took the place of a file, such as a pipe, is named with the reason."""
    # a directory that became a link leads to other files
    is_link = cache(lambda directory: (root / directory).is_symlink())
    found: set[str] = set()
    left_out: list[str] = []
    for name in names:
        if any(map(is_link, PurePath(name).parents)):
            continue
        with suppress(FileNotFoundError, NotADirectoryError):
            mode = (root / name).lstat().st_mode
            if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
                found.add(name)
            else:
                left_out.append(f"{name}{'/ ' if stat.S_ISDIR(mode) else ' '}(not a file)")
    return found, left_out


def _new_files(repository: Repository) -> tuple[list[str], list[str], list[str]]:
    """Returns the untracked files that the code may need, those of them that git ignores, and the rest with reasons."""
    root = repository.root
    is_run = cache(lambda directory: has_info(root / directory))
    verdicts: dict[str, str | None] = {}  # why a name is left out; None: it is copied
    ignored: set[str] = set()
    for name in _names(repository, "--others", "--exclude-standard"):
        if not any(map(is_run, PurePath(name).parents)):
            verdicts[name] = _why_not(root / name, _SOURCE, "not tracked by git")
    for name in _names(repository, "--others", "--ignored", "--exclude-standard", "--directory"):
        hidden_directory = name.startswith(".") and name.endswith("/")  # caches of tools
        noise = hidden_directory or any(map(is_noise, PurePath(name).parts))
        if noise:
            continue
        if name.endswith("/") and not _may_read(root / name):
            verdicts[name] = _CLOSED
        elif not (root / name / "pyvenv.cfg").exists():
            # a generated _version.py or a compiled extension is needed, even if git ignores it
            verdicts[name] = _why_not(root / name, _IMPORTABLE, "ignored by git")
            ignored.add(name)
    added = [name for name, reason in verdicts.items() if reason is None]
    left_out = [f"{name} ({reason})" for name, reason in verdicts.items() if reason]
    return added, [name for name in added if name in ignored], left_out


def _why_not(path: Path, suffixes: re.Pattern[str], reason: str) -> str | None:
    if path.is_symlink() or not path.is_file() or not suffixes.fullmatch(path.suffix):
        return reason
    size = path.stat().st_size
    return f"{reason}, and {format_bytes(size)} large" if size > _UNTRACKED_MAX_BYTES else None


def _directory(directory: Path, limit: int, *, note: str) -> ProjectFiles:
    """Returns a directory without caches, results and data; of a home directory, only the files beside the script."""
    root = _project_root(directory)
    names: list[str] = []
    left_out: list[str] = []
    total = 0

    def walk(inside: Path) -> None:
        nonlocal total
        for path in sorted(inside.iterdir()):
            name = str(path.relative_to(root))
            if total > limit or len(names) > _MAX_FILES:
                return  # it is refused anyway: do not walk through a whole dataset first
            if is_noise(path.name):
                continue
            if path.is_symlink() or path.is_file():
                if not _is_home(root) or _SOURCE.fullmatch(path.suffix):
                    names.append(name)
                    total += path.lstat().st_size
            elif not path.is_dir():
                left_out.append(f"{name} (not a file)")
            elif reason := _not_code(path):
                left_out.append(f"{name}/ ({reason})")
            else:
                walk(path)

    walk(root)
    code = ProjectFiles(root=root, names=tuple(names), left_out=tuple(left_out), note=note)
    code.check_size(limit)
    return code


def _project_root(directory: Path) -> Path:
    """Returns the root of a project without git: the working directory if it contains the script and is not a home."""
    here = Path.cwd()
    return here if directory.is_relative_to(here) and not _is_home(here) else directory


def _is_home(path: Path) -> bool:
    """Whether a path is a home directory, which is not a project even if it is in git."""
    return path in (Path.home(), Path("/"))


def _not_code(path: Path) -> str | None:
    if _is_home(path.parent):
        return "a directory in a home directory"
    if not _may_read(path):
        return _CLOSED
    if (path / "pyvenv.cfg").exists():
        return "a virtual environment"
    if has_info(path):
        return "a run"
    if _RESULTS.fullmatch(path.name) and not any(path.glob("*.py")):
        return "data or results, by its name"
    return None


def _may_read(directory: Path) -> bool:
    return os.access(directory, os.R_OK | os.X_OK, effective_ids=True)


def _names(repository: Repository, *options: str) -> list[str]:
    return list(_asked(repository, lambda: repository.list_files(*options, timeout_s=GIT_TIMEOUT_S)))


def _asked(repository: Repository, ask: Callable[[], T]) -> T:
    """Returns the answer of git, which a submission cannot do without."""
    try:
        return ask()
    except GitFailure as failure:
        raise UsageError(
            f"git cannot list the files of {repository.root}: {failure}; repair it, or use --dirty live"
        ) from failure
