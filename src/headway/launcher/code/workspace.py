"""The directory in which the ranks of a job start: the copy of the code, with the data of the project around it.

    work/               train.py -> ../code/tree/train.py   what was copied comes from the copy
                        data     -> /home/me/project/data    what was not copied leads to where it was submitted from
                        model.pt                             what the job writes under a new name stays here

Scripts open `data/x` and write `model.pt` by relative paths. Modules are not imported from here, but from the copy:
Python follows the link of a script to find its directory, and Python code of the project that was not copied gets no
link.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from headway.launcher.code.project_files import is_importable, is_noise
from headway.launcher.code.snapshot import CodeSnapshot, load
from headway.run import Run
from headway.system import files
from headway.system.log import logger

_MAX_LINKS = 5_000
"""files beside copied ones; a directory with more is data, and is linked as a whole"""


def prepare(run: Run) -> None:
    """Makes the directory in which the ranks start, or adds what is new since the last start.

    All nodes of a job may do it at the same time, and need it complete. Jobs of headway's own, such as the examination
    of nodes, have no copy of code.
    """
    if not run.info()["code"].get("snapshot"):
        return
    code = load(run)
    if code.start == code.directory:
        return  # the files are run where they are
    with files.storage(f"link the code and data of {run.id} in {run.work_dir}"):
        _link(code, code.tree, code.origin, run.work_dir)
        repository = code.tree / ".git"
        if repository.is_dir():  # so that trackers find the commit
            with suppress(FileExistsError):
                files.write_new(run.work_dir / ".git", f"gitdir: {repository}\n".encode(), durable=False)


def _link(code: CodeSnapshot, copy: Path, origin: Path | None, work: Path) -> None:
    """Links the entries of a directory of the copy in `work`, and those that only the origin has."""
    copied = {entry.name: entry for entry in os.scandir(copy) if entry.name != ".git"}
    others = list(islice(_others(origin, copied, work), _MAX_LINKS + 1)) if origin else []
    if len(others) > _MAX_LINKS and not code.start.is_relative_to(work):
        logger.warning("%s leads to %s, with all its files: it has too many to link each", work, origin)
        _symlink(str(origin), work)
        return
    with suppress(FileExistsError):
        files.make_dir(work)
    for name, entry in copied.items():
        if entry.is_dir(follow_symlinks=False):
            _link(code, copy / name, origin and origin / name, work / name)
        else:
            _symlink(str((copy / name).readlink()) if entry.is_symlink() else entry.path, work / name)
    for path in others:
        _symlink(path, work / Path(path).name)


def _others(origin: Path, copied: dict[str, os.DirEntry[str]], work: Path) -> Iterator[str]:
    """Yields what only the origin has, but for caches, environments, Python code, and the directory of this run."""
    with suppress(OSError), os.scandir(origin) as entries:  # it was removed, or is on another machine
        for entry in entries:
            holds_run = work.is_relative_to(entry.path)
            if not (entry.name in copied or is_noise(entry.name) or is_importable(entry) or holds_run):
                yield entry.path


def _symlink(aim: str, path: Path) -> None:
    with suppress(
        FileExistsError
    ):  # from an earlier start, by another node, or what the job has written there
        path.symlink_to(aim)
