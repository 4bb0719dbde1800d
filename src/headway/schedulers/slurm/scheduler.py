"""SLURM as a `Scheduler`: jobs through sbatch, squeue, sacct, scontrol and scancel, ids from SLURM_* variables."""

from __future__ import annotations

import os
import re
import shlex
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, final

from headway.errors import HeadwayError, UsageError
from headway.schedulers.base import AllocatedNode, EndedBy, Health, JobIds, JobRequest, Queue, Scheduler
from headway.schedulers.slurm import queue as slurm_queue
from headway.schedulers.slurm.client import SlurmAnswer, SlurmClient
from headway.schedulers.slurm.refusals import partition_option, refusal
from headway.schedulers.slurm.script import job_script, options, resized_step, submit_options
from headway.schedulers.slurm.time_limit import parse_time_limit
from headway.system.log import logger
from headway.system.text import format_duration

_TIMEOUT_S = 120.0
"""how long a busy controller may take to answer a request that changes something"""
_SLOW_START_S = 300.0
"""how long after the start of a job training usually begins; later, the clock is compared with the controller's"""
_CLOCK_ERROR_S = 60.0
"""by how much clocks may differ before the end of a job is corrected"""
_CONTROLLER_TIME = re.compile(r"^sdiag output at .*\((\d{9,})\)", re.MULTILINE)
_REQUEUE_TRIES, _REQUEUE_PAUSE_S = 5, 2.0
_TRANSIENT = re.compile(
    "timed out|unable to contact|try again|temporarily|connection|communication", re.IGNORECASE
)
_LOST_ANSWER = re.compile(r"timed out|(send|receive|shutdown) failure|zero bytes", re.IGNORECASE)
"""errors after which the controller may have received the request without answering"""
_NEVER_ASKED = re.compile("connect failure|connection refused", re.IGNORECASE)
"""its last error if no controller could have received the request"""
_NUMBER = re.compile(r"^(\d+)(?:;(\S+))?$", re.MULTILINE)
"""the number and the cluster of a job, as --parsable prints them; programs of a site may print lines of their own"""
_LIMIT = re.compile(r"(\S+) (infinite|(?:\d+-)?\d+(?::\d+){0,2})")
"""a partition and its time limit; a program of a site may print lines of its own"""
_LOOK = "check with squeue whether the job is there before you try again"
_ID_VARIABLES = ("CLUSTER_NAME", "JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT")


