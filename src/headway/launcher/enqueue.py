"""From run directories to a job in the queue: job.json and job.sh in each run, and the scheduler's ids afterwards."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from headway import schedulers
from headway.errors import HeadwayError, IncompleteSubmission, RunLocked, StorageError, UsageError
from headway.launcher.program import JobFile, Program
from headway.launcher.targets import ClusterTarget
from headway.record.alerts import AlertChannels
from headway.run import Run
from headway.run.info import read_json
from headway.run.paths import RELATIVE
from headway.schedulers.base import JobIds, JobRequest
from headway.system import files
from headway.system.log import logger

_LINKS = ".array-"
"""how the names of directories with links to the runs of an array begin"""


def check_target(target: ClusterTarget, *, is_array: bool = False) -> None:
    """Asks the scheduler whether such a job could run; `UsageError` says what is wrong with it."""
    for path in target.pre:
        if not Path(path).exists():
            raise UsageError(
                f"pre: there is nothing to copy at {path!r:.200}; correct the path, or make it first"
            )
    if target.alert:
        AlertChannels.from_environment()
    request = target.request(name="check", directory=Path("/run"), log=RELATIVE.job_log)
    target.scheduler.check(replace(request, is_array=request.is_array or is_array))


def submit_runs(runs: Sequence[Run], programs: Sequence[Program], target: ClusterTarget) -> JobIds:
    """Submits one job, or an array with one job per run, and notes its ids in each run.

    Several runs are an array, and so is one whose target says so. After `IncompleteSubmission` the job may be in the
    queue and need its runs; after any other error it is not there.

    >>> submit_runs([run], [Program(command=["python", "train.py"])], Slurm(nodes=2)).number  # doctest: +SKIP
    '17'
    """
    scheduler = target.scheduler
    for run, program in zip(runs, programs, strict=True):
        JobFile(program=program, target=target).write(run)
        _write_script(run, target)
    for run in runs:
        run.check_private()  # the scheduler and the job read what others could have put there
    if not target.array and len(runs) == 1:
        request = _request(runs[0], target)
        return _submit(runs, lambda: scheduler.submit(request, runs[0].job_script))
    with _linked(runs) as directory:
        array = target.request(name=runs[0].name, directory=directory, log=RELATIVE.job_log)
        array, script = replace(array, is_array=True), directory / runs[0].job_script.name
        with files.storage(f"write {script}"):
            files.write_atomic(script, scheduler.script(array).encode())
        return _submit(runs, lambda: scheduler.submit_array(array, script, range(len(runs))), is_array=True)


def submit_successor(run: Run, job: JobFile, ids: JobIds, env: Mapping[str, str]) -> JobIds:
    """Submits a job's script once more, to start when the job is over: for sites that do not requeue jobs."""
    run.check_private()
    scheduler = job.target.scheduler
    request = _request(run, job.target)
    request = replace(request, after=ids, env={**request.env, **env})
    before = list(dict.fromkeys([*_jobs_before(run), ids.number]))
    try:
        if ids.array_task_id is not None:  # earlier versions left the script of the whole array there
            _write_script(run, job.target)
        successor = scheduler.submit(request, run.job_script)
    except HeadwayError as error:
        raise HeadwayError(
            f"job {ids.number} could not be followed by another: {error}; "
            f"to resume: {scheduler.submit_command(run.job_script)}"
        ) from error
    _record(run, successor, before=before)
    return successor


def note_job(run: Run, ids: JobIds) -> None:
    """Makes the job that has just started the job of its run, if that names another: a script submitted by hand.

    The record of another job that is still there is left to that one: this start will be refused, or is its rival.
    """
    known = JobIds.from_submission(read_json(run.submission_file) or {})
    if known is None:  # whoever submitted it could not note its number
        try:
            _record(run, ids)
        except StorageError as error:  # the job can train all the same
            logger.warning("%s; lists of runs do not show job %s", error, ids.number)
        return
    if known.number == ids.number:
        return
    queue = schedulers.queue([known])
    queued = queue.find(known)
    if queued is None and queue.note:  # it may be there all the same
        logger.warning("job %s is still noted as the job of %s: %s", known.number, run.id, queue.note)
        return
    if queued is not None and not queued.is_over:
        return
    with suppress(RunLocked), run.lock() as held:
        if held.note:
            logger.warning("%s", held.note)
        set_end_aside(run)
        _record(run, ids, before=_jobs_before(run))


