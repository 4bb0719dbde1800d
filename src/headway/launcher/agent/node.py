"""One agent among several: finds out from its launcher which of how many it is, and where they meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.dist.environment import Place, detect
from headway.dist.rendezvous import file_meeting
from headway.errors import UsageError
from headway.launcher.agent.agent import Agent
from headway.launcher.agent.team import Team
from headway.launcher.epilogue import launch_name
from headway.launcher.program import JobFile
from headway.launcher.prologue import staged
from headway.run import Run


def run_submitted(path: str) -> int:
    """Runs on this node what was submitted into a run directory. Its job script says how it ended."""
    run = Run.open(Path(path).resolve())
    job = JobFile.read(run)
    place = _place()
    team = Team(run.launch_dir / launch_name(os.environ), number=place.rank, size=place.world_size)
    return Agent(
        job.program.command,
        processes=job.program.processes,
        environ=job.program.environment(os.environ) | {"HEADWAY_RUN": str(run.path)},
        cwd=job.program.cwd,
        team=team,
        host=_host(os.environ),
        announce=False,
        max_restarts=job.target.max_restarts,
        prepare=lambda: staged(job.target),
    ).run()


def run_here(command: Sequence[str], *, processes: int, max_restarts: int = 0) -> int:
    """Runs a command on this node; under srun or mpirun together with the agents of the other nodes."""
    place = _place()
    team = None
    if place.world_size > 1:
        meeting = file_meeting(place)
        meeting.check()
        folder = meeting.path.with_name(meeting.path.name.replace(".meeting-", ".agents-"))
        team = Team(folder, number=place.rank, size=place.world_size)
    code = Agent(
        command, processes=processes, team=team, host=_host(os.environ), max_restarts=max_restarts
    ).run()
    if team is not None:
        team.leave()
    return code


def _place() -> Place:
    place = detect()
    if place.launcher in ("headway", "torchrun"):
        raise UsageError(
            f"an agent starts ranks, and {place.launcher} has started this process as one; "
            "start agents with srun or mpirun, one per node"
        )
    return place


def _host(environ: Mapping[str, str]) -> str:
    """This node's name, as the other nodes know it."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()
