"""What a job does when its ranks are down: say why, and queue itself again if it was only stopped.

Called by the job script as its last command, so its exit code is the job's. SLURM itself ends this process when the job
is cancelled or requeued by others, or when its time is over: what is decided here is decided only where the ranks
ended by themselves, which SLURM never answers by starting the job again.
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
from headway.launcher.agent.outcome import words
from headway.launcher.program import JobFile
from headway.launcher.targets import Slurm
from headway.run import Run
from headway.run.status import note_end
from headway.schedulers.slurm import client

EARLIER = "HEADWAY_EARLIER_STARTS"
"""how often the run was started by the jobs before this one, where jobs cannot be requeued"""


def main(path: str, status: str) -> int:
    """Returns the exit code of the job in whose script this runs; `status` is srun's."""
    try:
        run = Run.open(Path(path).resolve())
        job = JobFile.read(run)
        folder = run.launch_dir / launch_name(os.environ)
        outcome = read_outcome(folder, job.target.nodes, int(status))
        shutil.rmtree(folder, ignore_errors=True)  # an agent on a lost node may still be writing there
        code = int(outcome["exit_code"])
        if run.was_replaced():  # this node was cut off, and SLURM could not end us
            _say("headway: SLURM has started this job again meanwhile; this start has no more say in it\n")
            return code
        if code:
            _say(words(outcome, job.target.processes))
        note_end(run, code, error=(outcome.get("record") or {}).get("sentence"))
        if code in (Stopped.exit_code, TERMINATED):
            _say(f"headway: {again(run, job, os.environ)}\n")
        return code
    except HeadwayError as error:
        _say(f"headway: {error}\n")
        return error.exit_code


def launch_name(environ: Mapping[str, str]) -> str:
    """Tells the starts of a job apart: the same for its script and its agents, and for no other start."""
    return f"{environ['SLURM_JOB_ID']}-{environ.get('SLURM_RESTART_COUNT', '0')}"


def read_outcome(folder: Path, agents: int, status: int) -> dict[str, Any]:
    """How the launch ended, from what its agents have left in `folder`; `status` is what srun said, for people."""
    rounds = [entry for entry in folder.glob("round-*") if re.fullmatch(r"round-\d+", entry.name)]
    last = max(rounds, key=lambda entry: int(entry.name.partition("-")[2]), default=folder / "round-0")
    outcome: dict[str, Any] = {"exit_code": 0, "record": None}
    with suppress(FileNotFoundError):
        outcome = json.loads((last / "outcome.json").read_bytes())
    ends = [json.loads(file.read_bytes())["exit_code"] for file in last.glob("ended-*.json")]
    code = outcome["exit_code"] or max(ends, default=0)
    # srun ends all agents by SIGTERM when one of them dies, as SLURM does when the job must go: only then all speak
    if code not in (DONE, TERMINATED) or len(ends) == agents:
        return outcome | {"exit_code": code}
    # an agent that had only just been started could not hear of it, and died of it
    if status - 128 in STOP_REQUESTS:
        sentence = "told to stop before the ranks had started"
        return {"exit_code": Stopped.exit_code, "record": {"sentence": sentence}}
    _say(
        f"headway: {len(ends)} of {agents} node agents said how they ended; srun's exit status is {status}\n"
    )
    return {"exit_code": 1, "record": None}


def again(run: Run, job: JobFile, environ: Mapping[str, str]) -> str:
    """Queues the job once more, if it may; returns what was done, in a sentence."""
    target = job.target
    starts = int(environ.get(EARLIER, "0")) + int(environ.get("SLURM_RESTART_COUNT", "0")) + 1
    by_hand = f"to go on: sbatch {run.job_script}"
    if not target.requeue:
        return f"not queued again, as requeue is off; {by_hand}"
    if starts > target.max_requeues:
        return (
            f"not queued again: it was {starts - 1} times, and max_requeues={target.max_requeues}; {by_hand}"
        )
    number = job_number(environ)
    _say(f"headway: queueing job {number} again ({starts} of at most {target.max_requeues})\n")
    refused = client.requeue(number)
    if refused is None:
        return "queued again"
    return _successor(run, target, number, starts, environ) + f" (SLURM does not requeue it: {refused})"


def job_number(environ: Mapping[str, str]) -> str:
    """How SLURM's programs call this job; of an array, this one of its jobs.

    >>> job_number({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"})
    '7_2'
    """
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


def _successor(run: Run, target: Slurm, number: str, starts: int, environ: Mapping[str, str]) -> str:
    """Submits the same script to run when this job is over, for sites where jobs are not requeued."""
    task = environ.get("SLURM_ARRAY_TASK_ID")
    arguments = client.submission(run, run.path, target.alone())
    arguments = [
        f"--array={task}" if task else "",
        f"--dependency=afterany:{environ['SLURM_JOB_ID']}",
        *arguments,
    ]
    done = client.ask("sbatch", *filter(None, arguments), environ={**environ, EARLIER: str(starts)})
    if done.returncode:
        raise HeadwayError(
            f"job {number} could not be followed by another: {client.last_line(done.stderr)}; "
            f"to go on: sbatch {run.job_script}"
        )
    job = done.stdout.strip().partition(";")[0]
    client.record(run, job, task=int(task) if task else None, before=[number])
    return f"job {job} goes on when this one is over"


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
