"""A copy of the code in the run directory, made once, so that the code that runs is the code that was submitted.

    run.json            code.snapshot: where from, which commit, what was added, what was left out
    code/tree/          the files as they were, and the commit they are based on as a small repository of its own

The copy does not depend on the original: edit, commit, rebase or delete the original, and a job that starts tomorrow,
or starts again next week, runs today's code.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from json import loads
from pathlib import Path, PurePath
from typing import Literal, final
from urllib.parse import unquote, urlsplit

from headway.errors import UsageError
from headway.launcher.code.project_files import GIT_TIMEOUT_S, ProjectFiles, gather
from headway.run import Run
from headway.run.paths import RELATIVE
from headway.run.source import describe
from headway.system import files
from headway.system.git import GitFailure, create_repository, open_repository

Dirty = Literal["snapshot", "refuse", "live"]
MAX_BYTES = 500_000_000
_COPY_TIMEOUT_S = 300.0
_BLOCK_BYTES = 1 << 20


@final
@dataclass(frozen=True, kw_only=True)
class CodeSnapshot:
    """Where the code of a run is, as run.json says."""

    tree: Path
    """the copy"""
    origin: Path | None
    """what was copied; None if that is unknown"""
    directory: Path
    """the directory in the copy that corresponds to the working directory"""
    start: Path
    """where the ranks start: there, but among links to what was not copied (`workspace.prepare`)"""
    script: Path | None
    """the script, or the link to it where the ranks start; None where a directory was given, for `python -m`"""
    python_path: tuple[Path, ...]
    """directories to put before PYTHONPATH, so that packages installed in editable mode also come from the copy"""
    added: tuple[str, ...] = ()
    """files that were copied although git does not track them"""
    left_out: tuple[str, ...] = ()
    """files that were not copied, and why: a job that needs one must use its absolute path"""


def take(
    run: Run, script: str | os.PathLike[str], *, dirty: Dirty = "snapshot", limit: int = MAX_BYTES
) -> Path:
    """Copies the code of `script` into the run, once, and returns the directory to start it from.

    `script` may be a directory, for a module that is started in it. `dirty` determines what happens to uncommitted
    changes: "snapshot" copies them, "refuse" raises, and copies nothing that git ignores, "live" copies nothing and
    runs the files where they are. A second call returns the existing copy: a run does not change its code.

    >>> take(run, "train.py")  # doctest: +SKIP
    PosixPath('/home/me/runs/digits-2026.11.15-14.30-x7k2/code/tree')
    """
    if dirty not in ("snapshot", "refuse", "live"):
        raise UsageError(f"dirty={dirty!r} is not a valid choice; expected snapshot, refuse or live")
    if run.info()["code"].get("snapshot"):
        return load(run).directory
    path = Path.cwd() / script
    if not path.exists():
        raise UsageError(f"there is no script {str(script)!r} in {Path.cwd()}; give its path from there")
    path = path if path.is_dir() else path.parent.resolve() / path.name
    if dirty == "live":
        return _live(run, path)
    code = gather(path, limit=limit)
    if dirty == "refuse":
        _refuse_changes(code)
        code = code.without_generated()
    here = Path.cwd()
    start = here if here.is_relative_to(code.root) else path if path.is_dir() else path.parent
    note = _publish(code, run, start)
    run.record_snapshot(
        {
            "tree": str(RELATIVE.snapshot_dir),
            "from": str(code.root),
            "directory": str(start.relative_to(code.root)),
            "script": None if path.is_dir() else str(path.relative_to(code.root)),
            "python_path": list(_python_path(code.root, run.snapshot_dir)),
            "commit": code.commit,
            "submodules": code.submodules,
            "added": list(code.added),
            "left_out": code.named_left_out,
            "note": "; ".join(filter(None, (code.note, note))) or None,
        }
    )
    return load(run).directory


def adopt(run: Run, other: Run) -> None:
    """Makes a run use the copy of another one, as all runs of a sweep do."""
    facts = other.info()["code"]["snapshot"]
    run.record_snapshot(facts | {"tree": str(other.path / facts["tree"])})


def load(run: Run) -> CodeSnapshot:
    """Returns where the code of a run is; `UsageError` if no copy was made or it is gone."""
    facts = run.info()["code"].get("snapshot")
    if not facts:
        raise UsageError(f"{run.id} has no copy of its code: it was not submitted by headway")
    tree = run.path / facts["tree"]
    directory = tree / facts["directory"]
    if not directory.is_dir():
        raise UsageError(f"the code of {run.id} is gone: there is no {directory}; submit it as a new run")
    origin = facts.get("from")
    is_live = origin == facts["tree"]
    return CodeSnapshot(
        tree=tree,
        origin=Path(origin) if origin else None,
        directory=directory,
        start=directory if is_live else run.work_dir / facts["directory"],
        script=(tree if is_live else run.work_dir) / facts["script"] if facts["script"] else None,
        python_path=tuple(tree / name for name in facts["python_path"]),
        added=tuple(facts["added"]),
        left_out=tuple(facts["left_out"]),
    )


def _live(run: Run, path: Path) -> Path:
    """Records that there is no copy: the job reads the files where they are when it starts."""
    here = Path.cwd()
    facts: dict[str, object] = {"tree": str(here), "from": str(here), "directory": ".", "python_path": []}
    facts |= {"script": None if path.is_dir() else str(path), "added": [], "left_out": []}
    run.record_snapshot(
        facts | {"note": "live: the job reads the files where they are, as they are when it starts"}
    )
    return here


def _refuse_changes(code: ProjectFiles) -> None:
    if code.commit is None:
        raise UsageError(
            f"{code.root} has no commit to pin the job to ({code.note or 'nothing is committed yet'}): commit the "
            "code, or submit it as it is with --dirty snapshot"
        )
    written = [name for name in code.added if name not in code.generated]
    state = describe(code.root, timeout_s=GIT_TIMEOUT_S)
    if state.dirty is None:
        raise UsageError(
            f"git cannot say whether {code.root} has changes ({state.note}): repair it, or submit the files as they "
            "are with --dirty snapshot"
        )
    if state.dirty or written:
        new = f"new: {', '.join(written[:5])}" if written else "see git status"
        raise UsageError(
            f"{code.root} has changes that are not committed ({new}): commit them, or submit them as they are with "
            "--dirty snapshot"
        )


def _publish(code: ProjectFiles, run: Run, start: Path) -> str | None:
    """Makes the copy under a hidden name, then renames it; returns a note, if there is one."""
    staged = run.code_dir / f".tree-{secrets.token_hex(8)}.tmp"
    try:
        with files.storage(f"copy the code of {code.root} into {run.code_dir}"):
            files.make_dir(staged)
            _copy_files(code, staged)
            note = _keep_commit(code, staged)
            (staged / start.relative_to(code.root)).mkdir(parents=True, exist_ok=True)  # it may hold no code
            # a copy from a submission that was killed before it was recorded
            shutil.rmtree(run.snapshot_dir, ignore_errors=True)
            staged.rename(run.snapshot_dir)
            files.sync_dir(run.code_dir)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return note


def _copy_files(code: ProjectFiles, to: Path) -> None:
    """Copies the files, readable by their owner only. No link is followed, not even one that appears meanwhile."""
    with files.open_tree(code.root) as source, files.open_tree(to) as target:
        for parent, names in groupby(sorted(map(PurePath, code.names)), key=lambda name: name.parent):
            with (
                files.open_tree(source, str(parent)) as from_directory,
                files.open_tree(target, str(parent), make=True) as to_directory,
            ):
                for name in names:
                    _copy(code.root, name, from_directory, to_directory)


def _copy(root: Path, name: PurePath, source: int, target: int) -> None:
    """Copies one file between open directories; a link stays a link, even one that leads out of the tree."""
    if stat.S_ISLNK(os.stat(name.name, dir_fd=source, follow_symlinks=False).st_mode):
        parent = root / name.parent
        aim = Path(os.path.normpath(parent / os.readlink(name.name, dir_fd=source)))
        kept = os.path.relpath(aim, parent) if aim.is_relative_to(root) else aim
        os.symlink(kept, name.name, dir_fd=target)
        return
    with files.open_inside(source, name.name) as file:
        status = os.fstat(file.fileno())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name.name, flags, 0o700 if status.st_mode & 0o111 else 0o600, dir_fd=target)
        with os.fdopen(fd, "wb") as copy:
            left = status.st_size  # what another process appends meanwhile may never end
            while block := file.read(min(left, _BLOCK_BYTES)):
                copy.write(block)
                left -= len(block)


def _keep_commit(code: ProjectFiles, tree: Path) -> str | None:
    """Keeps the commit that the files are based on, without history, so that a rebase or gc does not remove it.

    Trackers that read the commit from git get the true one, and `git diff` in the copy shows uncommitted changes.
    """
    if code.commit is None:
        return None
    try:
        with open_repository(code.root) as repository:
            kept = create_repository(tree, commit=code.commit)
            pack = kept.git_dir / "objects" / "pack" / f"pack-{code.commit}.pack"
            listed = repository.ask(
                "rev-list", "--objects", "--no-walk", code.commit, timeout_s=_COPY_TIMEOUT_S
            )
            with pack.open("xb") as file:
                packing = ("pack-objects", "--stdout", "-q")
                repository.ask(*packing, given=listed, into=file, timeout_s=_COPY_TIMEOUT_S)
        (kept.git_dir / "shallow").write_text(f"{code.commit}\n")
        kept.ask("index-pack", str(pack), timeout_s=_COPY_TIMEOUT_S)
        kept.ask("update-ref", "--no-deref", "HEAD", code.commit)
        kept.ask("read-tree", "HEAD")
        kept.ask("config", "core.worktree", "..")  # for git in the directory in which the ranks start
    except GitFailure as failure:
        shutil.rmtree(tree / ".git", ignore_errors=True)  # the files themselves are complete
        return f"the commit itself could not be kept: {failure}"
    return None


def _python_path(root: Path, tree: Path) -> Iterator[str]:
    """Yields the directories below `root` from which this Python imports: of `sys.path`, and of editable installs."""
    origins = [Path(entry) for entry in sys.path if entry] + list(_editable_projects())
    seen: set[Path] = set()
    for origin in origins:
        if origin.is_relative_to(root):
            inside = origin.relative_to(root)
            if inside not in seen and (tree / inside).is_dir():
                seen.add(inside)
                yield str(inside)


def _editable_projects() -> Iterator[Path]:
    for package in metadata.distributions():
        if text := package.read_text("direct_url.json"):
            origin = loads(text)
            if origin.get("dir_info", {}).get("editable"):
                project = Path(unquote(urlsplit(origin["url"]).path))
                yield project / "src" if (project / "src").is_dir() else project
