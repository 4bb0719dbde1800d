"""The interface to a scheduler: how headway gets nodes, determines which job it is in, and starts a job again.

    ids = scheduler.submit(request, script=Path("job.sh"))     # from a login node
    scheduler.queue([ids]).find(ids)                           # JobStatus(state="queued", why="Priority")

    ids = scheduler.detect(os.environ)                         # inside the job
    scheduler.end_time(os.environ)                             # seconds since 1970
    scheduler.requeue(ids)

An implementation is a class without arguments: its methods get all facts from the request, the ids or the environment.
Everything that passes through the interface is a frozen dataclass of plain values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, final

JobState = Literal["queued", "running", "done", "failed", "cancelled"]
EndedBy = Literal["time limit", "requeue", "cancel"]
"""why a scheduler ends a running job; after a requeue (a preemption, for example) it starts the job again itself"""


@final
@dataclass(frozen=True, kw_only=True)
class JobIds:
    """One start of one job, by the names that its scheduler gives it."""

    scheduler: str
    """`Scheduler.name`"""
    job_id: str
    cluster_name: str | None = None
    """without it, `is_gone` has no evidence that another job is over: the same number may be another cluster's job"""
    array_job_id: str | None = None
    array_task_id: str | None = None
    restart_count: str = "0"
    """how often the scheduler has started the job again"""

    @property
    def number(self) -> str:
        """The number that people and the scheduler's own programs use for the job, or for one job of an array.

        >>> JobIds(scheduler="slurm", job_id="9", array_job_id="7", array_task_id="2").number
        '7_2'
        """
        is_array = self.array_job_id is not None and self.array_task_id is not None
        return f"{self.array_job_id}_{self.array_task_id}" if is_array else self.job_id

    @property
    def start(self) -> str:
        """A name for this start of the job that no other start has."""
        return f"{self.job_id}-{self.restart_count}"

    @property
    def restarts(self) -> int:
        """`restart_count` as a number."""
        return int(self.restart_count) if self.restart_count.isdecimal() else 0

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for run.json and the run's lock.

        >>> JobIds(scheduler="slurm", job_id="7").to_dict()
        {'scheduler': 'slurm', 'ids': {'job_id': '7', 'restart_count': '0'}}
        """
        ids = {name: value for name, value in asdict(self).items() if value is not None}
        return {"scheduler": ids.pop("scheduler"), "ids": ids}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> JobIds | None:
        """Returns the ids in a record; None if it has none."""
        ids = values.get("ids") or {}
        if not isinstance(ids, dict) or not all(isinstance(value, str) for value in ids.values()):
            return None
        known = {name: ids[name] for name in _ID_NAMES if name in ids}
        return cls(scheduler=str(values.get("scheduler") or "slurm"), **known) if "job_id" in known else None

    @classmethod
    def from_submission(cls, values: Mapping[str, Any]) -> JobIds | None:
        """Returns the job that submitted.json names; None if the run was not submitted to a scheduler."""
        if "job_id" not in values:
            return None
        job, task, cluster = str(values["job_id"]), values.get("array_task"), values.get("cluster")
        return cls(
            scheduler=str(values.get("scheduler") or "slurm"),
            job_id=job,
            cluster_name=None if cluster is None else str(cluster),
            array_job_id=None if task is None else job,
            array_task_id=None if task is None else str(task),
        )


_ID_NAMES = ("cluster_name", "job_id", "array_job_id", "array_task_id", "restart_count")


@final
@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The resources that a job needs, and the commands that it runs."""

    name: str
    directory: Path
    """the run directory; for an array, a directory whose entries 0, 1, ... lead to the run directories"""
    log: Path
    """where the job's output goes, relative to the run directory"""
    agent: Sequence[str]
    """the command that each node runs, with the run directory as its last argument"""
    epilogue: Sequence[str]
    """the last command of the job, whose status is the job's: with the run directory and the agents' exit status; or
    with the run directory, `--step` and the pid of the process that runs the agents, a child of this one; or with the
    run directory, `--prologue`, the pid of the process that runs the prologue, and the command that runs the agents"""
    prologue: Sequence[str] | None = None
    """a command that each node runs before the agents, with the run directory; if it fails, no agent starts"""
    nodes: int = 1
    """the number of nodes, or the least if `max_nodes` is larger"""
    max_nodes: int | None = None
    """the most nodes; the job gets as many as are free. None for as many as `nodes`"""
    nproc_per_node: int = 1
    """the number of ranks that an agent starts on its node"""
    is_array: bool = False
    array_size: int | None = None
    """how many jobs the array has, for `Scheduler.check`"""
    array_limit: int | None = None
    """how many jobs of the array may run at once"""
    signal_lead_s: int = 120
    """seconds before the time limit at which the ranks get SIGUSR2: they save and stop"""
    requeue: bool = True
    """whether the scheduler may start the job again"""
    setup: Sequence[str] = ()
    """shell lines that come first, on the first node"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """settings under the scheduler's own names"""
    env: Mapping[str, str] = field(default_factory=dict)
    """further variables for the job; if the script does not export them, a job submitted by hand lacks them"""
    after: JobIds | None = None
    """a job whose end this one waits for"""


@final
@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """A scheduler's view of one job: its state, and the reason where it is not obvious."""

    state: JobState
    why: str = ""
    started: float | None = None
    """when it last started, in seconds since 1970; None if that is not known"""

    @property
    def is_over(self) -> bool:
        return self.state not in ("queued", "running")


