"""What a job does when its ranks have ended: report why, and queue itself again if it was only stopped.

The job script calls it as its last command, so its exit code is the job's. It is reached only if the ranks ended by
themselves: on a cancel, a requeue by others or the time limit, the scheduler ends this process, too. So a requeue from
here never competes with the scheduler's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.dist.control.signals import STOP_REQUESTS
from headway.errors import DONE, TERMINATED, HeadwayError, Stopped
from headway.launcher.agent.outcome import summary
from headway.launcher.program import JobFile
from headway.launcher.submission import submit_successor
from headway.run import Run
from headway.run.status import record_end
from headway.system.environment import EARLIER_STARTS
from headway.system.log import install_handler, logger


def main(path: str, status: str) -> int:
    """Returns the exit code of the job in whose script this runs; `status` is that of the agents' step."""
    install_handler()
    try:
        run = Run.open_private(path)
        job = JobFile.read(run)
        directory = job.launch_directory(run, os.environ)
        outcome = read_outcome(directory, job.target.nodes, int(status))
        shutil.rmtree(directory, ignore_errors=True)  # an agent on a lost node may still be writing there
        code = int(outcome["exit_code"])
        if run.was_replaced():  # this node was cut off, and the scheduler could not end us
            label = job.target.scheduler.label
            logger.warning("%s has started this job again meanwhile; this start leaves the run to it", label)
            return code
        if code:
            print(summary(outcome, job.target.nproc), end="", file=sys.stderr, flush=True)
        record = outcome.get("record") or {}
        if not record.get("locked_out"):  # else the run is another job's, which may have ended meanwhile
            record_end(run, code, error=record.get("sentence"))
        if code in (Stopped.exit_code, TERMINATED):
            logger.info(requeue(run, job, os.environ))
        return code
    except HeadwayError as error:
        logger.error(error)
        return error.exit_code


def read_outcome(directory: Path, agents: int, status: int) -> dict[str, Any]:
    """How the launch ended, from what its agents have left in `directory`; `status` is that of their step."""
    rounds = [entry for entry in directory.glob("round-*") if re.fullmatch(r"round-\d+", entry.name)]
    last = max(rounds, key=lambda entry: int(entry.name.partition("-")[2]), default=directory / "round-0")
    outcome: dict[str, Any] = {"exit_code": 0, "record": None}
    with suppress(FileNotFoundError):
        outcome = json.loads((last / "outcome.json").read_bytes())
    ends = [json.loads(file.read_bytes())["exit_code"] for file in last.glob("ended-*.json")]
    code = outcome["exit_code"] or max(ends, default=0)
    # srun ends all agents by SIGTERM when one of them fails, as SLURM does when the job must go: only in the second
    # case does each of them leave a record
    if code not in (DONE, TERMINATED) or len(ends) == agents:
        return outcome | {"exit_code": code}
    # an agent that had only just been started had no handler yet, and the signal ended it
    if status - 128 in STOP_REQUESTS:
        sentence = "stopped before the ranks had started"
        return {"exit_code": Stopped.exit_code, "record": {"sentence": sentence}}
    logger.error(
        "%d of %d node agents recorded how they ended; their step's exit status is %d",
        len(ends),
        agents,
        status,
    )
    return {"exit_code": 1, "record": None}


def requeue(run: Run, job: JobFile, environ: Mapping[str, str]) -> str:
    """Queues the job again, if it may; returns what was done, in a sentence."""
    target, scheduler, ids = job.target, job.target.scheduler, job.ids(environ)
    starts = int(environ.get(EARLIER_STARTS, "0")) + ids.restarts + 1
    by_hand = f"to resume: {scheduler.submit_command(run.job_script)}"
    if not target.requeue:
        return f"not queued again, as requeue is off; {by_hand}"
    if starts > target.max_requeues:
        return (
            f"not queued again: it was {starts - 1} times, and max_requeues={target.max_requeues}; {by_hand}"
        )
    logger.info("queueing job %s again (%d of at most %d)", ids.number, starts, target.max_requeues)
    refused = scheduler.requeue(ids)
    if refused is None:
        return "queued again"
    successor = submit_successor(run, job, ids, {EARLIER_STARTS: str(starts)})
    return (
        f"job {successor.job_id} resumes the run when this one is over "
        f"({scheduler.label} does not requeue it: {refused})"
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
