"""What a job does before its ranks start: copy their data to each node's own disk.

Called by the job script, once on each node. How it ended is left where the agents would leave it, so that `after`
says why the ranks never started, and queues a job again that was only stopped: what is copied is kept.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

from headway.data.cache.staging import stage
from headway.dist.control.signals import STOP_REQUESTS
from headway.dist.environment import detect
from headway.errors import DONE, TERMINATED, HeadwayError, Stopped, UsageError
from headway.launcher.agent.team import Team
from headway.launcher.epilogue import launch_name
from headway.launcher.program import JobFile
from headway.launcher.targets import Slurm
from headway.run import Run

VARIABLE = "HEADWAY_STAGED"
"""names the folder with what was staged for a job"""


def main(path: str) -> int:
    """Stages on this node what a submitted run asks for."""
    for number in (*STOP_REQUESTS, signal.SIGTERM):
        signal.signal(number, _stop)
    run = Run.open(Path(path).resolve())
    place = detect()
    team = Team(run.launch_dir / launch_name(os.environ), number=place.rank, size=place.world_size)
    try:
        target = JobFile.read(run).target
        stage(target.pre, staged(target)[VARIABLE])
        return DONE
    except HeadwayError as error:
        team.begin_round(0)
        record = {"kind": "staging", "sentence": str(error)}
        team.conclude({"exit_code": error.exit_code, "record": record})
        team.ended(error.exit_code)
        return error.exit_code
    except SystemExit:
        team.ended(TERMINATED)
        raise


def staged(target: Slurm) -> dict[str, str]:
    """What tells ranks where their data is; nothing if none was staged. Variables are those of this node."""
    if not target.pre:
        return {}
    folder = os.path.expandvars(target.pre_to)
    if "$" in folder:
        raise UsageError(
            f"pre_to={target.pre_to!r}: not all of these variables are set on {socket.gethostname()}; "
            "give a folder on the node's own disk, like /scratch/$USER"
        )
    return {VARIABLE: folder}


def _stop(number: int, _: FrameType | None) -> None:
    """Ends the copying at once, and only once: SLURM and srun may both send the signal."""
    for each in (*STOP_REQUESTS, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGTERM:
        raise SystemExit(TERMINATED)
    raise Stopped("stopped while data was copied to the nodes; the next start goes on from what is there")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