@final
@dataclass(frozen=True, kw_only=True)
class Queue:
    """The jobs of which a scheduler has a record; `note` explains why some may be missing."""

    statuses: Mapping[tuple[str, str], JobStatus] = field(default_factory=dict)
    """by scheduler and number"""
    note: str | None = None

    def find(self, ids: JobIds) -> JobStatus | None:
        return self.statuses.get((ids.scheduler, ids.number))


@final
@dataclass(frozen=True, kw_only=True)
class AllocatedNode:
    """The node of a job on which this process runs."""

    index: int
    count: int
    host: str
    """its name on the network of the cluster"""
    cpus: int | None = None
    """how many CPUs the job has there, if the kernel does not enforce it"""


@final
@dataclass(frozen=True, kw_only=True)
class Health:
    """Whether a scheduler can be used from this machine; `advice` is what to do if not."""

    good: bool
    line: str
    advice: str = ""


class Scheduler(ABC):
    """A batch scheduler: it submits jobs, requeues them, and detects which job a process is in."""

    name: ClassVar[str]
    """for run.json and job.json: `slurm`, or `module:Class` for one that does not ship with headway"""
    label: ClassVar[str]
    """for people: SLURM"""
    variables: ClassVar[tuple[str, ...]]
    """prefixes of the environment variables that belong to it"""

    # --- inside a job

    @abstractmethod
    def detect(self, environ: Mapping[str, str]) -> JobIds | None:
        """Returns the job that `environ` belongs to; None outside of a job."""

    @abstractmethod
    def node(self, environ: Mapping[str, str]) -> AllocatedNode | None:
        """Returns the node on which a process of the job's step runs; None for other processes."""

    def node_count(self, environ: Mapping[str, str]) -> int | None:  # noqa: ARG002
        """Returns how many nodes the job of this environment was given; None if it has as many as it asked for."""
        return None

    def resized(self, step: Sequence[str], nodes: int) -> list[str] | None:  # noqa: ARG002
        """Returns the command of a step, as the job's script has passed it, on fewer nodes; None if there is no way."""
        return None

    @abstractmethod
    def end_time(self, environ: Mapping[str, str]) -> float | None:
        """Returns when the job's time is over, in seconds since 1970; None if there is no limit, or no job."""

    def time_limit_s(self, environ: Mapping[str, str]) -> float | None:  # noqa: ARG002
        """Returns how long this start of the job may take; None if that is not known."""
        return None

    @abstractmethod
    def local_disk(self, environ: Mapping[str, str]) -> str | None:
        """Returns a directory of the job on the node's own disk; None if there is none."""

    @abstractmethod
    def is_earlier_start(self, ids: JobIds, ours: JobIds) -> bool:
        """Whether `ids` name an earlier start of the same job as `ours`."""

    # --- a new job

    @abstractmethod
    def check(self, request: JobRequest) -> None:
        """Raises `UsageError` if such a job could never run. Submits nothing."""

    @abstractmethod
    def script(self, request: JobRequest) -> str:
        """Returns the text of the job's script: a pure function of the request.

        The script runs the lines of `setup`; then `prologue`, if there is one, and `agent`, each as one process per
        node of which `node` returns the node; then `epilogue`, in one of the ways that the request describes. Its
        output is appended to `log`. The agents get SIGUSR2 `signal_lead_s` before the time limit.
        """

    @abstractmethod
    def submit(self, request: JobRequest, script: Path) -> JobIds:
        """Submits a job that runs `script`, a file with the text of `script(request)`.

        Raises `UsageError` if the scheduler refuses the job, and `SchedulerUnreachable` if the request did not reach
        it; after any other exception the job may be in the queue.
        """

    @abstractmethod
    def submit_array(self, request: JobRequest, script: Path, tasks: Sequence[int]) -> JobIds:
        """Submits one job for each of `tasks`, which are entries of the request's directory; raises as `submit`.

        Returns the ids of the whole array: its `job_id`, without a task.
        """

    # --- a job that was submitted

    @abstractmethod
    def queue(self, jobs: Iterable[JobIds]) -> Queue:
        """Returns the statuses of these jobs, with one request to the scheduler for all of them."""

    @abstractmethod
    def requeue(self, ids: JobIds) -> str | None:
        """Queues a job again, under its number; returns the scheduler's reason if it refuses.

        The epilogue of the job itself calls it, and the scheduler may end that process.
        """

    @abstractmethod
    def cancel(self, ids: JobIds) -> None:
        """Ends a job; its ranks get a signal first, so that they can save. `HeadwayError` if that fails."""

    @abstractmethod
    def is_gone(self, ids: JobIds) -> bool | None:
        """Whether no process of a job is left; False if it is suspended and will resume, None if unknown."""

    def ended_by(self, ids: JobIds) -> EndedBy | None:  # noqa: ARG002
        """Returns why the scheduler ends this start of a job, whose processes have received SIGTERM.

        None if it does not answer: then the job's end time decides.
        """
        return "cancel"

    # --- for people

    @abstractmethod
    def commands(self, ids: JobIds) -> Mapping[Literal["look", "cancel"], str]:
        """Returns the scheduler's own command lines by which people look at a job and cancel it."""

    @abstractmethod
    def submit_command(self, script: Path) -> str:
        """Returns the scheduler's own command line by which people submit a script again."""

    @abstractmethod
    def health(self, environ: Mapping[str, str]) -> Health | None:
        """Returns whether the scheduler answers; None if it is not installed on this machine."""
