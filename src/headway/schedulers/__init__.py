"""Batch schedulers: the interface that every scheduler implements (`base`), and SLURM, which ships with headway.

Other packages call these functions and name no scheduler: `detect` returns the job of this process, `load` the
scheduler that a record names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module

from headway.errors import UsageError
from headway.schedulers.base import AllocatedNode, JobIds, Queue, Scheduler
from headway.system.environment import SCHEDULER

_SHIPPED = {"slurm": "headway.schedulers.slurm.scheduler:SlurmScheduler"}


@cache
def load(name: str) -> Scheduler:
    """Returns the scheduler of a name: one that ships with headway, or `module:Class`.

    Names come from run directories, which may belong to other people: a module that is not part of headway is imported
    only if $HEADWAY_SCHEDULER names it.

    >>> load("slurm").label
    'SLURM'
    """
    module, _, attribute = _SHIPPED.get(name, name).partition(":")
    if name not in _SHIPPED and module not in sys.modules and os.environ.get(SCHEDULER) != name:
        raise UsageError(
            f"the scheduler {name!r:.80} is not loaded; if it is your own, set {SCHEDULER}={name:.80}"
        )
    try:
        if module.startswith("."):
            raise ImportError("the name is relative")
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"the scheduler {name!r:.80} cannot be loaded ({error}); give {', '.join(_SHIPPED)} or MODULE:CLASS"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise UsageError(f"{name!r:.80} is not a subclass of headway.schedulers.base.Scheduler")
    return found()


def shipped() -> list[Scheduler]:
    """Returns the schedulers that ship with headway."""
    return [load(name) for name in _SHIPPED]


def environment(scheduler: Scheduler) -> dict[str, str]:
    """Returns the variables by which the processes of a job find their scheduler."""
    return {} if scheduler.name in _SHIPPED else {SCHEDULER: scheduler.name}


def detect(environ: Mapping[str, str] = os.environ) -> JobIds | None:
    """Returns the job in which this process runs; None outside of a job."""
    return next((ids for scheduler in _candidates(environ) if (ids := scheduler.detect(environ))), None)


def node(environ: Mapping[str, str] = os.environ) -> AllocatedNode | None:
    """Returns the node of a job on which this process runs, if a scheduler has started it there."""
    return next((found for scheduler in _candidates(environ) if (found := scheduler.node(environ))), None)


def local_disk(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the job's directory on this node's own disk, if its scheduler provides one."""
    found = (scheduler.local_disk(environ) for scheduler in _candidates(environ))
    return next((directory for directory in found if directory), None)


def end_time(environ: Mapping[str, str] = os.environ) -> float | None:
    """Returns when the time of this process's job is over, in seconds since 1970; None if there is no limit, or no job.

    >>> end_time({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1800000000"})
    1800000000.0
    """
    ids = detect(environ)
    return load(ids.scheduler).end_time(environ) if ids else None


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that a scheduler has set for this process."""
    prefixes = tuple(prefix for scheduler in _candidates(environ) for prefix in scheduler.variables)
    return {name: value for name, value in environ.items() if name.startswith(prefixes)}


def describe(ids: JobIds) -> str:
    """Returns the name of a job for messages.

    >>> describe(JobIds(scheduler="slurm", job_id="7"))
    'SLURM job 7'
    """
    try:
        return f"{load(ids.scheduler).label} job {ids.job_id}"
    except UsageError:
        return f"{ids.scheduler} job {ids.job_id}"


def cancel_command(ids: JobIds) -> str:
    """Returns the command line by which people cancel a job."""
    try:
        return load(ids.scheduler).commands(ids)["cancel"]
    except UsageError:
        return f"cancel {ids.scheduler} job {ids.number}"


def is_earlier_start(ids: JobIds | None, ours: JobIds | None) -> bool:
    """Whether `ids` name an earlier start of our own job."""
    if ids is None or ours is None or ids.scheduler != ours.scheduler:
        return False
    return load(ours.scheduler).is_earlier_start(ids, ours)


def is_gone(ids: JobIds | None, ours: JobIds | None) -> bool | None:
    """Whether no process of another job is left, as far as our own job can determine; None without evidence.

    Only the cluster of our own job is asked: elsewhere the same number is another job.
    """
    if ids is None or ours is None or ids.scheduler != ours.scheduler:
        return None
    if ours.cluster_name is None or ids.cluster_name != ours.cluster_name:
        return None
    if ids.job_id == ours.job_id:
        return True if is_earlier_start(ids, ours) else None
    return load(ids.scheduler).is_gone(ids)


def queue(jobs: Iterable[JobIds | None]) -> Queue:
    """Returns the statuses of these jobs; each scheduler is asked once."""
    by_scheduler: dict[str, list[JobIds]] = {}
    for ids in jobs:
        if ids is not None:
            by_scheduler.setdefault(ids.scheduler, []).append(ids)
    queues = [_queue(name, own) for name, own in by_scheduler.items()]
    statuses = {key: status for found in queues for key, status in found.statuses.items()}
    return Queue(statuses=statuses, note="; ".join(found.note for found in queues if found.note) or None)


def _queue(name: str, jobs: list[JobIds]) -> Queue:
    try:
        return load(name).queue(jobs)
    except UsageError as error:  # a list of runs is worth showing without it
        return Queue(note=str(error))


def _candidates(environ: Mapping[str, str]) -> list[Scheduler]:
    return [load(environ[SCHEDULER])] if environ.get(SCHEDULER) else shipped()
