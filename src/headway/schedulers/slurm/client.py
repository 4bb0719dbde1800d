"""Talking to SLURM by its own programs: is this job possible, submit it, end it, queue it again."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError, UsageError
from headway.launcher.program import JobFile, Program
from headway.launcher.targets import Slurm, seconds
from headway.run import Run
from headway.schedulers.slurm.queue import number_of
from headway.schedulers.slurm.refusals import refusal
from headway.schedulers.slurm.script import job_script, options
from headway.system import files

_PATIENCE = 120.0
"""seconds that a busy controller may take to answer"""
_TRANSIENT = re.compile(
    "timed out|unable to contact|try again|temporarily|connection|communication", re.IGNORECASE
)
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")


def check(target: Slurm) -> str:
    """Asks SLURM whether such a job could run; `UsageError` says what is wrong with it. Nothing is submitted."""
    text = job_script(target, run=Path("/run"), python=sys.executable)
    done = ask("sbatch", "--test-only", *options(target), *_array(target, 1), stdin=text)
    if done.returncode:
        raise refusal(done.stderr, target)
    if (limit := longest(target)) and target.time and seconds(target.time) > seconds(limit):
        raise refusal("time limit exceeds", target)  # many sites take such a job, and never start it
    return done.stderr.strip().removeprefix("sbatch: ")


def longest(target: Slurm) -> str | None:
    """The longest time that the partitions of a job allow; None if there is no limit."""
    which = ["-p", target.partition] if target.partition else []
    lines = [line.split() for line in ask("sinfo", "-ho", "%P %l", *which).stdout.splitlines()]
    limits = [limit for name, limit in lines if target.partition or name.endswith("*")]  # * is the default
    if not limits or "infinite" in limits:
        return None
    return max(limits, key=seconds)


def submit(runs: Sequence[Run], programs: Sequence[Program], target: Slurm) -> str:
    """Submits one job, or an array of one job per run, and returns its number. Each run learns of it.

    >>> submit([run], [Program(command=["python", "train.py"])], Slurm(nodes=2))  # doctest: +SKIP
    '17'
    """
    path = _links(runs) if target.array else runs[0].path
    text = job_script(target, run=path, python=sys.executable)
    for run, program in zip(runs, programs, strict=True):
        JobFile(program=program, target=target).write(run)
        with files.storage(f"write {run.job_script}"):
            files.write_atomic(run.job_script, text.encode())
    done = ask("sbatch", *submission(runs[0], path, target, tasks=len(runs)))
    if done.returncode:
        raise refusal(done.stderr, target)
    number, _, cluster = done.stdout.strip().partition(";")
    for index, run in enumerate(runs):
        record(run, number, cluster=cluster, task=index if target.array else None)
    return number


def submission(run: Run, path: Path, target: Slurm, *, tasks: int = 1) -> list[str]:
    """The arguments of sbatch. Names and paths are words of their own here, and no shell reads them."""
    log = str(path).replace("%", "%%") + ("/%a" if target.array else "")
    log = f"{log}/{run.job_log.relative_to(run.path)}"
    named = ["--parsable", f"--job-name={run.name}", f"--output={log}", *_array(target, tasks)]
    return [*named, *options(target), str(run.job_script)]


def record(
    run: Run, job: str, *, cluster: str = "", task: int | None = None, before: Sequence[str] = ()
) -> None:
    """Notes in the run directory which job it is; `before` are the jobs that it goes on from."""
    facts = {
        "job_id": job,
        "array_task": task,
        "cluster": cluster or None,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "before": list(before),
    }
    with files.storage(f"write {run.submission_file}"):
        files.write_atomic(run.submission_file, json.dumps(facts, indent=2).encode())


def cancel(submitted: Mapping[str, Any]) -> None:
    """Ends a job; ranks that use headway save first. `submitted` is what submitted.json says."""
    job = number_of(submitted)
    done = ask("scancel", job)
    if done.returncode:
        raise HeadwayError(f"job {job} could not be cancelled: {last_line(done.stderr)}")


def requeue(job: str, *, tries: int = 5, pause: float = 2.0) -> str | None:
    """Queues a job again; returns why not, in SLURM's words, if SLURM refuses. A busy controller is asked again."""
    for attempt in range(tries):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        done = ask("scontrol", "requeue", job)
        if done.returncode == 0:
            return None
        if not _TRANSIENT.search(done.stderr):
            break
    return last_line(done.stderr)


def ask(
    *command: str, stdin: str = "", environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Runs one of SLURM's programs, free of the variables of a job in which we may be ourselves."""
    clean = {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not name.startswith(("SLURM_", "SRUN_"))
    }
    try:
        return subprocess.run(
            command, input=stdin, env=clean, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except FileNotFoundError:
        if command[0] != "sbatch":
            return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed")
        raise UsageError(
            "sbatch is not on this machine: submit from a login node of the cluster, or run here with: headway run"
        ) from None
    except subprocess.TimeoutExpired:
        raise HeadwayError(
            f"{command[0]} did not answer within {_PATIENCE:.0f} s: SLURM's controller is busy or down; "
            "look with squeue whether the job is there before trying again"
        ) from None


def last_line(text: str) -> str:
    """What a program said last, without its name."""
    lines = text.strip().splitlines() or ["no reason given"]
    return re.sub(r"^\w+: (error: )?", "", lines[-1])


def _array(target: Slurm, tasks: int) -> list[str]:
    limit = f"%{target.array_limit}" if target.array_limit else ""
    return [f"--array=0-{tasks - 1}{limit}"] if target.array else []


def _links(runs: Sequence[Run]) -> Path:
    """A folder whose entries 0, 1, ... lead to the runs: SLURM knows the jobs of an array by number only."""
    folder = runs[0].path.parent / f".array-{secrets.token_hex(4)}"
    with files.storage(f"make {folder}"):
        files.make_dir(folder)
        for number, run in enumerate(runs):
            (folder / str(number)).symlink_to(Path("..") / run.path.name)
    return folder