def set_end_aside(run: Run) -> None:
    """Removes what a run says of the end of its last job, which another one follows."""
    with files.storage(f"start {run.id} again"):
        run.ended_file.unlink(missing_ok=True)
        run.set_failure_aside(len(run.info()["attempts"]))


def _jobs_before(run: Run) -> list[str]:
    """The numbers of the jobs that a run has had so far."""
    earlier = read_json(run.submission_file) or {}
    last = JobIds.from_submission(earlier)
    return [*earlier.get("before", ()), last.number] if last else []


def _request(run: Run, target: ClusterTarget) -> JobRequest:
    """A job for one run alone, also where the target is that of an array."""
    return target.without_array().request(name=run.name, directory=run.path, log=RELATIVE.job_log)


def _write_script(run: Run, target: ClusterTarget) -> None:
    """Writes the script that people may submit by hand: that of this run alone."""
    with files.storage(f"write {run.job_script}"):
        files.write_atomic(run.job_script, target.scheduler.script(_request(run, target)).encode())


def _submit(runs: Sequence[Run], ask: Callable[[], JobIds], *, is_array: bool = False) -> JobIds:
    """Asks the scheduler to take a job, and notes its ids; whatever is not a refusal may have left it in the queue."""
    before = [_jobs_before(run) for run in runs]  # the job may start, and note itself, before we do
    ids = None
    try:
        ids = ask()
        for index, run in enumerate(runs):
            task = replace(ids, array_job_id=ids.job_id, array_task_id=str(index)) if is_array else ids
            _record(run, task, before=before[index])
    except BaseException as error:
        if ids is None and isinstance(error, UsageError):
            raise
        why = (
            str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}".rstrip(": ")
        )
        kept = f"{runs[0].path} is kept" if len(runs) == 1 else f"{runs[0].path} and the other runs are kept"
        if ids is not None:
            raise IncompleteSubmission(
                f"job {ids.job_id} is in the queue, but {why}; {kept}, and the job notes its number when it starts"
            ) from error
        raise IncompleteSubmission(
            f"the job may be in the queue: {why}; {kept}: if it is not there, headway resume {runs[0].path}"
            + (", and each of the others" if len(runs) > 1 else "")
        ) from error
    return ids


def _record(run: Run, ids: JobIds, *, before: Sequence[str] = ()) -> None:
    """Notes in the run directory which job it is; `before` are the jobs that it continues."""
    facts = {
        "scheduler": ids.scheduler,
        "job_id": ids.job_id if ids.array_task_id is None else ids.array_job_id,
        "array_task": None if ids.array_task_id is None else int(ids.array_task_id),
        "cluster": ids.cluster_name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "before": list(before),
    }
    with files.storage(f"write {run.submission_file}"):
        files.write_atomic(run.submission_file, json.dumps(facts, indent=2).encode())


@contextmanager
def _linked(runs: Sequence[Run]) -> Iterator[Path]:
    """A directory whose entries 0, 1, ... lead to the runs: a scheduler knows the jobs of an array by number only.

    It is removed if the block fails, unless the array may be in the queue.
    """
    directory = runs[0].path.parent / f"{_LINKS}{secrets.token_hex(4)}"
    try:
        with files.storage(f"make {directory}"):
            files.make_dir(directory)
            for number, run in enumerate(runs):
                (directory / str(number)).symlink_to(Path("..") / run.path.name)
        yield directory
    except IncompleteSubmission:
        raise
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def remove_dead_links(root: Path) -> None:
    """Removes what arrays have left in a directory of runs from which all their runs were removed."""
    for directory in root.glob(f"{_LINKS}*"):
        with suppress(OSError):  # another process removes it, too
            entries = list(directory.iterdir())
            is_ours = directory.lstat().st_uid == os.geteuid() and not directory.is_symlink()
            if is_ours and not any(entry.is_symlink() and entry.exists() for entry in entries):
                shutil.rmtree(directory)
