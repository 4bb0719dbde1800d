"""The interface to a scheduler: how headway gets nodes, learns which job it is in, and starts a job again.

    ids = scheduler.submit(request, script=Path("job.sh"))     # from a login node
    scheduler.queue([ids]).find(ids)                           # JobStatus(state="queued", why="Priority")

    ids = scheduler.detect(os.environ)                         # inside the job
    scheduler.end_time(os.environ)                             # seconds since 1970
    scheduler.requeue(ids)

An implementation is a class without arguments: what it needs to know is in the request, the ids or the environment.
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
"""why a scheduler ends a job that runs; after a requeue (a preemption, for example) it starts the job again itself"""


@final
@dataclass(frozen=True, kw_only=True)
class JobIds:
    """One start of one job, by the names that its scheduler gives it."""

    scheduler: str
    """`Scheduler.name`"""
    job_id: str
    cluster_name: str | None = None
    step_id: str | None = None
    array_job_id: str | None = None
    array_task_id: str | None = None
    restart_count: str = "0"
    """how often the scheduler has started the job again"""

    @property
    def number(self) -> str:
        """The job as people and the scheduler's own programs call it; of an array, one of its jobs.

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
        """The plain values that run.json and the run's lock keep.

        >>> JobIds(scheduler="slurm", job_id="7").to_dict()
        {'scheduler': 'slurm', 'ids': {'job_id': '7', 'restart_count': '0'}}
        """
        ids = {name: value for name, value in asdict(self).items() if value is not None}
        return {"scheduler": ids.pop("scheduler"), "ids": ids}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> JobIds | None:
        """The ids in a record; None if it has none. Records of older versions hold them under `slurm`."""
        ids = values.get("ids") or values.get("slurm") or {}
        if not isinstance(ids, dict) or not all(isinstance(value, str) for value in ids.values()):
            return None
        known = {name: ids[name] for name in _ID_NAMES if name in ids}
        return cls(scheduler=str(values.get("scheduler") or "slurm"), **known) if "job_id" in known else None

    @classmethod
    def from_submission(cls, values: Mapping[str, Any]) -> JobIds | None:
        """The job that submitted.json names; None if the run was not submitted to a scheduler."""
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


_ID_NAMES = ("cluster_name", "job_id", "step_id", "array_job_id", "array_task_id", "restart_count")


@final
@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What a job needs and what it runs."""

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
    """the most nodes, as many of which as are free the job gets; None for as many as `nodes`"""
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
    """further variables for the job's script"""
    after: JobIds | None = None
    """a job whose end this one waits for"""


@final
@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What a scheduler knows about one job: its state, and why where that is not plain."""

    state: JobState
    why: str = ""
    started: float | None = None
    """when it started last, in seconds since 1970; None if that is not known"""

    @property
    def is_over(self) -> bool:
        return self.state not in ("queued", "running")


@final
@dataclass(frozen=True, kw_only=True)
class Queue:
    """The jobs that a scheduler still knows; `note` says why it may not be all of them."""

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
    """its name, as the other nodes know it"""
    cpus: int | None = None
    """how many CPUs the job has there, where the kernel does not limit them by itself"""


@final
@dataclass(frozen=True, kw_only=True)
class Health:
    """Whether a scheduler can be used from this machine; `advice` is what to do if not."""

    good: bool
    line: str
    advice: str = ""


class Scheduler(ABC):
    """A batch scheduler: it submits jobs, requeues them, and knows which job a process is in."""

    name: ClassVar[str]
    """for run.json and job.json: `slurm`, or `module:Class` for one that headway does not ship"""
    label: ClassVar[str]
    """for people: SLURM"""
    variables: ClassVar[tuple[str, ...]]
    """prefixes of the environment variables that belong to it"""

    # --- inside a job

    @abstractmethod
    def detect(self, environ: Mapping[str, str]) -> JobIds | None:
        """The job in whose environment this is; None outside of a job."""

    @abstractmethod
    def node(self, environ: Mapping[str, str]) -> AllocatedNode | None:
        """The node on which a process of the job's step runs; None for other processes."""

    def node_count(self, environ: Mapping[str, str]) -> int | None:  # noqa: ARG002
        """Returns how many nodes the job of this environment was given; None if it has as many as it asked for."""
        return None

    @abstractmethod
    def end_time(self, environ: Mapping[str, str]) -> float | None:
        """When the job's time is over, in seconds since 1970; None if there is no limit, or no job."""

    def time_limit_s(self, environ: Mapping[str, str]) -> float | None:  # noqa: ARG002
        """How long this start of the job may take; None if that is not known."""
        return None

    @abstractmethod
    def local_disk(self, environ: Mapping[str, str]) -> str | None:
        """A directory of the job on the node's own disk; None if there is none."""

    @abstractmethod
    def is_earlier_start(self, ids: JobIds, ours: JobIds) -> bool:
        """Whether `ids` name an earlier start of the same job as `ours`."""

    # --- a new job

    @abstractmethod
    def check(self, request: JobRequest) -> None:
        """Raises `UsageError` if such a job could never run. Submits nothing."""

    @abstractmethod
    def script(self, request: JobRequest) -> str:
        """The text of the job's script: a pure function of the request."""

    @abstractmethod
    def submit(self, request: JobRequest, script: Path) -> JobIds:
        """Submits a job that runs `script`, which holds what `script(request)` gave.

        `UsageError` says that the scheduler refuses it, `SchedulerUnreachable` that it could not be asked; after any
        other exception the job may be in the queue.
        """

    @abstractmethod
    def submit_array(self, request: JobRequest, script: Path, tasks: Sequence[int]) -> JobIds:
        """Submits one job for each of `tasks`, which are entries of the request's directory; raises as `submit`."""

    # --- a job that was submitted

    @abstractmethod
    def queue(self, jobs: Iterable[JobIds]) -> Queue:
        """What the scheduler knows about these jobs, asked once for all of them."""

    @abstractmethod
    def requeue(self, ids: JobIds) -> str | None:
        """Queues a job again, under its number; returns the scheduler's reason if it refuses."""

    @abstractmethod
    def cancel(self, ids: JobIds) -> None:
        """Ends a job; its ranks get a signal first, so that they can save. `HeadwayError` if that fails."""

    @abstractmethod
    def is_gone(self, ids: JobIds) -> bool | None:
        """Whether no process of a job is left; False if it is suspended and will come back, None if unknown."""

    def ended_by(self, ids: JobIds) -> EndedBy | None:  # noqa: ARG002
        """Why the scheduler ends this start of a job, whose processes have got SIGTERM.

        None if it does not answer: then the job's end time counts.
        """
        return "cancel"

    # --- for people

    @abstractmethod
    def commands(self, ids: JobIds) -> Mapping[Literal["look", "cancel"], str]:
        """The scheduler's own command lines by which people look at a job and cancel it."""

    @abstractmethod
    def submit_command(self, script: Path) -> str:
        """The scheduler's own command line by which people submit a script again."""

    @abstractmethod
    def health(self, environ: Mapping[str, str]) -> Health | None:
        """Whether the scheduler answers; None if it is not installed on this machine."""
