"""Runs the agent of this node: determines from its launcher which of how many agents it is, and where they meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from headway import schedulers
from headway.dist.environment import detect
from headway.dist.rendezvous import file_rendezvous
from headway.errors import UsageError
from headway.launcher.agent.agent import Agent, check_nproc
from headway.launcher.agent.team import Team
from headway.launcher.code import workspace
from headway.launcher.enqueue import note_job
from headway.launcher.program import JobFile
from headway.run import Run
from headway.run.job_record import record_start
from headway.schedulers.base import AllocatedNode
from headway.system import environment


def run_submitted(path: str) -> int:
    """Runs the agent of this node for a submitted run. The job's epilogue reports how it ended."""
    run = Run.open_private(path)
    job = JobFile.read(run)
    team, node = team_of(run, job, os.environ)
    if node.index == 0:
        ids = job.ids(os.environ)
        note_job(run, ids)
        record_start(run, job=ids.number)

    def prepare() -> Mapping[str, str]:  # called by the agent, which records why it cannot start its ranks
        check_nproc(job.program.nproc, "--ntasks-per-node")
        workspace.prepare(run)
        return job.staged_environment()

    return Agent(
        job.program.command,
        nproc=job.program.nproc,
        environ=job.program.environment(os.environ) | {environment.RUN: str(run.path)},
        cwd=job.program.cwd,
        team=team,
        host=node.host,
        report=False,
        max_restarts=job.target.max_restarts,
        prepare=prepare,
    ).run()


def team_of(run: Run, job: JobFile, environ: Mapping[str, str]) -> tuple[Team, AllocatedNode]:
    """Returns the agents of a submitted job, as seen from this node, and this node."""
    alone = AllocatedNode(index=0, count=1, host=socket.gethostname())
    node = job.target.scheduler.node(environ) or alone
    return Team(job.launch_directory(run, environ), number=node.index, size=node.count), node


def run_here(command: Sequence[str], *, nproc: int, max_restarts: int = 0) -> int:
    """Runs a command as ranks on this node; under srun or mpirun, together with the agents of the other nodes."""
    check_nproc(nproc)
    place = detect()
    if place.launcher in ("headway", "torchrun"):
        raise UsageError(
            f"an agent starts ranks, and {place.launcher} has started this process as one; "
            "start agents with srun or mpirun, one per node"
        )
    team = None
    if place.world_size > 1:
        rendezvous = file_rendezvous(place)
        rendezvous.check()
        directory = rendezvous.path.with_name(rendezvous.path.name.replace(".meeting-", ".agents-"))
        team = Team(directory, number=place.rank, size=place.world_size)
    node = schedulers.node()
    host = node.host if node else socket.gethostname()
    agent = Agent(
        command,
        nproc=nproc,
        team=team,
        host=host,
        max_restarts=max_restarts,
        finish=team.leave if team is not None else lambda: None,
    )
    return agent.run()
