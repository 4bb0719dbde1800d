"""The supervisor of a job in the background of this machine: starts it, and records how it ended.

Started as `python -m headway.launcher.functions.background RUN`. It is the parent process of the ranks or of mpirun,
and forwards signals to them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType

from headway.dist.control.signals import STOP_SIGNALS, handled_signals
from headway.launcher.agent.agent import Agent
from headway.launcher.functions.worker import Call
from headway.launcher.program import worker_command
from headway.launcher.targets import Local, Mpi
from headway.run import Run
from headway.run.job_record import run_recorded
from headway.system import environment
from headway.system.log import install_handler


def main(argv: Sequence[str]) -> int:
    run = Run.open_private(argv[0])
    facts = Call.read(run).target
    target = Mpi.from_dict(facts) if facts["kind"] == Mpi.kind else Local.from_dict(facts)
    command = worker_command(run)
    environ = os.environ | target.env | {environment.RUN: str(run.path)}
    if isinstance(target, Mpi):
        return run_recorded(run, partial(_mpirun, target, command, environ))
    return run_recorded(run, Agent(command, nproc=target.nproc, environ=environ).run)


def mpirun_command(target: Mpi, command: Sequence[str]) -> list[str]:
    """Returns the command line that starts `command` on all ranks.

    >>> mpirun_command(Mpi(nproc=4, hosts=("n1:2", "n2:2")), ["who"])
    ['mpirun', '-n', '4', '--host', 'n1:2,n2:2', 'who']
    """
    hosts = ["--host", ",".join(target.hosts)] if target.hosts else []
    return [target.mpirun, "-n", str(target.nproc), *hosts, *target.args, *command]


def _mpirun(target: Mpi, command: Sequence[str], environ: Mapping[str, str]) -> int:
    process = subprocess.Popen(mpirun_command(target, command), env=environ, stdin=subprocess.DEVNULL)

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in handled_signals(STOP_SIGNALS):
        signal.signal(number, forward)
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    install_handler()
    sys.exit(main(sys.argv[1:]))
