"""Submits run directories as a job: writes job.json and job.sh to each run, and records the scheduler's ids there."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from headway import schedulers
from headway.errors import (
    HeadwayError,
    IncompleteSubmission,
    RunLocked,
    SchedulerUnreachable,
    StorageError,
    UsageError,
)
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
"""prefix of directories with links to the runs of an array"""
_NOT_SUBMITTED = (UsageError, SchedulerUnreachable)
"""after these the job is not in the queue; after any other exception it may be"""


def check_target(target: ClusterTarget, *, jobs: int = 1) -> None:
    """Raises `UsageError` if the scheduler could not run such a job, or an array of `jobs`."""
    for path in target.pre:
        if not Path(path).exists():
            raise UsageError(
                f"pre: there is nothing to copy at {path!r:.200}; correct the path, or make it first"
            )
    if target.alert:
        AlertChannels.from_environment()
    request = target.request(name="check", directory=Path("/run"), log=RELATIVE.job_log)
    is_array = request.is_array or jobs > 1
    target.scheduler.check(replace(request, is_array=is_array, array_size=jobs if is_array else None))


def submit_runs(runs: Sequence[Run], programs: Sequence[Program], target: ClusterTarget) -> JobIds:
    """Submits one job, or an array with one job per run, and records its ids in each run.

    Several runs are an array, and so is one run whose target has an array. After `IncompleteSubmission` the job may be
    in the queue and need its runs; after any other error it is not.

    >>> submit_runs([run], [Program(command=["python", "train.py"])], Slurm(nodes=2)).number  # doctest: +SKIP
    '17'
    """
    scheduler = target.scheduler
    submit = partial(_submit, runs, scheduler.name)
    for run, program in zip(runs, programs, strict=True):
        JobFile(program=program, target=target).write(run)
        _write_script(run, target)
    for run in runs:
        run.check_private()  # the scheduler and the job read files that others could have put there
    if not target.array and len(runs) == 1:
        request = _request(runs[0], target)
        return submit(lambda: scheduler.submit(request, runs[0].job_script))
    with _linked(runs) as directory:
        array = target.request(name=runs[0].name, directory=directory, log=RELATIVE.job_log)
        array, script = replace(array, is_array=True), directory / runs[0].job_script.name
        with files.storage(f"write {script}"):
            files.write_atomic(script, _encoded(scheduler.script(array)))
        return submit(lambda: scheduler.submit_array(array, script, range(len(runs))), is_array=True)


def submit_successor(run: Run, job: JobFile, ids: JobIds, env: Mapping[str, str]) -> JobIds:
    """Submits a job's script again, to start when the job is over: for sites that do not requeue jobs."""
    run.check_private()
    scheduler = job.target.scheduler
    request = _request(run, job.target)
    request = replace(request, after=ids, env={**request.env, **env})
    before = list(dict.fromkeys([*_jobs_before(run), ids.number]))
    try:
        successor = scheduler.submit(request, run.job_script)
    except HeadwayError as error:
        sure = isinstance(error, _NOT_SUBMITTED)
        then = "to resume" if sure else "it may be in the queue all the same; if it is not there"
        raise HeadwayError(
            f"job {ids.number} could not be followed by another: {error}; "
            f"{then}: {scheduler.submit_command(run.job_script)}"
        ) from error
    _record(run, successor, before=before)
    return successor


def note_job(run: Run, ids: JobIds) -> None:
    """Records the job that has just started as the job of its run, as for a script that was submitted by hand.

    If another job of the run is still in the queue, its record stays: the lock of the run refuses one of the two.
    """
    recorded = JobIds.from_submission(read_json(run.submission_file) or {})
    if recorded is None:  # the process that submitted it could not record its number
        try:
            _record(run, ids, before=_jobs_before(run))
        except StorageError as error:  # the job can train all the same
            logger.warning("%s; lists of runs do not show job %s", error, ids.number)
        return
    if recorded.number == ids.number:
        return
    queue = schedulers.queue([recorded])
    queued = queue.find(recorded)
    if queued is None and queue.note:  # it may still be in the queue
        logger.warning("job %s is still recorded as the job of %s: %s", recorded.number, run.id, queue.note)
        return
    if queued is not None and not queued.is_over:
        return
    with suppress(RunLocked), run.lock() as held:
        if held.note:
            logger.warning("%s", held.note)
        set_end_aside(run)
        _record(run, ids, before=_jobs_before(run))


def set_end_aside(run: Run) -> None:
    """Removes the record of how the last job of a run ended, because another job follows."""
    with files.storage(f"start {run.id} again"):
        run.ended_file.unlink(missing_ok=True)
        run.set_failure_aside(len(run.info()["attempts"]))


@contextmanager
def keeping_end(run: Run) -> Iterator[None]:
    """Restores the records of a run's last job if headway or the scheduler refuses another one, or cannot be reached.

    >>> with keeping_end(run):  # doctest: +SKIP
    ...     set_end_aside(run)
    ...     submit_runs([run], [program], target)
    """
    aside = run.old_failure_file(len(run.info()["attempts"]))
    paths = (run.ended_file, run.failure_file, aside, run.job_file, run.job_script)
    before = {path: _content(path) for path in paths}
    try:
        yield
    except _NOT_SUBMITTED:
        for path, content in before.items():
            _put_back(path, content)
        raise


