"""Submits a script: makes run directories, copies the code as it is now, and puts a job into the queue."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from headway.errors import IncompleteSubmission, UsageError
from headway.launcher import sweep
from headway.launcher.code import snapshot
from headway.launcher.code.snapshot import Dirty
from headway.launcher.enqueue import check_target, submit_runs
from headway.launcher.program import Program, python_command
from headway.launcher.targets import ClusterTarget
from headway.run import Run, check_name
from headway.run.paths import RELATIVE
from headway.run.source import describe
from headway.schedulers.base import JobIds
from headway.system import ownership
from headway.system.text import shorten_list

_NAMED = 5
"""how many files a note names"""


@final
@dataclass(frozen=True, kw_only=True)
class Script:
    """What to run: a file, or a module as for `python -m`, and its arguments."""

    name: str
    args: Sequence[str] = ()
    module: bool = False

    @property
    def run_name(self) -> str:
        """A name for its runs.

        >>> Script(name="exp/my train.py").run_name, Script(name="pkg.train", module=True).run_name
        ('my-train', 'train')
        """
        last = self.name.rpartition(".")[2] if self.module else Path(self.name).stem
        return re.sub(r"[^A-Za-z0-9_.]+", "-", last).strip("-.")[:64] or "run"


@final
@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A job in the queue, with one run, or several for an array."""

    ids: JobIds
    runs: Sequence[Run]
    notes: Sequence[str]
    """notes about the copy of the code, for people"""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        runs = [str(run.path) for run in self.runs]
        return {"job_id": self.ids.job_id, "runs": runs, "notes": list(self.notes)}


def dry_run(script: Script, target: ClusterTarget, *, root: Path, name: str | None = None) -> str:
    """Returns the job script that `submit` would submit; creates nothing."""
    name = check_script(script, root=root, name=name)
    sweep.grid(target.array)
    path = root.absolute() / ("ARRAY" if target.array else f"{name}-DATE-TIME-XXXX")
    request = target.request(name=name, directory=path, log=RELATIVE.job_log)
    return target.scheduler.script(request)


def submit(
    script: Script, target: ClusterTarget, *, root: Path, name: str | None = None, dirty: Dirty = "snapshot"
) -> SubmittedJob:
    """Submits a script. If headway or the scheduler refuses it, no run directory is left.

    >>> submit(Script(name="train.py"), Slurm(nodes=2), root=Path("runs"))  # doctest: +SKIP
    """
    name = check_script(script, root=root, name=name)
    settings = sweep.grid(target.array)
    check_target(target, jobs=len(settings))
    with prepare_runs(script, settings, root=root, name=name, dirty=dirty) as (runs, notes):
        programs = [
            replace(make_program(run, script, values), nproc=target.nproc_per_node, env=dict(target.env))
            for run, values in zip(runs, settings, strict=True)
        ]
        return SubmittedJob(ids=submit_runs(runs, programs, target), runs=runs, notes=notes)


@contextmanager
def prepare_runs(
    script: Script,
    settings: Sequence[sweep.Settings],
    *,
    root: Path,
    name: str,
    dirty: Dirty = "snapshot",
    world: object = None,
) -> Iterator[tuple[list[Run], list[str]]]:
    """Makes a run for each setting, with a copy of the code, and yields them with notes. Call `check_script` first.

    `world` describes the ranks, if that is known. If the block fails, the runs are removed, unless a job that may be in
    the queue needs them (`IncompleteSubmission`).

    >>> with prepare_runs(script, [{"lr": "1"}], root=Path("runs"), name="fit") as (runs, notes):  # doctest: +SKIP
    ...     start(runs)
    """
    runs: list[Run] = []
    is_new = not root.exists()
    source = describe(Path.cwd())
    try:
        for values in settings:
            command = [script.name, *sweep.arguments(script.args, values)]
            runs.append(
                Run.create(root, name=name, config=values, command=command, world=world, source=source)
            )
        if any(settings):
            sweep.join(runs, settings)
        yield runs, _pin(runs, script, dirty)
    except IncompleteSubmission:
        raise
    except BaseException:
        for run in runs:
            shutil.rmtree(run.path, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # other processes have made runs there meanwhile
                root.rmdir()
        raise


def check_script(script: Script, *, root: Path, name: str | None = None) -> str:
    """Refuses a script that could not run, before anything is created; returns the name of its runs.

    >>> check_script(Script(name="train.py"), root=Path("runs"))  # doctest: +SKIP
    'train'
    """
    python_command(script.name, script.args, module=script.module)
    _check_root(root)
    return check_name(name or script.run_name)


def _check_root(root: Path) -> None:
    """Refuses a root in which no runs can be made, or that other users could change."""
    nearest = next(path for path in (root.absolute(), *root.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise UsageError(f"{str(nearest)!r} is not a directory: give --root a directory for runs")
    ownership.check_root(root)


def _pin(runs: Sequence[Run], script: Script, dirty: Dirty) -> list[str]:
    """Copies the code into the first run, for all of them, and returns notes about the copy."""
    snapshot.take(runs[0], Path.cwd() if script.module else script.name, dirty=dirty)
    for run in runs[1:]:
        snapshot.adopt(run, runs[0])
    found = snapshot.load(runs[0])
    ours = f"{runs[0].path.parent.name}/"  # the directory of runs itself needs no note
    notes = [f"not in git, but copied: {shorten_list(found.added, _NAMED)}"] if found.added else []
    left_out = [name for name in found.left_out if not name.startswith(ours)]
    return notes + ([f"left out of the copy: {shorten_list(left_out, _NAMED)}"] if left_out else [])


def make_program(run: Run, script: Script, values: sweep.Settings) -> Program:
    """Returns the program that runs the script with these settings, from the run's copy of the code.

    Python imports from the directory of a script, to which its link leads. A module would be imported from the
    directory in which it is started, but with -P it is imported from the copy.
    """
    code = snapshot.load(run)
    path = code.python_path
    if script.module:
        start, path = ["-P", "-m", script.name], (code.directory, *path)
    else:
        start = [str(code.script)]
    return Program(
        command=[sys.executable, *start, *sweep.arguments(script.args, values)],
        cwd=str(code.start),
        python_path=list(map(str, path)),
    )