@final
class SlurmScheduler(Scheduler):
    """SLURM, through the programs that are on this machine's PATH."""

    name = "slurm"
    label = "SLURM"
    variables = ("SLURM_",)

    def __init__(self, client: SlurmClient | None = None) -> None:
        self._client = client or SlurmClient()

    def detect(self, environ: Mapping[str, str]) -> JobIds | None:
        """Reads the job from the variables that SLURM sets.

        >>> SlurmScheduler().detect({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "big"}).start
        '7-0'
        """
        if "SLURM_JOB_ID" not in environ:
            return None
        known = {
            name.lower(): environ[f"SLURM_{name}"] for name in _ID_VARIABLES if f"SLURM_{name}" in environ
        }
        return JobIds(scheduler=self.name, **known)

    def node(self, environ: Mapping[str, str]) -> AllocatedNode | None:
        if "SLURM_STEP_ID" not in environ:
            return None
        cpus = environ.get("SLURM_CPUS_PER_TASK") or environ.get("SLURM_CPUS_ON_NODE") or ""
        return AllocatedNode(
            index=int(environ.get("SLURM_PROCID", "0")),
            count=int(environ.get("SLURM_STEP_NUM_TASKS", "1")),
            host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
            cpus=int(cpus) if cpus.isdecimal() and int(cpus) else None,
        )

    def node_count(self, environ: Mapping[str, str]) -> int | None:
        given = environ.get("SLURM_JOB_NUM_NODES", "")
        return int(given) if given.isdecimal() else None

    def resized(self, step: Sequence[str], nodes: int) -> list[str]:
        return resized_step(step, nodes)

    def end_time(self, environ: Mapping[str, str]) -> float | None:
        began, end = self._times(environ)
        return None if end is None else end + self._clock_error_s(began)

    def time_limit_s(self, environ: Mapping[str, str]) -> float | None:
        began, end = self._times(environ)
        return None if began is None or end is None else end - began

    def _times(self, environ: Mapping[str, str]) -> tuple[float | None, float | None]:
        """When this start of the job began and when it ends, by the controller's clock; None where unknown."""
        ids, end = self.detect(environ), environ.get("SLURM_JOB_END_TIME", "")
        if ids is None:
            return None, None
        if end.isdecimal():
            began = environ.get("SLURM_JOB_START_TIME", "")
            return float(began) if began.isdecimal() else None, float(end)
        # before 23.02, SLURM sets no such variables; N/A: there is no limit
        answer = self._client.run("squeue", "--noheader", f"--jobs={ids.job_id}", "--format=%S|%e")
        first, _, second = answer.out.partition("|")
        return slurm_queue.parse_time(first), slurm_queue.parse_time(second)

    def _clock_error_s(self, began: float | None) -> float:
        """Returns how far this node's clock is ahead of the controller's, by which the job ends.

        The controller is asked only if, by this clock, the job began in the future or long ago.
        """
        if began is None or 0 <= time.time() - began <= _SLOW_START_S:
            return 0.0
        found = _CONTROLLER_TIME.search(self._client.run("sdiag").out)
        error = time.time() - float(found[1]) if found else 0.0
        if abs(error) < _CLOCK_ERROR_S:
            return 0.0
        logger.warning(
            "the clock of this node is %s %s the clock of SLURM's controller: the end of the job's time is corrected",
            format_duration(abs(error)),
            "ahead of" if error > 0 else "behind",
        )
        return error

    def local_disk(self, environ: Mapping[str, str]) -> str | None:
        return environ.get("SLURM_TMPDIR")  # many sites set it; SLURM itself does not

    def is_earlier_start(self, ids: JobIds, ours: JobIds) -> bool:
        same = (ids.cluster_name, ids.job_id) == (ours.cluster_name, ours.job_id)
        return same and ids.restarts < ours.restarts

    def check(self, request: JobRequest) -> None:
        elsewhere = os.environ.get("SBATCH_CLUSTERS")
        if elsewhere and elsewhere != os.environ.get("SLURM_CLUSTERS"):
            raise UsageError(
                f"SBATCH_CLUSTERS={elsewhere} submits to another cluster, but squeue and scancel look up its numbers "
                f"on this one: export SLURM_CLUSTERS={elsewhere}, too, or unset SBATCH_CLUSTERS"
            )
        tasks = submit_options(request, range(request.array_size or 1))[:1] if request.is_array else []
        answer = self._sbatch("--test-only", *options(request), *tasks, stdin=job_script(request))
        if answer.code:
            raise refusal(answer.err, request, self._client)
        limit, wanted = self._time_limit(request), request.options.get("time")
        has_qos = request.options.get("qos") or os.environ.get("SBATCH_QOS")  # it may allow more
        if limit and wanted and not has_qos and parse_time_limit(wanted) > parse_time_limit(limit):
            # many sites accept such a job and never start it
            raise refusal("time limit exceeds", request, self._client)

    def script(self, request: JobRequest) -> str:
        return job_script(request)

    def submit(self, request: JobRequest, script: Path) -> JobIds:
        return self._submit(request, script, None)

    def submit_array(self, request: JobRequest, script: Path, tasks: Sequence[int]) -> JobIds:
        return self._submit(request, script, tasks)

    def queue(self, jobs: Iterable[JobIds]) -> Queue:
        return slurm_queue.ask_queue(self._client, jobs)

    def requeue(
        self, ids: JobIds, *, tries: int = _REQUEUE_TRIES, pause_s: float = _REQUEUE_PAUSE_S
    ) -> str | None:
        lost = False
        for attempt in range(tries):  # the controller may be busy
            if attempt:
                time.sleep(pause_s * 2 ** (attempt - 1))
            answer = self._change("scontrol", "requeue", ids.number)
            if answer.code == 0:
                return None
            is_lost = _LOST_ANSWER.search(answer.err) is not None
            lost |= is_lost
            # a job that has been requeued is refused the second time, and must not be followed by another one
            ended = self.ended_by(ids) if lost else None
            if ended == "requeue":
                return None
            unknown = lost and ended is None
            if not (is_lost or unknown or _TRANSIENT.search(answer.err)):
                break
        return answer.reason

    def cancel(self, ids: JobIds) -> None:
        answer = self._change("scancel", ids.number)
        if answer.code:
            raise HeadwayError(
                f"job {ids.number} could not be cancelled: {answer.reason}; see: squeue --jobs {ids.number}"
            )

    def is_gone(self, ids: JobIds) -> bool | None:
        return slurm_queue.is_gone(self._client, ids.job_id)

    def ended_by(self, ids: JobIds) -> EndedBy | None:
        columns = "--Format=Reason:64,RestartCnt:16"
        answer = self._client.run("squeue", "--noheader", "--states=all", columns, f"--jobs={ids.number}")
        words = " ".join(answer.lines).split()
        if not words:
            return None
        # SLURM counts a restart as soon as it decides on it; the state is COMPLETING, as after a cancel
        if words[-1].isdecimal() and int(words[-1]) > ids.restarts:
            return "requeue"
        return "time limit" if "TimeLimit" in words else "cancel"

    def commands(self, ids: JobIds) -> Mapping[Literal["look", "cancel"], str]:
        return {"look": f"squeue --jobs {ids.number}", "cancel": f"scancel {ids.number}"}

    def submit_command(self, script: Path) -> str:
        return f"sbatch {shlex.quote(str(script))}"

    def health(self, environ: Mapping[str, str]) -> Health | None:
        version = self._client.run("sinfo", "--version")
        if version.not_installed:
            return None
        if version.code:
            advice = "if this machine belongs to a cluster, set SLURM_CONF"
            return Health(good=False, line=_first_line(version), advice=advice)
        ping, ids = self._client.run("scontrol", "ping"), self.detect(environ)
        if ping.code or " UP" not in _first_line(ping):
            advice = "the controller does not answer: ask the site"
            return Health(good=False, line=f"{_first_line(version)}: {_first_line(ping)}", advice=advice)
        job = f", in job {ids.job_id}" if ids else ""
        return Health(good=True, line=f"{_first_line(version)}{job}: {_first_line(ping)}")

    def _submit(self, request: JobRequest, script: Path, tasks: Sequence[int] | None) -> JobIds:
        # the last of two options counts: a user's own --dependency was met when the job that this one follows began
        words = [*options(request), *submit_options(request, tasks), str(script)]
        answer = self._sbatch(*words, env=request.env)
        lost = _LOST_ANSWER.search(answer.err) and not _NEVER_ASKED.search(answer.reason)
        if answer.code < 0 or (answer.code and lost):
            raise HeadwayError(f"sbatch ended with {answer.reason!r}")
        if answer.code:
            raise refusal(answer.err, request, self._client)
        found = _NUMBER.findall(answer.out)
        if not found:
            raise HeadwayError(f"sbatch did not print the number of the job, but {answer.out!r:.200}")
        job, cluster = found[-1]
        return JobIds(scheduler=self.name, job_id=job, cluster_name=cluster or None)

    def _sbatch(self, *words: str, stdin: str = "", env: Mapping[str, str] | None = None) -> SlurmAnswer:
        answer = self._change("sbatch", *words, stdin=stdin, env=env)
        if answer.not_installed:
            raise UsageError(
                "sbatch is not on this machine: submit from a login node of the cluster, "
                "or run here with: headway run"
            )
        return answer

    def _change(self, *command: str, stdin: str = "", env: Mapping[str, str] | None = None) -> SlurmAnswer:
        """Runs a program that changes something; raises if it does not answer in time, as it may have had an effect."""
        answer = self._client.run(*command, stdin=stdin, env=env, timeout_s=_TIMEOUT_S)
        if answer.timed_out:
            advice = "" if command[0] == "sbatch" else f"; {_LOOK}"  # the callers of sbatch add their own
            raise HeadwayError(f"{answer.err}: SLURM's controller is busy or down{advice}")
        return answer

    def _time_limit(self, request: JobRequest) -> str | None:
        """Returns the longest time that the partitions of a job allow; None if there is no limit."""
        partition = partition_option(request)
        answer = self._client.run("sinfo", "-ho", "%P %l", *partition)
        found = filter(None, map(_LIMIT.fullmatch, answer.lines))
        limits = [line[2] for line in found if partition or line[1].endswith("*")]  # * is the default
        if not limits or "infinite" in limits:
            return None
        return max(limits, key=parse_time_limit)


def _first_line(answer: SlurmAnswer) -> str:
    """Returns the first line that a program printed, with the next one if it is a heading."""
    lines = (answer.out + answer.err).strip().splitlines() or [f"exit code {answer.code}"]
    first = lines[:2] if lines[0].endswith(":") else lines[:1]
    return " ".join(" ".join(first).split())
