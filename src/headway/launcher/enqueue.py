"""From run directories to a job in the queue: job.json and job.sh in each run, and the scheduler's ids afterwards."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from headway import schedulers
from headway.errors import HeadwayError, RunLocked, UsageError
from headway.launcher.program import JobFile, Program
from headway.launcher.targets import ClusterTarget
from headway.record.alerts import AlertChannels
from headway.run import Run
from headway.run.info import read_json
from headway.run.paths import RELATIVE
from headway.schedulers.base import JobIds, JobRequest
from headway.system import files
from headway.system.log import logger


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

    Several runs are an array, and so is one whose target says so.

    >>> submit_runs([run], [Program(command=["python", "train.py"])], Slurm(nodes=2)).number  # doctest: +SKIP
    '17'
    """
    scheduler = target.scheduler
    is_array = bool(target.array) or len(runs) > 1
    request = _request(runs[0], target, _link_all(runs) if is_array else runs[0].path)
    request = replace(request, is_array=is_array)
    text = scheduler.script(request)
    for run, program in zip(runs, programs, strict=True):
        JobFile(program=program, target=target).write(run)
        with files.storage(f"write {run.job_script}"):
            files.write_atomic(run.job_script, text.encode())
    for run in runs:
        run.check_private()  # the scheduler and the job read what others could have put there
    if not is_array:
        ids = scheduler.submit(request, runs[0].job_script)
        _record(runs[0], ids, before=_jobs_before(runs[0]))
        return ids
    ids = scheduler.submit_array(request, runs[0].job_script, range(len(runs)))
    for index, run in enumerate(runs):
        _record(run, replace(ids, array_job_id=ids.job_id, array_task_id=str(index)))
    return ids


def submit_successor(run: Run, job: JobFile, ids: JobIds, env: Mapping[str, str]) -> JobIds:
    """Submits a job's script once more, to start when the job is over: for sites that do not requeue jobs."""
    run.check_private()
    scheduler = job.target.scheduler
    request = _request(run, job.target.without_array(), run.path)
    request = replace(request, after=ids, env={**request.env, **env})
    try:
        if ids.array_task_id is None:
            successor = scheduler.submit(request, run.job_script)
        else:
            successor = scheduler.submit_array(request, run.job_script, [int(ids.array_task_id)])
            successor = replace(successor, array_job_id=successor.job_id, array_task_id=ids.array_task_id)
    except HeadwayError as error:
        raise HeadwayError(
            f"job {ids.number} could not be followed by another: {error}; "
            f"to resume: {scheduler.submit_command(run.job_script)}"
        ) from error
    _record(run, successor, before=[ids.number])
    return successor


def note_job(run: Run, ids: JobIds) -> None:
    """Makes the job that has just started the job of its run, if somebody has submitted its script by hand.

    The record of another job that is still there is left to that one: this start will be refused, or is its rival.
    """
    known = JobIds.from_submission(read_json(run.submission_file) or {})
    if known is None or known.number == ids.number:
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


def _request(run: Run, target: ClusterTarget, directory: Path) -> JobRequest:
    return target.request(name=run.name, directory=directory, log=RELATIVE.job_log)


def _record(run: Run, ids: JobIds, *, before: Sequence[str] = ()) -> None:
    """Notes in the run directory which job it is; `before` are the jobs that it continues."""
    facts = {
        "scheduler": ids.scheduler,
        "job_id": ids.job_id,
        "array_task": None if ids.array_task_id is None else int(ids.array_task_id),
        "cluster": ids.cluster_name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "before": list(before),
    }
    with files.storage(f"write {run.submission_file}"):
        files.write_atomic(run.submission_file, json.dumps(facts, indent=2).encode())


def _link_all(runs: Sequence[Run]) -> Path:
    """A directory whose entries 0, 1, ... lead to the runs: a scheduler knows the jobs of an array by number only."""
    directory = runs[0].path.parent / f".array-{secrets.token_hex(4)}"
    with files.storage(f"make {directory}"):
        files.make_dir(directory)
        for number, run in enumerate(runs):
            (directory / str(number)).symlink_to(Path("..") / run.path.name)
    return directory
