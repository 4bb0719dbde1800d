"""What a job does before its ranks start: copy their data to each node's own disk.

The job script calls it, once on each node. How it ended is left where the agents would leave it, so that the epilogue
reports why the ranks never started, and queues a job again that was only stopped: what is copied is kept.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from headway.data.cache.staging import stage
from headway.dist.control.signals import STOP_REQUESTS
from headway.errors import DONE, TERMINATED, HeadwayError, Stopped
from headway.launcher.agent.node import team_of
from headway.launcher.program import JobFile
from headway.run import Run
from headway.system.environment import STAGED
from headway.system.log import install_handler


def main(path: str) -> int:
    """Copies to this node what a submitted run asks for."""
    install_handler()
    for number in (*STOP_REQUESTS, signal.SIGTERM):
        signal.signal(number, _stop)
    run = Run.open_private(path)
    job = JobFile.read(run)
    team, _ = team_of(run, job, os.environ)
    try:
        stage(job.target.pre, job.staged_environment()[STAGED])
        return DONE
    except HeadwayError as error:
        team.begin_round(0)
        record = {"kind": "staging", "sentence": str(error)}
        team.conclude({"exit_code": error.exit_code, "record": record})
        team.mark_ended(error.exit_code)
        return error.exit_code
    except SystemExit:
        team.mark_ended(TERMINATED)
        raise


def _stop(number: int, _: FrameType | None) -> None:
    """Ends the copying at once, and only once: SLURM and srun may both send the signal."""
    for each in (*STOP_REQUESTS, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGTERM:
        raise SystemExit(TERMINATED)
    raise Stopped("stopped while data was copied to the nodes; the next start continues from what is there")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
