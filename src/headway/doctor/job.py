"""Submits a job that examines nodes of a cluster, waits for it, and reads its report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError, IncompleteSubmission
from headway.launcher.enqueue import check_target, submit_runs
from headway.launcher.job import Job
from headway.launcher.program import Program
from headway.launcher.prologue import examination_command
from headway.launcher.targets import ClusterTarget, target_fields
from headway.run import Run
from headway.run.info import read_json
from headway.run.status import Status

NOT_FOR_EXAMINATIONS = (
    "array",
    "array_limit",
    "pre",
    "pre_to",
    "doctor",
    "alert",
    "requeue",
    "max_requeues",
    "max_attempts",
    "progress",
    "max_restarts",
)
"""settings of a target that are for training runs: an examination ignores them"""
_LOOK_S = 1.0
_TAIL_LINES = 12
Report = dict[str, Any]
"""`ClusterReport.to_dict()`, as the job wrote it"""


def submit(target: ClusterTarget, *, root: Path, data: Sequence[Path] = ()) -> Job:
    """Submits a job that examines the nodes it gets; its run directory is called doctor-DATE.

    >>> submit(Slurm(nodes=2, gpus_per_node=8), root=Path("runs"))  # doctest: +SKIP
    """
    settings = target_fields(type(target))
    plain = {each.name: each.default for each in settings if each.name in NOT_FOR_EXAMINATIONS}
    target = replace(target, **plain | {"requeue": False})  # type: ignore[type-var]  # it is a dataclass
    check_target(target)
    run = Run.create(root, name="doctor", command=["headway", "doctor"])
    program = Program(
        command=examination_command(run, [str(path.absolute()) for path in data]),
        nproc=target.nproc_per_node,
        env=dict(target.env),
    )
    try:
        submit_runs([run], [program], target)
    except IncompleteSubmission:
        raise
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return Job(run)


def wait(job: Job, report_state: Callable[[Status, float], None], look_s: float = _LOOK_S) -> Report:
    """Waits for the end of the job and returns its report; calls `report_state` with its state and the seconds so far.

    Raises `HeadwayError` with the last lines of the job's log if the examination itself failed.
    """
    start = time.monotonic()
    while not (now := job.status()).over:
        report_state(now, time.monotonic() - start)
        time.sleep(look_s)
    report = read_json(job.run.doctor_file)
    if report is None:
        tail = "\n".join(job.log().splitlines()[-_TAIL_LINES:])
        why = f": {now.why}" if now.why else ""
        raise HeadwayError(
            f"the examination is {now.state}{why}; the end of {job.run.job_log}:\n{tail}".rstrip()
        )
    return {"run": str(job.run.path), **report}
