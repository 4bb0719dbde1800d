"""The first command of a job, on each node: examines the nodes, and copies data to each node's own disk.

It records its end as an agent does, so that the epilogue reports why the ranks never started. A job that was only
stopped is queued again, and keeps the data that was copied.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from headway.data.cache.staging import stage
from headway.dist.control.signals import STOP_REQUESTS
from headway.errors import DONE, TERMINATED, HeadwayError, Stopped, UnfitNodes
from headway.interpreter import module_command
from headway.launcher.agent.agent import Agent, check_nproc
from headway.launcher.agent.node import team_of
from headway.launcher.agent.team import Team
from headway.launcher.agent.team_watch import BEAT_S
from headway.launcher.enqueue import note_job
from headway.launcher.program import JobFile
from headway.run import Run
from headway.run.info import read_json
from headway.schedulers.base import AllocatedNode
from headway.system.environment import STAGED
from headway.system.log import install_handler, logger


def main(path: str) -> int:
    """Prepares this node as the job of a submitted run requires."""
    install_handler()
    for number in (*STOP_REQUESTS, signal.SIGTERM):
        signal.signal(number, _stop)
    team: Team | None = None
    try:
        run = Run.open_private(path)
        job = JobFile.read(run)
        team, node = team_of(run, job, os.environ)
        if node.index == 0:
            note_job(run, job.ids(os.environ))
        with _recording_preparation(team, node.host):
            if job.target.doctor:
                _examine(run, job, node)
            if job.target.pre:
                stage(job.target.pre, job.staged_environment()[STAGED])
        team.record_preparation({"host": node.host, "exit_code": DONE})
        return DONE
    except SystemExit:
        if team is not None:
            _leave(team, TERMINATED)
        raise
    except Exception as error:  # noqa: BLE001 - the job must report any error
        code = error.exit_code if isinstance(error, HeadwayError) else 1
        if not isinstance(error, HeadwayError):
            traceback.print_exc()
        if team is None:  # the exit status of the step is all that the epilogue gets
            logger.error(error)
            return code
        why = f"{socket.gethostname()} could not be prepared for the ranks: {type(error).__name__}: {error}"
        record = {
            "kind": "doctor" if isinstance(error, UnfitNodes) else "staging",
            "sentence": str(error) if isinstance(error, HeadwayError) else why,
        }
        team.begin_round(0)
        team.conclude({"exit_code": code, "record": record})
        _leave(team, code)
        return code


def _leave(team: Team, code: int) -> None:
    """Records that this node was not prepared; a silent node would count as lost."""
    team.mark_ended(code)
    team.record_preparation({"host": socket.gethostname(), "exit_code": code})


@contextmanager
def _recording_preparation(team: Team, host: str) -> Iterator[None]:
    """Shows the job's script, from a thread, that this node is alive: preparing it may take hours."""
    over = threading.Event()

    def record() -> None:
        for count in itertools.count():
            team.record_preparation({"host": host, "count": count})
            if over.wait(BEAT_S):
                return

    thread = threading.Thread(target=record, name="headway prologue", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def examination_command(run: Run, data: Sequence[str] = ()) -> list[str]:
    """Returns the command of the ranks that examine the nodes of a job before, or instead of, its own ranks."""
    return module_command("headway.doctor.examination", str(run.doctor_file), *data)


def _examine(run: Run, job: JobFile, node: AllocatedNode) -> None:
    """Starts ranks that examine all nodes; raises `UnfitNodes` if these nodes would break the run."""
    check_nproc(job.program.nproc, "--ntasks-per-node")
    directory = job.launch_directory(run, os.environ) / "doctor"
    code = Agent(
        examination_command(run, job.target.pre),
        nproc=job.program.nproc,
        environ=job.program.environment(os.environ),
        team=Team(directory, number=node.index, size=node.count),
        host=node.host,
        report=False,
    ).run()
    if code == Stopped.exit_code:
        raise Stopped("stopped while the nodes were examined; the next start examines its own")
    if code == TERMINATED:
        raise SystemExit(TERMINATED)
    if code:
        report = read_json(run.doctor_file) or {}
        names = [check["name"] for check in report.get("checks", ()) if check["verdict"] == "bad"]
        what = f"these checks: {', '.join(names)}" if names else "the examination itself"
        raise UnfitNodes(f"the script was not started: the nodes fail {what}; the lines above say how")


def _stop(number: int, _: FrameType | None) -> None:
    """Ends the preparation at once, and only once: SLURM and srun may both send the signal."""
    for repeated in (*STOP_REQUESTS, signal.SIGTERM):
        signal.signal(repeated, signal.SIG_IGN)
    if number == signal.SIGTERM:
        raise SystemExit(TERMINATED)
    raise Stopped(
        "stopped while the nodes were prepared; the next start continues from what was copied to them"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
