"""A scheduler that uses nothing but the interface: its nodes are processes of this machine.

A job is a directory in $PROCESS_QUEUE with a request, a state and, while it runs, a process that plays the cluster: it
starts one agent per node, then the epilogue, and starts again if the job was requeued meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from headway.launcher.targets import ClusterTarget
from headway.schedulers.base import (
    AllocatedNode,
    Health,
    JobIds,
    JobRequest,
    JobState,
    JobStatus,
    Queue,
    Scheduler,
)

RUNNING: list[subprocess.Popen[bytes]] = []
"""the processes that play the cluster"""


class ProcessScheduler(Scheduler):
    name = "process_scheduler:ProcessScheduler"
    label = "process"
    variables = ("PROCESS_",)

    def detect(self, environ: Mapping[str, str]) -> JobIds | None:
        if "PROCESS_JOB" not in environ:
            return None
        restarts = environ["PROCESS_RESTARTS"]
        return replace(self._ids(environ["PROCESS_JOB"]), restart_count=restarts)

    def node(self, environ: Mapping[str, str]) -> AllocatedNode | None:
        if "PROCESS_NODE" not in environ:
            return None
        index = int(environ["PROCESS_NODE"])
        return AllocatedNode(index=index, count=int(environ["PROCESS_NODES"]), host=f"127.0.0.{1 + index}")

    def end_time(self, environ: Mapping[str, str]) -> float | None:
        return float(environ["PROCESS_END"]) if "PROCESS_END" in environ else None

    def local_disk(self, environ: Mapping[str, str]) -> str | None:
        return environ.get("PROCESS_DISK")

    def is_earlier_start(self, ids: JobIds, ours: JobIds) -> bool:
        return ids.job_id == ours.job_id and ids.restarts < ours.restarts

    def check(self, request: JobRequest) -> None:
        pass

    def script(self, request: JobRequest) -> str:
        return json.dumps(asdict(request) | {"after": None}, default=str)

    def submit(self, request: JobRequest, script: Path) -> JobIds:  # noqa: ARG002
        ids = self._ids(str(1 + len(list(queue_directory().iterdir()))))
        directory = queue_directory() / ids.job_id
        directory.mkdir()
        (directory / "script").write_text(script.read_text())
        write_state(directory, "queued")
        command = [sys.executable, __file__, str(directory)]
        RUNNING.append(subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL))
        return ids

    def submit_array(self, request: JobRequest, script: Path, tasks: Sequence[int]) -> JobIds:
        raise NotImplementedError

    def queue(self, jobs: Iterable[JobIds]) -> Queue:
        states = {ids: (queue_directory() / ids.job_id / "state").read_text() for ids in jobs}
        return Queue(
            statuses={(self.name, ids.number): JobStatus(state=state) for ids, state in states.items()}
        )  # type: ignore[arg-type]

    def requeue(self, ids: JobIds) -> str | None:
        (queue_directory() / ids.job_id / "requeue").touch()
        return None

    def cancel(self, ids: JobIds) -> None:
        self._signal(ids, signal.SIGTERM)

    def preempt(self, ids: JobIds) -> None:
        """Takes the nodes away, as a scheduler does for a job that is more urgent."""
        self._signal(ids, signal.SIGUSR2)

    def is_gone(self, ids: JobIds) -> bool | None:
        return (queue_directory() / ids.job_id / "state").read_text() != "running"

    def commands(self, ids: JobIds) -> Mapping[Literal["look", "cancel"], str]:
        return {"look": f"look {ids.number}", "cancel": f"cancel {ids.number}"}

    def submit_command(self, script: Path) -> str:
        return f"submit {script}"

    def health(self, environ: Mapping[str, str]) -> Health | None:  # noqa: ARG002
        return None

    def _ids(self, job: str) -> JobIds:
        return JobIds(scheduler=self.name, job_id=job, cluster_name="this machine")

    def _signal(self, ids: JobIds, number: signal.Signals) -> None:
        os.kill(int((queue_directory() / ids.job_id / "pid").read_text()), number)


@dataclass(frozen=True, kw_only=True)
class ProcessCluster(ClusterTarget):
    """What a user gives: `on=ProcessCluster(nodes=2)`."""

    kind: ClassVar[str] = "process_scheduler:ProcessCluster"
    nodes: int = 2
    nproc_per_node: int = 1
    max_requeues: int = 5
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def scheduler(self) -> ProcessScheduler:
        return ProcessScheduler()

    def options(self) -> Mapping[str, Any]:
        return {}


def queue_directory() -> Path:
    return Path(os.environ["PROCESS_QUEUE"])


def write_state(directory: Path, state: JobState) -> None:
    (directory / "state.new").write_text(state)
    (directory / "state.new").rename(directory / "state")


def run_job(directory: Path) -> None:
    """The cluster's part, in a process of its own."""
    request = json.loads((directory / "script").read_text())
    agents: list[subprocess.Popen[bytes]] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: [agent.send_signal(number) for agent in agents])
    (directory / "pid").write_text(str(os.getpid()))
    run, nodes = request["directory"], request["nodes"]
    with Path(run, request["log"]).open("ab") as log:
        for restarts in range(100):
            write_state(directory, "running")
            job = {"PROCESS_JOB": directory.name, "PROCESS_RESTARTS": str(restarts)}
            environ = os.environ | request["env"] | job
            for node in range(nodes):
                place = {"PROCESS_NODE": str(node), "PROCESS_NODES": str(nodes)}
                command = [*request["agent"], run]
                agents.append(subprocess.Popen(command, env=environ | place, stdout=log, stderr=log))
            status = max(agent.wait() for agent in agents)
            agents.clear()
            (directory / "requeue").unlink(missing_ok=True)
            done = subprocess.run(
                [*request["epilogue"], run, str(status)], env=environ, stdout=log, stderr=log
            )
            if not (directory / "requeue").exists():
                break
            write_state(directory, "queued")
    write_state(directory, "done" if done.returncode == 0 else "failed")


if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
