"""`launch`: call a function on many processes, here or on a cluster, and get back what it returned."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from headway.errors import UsageError
from headway.launcher.agent.agent import check_nproc
from headway.launcher.code import snapshot
from headway.launcher.functions import pickled
from headway.launcher.functions.start import in_background, worker_program
from headway.launcher.functions.worker import Call
from headway.launcher.job import Job
from headway.launcher.submission import check_target, submit_runs
from headway.launcher.targets import ClusterTarget, Local, Mpi
from headway.run import Run
from headway.system import environment, files


def launch(
    function: Callable[..., Any],
    *args: Any,
    on: Local | ClusterTarget | Mpi | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    upon_finish: Callable[[Any], Any] | None = None,
    root: str | os.PathLike[str] = "runs",
    name: str | None = None,
    **kwargs: Any,
) -> Job:
    """Calls `function(*args, **kwargs)` on every rank of a target, in the background, and returns a `Job`.

    The ranks have joined before the function begins: `hw.rank()`, `hw.barrier()` and torch's collectives work, and a
    `Pipeline` in it trains in the job's run directory. On a cluster the code is copied first: you may
    continue to edit it.

    `groups` divides the ranks, each into one group: `groups=[[0, 1], [2, 3]]`; the function gets its own group of
    torch as the keyword `group`. `upon_finish` is called on rank 0 with what it returned, once all ranks have returned.
    Functions that other processes cannot import, from a notebook or a `lambda`, need the extra `launch`.

    >>> job = hw.launch(train, 3e-4, on=hw.Local(nproc=4), epochs=3)
    >>> job.result()
    {'accuracy': 0.98}
    """
    target = Local() if on is None else on
    _check(function, target, groups)
    called = _name_of(function)
    box = pickled.pack((function, args, kwargs, upon_finish), what=f"{called} with its arguments")
    run = Run.create(root, name=name or _run_name(called), command=["headway.launch", called])
    try:
        cwd = _code(run, function, target)
        with files.storage(f"write {run.call_dir}"):
            files.make_dir(run.call_dir)
            files.write_new(run.call_dir / "call.pickle", box)
        Call(
            function=called,
            target=target.to_dict(),
            world_size=target.nproc,
            groups=[list(ranks) for ranks in groups] if groups is not None else None,
            sys_path=_sys_path(run),
        ).write(run)
        if isinstance(target, ClusterTarget):
            submit_runs([run], [worker_program(run, target, cwd)], target)
        else:
            in_background(run, cwd)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)  # what could not be started leaves nothing behind
        raise
    return Job(run)


def _check(function: object, target: object, groups: Sequence[Sequence[int]] | None) -> None:
    """Refuses what cannot work before anything is made."""
    if not callable(function):
        raise UsageError(f"launch needs a function, not {function!r:.80}; give its arguments after it")
    if not isinstance(target, Local | ClusterTarget | Mpi):
        raise UsageError(f"on={target!r:.80} is not a target; expected hw.Local, hw.Slurm or hw.Mpi")
    if environment.RUN in os.environ and "RANK" in os.environ:
        raise UsageError("launch was called inside a rank of a job; call it once, outside of the ranks")
    if isinstance(target, ClusterTarget) and target.array:
        raise UsageError(
            "launch takes no array: launch a job for each setting, or submit a script with --array"
        )
    if isinstance(target, ClusterTarget):
        check_target(target)
    if isinstance(target, Local):
        check_nproc(target.nproc)
    if isinstance(target, Mpi) and shutil.which(target.mpirun) is None:
        raise UsageError(
            f"there is no {target.mpirun!r} on this machine: install Open MPI or MPICH, or load its module"
        )
    if groups is None:
        return
    ranks = [rank for group in groups for rank in group]
    if sorted(ranks) != list(range(target.nproc)):
        raise UsageError(
            f"groups={groups!r:.80} must hold each of the ranks 0 to {target.nproc - 1} exactly once"
        )


def _code(run: Run, function: object, target: Local | ClusterTarget | Mpi) -> Path:
    """Where the ranks start: in a copy of the code if they start later, here if they start now."""
    source = None
    with suppress(TypeError, OSError):  # not written in Python, or typed at a prompt
        source = inspect.getsourcefile(inspect.unwrap(function))  # type: ignore[arg-type]
    project = (
        Path(source) if source and Path(source).is_file() and "site-packages" not in source else Path.cwd()
    )
    return snapshot.take(run, project, dirty="snapshot" if isinstance(target, ClusterTarget) else "live")


def _sys_path(run: Run) -> list[str]:
    """Where this process imports from, with the copy of the code in the place of the code."""
    here = [str(Path(entry or ".").absolute()) for entry in sys.path]
    origin = Path(run.info()["code"]["snapshot"]["from"])
    if not run.snapshot_dir.is_dir():
        return here
    copies = (run.snapshot_dir / os.path.relpath(entry, origin) for entry in here)
    return [
        str(copy) if Path(entry).is_relative_to(origin) and copy.is_dir() else entry
        for entry, copy in zip(here, copies, strict=True)
    ]


def _name_of(function: Any) -> str:
    """module:qualname, for people."""
    inner = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    named = (
        inner if isinstance(inner, FunctionType | MethodType | BuiltinFunctionType | type) else type(inner)
    )
    return f"{named.__module__}:{named.__qualname__}"


def _run_name(called: str) -> str:
    """The last part of a function's name, as a run may be called.

    >>> _run_name("train:main.<locals>.<lambda>")
    'lambda'
    """
    last = called.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_]+", "-", last).strip("-")[:64] or "function"
