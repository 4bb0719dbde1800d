"""`sampling_devices`: starts and ends the sampling process, in the training process."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final

from headway.dist.control.signals import block_signals
from headway.interpreter import module_command, module_environment
from headway.run import Run
from headway.system import environment, files
from headway.system.locks import block_forks
from headway.system.log import logger

INTERVAL_S = 15.0
"""seconds between two samples, unless HEADWAY_SAMPLE_EVERY says otherwise"""
_DELAY_S = 5.0
"""A shorter run has no samples, and starts no process."""
_KILLED_S = 2.0
"""how long to wait for the process after it was killed"""


@contextmanager
def sampling_devices(run: Run, *, host: str, delay_s: float = _DELAY_S) -> Iterator[None]:
    """Samples the devices of this node while the block runs. Call it on one rank of each node.

    with sampling_devices(run, host=world.host):
        train()
    """
    every_s = environment.sample_every_s(INTERVAL_S)
    if not every_s:
        yield
        return
    sampler, pid = DeviceSampler(run, host=host, every_s=every_s), os.getpid()
    timer = threading.Timer(delay_s, sampler.start)
    timer.daemon = True
    timer.name = "headway device sampler"
    timer.start()
    try:
        yield
    finally:
        if os.getpid() == pid:  # a forked child that leaves the block has no such thread
            timer.cancel()
            timer.join()
            sampler.stop()


@final
class DeviceSampler:
    """The sampling process, seen from the training process. It ends when its standard input closes."""

    def __init__(self, run: Run, *, host: str, every_s: float) -> None:
        owner = str(run.fence.number) if run.fence else ""
        self._command = module_command("headway.record.devices")
        self._command += [str(run.path), owner, host, str(every_s)]
        self._log = run.device_log(host)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; if that fails, the node trains without samples."""
        try:
            log = files.open_private(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                # the training thread may start data workers at the same time; signals are for the training process
                with block_forks(), block_signals():
                    self._process = subprocess.Popen(
                        self._command,
                        env=module_environment(),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C is for the training process
                    )
            finally:
                os.close(log)
        except OSError as error:
            logger.warning("the devices of this node are not sampled: %s", error)

    def stop(self) -> None:
        """Ends the process at once: a driver call in it may hang."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver call may delay even SIGKILL
                self._process.wait(_KILLED_S)
