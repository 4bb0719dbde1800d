"""`launch`: call a function on many processes, here or on a cluster, and get back what it returned."""

from __future__ import annotations

import functools
import inspect
import os
import re
import reprlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, final, overload

from headway.errors import IncompleteSubmission, UsageError, unknown_name
from headway.interpreter import import_path
from headway.launcher import sweep
from headway.launcher.agent.agent import check_nproc
from headway.launcher.code import snapshot
from headway.launcher.code.snapshot import Dirty
from headway.launcher.enqueue import check_target, submit_runs
from headway.launcher.functions import pickled
from headway.launcher.functions.worker import Call
from headway.launcher.job import Job
from headway.launcher.job_start import BACKGROUND, in_background, worker_program
from headway.launcher.targets import ClusterTarget, Local, Mpi
from headway.run import Run
from headway.run.source import describe
from headway.system import environment, files

Groups = Sequence[Sequence[int]] | None


@final
class _Launch:
    """Calls `function(*args, **kwargs)` on every rank of a target, in the background, and returns a `Job`.

    The ranks have joined before the function begins: `hw.rank()`, `hw.barrier()` and torch's collectives work, and a
    `Pipeline` in it trains in the job's run directory. On a cluster the code is copied first: you may
    continue to edit it.

    `array` starts a job for each of its elements and returns a list of jobs: a mapping adds keywords to the call, a
    tuple adds arguments, and anything else is one argument. On a cluster they are one job array. `launch.map` takes
    an iterable for each argument instead.

    `groups` divides the ranks, each into one group: `groups=[[0, 1], [2, 3]]`; the function gets its own group, one of
    torch's process groups, as the keyword `group`. `upon_finish` is called on rank 0 with what the function returned
    there, once all ranks have returned. Functions that other processes cannot import, from a notebook or a `lambda`,
    need the extra `launch`.

    >>> job = hw.launch(train, 3e-4, on=hw.Local(nproc=4), epochs=3)
    >>> job.result()
    {'accuracy': 0.98}
    >>> jobs = hw.launch(train, array=[{"lr": 1e-3}, {"lr": 3e-4}], on=hw.Slurm(), epochs=3)
    >>> [job.result() for job in hw.as_completed(jobs)]
    [{'accuracy': 0.97}, {'accuracy': 0.98}]
    """

    @overload
    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        array: None = None,
        on: Local | ClusterTarget | Mpi | None = None,
        groups: Groups = None,
        upon_finish: Callable[[Any], Any] | None = None,
        root: str | os.PathLike[str] = "runs",
        name: str | None = None,
        **kwargs: Any,
    ) -> Job: ...

    @overload
    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        array: Iterable[Any],
        on: Local | ClusterTarget | Mpi | None = None,
        groups: Groups = None,
        upon_finish: Callable[[Any], Any] | None = None,
        root: str | os.PathLike[str] = "runs",
        name: str | None = None,
        **kwargs: Any,
    ) -> list[Job]: ...

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        array: Iterable[Any] | None = None,
        on: Local | ClusterTarget | Mpi | None = None,
        groups: Groups = None,
        upon_finish: Callable[[Any], Any] | None = None,
        root: str | os.PathLike[str] = "runs",
        name: str | None = None,
        **kwargs: Any,
    ) -> Job | list[Job]:
        """Starts one job, or one for each element of `array`."""
        target = Local() if on is None else on
        elements = None if array is None else _elements(array)
        calls = [(args, kwargs)] if elements is None else [_add(each, args, kwargs) for each in elements]
        _check(function, target, groups, len(calls))
        _check_calls(function, calls, groups, upon_finish)
        called = _name_of(function)
        what = f"{called} with its arguments"
        packed = [pickled.pack((function, *each, upon_finish), what=what) for each in calls]
        call = Call(
            function=called,
            target=target.to_dict(),
            world_size=target.nproc,
            groups=[list(ranks) for ranks in groups] if groups is not None else None,
            sys_path=(),
        )
        runs: list[Run] = []
        source = describe(Path.cwd())
        try:
            for _ in packed:
                command = ["headway.launch", called]
                runs.append(Run.create(root, name=name or _run_name(called), command=command, source=source))
            if elements is not None:
                sweep.join(runs, list(map(_settings, elements)))
            _pin(runs, function, target)
            _start(runs, packed, call, target)
        except IncompleteSubmission:  # the job may be in the queue, and needs them
            raise
        except BaseException:
            _discard(runs)
            raise
        jobs = list(map(Job, runs))
        return jobs[0] if elements is None else jobs

    def map(
        self,
        function: Callable[..., Any],
        *iterables: Iterable[Any],
        on: Local | ClusterTarget | Mpi | None = None,
        upon_finish: Callable[[Any], Any] | None = None,
        root: str | os.PathLike[str] = "runs",
        name: str | None = None,
        **kwargs: Any,
    ) -> list[Job]:
        """Starts a job for each tuple of arguments, one from each iterable, as the built-in `map` calls a function.

        >>> jobs = hw.launch.map(train, [1e-3, 3e-4], [1, 2], on=hw.Slurm())   # train(1e-3, 1), train(3e-4, 2)
        """
        columns = [list(each) for each in iterables]
        if len({len(column) for column in columns}) != 1:
            counts = ", ".join(str(len(column)) for column in columns) or "none"
            raise UsageError(f"map needs iterables of the same length, and got {counts}")
        rows = list(zip(*columns, strict=True))
        return self(function, array=rows, on=on, upon_finish=upon_finish, root=root, name=name, **kwargs)