def _content(path: Path) -> bytes | None:
    with files.storage(f"read {path}"), suppress(FileNotFoundError):
        return files.read_regular(path)
    return None


def _put_back(path: Path, content: bytes | None) -> None:
    with files.storage(f"write {path}"):
        if content is None:
            path.unlink(missing_ok=True)
        else:
            files.write_atomic(path, content)


def _jobs_before(run: Run) -> list[str]:
    """Returns the numbers of the jobs that a run has had so far."""
    earlier = read_json(run.submission_file) or {}
    last = JobIds.from_submission(earlier)
    return [*earlier.get("before", ()), *([last.number] if last else [])]


def _request(run: Run, target: ClusterTarget) -> JobRequest:
    """Returns the request for a job of one run alone, even if the target has an array."""
    return target.without_array().request(name=run.name, directory=run.path, log=RELATIVE.job_log)


def _write_script(run: Run, target: ClusterTarget) -> None:
    """Writes the job script of one run alone, which people may submit by hand."""
    with files.storage(f"write {run.job_script}"):
        files.write_atomic(run.job_script, _encoded(target.scheduler.script(_request(run, target))))


def _encoded(script: str) -> bytes:
    """Returns the bytes of a script; those in lines of `setup` that are not UTF-8 are kept."""
    return script.encode(errors="surrogateescape")


def _submit(
    runs: Sequence[Run], scheduler: str, ask: Callable[[], JobIds], *, is_array: bool = False
) -> JobIds:
    """Submits a job by `ask`, and records its ids.

    The runs record first that a job may be in the queue: the scheduler's answer may be lost, or this process killed.
    """
    # first: the job may start, and record itself, before this process does
    before = [_jobs_before(run) for run in runs]
    earlier = [_content(run.submission_file) for run in runs]
    ids: JobIds | None = None
    asked = False
    try:
        for run, numbers in zip(runs, before, strict=True):
            _write_submission(run, {"scheduler": scheduler}, before=numbers)
        asked = True
        ids = ask()
        for index, run in enumerate(runs):
            task = replace(ids, array_job_id=ids.job_id, array_task_id=str(index)) if is_array else ids
            _record(run, task, before=before[index])
    except BaseException as error:
        if asked and (ids is not None or not isinstance(error, _NOT_SUBMITTED)):
            raise _incomplete(runs, ids, error) from error
        for run, content in zip(runs, earlier, strict=True):
            with suppress(StorageError):  # a full disk, which is the error itself
                _put_back(run.submission_file, content)
        raise
    return ids


def _incomplete(runs: Sequence[Run], ids: JobIds | None, error: BaseException) -> IncompleteSubmission:
    """Returns the error for a job that is in the queue, or may be, although submitting it failed."""
    why = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}".rstrip(": ")
    kept = f"{runs[0].path} is kept" if len(runs) == 1 else f"{runs[0].path} and the other runs are kept"
    if ids is not None:
        return IncompleteSubmission(
            f"job {ids.job_id} is in the queue, but {why}; {kept}, and the job notes its number when it starts"
        )
    resume = f"headway resume {runs[0].shell_path}"
    more = ", and each of the others" if len(runs) > 1 else ""
    return IncompleteSubmission(f"{why}, so the job may be in the queue; if it is not there: {resume}{more}")


def _record(run: Run, ids: JobIds, *, before: Sequence[str] = ()) -> None:
    """Records the job of a run; `before` are the jobs that it continues."""
    facts = {
        "scheduler": ids.scheduler,
        "job_id": ids.job_id if ids.array_task_id is None else ids.array_job_id,
        "array_task": None if ids.array_task_id is None else int(ids.array_task_id),
        "cluster": ids.cluster_name,
    }
    _write_submission(run, facts, before=before)


def _write_submission(run: Run, facts: Mapping[str, Any], *, before: Sequence[str]) -> None:
    facts = {**facts, "time": datetime.now(UTC).isoformat(timespec="seconds"), "before": list(before)}
    with files.storage(f"write {run.submission_file}"):
        files.write_atomic(run.submission_file, json.dumps(facts, indent=2).encode())


@contextmanager
def _linked(runs: Sequence[Run]) -> Iterator[Path]:
    """Makes a directory whose entries 0, 1, ... link to the runs: a job of an array is given only its number.

    It is removed if the block fails, unless the array may be in the queue. It gets its name once it has all links:
    otherwise `remove_dead_links` in another process could remove it.
    """
    token = secrets.token_hex(4)
    directory = runs[0].path.parent / f"{_LINKS}{token}"
    staged = directory.with_name(f".headway-array-{token}.tmp")
    try:
        with files.storage(f"make {directory}"):
            files.make_dir(staged)
            for number, run in enumerate(runs):
                (staged / str(number)).symlink_to(Path("..") / run.path.name)
            staged.rename(directory)
        yield directory
    except IncompleteSubmission:
        raise
    except BaseException:
        for path in (staged, directory):
            shutil.rmtree(path, ignore_errors=True)
        raise


def remove_dead_links(root: Path) -> None:
    """Removes the link directories of arrays of which all runs were removed."""
    for directory in root.glob(f"{_LINKS}*"):
        with suppress(OSError):  # another process is removing it, too
            entries = list(directory.iterdir())
            is_ours = directory.lstat().st_uid == os.geteuid() and not directory.is_symlink()
            if is_ours and not any(entry.is_symlink() and entry.exists() for entry in entries):
                shutil.rmtree(directory)
