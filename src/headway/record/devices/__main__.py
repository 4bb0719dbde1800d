"""`python -m headway.record.devices RUN OWNER HOST SECONDS`: the process that samples the devices of a node."""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress

from headway.dist.control.signals import ignore_run_signals
from headway.errors import RunLocked
from headway.record.devices.gpu import nvml_session, sample_gpu
from headway.record.devices.node import NodeMeter
from headway.run import Run
from headway.system import files


def main(path: str, owner: str, host: str, every_s: float) -> None:
    """Writes a row every `every_s` seconds until standard input closes or another process holds the run."""
    run = Run.open(path).held_as(int(owner) if owner else None)
    with suppress(FileExistsError):
        files.make_dir(run.nodes_dir)
    meter = NodeMeter()
    with nvml_session() as handles, run.open_rows(run.node_file(host), content="device samples") as rows:
        while True:
            gpus = [sample_gpu(index, handle) for index, handle in enumerate(handles)]
            try:
                rows.write({"time": time.time(), "host": host, **meter.sample(), "gpus": gpus})
            except RunLocked:
                return
            if select.select([sys.stdin], [], [], every_s)[0]:  # closed: nothing is ever sent
                return


if __name__ == "__main__":
    ignore_run_signals()
    os.nice(10)  # training comes first
    path, owner, host, seconds = sys.argv[1:]
    main(path, owner, host, every_s=float(seconds))