launch = _Launch()


def _elements(array: Iterable[Any]) -> list[Any]:
    if isinstance(array, str | bytes | Mapping) or not isinstance(array, Iterable):
        raise UsageError(f"array={array!r:.80} must be a list with an element for each job")
    elements = list(array)
    if not elements:
        raise UsageError("array is empty: give it an element for each job")
    if len(elements) > sweep.MAX_SETTINGS:
        raise UsageError(
            f"array has {len(elements)} elements, more than {sweep.MAX_SETTINGS}: leave some out"
        )
    return elements


def _add(
    element: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of one job of an array.

    >>> _add({"lr": 1}, ("x",), {"epochs": 3}), _add((1, 2), ("x",), {})
    ((('x',), {'epochs': 3, 'lr': 1}), (('x', 1, 2), {}))
    """
    if not isinstance(element, Mapping):
        return (*args, *(element if isinstance(element, tuple) else (element,))), dict(kwargs)
    for key in element:
        if not isinstance(key, str):
            raise UsageError(
                f"array: {key!r:.80} cannot be a keyword; to pass a mapping itself, put it in a tuple"
            )
        if key in kwargs:
            raise UsageError(f"array sets {key!r}, which is given for all jobs as well; leave one out")
    return args, {**kwargs, **element}


def _settings(element: Any) -> sweep.Settings:
    """Returns an element as `headway runs` shows it."""
    if isinstance(element, Mapping):
        return {key: reprlib.repr(value) for key, value in element.items()}
    return {"args": reprlib.repr(element)}


def _start(
    runs: Sequence[Run],
    packed: Sequence[bytes],
    call: Call,
    target: Local | ClusterTarget | Mpi,
) -> None:
    """Writes each call to its run and starts the jobs."""
    for run, data in zip(runs, packed, strict=True):
        with files.storage(f"write {run.call_dir}"):
            files.make_dir(run.call_dir)
            files.write_new(run.call_dir / "call.pickle", data)
        replace(call, sys_path=_sys_path(runs[0])).write(run)
    if isinstance(target, ClusterTarget):
        submit_runs(runs, [worker_program(run, target, snapshot.load(run).start) for run in runs], target)
        return
    for run in runs:
        in_background(run, snapshot.load(run).start)


def _discard(runs: Sequence[Run]) -> None:
    """Ends the jobs of an array that had started before another one failed to start, and removes all runs."""
    started = [process for run in runs if (process := BACKGROUND.pop(run.id, None))]
    for process in started:
        process.terminate()
    for process in started:
        process.wait()
    for run in runs:
        shutil.rmtree(run.path, ignore_errors=True)


def _check(function: object, target: object, groups: Groups, count: int) -> None:
    """Refuses a call that cannot work, before anything is created."""
    if not callable(function):
        raise UsageError(f"launch needs a function, not {function!r:.80}; give its arguments after it")
    if not isinstance(target, Local | ClusterTarget | Mpi):
        raise UsageError(f"on={target!r:.80} is not a target; expected hw.Local, hw.Slurm or hw.Mpi")
    if environment.RUN in os.environ and "RANK" in os.environ:
        raise UsageError("launch was called inside a rank of a job; call it once, outside of the ranks")
    if isinstance(target, ClusterTarget):
        if target.array:
            raise UsageError(
                "give the array to launch, not to its target: hw.launch(function, array=[{'lr': 1e-3}, {'lr': 3e-4}])"
            )
        if len({*target.node_range}) > 1:
            raise UsageError(
                f"nodes={target.nodes!r}: a function has a result of each rank, so their number is fixed: give one "
                "number of nodes, or submit a script with: headway submit"
            )
        check_target(target, jobs=count)
    if isinstance(target, Local):
        check_nproc(target.nproc * count)  # on this machine they run at the same time
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


def _check_calls(
    function: Callable[..., Any],
    calls: Iterable[tuple[Iterable[Any], Mapping[str, Any]]],
    groups: Groups,
    upon_finish: object = None,
) -> None:
    """Refuses arguments that the function does not take: a job would fail when it starts, perhaps hours later."""
    if upon_finish is not None and not callable(upon_finish):
        raise UsageError(f"upon_finish={upon_finish!r:.80} is not a function")
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # not written in Python
        return
    added = {} if groups is None else {"group": None}
    if added and not _takes(signature, "group"):
        raise UsageError(
            f"groups= passes each rank its process group as the argument 'group': add it to {_name_of(function)}"
        )
    for args, kwargs in calls:
        _check_call(function, signature, args, {**added, **kwargs})


def _check_call(
    function: object, signature: inspect.Signature, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> None:
    called, known = _name_of(function), signature.parameters
    for name in kwargs:
        if not _takes(signature, name):
            raise unknown_name(f"argument of {called} or of launch", name, known)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"{called}{signature!s:.200} cannot be called with these arguments: {error}"
        ) from None


def _takes(signature: inspect.Signature, name: str) -> bool:
    known = signature.parameters
    return name in known or any(each.kind is each.VAR_KEYWORD for each in known.values())


def _pin(runs: Sequence[Run], function: object, target: Local | ClusterTarget | Mpi) -> None:
    """Copies the code if the ranks start later; if they start now, they run it where it is."""
    source = None
    with suppress(TypeError, OSError):  # not written in Python, or typed at a prompt
        source = inspect.getsourcefile(inspect.unwrap(function))  # type: ignore[arg-type]
    project = (
        Path(source) if source and Path(source).is_file() and "site-packages" not in source else Path.cwd()
    )
    dirty: Dirty = "snapshot" if isinstance(target, ClusterTarget) else "live"
    snapshot.take(runs[0], project, dirty=dirty)
    for run in runs[1:]:
        snapshot.adopt(run, runs[0])


def _sys_path(run: Run) -> list[str]:
    """Returns this process's import path, with the copy of the code in place of the original."""
    here = import_path()
    origin = Path(run.info()["code"]["snapshot"]["from"])
    if not run.snapshot_dir.is_dir():
        return here
    copies = (run.snapshot_dir / os.path.relpath(entry, origin) for entry in here)
    return [
        str(copy) if Path(entry).is_relative_to(origin) and copy.is_dir() else entry
        for entry, copy in zip(here, copies, strict=True)
    ]


def _name_of(function: Any) -> str:
    """Returns module:qualname, for messages."""
    inner = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    named = (
        inner if isinstance(inner, FunctionType | MethodType | BuiltinFunctionType | type) else type(inner)
    )
    return f"{named.__module__}:{named.__qualname__}"


def _run_name(called: str) -> str:
    """Returns the last part of a function's name, in a form that can name a run.

    >>> _run_name("train:main.<locals>.<lambda>")
    'lambda'
    """
    last = called.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_]+", "-", last).strip("-")[:64] or "function"
